"""The page-table kernel against plain Python: attention, its log-sum-exp, the schedule, the page table."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import COMPILED
from graphpact.errors import KernelRefusal
from graphpact_kernels import (
    fill_page_table,
    merge_states,
    page_table_attention,
    schedule_attention,
    schedule_size,
)
from graphpact_kernels._attend import attend_padded
from graphpact_kernels.page_table_attention import _keys
from graphpact_kernels.schedule import BLOCK
from kernel_calls import page_table_call

EXAMPLES = settings(derandomize=True, max_examples=100)
NAN, NONE = float("nan"), float("-inf")
INT = {"dtype": torch.int32}
PATHS = ("cpu", "elsewhere", *COMPILED)
ON_CPU = ("cpu", *COMPILED)
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


@dataclass
class PageTableProblem:
    """A call of the kernel, with the KV slots of each request."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    num_q: list[int]
    slots: list[list[int]]
    arguments: dict[str, Any]

    def run(self, path: str = "cpu", **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp on the CPU path, from C++, or on the path of other devices."""
        call = page_table_call(
            self.q, self.k_cache, self.v_cache, **(self.arguments | changes), with_lse=True
        )
        lse = call.new_lse().fill_(NAN)
        if path in ON_CPU:
            out, returned = page_table_attention(call, lse=lse, compiled=path == "compiled")
            assert returned is lse
            return out, lse
        out, rows = call.new_output().fill_(NAN), call.rows
        keys = _keys(rows, rows.page_table, call.schedule)
        attend_padded(call, rows.cu_seqlens_q, keys, rows.max_seqlen_q, out, lse=lse)
        return out, lse

    def sees(self, row: int, query: int, key: int) -> bool:
        """Return whether a query of a row sees a key, both by their index, by causality and the window."""
        at = len(self.slots[row]) - self.num_q[row] + query
        window = self.arguments["sliding_window"]
        return (not self.arguments["is_causal"] or key <= at) and (not window or key > at - window)

    def reference(self, planned: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp in float64, computed one by one from the requests' lists of slots.

        Args:
            planned: The number of keys of each request that a schedule covers; None for all.

        Returns:
            As `run`.
        """
        a = self.arguments
        out = torch.zeros(*self.q.shape[:2], self.v_cache.shape[2], dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], NONE, dtype=torch.float64)
        row, group = 0, self.q.shape[1] // self.k_cache.shape[1]
        for r, (count, slots) in enumerate(zip(self.num_q, self.slots, strict=True)):
            for i in range(count):
                seen = [
                    slot
                    for j, slot in enumerate(slots)
                    if self.sees(r, i, j) and (planned is None or j < planned[r])
                ]
                for h in range(self.q.shape[1]):
                    total = 0.0 if a["sinks"] is None else math.exp(a["sinks"][h])
                    value = torch.zeros(self.v_cache.shape[2], dtype=torch.float64)
                    for slot in seen:
                        key = self.k_cache[slot, h // group].double()
                        score = float(self.q[row, h].double() @ key) * a["scaling"]
                        if a["softcap"]:
                            score = a["softcap"] * math.tanh(score / a["softcap"])
                        total += math.exp(score)
                        value += math.exp(score) * self.v_cache[slot, h // group].double()
                    lse[row, h] = math.log(total) if total else NONE
                    out[row, h] = value / total if seen else 0
                row += 1
        return out, lse


def make_problem(
    *,
    num_q: list[int],
    num_kv: list[int],
    page_size: int = 1,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 4,
    v_head_dim: int = 4,
    latent: bool = False,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
    num_unowned: int = 0,
    spare: int = 0,
    seed: int = 0,
) -> PageTableProblem:
    """Return a random problem; unowned KV slots and unused entries of the page table hold poison."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    num_pages = [-(-n // page_size) for n in num_kv]
    total, width = sum(num_pages), max(num_pages, default=0) + spare
    order = torch.randperm(total, generator=generator) + 1  # page 0 is scratch
    k_cache = torch.full((page_size * (total + 2), heads[1], head_dim), NAN, dtype=dtype)
    v_cache = torch.full((page_size * (total + 2), heads[1], v_head_dim), NAN, dtype=dtype)
    if latent:
        v_cache = k_cache[..., :v_head_dim]
    table = torch.full((len(num_kv), max(width, 1)), 10**6, **INT)  # not a valid page
    slots, start = [], 0
    for row, (length, pages) in enumerate(zip(num_kv, num_pages, strict=True)):
        mine = order[start : start + pages].tolist()
        start += pages
        table[row, :pages] = torch.tensor(mine)
        slots.append([mine[j // page_size] * page_size + j % page_size for j in range(length)])
        k_cache[slots[-1]] = random(length, heads[1], head_dim)
        if not latent:
            v_cache[slots[-1]] = random(length, heads[1], v_head_dim)
    return PageTableProblem(
        q=random(sum(num_q) + num_unowned, heads[0], head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        num_q=num_q,
        slots=slots,
        arguments={
            "cu_seqlens_q": torch.tensor([0, *num_q]).cumsum(0).to(**INT),
            "cache_seqlens": torch.tensor(num_kv, **INT),
            "page_table": table,
            "page_size": page_size,
            "max_seqlen_q": max(1, *num_q, *num_q) if num_q else 1,
            "scaling": 1 / math.sqrt(head_dim),
            "is_causal": is_causal,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "sinks": random(heads[0]) if sinks else None,
        },
    )


def assert_same(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], **how: Any
) -> None:
    """Compare output and log-sum-exp with the expected ones."""
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, **how)


@st.composite
def problems(draw: st.DrawFn, **fixed: Any) -> PageTableProblem:
    """Draw a problem: ragged or uniform queries, rows without keys or queries, windows, sinks, caps."""
    bs = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 5), min_size=bs, max_size=bs)
    drawn: dict[str, Any] = {
        "num_q": draw(st.one_of(counts, st.integers(1, 3).map(lambda n: [n] * bs))),
        "num_kv": draw(st.lists(st.integers(0, 20), min_size=bs, max_size=bs)),
        "page_size": draw(st.sampled_from([1, 3, 16])),
        "heads": draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 1)])),
        "head_dim": draw(st.sampled_from([4, 8])),
        "v_head_dim": draw(st.sampled_from([2, 4])),
        "is_causal": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([None, None, 1, 2, 7, 100])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 30.0])),
        "sinks": draw(st.booleans()),
        "num_unowned": draw(st.integers(0, 2)),
        "spare": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 99)),
    }
    return make_problem(**(drawn | fixed))


# -- attention -------------------------------------------------------------------------------------


@EXAMPLES
@given(problem=problems(), path=st.sampled_from(PATHS))
def test_output_and_log_sum_exp_equal_a_plain_reference(problem: PageTableProblem, path: str) -> None:
    """Each query attends to the visible keys of its row; without keys or a request its output is zero."""
    assert_same(problem.run(path), problem.reference(), **TIGHT)


@EXAMPLES
@given(
    problem=problems(heads=(4, 1), head_dim=8, v_head_dim=4, latent=True),
    path=st.sampled_from(PATHS),
)
def test_latents_equal_a_plain_reference(problem: PageTableProblem, path: str) -> None:
    """If values are views of their keys, the result equals the reference too."""
    assert_same(problem.run(path), problem.reference(), **TIGHT)


@EXAMPLES
@given(problem=problems(sliding_window=3), hidden=st.sampled_from([None, 0]), path=st.sampled_from(PATHS))
def test_keys_that_no_query_sees_are_not_read(
    problem: PageTableProblem, hidden: int | None, path: str
) -> None:
    """Before a sliding window pages may be freed; the page table has their numbers, or that of scratch."""
    expected = problem.run(path)
    table, size = problem.arguments["page_table"].clone(), problem.arguments["page_size"]
    for row, slots in enumerate(problem.slots):
        seen = {j for i in range(problem.num_q[row]) for j in range(len(slots)) if problem.sees(row, i, j)}
        for j, slot in enumerate(slots):
            if j not in seen:
                problem.k_cache[slot] = problem.v_cache[slot] = NAN
            if hidden is not None and seen.isdisjoint(range(j // size * size, (j // size + 1) * size)):
                table[row, j // size] = hidden
    for mine, other in zip(problem.run(path, page_table=table), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("latent", [True, False])
def test_a_request_without_any_query(path: str, latent: bool) -> None:  # noqa: FBT001  a parameter
    """A call without queries returns an empty output."""
    problem = make_problem(num_q=[0], num_kv=[3], heads=(4, 1), latent=latent)
    assert_same(problem.run(path), problem.reference(), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS)
def test_other_dtypes(dtype: torch.dtype, path: str) -> None:
    """The output has the dtype of the queries, the log-sum-exp is float32; both are near the reference."""
    for extra in ({}, {"softcap": 5.0, "is_causal": False}, {"sinks": True, "sliding_window": 3}):
        problem = make_problem(num_q=[3, 1, 4], num_kv=[3, 10, 9], heads=(4, 2), dtype=dtype, **extra)
        out, lse = problem.run(path)
        assert out.dtype is dtype
        assert lse.dtype is torch.float32
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        assert_same((out, lse), problem.reference(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_reads_of_unowned_memory_are_caught(path: str) -> None:
    """With a length declared one key too long the kernel reads poison, so the tests above can fail."""
    problem = make_problem(num_q=[2, 1], num_kv=[5, 4], page_size=16)
    longer = problem.arguments["cache_seqlens"] + torch.tensor([0, 1], **INT)
    out, _ = problem.run(path, cache_seqlens=longer)
    assert bool(out[2].isnan().any())
    assert not bool(out[:2].isnan().any())


@pytest.mark.parametrize("path", ON_CPU)
def test_without_a_request_every_row_is_zero(path: str) -> None:
    """Without requests, the output of every query row is zero, and its log-sum-exp minus infinity."""
    problem = make_problem(num_q=[], num_kv=[], num_unowned=3)
    out, lse = problem.run(path)
    assert out.shape == (3, 2, 4)
    assert not out.any()
    assert bool((lse == NONE).all())


_CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "more offsets than rows": ({"cu_seqlens_q": torch.tensor([0, 2, 5, 5], **INT)}, "2 rows"),
    "a length too many": ({"cache_seqlens": torch.tensor([6, 4, 1], **INT)}, r"cache_seqlens 2 \(it has 3\)"),
    "offsets past the queries": ({"cu_seqlens_q": torch.tensor([0, 2, 6], **INT)}, "q has 5 rows"),
    "offsets that decrease": ({"cu_seqlens_q": torch.tensor([0, 3, 2], **INT)}, r"\[0, 3, 2\]"),
    "offsets that begin later": ({"cu_seqlens_q": torch.tensor([1, 2, 5], **INT)}, r"\[1, 2, 5\]"),
    "more queries than the bound": ({"max_seqlen_q": 2}, "request 1: 3 queries, max_seqlen_q is 2"),
    "more keys than the table": ({"cache_seqlens": torch.tensor([7, 4], **INT)}, "has room for 6"),
    "a negative length": ({"cache_seqlens": torch.tensor([6, -1], **INT)}, "request 1: -1 keys"),
    "a schedule too short": ({"schedule": torch.zeros(16, **INT)}, "at least 17 numbers"),
    "a semaphore that is set": ({"schedule": torch.eye(17, **INT)[0]}, "begin with 0"),
    "a schedule with more requests": (
        {"schedule": torch.eye(40, **INT)[30]},
        "zeros after those of the requests",
    ),
}


@pytest.mark.parametrize("path", ON_CPU)
@pytest.mark.parametrize("name", _CONTRADICTIONS)
def test_contradictions_are_refused_on_a_cpu(name: str, path: str) -> None:
    """Index tensors that contradict each other, the bounds or the schedule are refused with the reason."""
    changes, says = _CONTRADICTIONS[name]
    problem = make_problem(num_q=[2, 3], num_kv=[6, 4])
    with pytest.raises(KernelRefusal, match=says):
        problem.run(path, **changes)


# -- the schedule ----------------------------------------------------------------------------------


def schedule_of(problem: PageTableProblem, size: int | None = None, path: str = "cpu") -> torch.Tensor:
    """Return the schedule of a problem, written over other contents."""
    a = problem.arguments
    out = torch.full((size or schedule_size(len(problem.num_q)),), 77, **INT)
    schedule_attention(a["cu_seqlens_q"], a["cache_seqlens"], out=out, compiled=path == "compiled")
    return out


@EXAMPLES
@given(problem=problems(), spare=st.integers(0, 9), path=st.sampled_from(ON_CPU))
def test_a_schedule_counts_blocks_and_leaves_zeros(problem: PageTableProblem, spare: int, path: str) -> None:
    """A schedule has a 0, the query blocks and key blocks of each request, and zeros to its end."""
    bs = len(problem.num_q)
    assert schedule_size(bs) == 1 + 4 * math.ceil(bs / 4) * 4
    found = schedule_of(problem, schedule_size(bs) + spare, path).tolist()
    expected, width = [0] * len(found), math.ceil(bs / 4) * 4
    for i, (count, slots) in enumerate(zip(problem.num_q, problem.slots, strict=True)):
        expected[1 + i] = math.ceil(count / BLOCK)
        expected[1 + width + i] = math.ceil(len(slots) / BLOCK)
    assert found == expected


@EXAMPLES
@given(problem=problems(), path=st.sampled_from(PATHS))
def test_a_right_schedule_changes_nothing(problem: PageTableProblem, path: str) -> None:
    """With the schedule of the same step, a call has the same result as without a schedule."""
    assert_same(problem.run(path, schedule=schedule_of(problem)), problem.run(path), **TIGHT)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_a_stale_schedule_lacks_are_not_attended(path: str, *, causal: bool) -> None:
    """With the schedule of an earlier, shorter step, newer key blocks are not attended."""
    kinds = {"num_q": [1, 2], "page_size": 3, "is_causal": causal}
    before = make_problem(num_kv=[15, 40], **kinds)
    now = make_problem(num_kv=[37, 45], **kinds)
    stale = now.run(path, schedule=schedule_of(before))
    assert_same(stale, now.reference(planned=[BLOCK, 3 * BLOCK]), **TIGHT)
    assert not torch.allclose(stale[0], now.reference()[0])


# -- the page table --------------------------------------------------------------------------------


@EXAMPLES
@given(
    data=st.data(),
    page_size=st.sampled_from([1, 3, 16]),
    bs=st.integers(0, 4),
    spare=st.integers(0, 2),
    path=st.sampled_from(ON_CPU),
)
def test_the_page_table_has_pages_and_scratch_behind_them(
    data: st.DataObject, page_size: int, bs: int, spare: int, path: str
) -> None:
    """Each row has its request's pages in order, then zeros; the lengths count the drafts; all is written."""
    context = data.draw(st.integers(1, 40))
    pages = -(-context // page_size)
    lengths = data.draw(st.lists(st.integers(0, context), min_size=bs, max_size=bs))
    rows = data.draw(st.lists(st.integers(0, 5), min_size=bs, max_size=bs))
    numbers = torch.randint(1, 10**6, (6, pages), generator=torch.Generator().manual_seed(bs))
    table = (numbers.repeat_interleave(page_size, 1) * page_size)[:, :context].to(**INT)
    drafts = data.draw(st.integers(0, min(lengths, default=0)))
    out, lens, ends = torch.full((bs, pages + spare), -7, **INT), torch.full((bs,), -7, **INT), None
    if data.draw(st.booleans()):
        ends = torch.full((bs + 1,), -7, **INT)
    fill_page_table(
        table,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor([length - drafts for length in lengths], dtype=torch.int64),
        uncounted=drafts,
        page_size=page_size,
        cache_seqlens=lens,
        cu_seqlens_k=ends,
        page_table=out,
        compiled=path == "compiled",
    )
    assert lens.tolist() == lengths
    assert ends is None or ends.tolist() == [0, *itertools.accumulate(lengths)]
    for row, length, got in zip(rows, lengths, out.tolist(), strict=True):
        used = -(-length // page_size)
        assert got == numbers[row, :used].tolist() + [0] * (pages + spare - used)


# -- cascades --------------------------------------------------------------------------------------


@EXAMPLES
@given(problem=problems(is_causal=False, sliding_window=None, sinks=False, page_size=1), data=st.data())
def test_two_halves_merge_to_the_whole(problem: PageTableProblem, data: st.DataObject) -> None:
    """Attention over two disjoint sets of keys, even empty ones, merges to attention over their union."""
    a = problem.arguments
    lens = a["cache_seqlens"]
    cut = torch.tensor([data.draw(st.integers(0, n)) for n in lens.tolist()], **INT)
    column = torch.arange(a["page_table"].shape[1])
    rest = (column + cut[:, None]).clamp(max=len(column) - 1).long()
    parts = (
        problem.run(cache_seqlens=cut),
        problem.run(cache_seqlens=lens - cut, page_table=a["page_table"].gather(1, rest)),
    )
    merged = merge_states(*itertools.chain(*parts))
    torch.testing.assert_close(merged, problem.reference()[0], **TIGHT)
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), problem.reference()[1])
