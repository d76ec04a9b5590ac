"""The kernels against plain Python, portable and compiled: attention, packing of pages, cache writes."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from compiled_kernels import COMPILED
from graphpact.errors import KernelRefusal
from graphpact_kernels import pack_kv_indices, paged_attention, write_kv_cache
from graphpact_kernels.indices import _pack_padded
from graphpact_kernels.paged_attention import _attend_padded, _Chunks
from kernel_calls import paged_call

EXAMPLES = settings(derandomize=True, max_examples=150)
NAN = float("nan")
PATHS = ("cpu", "elsewhere", *COMPILED)


@dataclass
class PagedProblem:
    """A call of the attention kernel, with the KV slots of each request."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    num_q: list[int]
    num_kv: list[int]
    slots: list[list[int]]
    arguments: dict[str, Any]

    def run(self, path: str = "cpu", **changes: Any) -> torch.Tensor:
        """Return the kernel's result on the CPU path, from C++, or on the path of other devices."""
        arguments = self.arguments | changes
        chunks = {name: arguments.pop(name, None) for name in ("o_indptr", "kv_chunk_size")}
        call = paged_call(self.q, self.k_cache, self.v_cache, **arguments)
        if path in ("cpu", "compiled"):
            return paged_attention(call, **chunks, compiled=path == "compiled")
        out = call.new_output().fill_(NAN)
        _attend_padded(call, _Chunks(**chunks), out)
        return out

    def reference(self, sees: Callable[[int, int, int], bool] | None = None) -> torch.Tensor:
        """Return attention in float64, one query and head at a time, from the requests' lists of slots.

        Args:
            sees: Returns whether a query of a request sees a key, all three by index; None for causal
                attention.
        """
        a = self.arguments
        rows = []
        group = self.q.shape[1] // self.k_cache.shape[1]
        for r, (num_q, num_kv) in enumerate(zip(self.num_q, self.num_kv, strict=True)):
            for i in range(num_q):
                at = num_kv - num_q + i
                first = max(0, at - a["sliding_window"] + 1) if a["sliding_window"] else 0
                seen = self.slots[r][first : at + 1]
                if sees is not None:
                    seen = [slot for j, slot in enumerate(self.slots[r]) if sees(r, i, j)]
                heads = []
                for h in range(self.q.shape[1]):
                    q = self.q[len(rows), h].double()
                    scores = self.k_cache[seen, h // group].double() @ q * a["scaling"]
                    if a["softcap"]:
                        scores = a["softcap"] * torch.tanh(scores / a["softcap"])
                    weights = scores.exp()
                    total = weights.sum()
                    if a["sinks"] is not None:
                        total = total + a["sinks"][h].double().exp()
                    heads.append(
                        (weights / total if seen else weights) @ self.v_cache[seen, h // group].double()
                    )
                rows.append(torch.stack(heads))
        return torch.stack(rows)


def _problem(
    *,
    num_q: list[int],
    prefix: list[int],
    page_size: int = 1,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 4,
    v_head_dim: int = 4,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
    decode: bool = False,
    spare: int = 0,
    seed: int = 0,
) -> PagedProblem:
    """Return a random problem; KV slots that no request owns hold poison."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    num_kv = [n + p for n, p in zip(num_q, prefix, strict=True)]
    num_pages = [-(-n // page_size) for n in num_kv]
    total_pages = sum(num_pages)
    # Page 0 is scratch; one page after the last is unowned.
    order = torch.randperm(total_pages, generator=generator) + 1
    k_cache = torch.full((page_size * (total_pages + 2), heads[1], head_dim), NAN, dtype=dtype)
    v_cache = torch.full((page_size * (total_pages + 2), heads[1], v_head_dim), NAN, dtype=dtype)
    slots, start = [], 0
    for length, pages in zip(num_kv, num_pages, strict=True):
        mine = order[start : start + pages].tolist()
        start += pages
        slots.append([mine[j // page_size] * page_size + j % page_size for j in range(length)])
        k_cache[slots[-1]] = random(length, heads[1], head_dim)
        v_cache[slots[-1]] = random(length, heads[1], v_head_dim)
    unused = torch.full((spare,), total_pages + 1)  # the number of a page that contains poison
    int32 = {"dtype": torch.int32}
    return PagedProblem(
        q=random(sum(num_q), heads[0], head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        num_q=num_q,
        num_kv=num_kv,
        slots=slots,
        arguments={
            "qo_indptr": torch.tensor([0, *num_q]).cumsum(0).to(**int32),
            "kv_indptr": torch.tensor([0, *num_pages]).cumsum(0).to(**int32),
            "kv_indices": torch.cat([order, unused]).to(**int32),
            "kv_last_page_len": torch.tensor([(n - 1) % page_size + 1 for n in num_kv], **int32),
            "page_size": page_size,
            "max_q_len": 1 if decode else max(2, *num_q, *num_q),
            "max_kv_len": max(num_kv) + 3,
            "scaling": 1 / math.sqrt(head_dim),
            "sliding_window": sliding_window,
            "softcap": softcap,
            "sinks": random(heads[0]) if sinks else None,
        },
    )


@st.composite
def _problems(
    draw: st.DrawFn, *, decode: bool, dtypes: Sequence[torch.dtype] = (torch.float64,)
) -> PagedProblem:
    bs = draw(st.integers(1, 4))
    num_q = [1] * bs if decode else draw(st.lists(st.integers(1, 5), min_size=bs, max_size=bs))
    return _problem(
        num_q=num_q,
        prefix=draw(st.lists(st.integers(0, 20), min_size=bs, max_size=bs)),
        page_size=draw(st.sampled_from([1, 3, 16])),
        heads=draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (4, 1)])),
        head_dim=draw(st.sampled_from([2, 8])),
        v_head_dim=draw(st.sampled_from([2, 4, 8])),
        sliding_window=draw(st.sampled_from([None, None, 1, 2, 7, 100])),
        softcap=draw(st.sampled_from([None, None, 0.5, 30.0])),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        decode=decode,
        spare=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


# -- attention -------------------------------------------------------------------------------------


@EXAMPLES
@given(problem=_problems(decode=True), path=st.sampled_from(PATHS))
def test_decode_equals_a_plain_reference(problem: PagedProblem, path: str) -> None:
    """With one query per request, either path attends to exactly the keys of the request."""
    torch.testing.assert_close(problem.run(path), problem.reference(), rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(problem=_problems(decode=True), path=st.sampled_from(PATHS))
def test_keys_and_values_may_be_allocated_together(problem: PagedProblem, path: str) -> None:
    """Caches that are two parts of one storage are two caches, and not a latent and its first part."""
    together = torch.cat([problem.k_cache.flatten(), problem.v_cache.flatten()])
    keys, values = together.split([problem.k_cache.numel(), problem.v_cache.numel()])
    k_cache, v_cache = keys.view_as(problem.k_cache), values.view_as(problem.v_cache)
    got = replace(problem, k_cache=k_cache, v_cache=v_cache).run(path)
    torch.testing.assert_close(got, problem.run(path), rtol=0, atol=0, equal_nan=True)


@EXAMPLES
@given(problem=_problems(decode=False), path=st.sampled_from(PATHS))
def test_extend_equals_a_plain_reference(problem: PagedProblem, path: str) -> None:
    """With ragged new tokens over cached prefixes, either path attends causally within each request."""
    torch.testing.assert_close(problem.run(path), problem.reference(), rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(problem=_problems(decode=False), window=st.integers(1, 7), path=st.sampled_from(PATHS))
def test_keys_before_the_window_are_not_read(problem: PagedProblem, window: int, path: str) -> None:
    """Before a sliding window, the pages of a request may be freed."""
    problem.arguments["sliding_window"] = window
    expected = problem.run(path)
    for num_q, slots in zip(problem.num_q, problem.slots, strict=True):
        hidden = slots[: max(0, len(slots) - num_q + 1 - window)]
        problem.k_cache[hidden] = problem.v_cache[hidden] = NAN
    assert torch.equal(problem.run(path), expected)


@st.composite
def _with_blind_queries(draw: st.DrawFn) -> tuple[PagedProblem, torch.Tensor]:
    """Draw a problem whose mask or plan, or both, hide all keys from some queries, and the result."""
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    problem = draw(_problems(decode=False, dtypes=dtypes))
    bs, arguments = len(problem.num_q), problem.arguments
    sizes = [(q, kv) for q, kv in zip(problem.num_q, problem.num_kv, strict=True)]
    chunks, bits = draw(st.lists(st.integers(0, 3), min_size=bs, max_size=bs)), None
    has_plan = draw(st.booleans())
    if has_plan:
        arguments["o_indptr"] = torch.tensor([0, *itertools.accumulate(chunks)], dtype=torch.int32)
        arguments["kv_chunk_size"] = torch.tensor([8], dtype=torch.int32)
    if not has_plan or draw(st.booleans()):
        rows = st.sampled_from(["none", "all", "some"])
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        bits = [torch.randint(2, size, generator=generator).bool() for size in sizes]
        for each in bits:
            for row in each:
                kind = draw(rows)
                row.logical_and_(torch.tensor(kind != "none")).logical_or_(torch.tensor(kind == "all"))
        packed = [_packed(each) for each in bits]
        arguments["mask"] = torch.cat(packed)
        begins = [0, *itertools.accumulate(map(len, packed))]
        arguments["mask_indptr"] = torch.tensor(begins, dtype=torch.int32)

    def sees(request: int, query: int, key: int) -> bool:
        if has_plan and key >= 8 * chunks[request]:
            return False
        if bits is not None:
            return bool(bits[request][query, key])
        at = problem.num_kv[request] - problem.num_q[request] + query
        return at - (arguments["sliding_window"] or 100) < key <= at

    return problem, problem.reference(sees)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return the bits in bytes, the lowest bit first."""
    flat = functional.pad(bits.flatten().to(torch.uint8), (0, -bits.numel() % 8))
    return (flat.view(-1, 8) << torch.arange(8)).sum(dim=1).to(torch.uint8)


@EXAMPLES
@given(drawn=_with_blind_queries())
def test_a_query_that_sees_no_key_gives_zeros(drawn: tuple[PagedProblem, torch.Tensor]) -> None:
    """Every path agrees with float64 when keys are hidden, with caps, sinks, windows, masks and dtypes."""
    problem, expected = drawn
    near = 1e-9 if problem.q.dtype is torch.float64 else 4 * torch.finfo(problem.q.dtype).eps
    for path in PATHS:
        torch.testing.assert_close(problem.run(path).double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("path", ["cpu", *COMPILED])
def test_every_call_answers_for_what_its_tensors_hold_now(path: str) -> None:
    """The layout that layers share is cached by contents: an index tensor changed in place takes effect."""
    problem = _problem(num_q=[1, 1], prefix=[6, 3], decode=True)
    whole = {
        "o_indptr": torch.tensor([0, 1, 2], dtype=torch.int32),
        "kv_chunk_size": torch.tensor([16], dtype=torch.int32),
    }

    def agrees(with_slots: list[list[int]]) -> None:
        expected = replace(problem, slots=with_slots).reference()
        torch.testing.assert_close(problem.run(path, **whole), expected, rtol=1e-9, atol=1e-9)

    agrees(problem.slots)
    agrees(problem.slots)  # the second layer
    pages = problem.arguments["kv_indices"]
    before = pages.clone()
    pages[1:7] = pages[0]
    agrees([[problem.slots[0][0]] * 7, problem.slots[1]])
    pages.copy_(before)
    agrees(problem.slots)
    whole["kv_chunk_size"].fill_(2)  # the plan covers the first two keys of each request
    short = problem.run(path, **whole)
    assert not torch.allclose(short, problem.reference())
    whole["kv_chunk_size"].fill_(16)
    agrees(problem.slots)


@EXAMPLES
@given(problem=_problems(decode=True))
def test_decode_and_extend_agree(problem: PagedProblem) -> None:
    """With one query per request, the decode path and the extend path give equal results."""
    expected = problem.run()
    for path in PATHS:
        got = problem.run(path, max_q_len=2)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_requests_without_new_tokens_are_passed_over(path: str) -> None:
    """Requests without queries, in the middle and at both ends, have no rows in the output."""
    problem = _problem(num_q=[0, 2, 0, 3, 0], prefix=[4, 3, 2, 0, 5], page_size=3)
    torch.testing.assert_close(problem.run(path), problem.reference(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_other_dtypes(dtype: torch.dtype, decode: bool, path: str) -> None:  # noqa: FBT001
    """The output has the dtype of the queries and is near the float64 reference."""
    for extra in ({}, {"softcap": 5.0}, {"sinks": True, "sliding_window": 3}):
        num_q = [1, 1, 1] if decode else [3, 1, 4]
        problem = _problem(num_q=num_q, prefix=[0, 9, 5], heads=(4, 2), dtype=dtype, decode=decode, **extra)
        got = problem.run(path)
        assert got.dtype is dtype
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(got.double(), problem.reference(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_reads_of_unowned_memory_are_caught(decode: bool, path: str) -> None:  # noqa: FBT001
    """With a last page declared one key too long the kernel reads poison, so the tests above can fail."""
    problem = _problem(num_q=[1, 1] if decode else [2, 1], prefix=[3, 4], page_size=16, decode=decode)
    longer = problem.arguments["kv_last_page_len"] + torch.tensor([0, 1], dtype=torch.int32)
    rows = problem.run(path, kv_last_page_len=longer)
    assert bool(rows[-1].isnan().any())
    assert not bool(rows[:-1].isnan().any())


def test_results_do_not_depend_on_the_bounds() -> None:
    """Looser bounds on queries and keys do not change the result."""
    problem = _problem(num_q=[2, 3], prefix=[5, 1], page_size=3)
    for path in PATHS:
        for max_kv_len in (7, 8, 50):
            got = problem.run(path, max_kv_len=max_kv_len, max_q_len=9)
            torch.testing.assert_close(got, problem.reference(), rtol=1e-9, atol=1e-9)


_INT = {"dtype": torch.int32}
_CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "too few queries": (
        {"qo_indptr": torch.tensor([0, 2, 4], **_INT)},
        "from 0 to 4, q has 5 rows",
    ),
    "too many queries": ({"qo_indptr": torch.tensor([0, 2, 6], **_INT)}, "q has 5 rows"),
    "offsets that decrease": (
        {"qo_indptr": torch.tensor([0, 6, 5], **_INT)},
        r"qo_indptr decreases: \[0, 6, 5\]",
    ),
    "more queries than keys": (
        {"qo_indptr": torch.tensor([0, 0, 5], **_INT)},
        "request 1: causal attention of 5 queries over 4 keys",
    ),
    "more keys than planned": ({"max_kv_len": 5}, "6 keys, planned for at most 5"),
    "more queries than planned": ({"max_q_len": 2}, "request 1: 3 queries, planned for at most 2"),
    "queries that do not begin at 0": (
        {"qo_indptr": torch.tensor([1, 2, 5], **_INT)},
        "qo_indptr goes from 1 to 5, q has 5 rows",
    ),
    "pages that do not begin at 0": (
        {"kv_indptr": torch.tensor([1, 6, 10], **_INT)},
        "kv_indptr goes from 1 to 10, kv_indices has 10 rows",
    ),
    "pages beyond the index": (
        {"kv_indptr": torch.tensor([0, 6, 11], **_INT)},
        "kv_indptr goes from 0 to 11, kv_indices has 10 rows",
    ),
    "an index of too few pages": (
        {"kv_indices": torch.zeros(4, **_INT)},
        "kv_indptr goes from 0 to 10, kv_indices has 4 rows",
    ),
    "offsets of pages that decrease": (
        {"kv_indptr": torch.tensor([0, 7, 6], **_INT)},
        r"kv_indptr decreases: \[0, 7, 6\]",
    ),
    "a last page that is too full": (
        {"kv_last_page_len": torch.tensor([2, 1], **_INT)},
        r"kv_last_page_len\[0\] is 2, a page has 1 keys",
    ),
    "an empty last page": (
        {"kv_last_page_len": torch.tensor([1, 0], **_INT)},
        r"kv_last_page_len\[1\] is 0, a page has 1 keys",
    ),
}


@pytest.mark.parametrize("path", ["cpu", *COMPILED])
@pytest.mark.parametrize("name", _CONTRADICTIONS)
def test_contradictions_are_refused_on_a_cpu(name: str, path: str) -> None:
    """Index tensors that contradict each other or the bounds are refused; the error has the numbers."""
    changes, says = _CONTRADICTIONS[name]
    problem = _problem(num_q=[2, 3], prefix=[4, 1])
    with pytest.raises(KernelRefusal, match=says):
        problem.run(path, **changes)


@pytest.mark.parametrize("path", ["cpu", *COMPILED])
def test_the_decode_path_is_refused_to_ragged_queries(path: str) -> None:
    """With ``max_q_len`` 1, two queries of one request and none of another are refused."""
    problem = _problem(num_q=[2, 0], prefix=[4, 5])
    with pytest.raises(KernelRefusal, match="request 0: 2 queries, planned for at most 1"):
        problem.run(path, max_q_len=1)


# -- packing ---------------------------------------------------------------------------------------


@st.composite
def _tables(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int], int]:
    page_size = draw(st.sampled_from([1, 3, 16]))
    most = draw(st.integers(1, 4))
    width = most * page_size - draw(st.integers(0, page_size - 1))
    num_rows = draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5))
    pages = draw(st.lists(st.integers(0, most), min_size=len(rows), max_size=len(rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randint(1, 50, (num_rows, most), generator=generator)
    table = numbers.repeat_interleave(page_size, 1) * page_size
    table = (table + torch.arange(most * page_size) % page_size)[:, :width]
    return table.to(torch.int32).contiguous(), rows, pages, page_size


@EXAMPLES
@given(case=_tables(), spare=st.integers(0, 4))
def test_packing_equals_a_loop(case: tuple[torch.Tensor, list[int], list[int], int], spare: int) -> None:
    """Pages are packed request after request; a CPU writes nothing after them, other devices write zeros."""
    table, rows, pages, page_size = case
    expected = [
        int(table[row, j * page_size]) // page_size
        for row, n in zip(rows, pages, strict=True)
        for j in range(n)
    ]
    indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    out = torch.full((sum(pages) + spare,), -7, dtype=torch.int32)
    pack_kv_indices(table, torch.tensor(rows), indptr, page_size=page_size, out=out)
    assert out.tolist() == expected + [-7] * spare
    # Devices whose host does not know the count fill the rest of the output with page 0, scratch.
    out = torch.full((sum(pages) + spare,), -7, dtype=torch.int32)
    _pack_padded(table, torch.tensor(rows), indptr, None, page_size, out)
    assert out[: sum(pages)].tolist() == expected
    assert out[sum(pages) :].tolist() == [0] * spare


def test_too_many_pages_are_refused() -> None:
    """If the pages do not fit, a CPU writes nothing, and the error has the number of pages."""
    out = torch.full((2,), -7, dtype=torch.int32)
    indptr = torch.tensor([0, 1, 3], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    with pytest.raises(RuntimeError, match="has 2 entries, this batch needs 3 pages"):
        pack_kv_indices(table, torch.tensor([0, 1]), indptr, page_size=1, out=out)
    assert out.tolist() == [-7, -7]


# -- the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, *map(bool, COMPILED)])
def test_writes_go_to_their_slots_and_nowhere_else(compiled: bool) -> None:  # noqa: FBT001
    """Each token's key and value are written to its slot, padding tokens to slot 0; other slots stay."""
    k_cache, v_cache = torch.full((6, 2, 3), NAN), torch.full((6, 2, 5), NAN)
    k, v = torch.randn(4, 2, 3), torch.randn(4, 2, 5)
    write_kv_cache(k, v, k_cache, v_cache, torch.tensor([4, 2, 0, 0]), compiled=compiled)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[4], new[0])
        assert torch.equal(cache[2], new[1])
        assert any(torch.equal(cache[0], row) for row in new[2:])
        assert bool(cache[[1, 3, 5]].isnan().all())
