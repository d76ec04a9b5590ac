"""The Triton kernels: under the interpreter, through the compiler, on a GPU; and what runs without them."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphpact_kernels import _triton, fill_page_table, fill_paged_indices, schedule_attention, schedule_size
from graphpact_kernels.indices import _fill_page_table, _fill_paged_indices, _schedule_attention

HERE = Path(__file__).parent
INT = {"dtype": torch.int32}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)


@needs_triton
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("file", "interpreted"), [("triton_properties.py", "1"), ("triton_compiles.py", "0")]
)
def test_in_a_process_of_its_own(file: str, interpreted: str, tmp_path: Path) -> None:
    """The properties hold; each file runs in its own process, because Triton chooses its mode at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    env = {**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@needs_triton
@pytest.mark.parametrize("interpreted", ["1", pytest.param("0", marks=pytest.mark.sweep)])
def test_launches_are_recorded_in_a_process_of_its_own(interpreted: str) -> None:
    """Launches of the interpreter become nodes of a graph; without it, a launch is refused."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "triton_launches.py"]
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr


# -- which form runs -------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Forget the choice of the form before and after each test."""
    _triton.kernels.cache_clear()
    yield
    _triton.kernels.cache_clear()


@pytest.mark.parametrize("name", ["fill_paged_indices", "fill_page_table", "schedule_attention"])
def test_tensors_of_a_gpu_have_an_implementation_of_their_own(name: str) -> None:
    """The operator has an implementation for CUDA, in addition to the one for all devices."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"graphpact::{name}", "CUDA")
    assert has(f"graphpact::{name}", "CompositeExplicitAutograd")


def test_the_triton_kernel_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Triton's kernels can run, they get the operator's arguments."""
    seen: list[tuple[Any, ...]] = []
    module = SimpleNamespace(fill=lambda *args: seen.append(args))
    monkeypatch.setattr(_triton, "kernels", lambda: module)
    _triton.prefer_triton(lambda *_: pytest.fail("the portable kernel ran"), "fill")(1, 2)
    assert seen == [(1, 2)]


@pytest.mark.usefixtures("_fresh")
def test_without_triton_the_portable_kernel_fills_and_one_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is reported once in a process, for all kernels."""
    monkeypatch.setattr(_triton, "missing", lambda: "it is a Tuesday")
    seen: list[tuple[Any, ...]] = []
    with caplog.at_level(logging.WARNING, logger="graphpact_kernels"):
        for name in ("fill_page_table", "schedule_attention"):
            _triton.prefer_triton(lambda *args: seen.append(args), name)(name)
    assert seen == [("fill_page_table",), ("schedule_attention",)]
    (record,) = caplog.records
    assert "it is a Tuesday" in record.getMessage()


@pytest.mark.usefixtures("_fresh")
def test_a_triton_that_cannot_be_imported_is_a_reason_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a broken installation the portable kernels are used, and the error is logged."""
    monkeypatch.setattr(_triton, "missing", lambda: None)
    monkeypatch.delitem(sys.modules, "graphpact_kernels._triton_indices", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert _triton.kernels() is None
    assert "triton cannot be imported" in caplog.text


def test_what_triton_lacks_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, a C compiler or headers, the reason says what to install."""
    here = Path(__file__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'graphpact-kernels[triton]'" in str(_triton.missing())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("CC", "my-cc")
    assert "'my-cc' is not found; install gcc" in str(_triton.missing())
    monkeypatch.setattr(shutil, "which", lambda _: str(here))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(here.parent))
    assert "has no Python.h; install python3-dev" in str(_triton.missing())
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert _triton.missing() is None


# -- on a GPU --------------------------------------------------------------------------------------

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(_triton.missing() is not None, reason=str(_triton.missing())),
]


def _new(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), -7, dtype=torch.int32, device="cuda") for size in sizes]


def _paged(
    table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], list[torch.Tensor], list[torch.Tensor]]:
    """Return the operator and the portable kernel on tensors of FlashInfer, and what each writes."""
    sizes = len(lens) + 1, len(lens) * 8 + 3000, len(lens)
    got, expected = _new(*sizes), _new(*sizes)
    names = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), got, strict=True))
    more: dict[str, Any] = {"num_q": 2, "page_size": 16, "sliding_window": 40}
    return (
        lambda: fill_paged_indices(table, rows[:-1], lens, **more, **names),
        lambda: _fill_paged_indices(table, rows[:-1], lens, None, 2, 40, 16, *expected),
        got,
        expected,
    )


def _page_table(
    table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], list[torch.Tensor], list[torch.Tensor]]:
    """Return the operator and the portable kernel on tensors of FlashAttention, and what each writes."""
    sizes = len(lens), len(lens) + 1, len(lens) * 20
    got, expected = (
        [each.view(len(lens), -1) if i == 2 else each for i, each in enumerate(_new(*sizes))]
        for _ in range(2)
    )
    return (
        lambda: fill_page_table(
            *(table, rows, lens),
            uncounted=3,
            page_size=16,
            cache_seqlens=got[0],
            cu_seqlens_k=got[1],
            page_table=got[2],
        ),
        lambda: _fill_page_table(table, rows, lens, 3, 16, *expected),
        got,
        expected,
    )


def _schedule(
    _table: torch.Tensor, _rows: torch.Tensor, lens: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], list[torch.Tensor], list[torch.Tensor]]:
    """Return the operator and the portable kernel on the schedule of a decode, and what each writes."""
    offsets = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
    got, expected = (_new(schedule_size(len(lens)) + 9) for _ in range(2))
    return (
        lambda: schedule_attention(offsets, lens, out=got[0]),
        lambda: _schedule_attention(offsets, lens, expected[0]),
        got,
        expected,
    )


class TestOnAGPU:
    """On a GPU."""

    pytestmark = on_a_gpu

    @pytest.mark.parametrize("bs", [1, 7, 64, 1500])
    @pytest.mark.parametrize("problem", [_paged, _page_table, _schedule])
    def test_a_graph_records_one_launch_that_reads_the_lengths_of_each_replay(
        self, problem: Callable[..., Any], bs: int
    ) -> None:
        """Replays with other lengths write the same as the portable kernel, with one launch."""
        generator = torch.Generator().manual_seed(bs)
        table = torch.randint(1, 10**6, (bs, 256), generator=generator).to("cuda", torch.int32)
        rows = torch.randperm(bs, generator=generator).to("cuda")
        lens = torch.ones(bs, dtype=torch.int64, device="cuda")
        fill, portable, got, expected = problem(table, rows, lens)
        fill()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fill()
        for _ in range(3):
            lens.copy_(torch.randint(1, 256, (bs,), generator=generator))
            for tensor in got:
                tensor.fill_(-7)
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                graph.replay()
                torch.cuda.synchronize()
            portable()
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other)
            launches = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            assert len(launches) == 1, launches
