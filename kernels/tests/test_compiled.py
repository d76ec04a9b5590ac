"""The compiled kernels against the portable ones, at the edges of their blocks, tiles and vectors."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import needs_compiled
from graphpact_kernels import fill_paged_indices, page_table_attention, paged_attention, write_kv_cache
from graphpact_kernels.compiled import build, linear
from kernel_calls import page_table_call, paged_call

EXAMPLES = settings(derandomize=True, max_examples=100)
INT = {"dtype": torch.int32}
NAN = float("nan")
# Around a block of 64 keys; with four query heads, up to 800 rows in tiles of 192.
KEYS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 200]))
DIMS = st.sampled_from([1, 3, 8, 15, 16, 17, 32, 40, 64, 80])

pytestmark = needs_compiled


def paged_problem(
    num_q: list[int],
    num_kv: list[int],
    *,
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    by_head: bool,
    seed: int,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return queries and caches, and the index tensors of both kernels.

    Args:
        num_q: Queries of each request.
        num_kv: Keys of each request.
        page_size: KV slots in a page.
        heads: Query heads and key heads.
        dims: Head sizes of keys and of values.
        dtype: Dtype of queries and caches.
        by_head: Whether a cache has its heads outermost in memory, and queries lie in a wider tensor.
        seed: The seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in num_kv]
    order = torch.randperm(sum(pages), generator=generator) + 1

    def random(rows: int, count: int, dim: int) -> torch.Tensor:
        shape = (count, rows, dim) if by_head else (rows, count, dim)
        made = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        return made.transpose(0, 1) if by_head else made

    slots = (sum(pages) + 1) * page_size
    tensors = [random(sum(num_q), heads[0], dims[0]), *(random(slots, heads[1], dim) for dim in dims)]
    table = torch.zeros(len(num_kv), max(pages), **INT)
    starts = [0, *itertools.accumulate(pages)]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        table[row, : end - start] = order[start:end]
    return tensors, {
        "offsets": torch.tensor([0, *itertools.accumulate(num_q)], **INT),
        "kv_indptr": torch.tensor(starts, **INT),
        "kv_indices": order.to(**INT),
        "kv_last_page_len": torch.tensor([(n - 1) % page_size + 1 for n in num_kv], **INT),
        "lengths": torch.tensor(num_kv, **INT),
        "page_table": table,
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Draw a problem for both kernels: tensors, index tensors, and the options of the scores."""
    num_kv = draw(st.lists(KEYS, min_size=1, max_size=3))
    one = draw(st.booleans())
    num_q = [1 if one else draw(st.integers(0, n)) for n in num_kv]
    page_size = draw(st.sampled_from([1, 16]))
    heads = draw(st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]))
    tensors, index = paged_problem(
        num_q,
        num_kv,
        page_size=page_size,
        heads=heads,
        dims=(draw(DIMS), draw(DIMS)),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        by_head=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    options = {
        "page_size": page_size,
        "scaling": draw(st.sampled_from([0.1, 0.5])),
        "sliding_window": draw(st.sampled_from([None, None, 1, 5, 64, 90])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "sinks": draw(st.sampled_from([None, sinks])),
    }
    return tensors, index, options


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance of a comparison in ``dtype``."""
    near = 1e-9 if dtype is torch.float64 else 2e-5
    return {"rtol": near, "atol": near}


@EXAMPLES
@given(
    problem=problems(),
    threads=st.sampled_from([1, 2]),
    planned=st.sampled_from([None, 16, 64]),
    mask=st.sampled_from([None, None, "dense", "strided"]),
)
def test_paged_attention_equals_the_portable_kernel(
    problem: tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]],
    threads: int,
    planned: int | None,
    mask: str | None,
) -> None:
    """Forms agree for any keys, queries, heads, threads, strides, masks, and a plan of only some keys."""
    tensors, index, options = problem
    arguments = {
        "qo_indptr": index["offsets"],
        "kv_indptr": index["kv_indptr"],
        **{name: index[name] for name in ("kv_indices", "kv_last_page_len")},
        "max_q_len": 300,
        "max_kv_len": 300,
        **options,
    }
    chunks = {}
    if planned is not None:  # one chunk of each request
        chunks["kv_chunk_size"] = torch.tensor([planned], **INT)
        chunks["o_indptr"] = torch.arange(len(index["lengths"]) + 1, **INT)
    if mask is not None:
        num_q = index["offsets"].diff().tolist()
        sizes = [-(-q * kv // 8) for q, kv in zip(num_q, index["lengths"].tolist(), strict=True)]
        arguments["mask_indptr"] = torch.tensor([0, *itertools.accumulate(sizes)], **INT)
        bits = torch.randint(256, (sum(sizes), 2), generator=torch.Generator().manual_seed(sum(sizes)))
        arguments["mask"] = (
            bits.to(torch.uint8)[:, 0].clone() if mask == "dense" else bits.to(torch.uint8)[:, 0]
        )
    call = paged_call(*tensors, **arguments)
    expected = paged_attention(call, **chunks)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = paged_attention(call, **chunks, compiled=True)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, expected, **tolerance(got.dtype), equal_nan=True)


@EXAMPLES
@given(problem=problems(), causal=st.booleans())
def test_page_table_attention_equals_the_portable_kernel(
    problem: tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]],
    causal: bool,  # noqa: FBT001  a drawn value
) -> None:
    """Forms agree with and without causality, with the log-sum-exp, over a part of a wider table."""
    tensors, index, options = problem
    wide = torch.cat([index["page_table"], torch.full_like(index["page_table"], 10**6)], dim=1)
    arguments = {
        "cu_seqlens_q": index["offsets"],
        "cache_seqlens": index["lengths"],
        "max_seqlen_q": 300,
        "page_table": wide[:, : index["page_table"].shape[1]],
        "is_causal": causal,
        "with_lse": True,
        **options,
    }
    results = []
    for compiled in (False, True):
        lse = tensors[0].new_full(tensors[0].shape[:2], float("nan"))
        call = page_table_call(*tensors, **arguments)
        results.append(page_table_attention(call, lse=lse, compiled=compiled))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, **tolerance(got.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_q", [1, 70])
def test_narrow_numbers_are_summed_in_float32(dtype: torch.dtype, num_q: int) -> None:
    """A result of 16-bit numbers is the rounded result of the same numbers in float64."""
    tensors, index = paged_problem(
        [num_q, 1], [130, 77], page_size=16, heads=(6, 2), dims=(40, 24), dtype=dtype, by_head=False, seed=3
    )
    arguments = {
        "qo_indptr": index["offsets"],
        "kv_indptr": index["kv_indptr"],
        "kv_indices": index["kv_indices"],
        "kv_last_page_len": index["kv_last_page_len"],
        "page_size": 16,
        "scaling": 0.2,
        "max_q_len": 300,
        "max_kv_len": 300,
    }
    exact = paged_attention(paged_call(*(t.double() for t in tensors), **arguments))
    got = paged_attention(paged_call(*tensors, **arguments), compiled=True)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=step, atol=step / 8)


def test_a_row_does_not_depend_on_other_requests() -> None:
    """The result of a request is bitwise the same by itself and in a batch."""
    kinds = {"page_size": 16, "heads": (4, 2), "dims": (32, 32), "dtype": torch.float32, "by_head": False}
    tensors, index = paged_problem([3, 90, 1], [70, 90, 129], **kinds, seed=5)
    options = {"page_size": 16, "max_seqlen_q": 300, "scaling": 0.2}
    call = page_table_call(
        *tensors,
        cu_seqlens_q=index["offsets"],
        cache_seqlens=index["lengths"],
        page_table=index["page_table"],
        **options,
    )
    together, _ = page_table_attention(call, compiled=True)
    for row, (start, end) in enumerate(itertools.pairwise(index["offsets"].tolist())):
        call = page_table_call(
            tensors[0][start:end],
            *tensors[1:],
            cu_seqlens_q=torch.tensor([0, end - start], **INT),
            cache_seqlens=index["lengths"][row : row + 1],
            page_table=index["page_table"][row : row + 1],
            **options,
        )
        alone, _ = page_table_attention(call, compiled=True)
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("page", [-1, 5, 2**30])
@pytest.mark.parametrize("num_q", [1, 8])
def test_a_page_outside_the_cache_is_refused(page: int, num_q: int) -> None:
    """A page number outside the cache, as in a stale row, is an error, and no memory is read."""
    kinds = {"page_size": 16, "heads": (4, 2), "dims": (32, 32), "dtype": torch.float32, "by_head": False}
    tensors, index = paged_problem([num_q], [50], **kinds, seed=5)
    assert len(tensors[1]) == 5 * 16
    for tensor in (index["kv_indices"], index["page_table"].view(-1)):
        tensor[3] = page
    options = {"page_size": 16, "scaling": 0.2}
    with pytest.raises(IndexError, match=f"index out of range: page {page} of a request"):
        paged_attention(
            paged_call(
                *tensors,
                qo_indptr=index["offsets"],
                **{name: index[name] for name in ("kv_indptr", "kv_indices", "kv_last_page_len")},
                max_q_len=300,
                max_kv_len=300,
                **options,
            ),
            compiled=True,
        )
    with pytest.raises(IndexError, match=f"index out of range: page {page} of a request"):
        page_table_attention(
            page_table_call(
                *tensors,
                cu_seqlens_q=index["offsets"],
                cache_seqlens=index["lengths"],
                max_seqlen_q=300,
                page_table=index["page_table"],
                **options,
            ),
            compiled=True,
        )


# -- index tensors ---------------------------------------------------------------------------------


@EXAMPLES
@given(data=st.data(), page_size=st.sampled_from([1, 3, 16]), window=st.sampled_from([None, 1, 7, 30]))
def test_paged_indices_equal_the_portable_kernel(
    data: st.DataObject, page_size: int, window: int | None
) -> None:
    """Offsets, pages and last pages are the same, with windows, and with rows after the requests."""
    real, fake = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 1))
    lens = data.draw(st.lists(st.integers(1, 60), min_size=real + fake, max_size=real + fake))
    by_row = data.draw(st.booleans())
    num_q: torch.Tensor | int = 1
    if by_row:
        num_q = torch.tensor([data.draw(st.integers(0, n)) for n in lens], dtype=torch.int64)
    table = torch.randint(1, 10**6, (6, 64), generator=torch.Generator().manual_seed(real)).to(**INT)
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, 5), min_size=real, max_size=real)), dtype=torch.int64
    )
    results = []
    for compiled in (False, True):
        out = {
            "kv_indptr": torch.full((len(lens) + 1,), -7, **INT),
            "kv_indices": torch.full((sum(lens) + 3,), -7, **INT),
            "kv_last_page_len": torch.full((len(lens),), -7, **INT),
        }
        fill_paged_indices(
            table,
            rows,
            torch.tensor(lens, dtype=torch.int64),
            num_q=num_q,
            page_size=page_size,
            sliding_window=window,
            compiled=compiled,
            **out,
        )
        results.append({name: tensor.tolist() for name, tensor in out.items()})
    assert results[1] == results[0]


def test_an_index_that_is_too_small_is_refused_with_the_portable_error() -> None:
    """Pages that do not fit are refused as the portable kernel does; nothing is written past the end."""
    memory = torch.full((5,), -7, **INT)
    with pytest.raises(RuntimeError, match="kv_indices has 3 entries, this batch needs 5 pages"):
        fill_paged_indices(
            torch.ones(2, 8, **INT),
            torch.tensor([0, 1]),
            torch.tensor([2, 3]),
            num_q=1,
            page_size=1,
            kv_indptr=torch.zeros(3, **INT),
            kv_indices=memory[:3],
            kv_last_page_len=torch.zeros(2, **INT),
            compiled=True,
        )
    assert memory[3:].tolist() == [-7, -7]


def test_a_page_of_no_keys_is_refused() -> None:
    """A page size of 0 is an error, not a crash of the process."""
    kinds = {"page_size": 16, "heads": (4, 2), "dims": (32, 32), "dtype": torch.float32, "by_head": False}
    tensors, index = paged_problem([1], [50], **kinds, seed=5)
    options = {"page_size": 0, "scaling": 0.2}
    with pytest.raises((RuntimeError, ZeroDivisionError)):  # the portable kernel's
        paged_attention(
            paged_call(
                *tensors,
                qo_indptr=index["offsets"],
                **{name: index[name] for name in ("kv_indptr", "kv_indices", "kv_last_page_len")},
                max_q_len=300,
                max_kv_len=300,
                **options,
            ),
            compiled=True,
        )
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        page_table_attention(
            page_table_call(
                *tensors,
                cu_seqlens_q=index["offsets"],
                cache_seqlens=index["lengths"],
                max_seqlen_q=300,
                page_table=index["page_table"],
                **options,
            ),
            compiled=True,
        )
    with pytest.raises(RuntimeError, match="page_size is 0"):
        fill_paged_indices(
            torch.ones(2, 8, **INT),
            torch.tensor([0]),
            torch.tensor([2]),
            num_q=1,
            page_size=0,
            kv_indptr=torch.zeros(2, **INT),
            kv_indices=torch.zeros(8, **INT),
            kv_last_page_len=torch.zeros(1, **INT),
            compiled=True,
        )


def test_a_slot_outside_the_cache_is_refused() -> None:
    """A KV slot past the end of the cache is refused before anything is written."""
    cache = torch.zeros(4, 1, 2)
    with pytest.raises(IndexError, match=r"out_cache_loc\[1\] is 4; the cache has 4 slots"):
        write_kv_cache(
            torch.ones(2, 1, 2), torch.ones(2, 1, 2), cache, cache, torch.tensor([1, 4]), compiled=True
        )
    assert not cache.any()


# -- products --------------------------------------------------------------------------------------


@EXAMPLES
@given(
    rows=st.one_of(st.integers(0, 19), st.sampled_from([23, 24, 29, 57, 71])),  # many: other code
    sizes=st.tuples(st.integers(1, 70), st.sampled_from([1, 15, 16, 31, 33, 64, 100, 1160, 2500])),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2]),
)
def test_linear_equals_the_exact_product(
    rows: int,
    sizes: tuple[int, int],
    has_bias: bool,  # noqa: FBT001  a drawn value
    dtype: torch.dtype,
    threads: int,
) -> None:
    """For any number of rows and features, the result is the rounded product of the same float64 numbers."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, sizes[1], generator=generator).to(dtype) for n in (rows, sizes[0]))
    bias = torch.randn(sizes[0], generator=generator).to(dtype) if has_bias else None
    out = torch.full((rows, sizes[0]), NAN, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear(x, weight, bias, out)
    finally:
        torch.set_num_threads(before)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Many rows are summed number by number in parts of up to 640, few rows by vectors.
    steps = max(60, 4 * min(sizes[1], 640)) if rows > 23 else max(40, sizes[1] / 4)
    of_sums = torch.finfo(torch.float32).eps * steps
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps * 4, atol=of_sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [200, 2505])  # rows of x that fit the L1 cache, and that do not
def test_a_row_of_a_product_does_not_depend_on_other_rows(features: int, dtype: torch.dtype) -> None:
    """The result of a row is bitwise the same by itself and among others, at any index."""
    x, weight = torch.randn(15, features).to(dtype), torch.randn(37, features).to(dtype)
    together = torch.empty(15, 37, dtype=dtype)
    linear(x, weight, None, together)
    for row in range(15):
        alone = torch.empty(1, 37, dtype=dtype)
        linear(x[row : row + 1], weight, None, alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [200, 2506])  # one panel of inputs, and several
def test_one_of_many_rows_does_not_depend_on_other_rows(features: int, dtype: torch.dtype) -> None:
    """Among many rows, the result of a row is bitwise the same at any index and for any number of them."""
    x, weight, bias = (torch.randn(n, features).to(dtype) for n in (75, 37, 37))
    bias = bias[:, 0]
    together = torch.empty(75, 37, dtype=dtype)
    linear(x, weight, bias, together)
    for first, count in ((0, 40), (1, 24), (9, 29), (35, 40)):  # in blocks of 9 to 14 rows
        fewer = torch.empty(count, 37, dtype=dtype)
        linear(x[first : first + count], weight, bias, fewer)
        assert torch.equal(fewer, together[first : first + count])


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((2, 4), (3, 5), (2, 3)), r"x \[2, 4\] \* weight \[3, 5\] does not give out \[2, 3\]"),
        (((2, 5), (3, 5), (2, 4)), r"does not give out \[2, 4\]"),
        (((1, 2, 5), (3, 5), (2, 3)), r"x \[1, 2, 5\]"),
        (((2, 0), (3, 0), (2, 3)), r"weight is \[3, 0\]"),
    ],
)
def test_shapes_of_a_product_that_do_not_agree_are_refused(
    shapes: tuple[tuple[int, ...], ...], says: str
) -> None:
    """The error has the shapes, and nothing is written."""
    x, weight, out = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(RuntimeError, match=says):
        linear(x, weight, None, out)
    with pytest.raises(RuntimeError, match=r"strides \[1, 5\]"):
        linear(x, torch.zeros(5, 5).t(), None, out)


# -- the build -------------------------------------------------------------------------------------


def run(program: str, **environment: str) -> str:
    """Return what a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


LOAD = "from graphpact_kernels.compiled import load; print(load())"


def test_a_refusal_is_the_same_with_stack_traces_of_cpp() -> None:
    """With TORCH_SHOW_CPP_STACKTRACES torch opens the library again, and the error is the same."""
    refused = """
import torch
from graphpact_kernels.compiled import linear, load
assert load() is None
try:
    linear(torch.ones(2, 3), torch.ones(4, 5), None, torch.ones(2, 4))
except Exception as error:
    print(type(error).__name__, str(error).partition(chr(10))[0])
"""
    assert run(refused, TORCH_SHOW_CPP_STACKTRACES="1") == run(refused) != ""


def test_the_reason_without_a_compiler_says_what_to_install() -> None:
    """Without a compiler on the path, the reason names it and what to install."""
    assert "no C++ compiler: 'no-such-c++' is not found" in run(LOAD, CXX="no-such-c++")


def test_a_compiler_that_fails_is_reported(tmp_path: Path) -> None:
    """The reason is the compiler's first error, and no library is kept."""
    broken = tmp_path / "c++"
    broken.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 1;; *) echo 'x.cpp: error: out of paper'; exit 1;; esac\n"
    )
    broken.chmod(0o755)
    said = run(LOAD, CXX=str(broken), GRAPHPACT_CACHE_DIR=str(tmp_path / "cache"))
    assert said == "they cannot be built and loaded: x.cpp: error: out of paper"
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.sweep
def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """The reason names the path."""
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in run(LOAD, GRAPHPACT_CACHE_DIR=str(tmp_path / "file"))


def test_other_sources_need_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a source or of the instructions changes the key of the library."""
    keys = set()
    for instructions in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda of=instructions: of)
        keys.add(build._key())
    for name in (*build._HEADERS, *build._SOURCES):
        (tmp_path / name).write_text((build._HERE / name).read_text() + "//")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    keys.add(build._key())
    assert len(keys) == 4


@pytest.mark.sweep
def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """Two processes with an empty cache: one builds, the other waits, and both have the kernels."""
    environment = os.environ | {"GRAPHPACT_CACHE_DIR": str(tmp_path)}
    program = LOAD + "; import torch; torch.ops.graphpact_compiled.schedule_attention.default"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [out.strip() for out, _ in said] == ["None", "None"], said
    assert sum("compiling the kernels, once" in err for _, err in said) == 1
    assert len(list(tmp_path.rglob("*.so"))) == 1


@pytest.mark.sweep
def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path) -> None:
    """An unloadable library, such as from another C library, gives a warning and is built again."""
    entry = tmp_path / "kernels" / build._key()
    (tmp_path / "built.so").write_bytes(b"no library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path))
        build._KERNELS.keep(entry.name, tmp_path / "built.so")
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env=os.environ | {"GRAPHPACT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None"
    assert f"{entry} is not used and compiled again" in done.stderr
    assert (entry / "library.so").stat().st_size > 10**5


@pytest.mark.sweep
def test_errors_are_made_without_the_library_of_cpp(tmp_path: Path) -> None:
    """A page outside the cache is refused too where the compiler links the library of C++ statically."""
    static = tmp_path / "c++"
    static.write_text('#!/bin/sh\nexec c++ -static-libstdc++ "$@"\n')
    static.chmod(0o755)
    chosen = ["-m", "not sweep", "-k", "refused and not stack_traces", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        env=os.environ | {"GRAPHPACT_CACHE_DIR": str(tmp_path), "CXX": str(static)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (library,) = tmp_path.rglob("library.so")
    assert b"libstdc++.so" not in library.read_bytes()


@pytest.mark.sweep
@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX2", "AVX512"])
def test_kernels_for_other_instructions_compute_the_same(instructions: str, tmp_path: Path) -> None:
    """The tests of this file pass with a library for older vector instructions, or for none."""
    have = torch.backends.cpu.get_cpu_capability()
    if instructions not in ("DEFAULT", "AVX2", have):
        pytest.skip(f"this CPU has {have}")
    program = f"""
import sys, pytest, torch
torch.backends.cpu.get_cpu_capability = lambda: {instructions!r}
torch.cpu._is_avx512_bf16_supported = lambda: False
chosen = ["-m", "not sweep", "-k", "not stack_traces"]  # that one starts a process, which builds for this CPU
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *chosen, {__file__!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"GRAPHPACT_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert " skipped" not in done.stdout
    assert len(list(tmp_path.rglob("*.so"))) == 1
