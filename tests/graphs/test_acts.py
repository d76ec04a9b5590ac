"""Tests that perform each act of graph_acts.toml: the tape has to behave as the table says.

`graphpact check` judges strict drivers by the CUDA column only. These tests check the tape's column. An act
is performed on the strict tape, on the fast tape and, where there is a GPU, on CUDA graphs.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from graphpact.graphs import GraphDriver
from graphpact_conformance.drivers.acts import ACTS, ActMemory
from graphpact_conformance.drivers.strictness import (
    ALLOWED,
    CHECKS,
    ROWS,
    cuda_verdict,
    perform,
    require_capture,
    require_line,
)
from graphpact_conformance.rules import RULES
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_tape.tape import TapeDriver

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_NO_CUDA = CudaDriver.unavailable(_CUDA)

# Acts that the tests of the fast tape skip, each with the reason.
_NOT_FAST = {
    "capture_does_not_run": "it runs what it records",
    "compiled_code": "refused, as by the strict tape",
    "dlpack": "refused, as by the strict tape",
    "copy_into_pinned_host": "it takes every copy to the host for a host read",
    "pinned_allocation": "without a GPU, torch pins no memory",
    "resize_in_region": "refused, as by the strict tape",
    "restored_generator": "refused, as by the strict tape",
    "transpose_in_region": "refused, as by the strict tape",
    "to_cpu": "to the fast tape, host and device of a CPU are one device",
    "to_cpu_non_blocking": "as above",
    "type_to_host_class": "as above",
}


def _fast() -> GraphDriver:
    return TapeDriver(_CPU)


def _strict() -> GraphDriver:
    return TapeDriver(_CPU, strict=True)


def _is_refused(name: str, make: Callable[[], GraphDriver]) -> None:
    """Assert that an act is refused with its line and a hint, and that the driver can capture afterwards."""
    world = ActMemory(make)
    done = perform(name, world)
    assert done.outcome == "refused"
    assert done.error is not None
    if ACTS[name].line:
        require_line(name, done.error)
    require_capture(world)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_no_less_than_cuda_does(name: str) -> None:
    """Each tape verdict is compatible with the CUDA verdict; stricter and GPU-only ones have a note."""
    row = ROWS[name]
    assert row["tape"] in {*ALLOWED[cuda_verdict(row)], "gpu only"}
    assert row["rule"] in RULES
    note = row.get("note", "")
    if row["tape"] == "refused" and cuda_verdict(row) in ("legal", "frozen"):
        assert note.startswith("stricter: ")
    if row["tape"] == "gpu only":
        assert note


def test_every_row_has_its_act_and_every_act_its_row() -> None:
    """Each row has an act of its name, except those that only a GPU can do, and each act has a row."""
    assert set(ACTS) == {name for name, row in ROWS.items() if row["tape"] != "gpu only"}
    assert set(CHECKS) == set(ACTS)
    assert set(_NOT_FAST) <= set(ACTS)


@pytest.mark.parametrize("name", ACTS)
def test_the_strict_tape_does_what_the_table_says(name: str) -> None:
    """On the strict tape each act is refused, differs from eager, or behaves as on CUDA, as its row says."""
    if ROWS[name]["tape"] == "refused":
        _is_refused(name, _strict)
        return
    assert perform(name, ActMemory(_strict)).outcome == ROWS[name]["tape"]


@pytest.mark.parametrize(
    "name",
    [name for name in ACTS if cuda_verdict(ROWS[name]) in ("legal", "frozen") and name not in _NOT_FAST],
)
def test_the_fast_tape_does_what_is_legal(name: str) -> None:
    """An act that is legal or frozen in a CUDA graph gives the same results on the fast tape."""
    done = perform(name, ActMemory(_fast))
    assert done.outcome == "same", done.evidence


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ACTS
        if ROWS[name]["kind"] == "host read" and cuda_verdict(ROWS[name]) == "fails" and name not in _NOT_FAST
    ],
)
def test_the_fast_tape_refuses_host_reads(name: str) -> None:
    """The fast tape refuses host reads too; the error names the line."""
    _is_refused(name, _fast)


@pytest.mark.parametrize("make", [_fast, _strict], ids=["fast", "strict"])
def test_a_copy_in_a_region_reads_the_host_at_every_replay(make: Callable[[], GraphDriver]) -> None:
    """`copy_async` in a region, which row `pinned_to_device` advises, reads its source in each replay."""
    w = ActMemory(make)

    def region() -> torch.Tensor:
        w.driver.copy_async(w.x, w.pinned)
        return w.x + 1

    graph = w.driver.capture(region, warmup=0)
    for turn in (0, 1):
        w.refresh(turn)
        graph.replay()
        w.driver.synchronize()
        assert graph.outputs.tolist() == [11.0 + turn] * 4


@pytest.mark.gpu
@pytest.mark.skipif(bool(_NO_CUDA), reason=str(_NO_CUDA))
@pytest.mark.parametrize(
    "name",
    [name for name, act in ACTS.items() if act.gpu and cuda_verdict(ROWS[name]) != "undefined"],
)
def test_cuda_graphs_do_what_the_table_says(name: str) -> None:
    """On a GPU, in a separate process, each safe and defined act behaves as its row says."""
    done = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _on_gpu(name: str) -> None:
    """Perform an act on CUDA graphs, and assert the verdict of its row."""
    world = ActMemory(lambda: CudaDriver(_CUDA))
    if cuda_verdict(ROWS[name]) != "fails":
        done = perform(name, world)
        assert done.outcome == "same", done.evidence
        return
    error = ACTS[name].error
    with pytest.raises((RuntimeError, *(error if isinstance(error, tuple) else (error,)))):
        ACTS[name].perform(world)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch warns of an empty graph
    with torch.inference_mode():
        _on_gpu(sys.argv[1])
