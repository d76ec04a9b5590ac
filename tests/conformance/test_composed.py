"""Test runners with eager calls between segments, or with three forward passes, on every driver.

Does not: check the rules; the museum does that.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from compiling import (
    compiler,  # noqa: F401  a fixture
    interpret,
)
from graphpact.graphs import GraphDriver
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import CPU, Rig
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_museum.collection import VARIANTS
from graphpact_tape.tape import TapeDriver

Driver = Callable[[torch.device], GraphDriver]
SEGMENTS, PASSES = "attention-between-segments", "three-passes-in-one-graph"
GIVEN = ("rows", "logits", "hidden_states")
"""The outputs of the suite's model for regions with several passes."""
MODES = ("decode", "extend")
DRIVERS: dict[str, Driver] = {
    "tape": TapeDriver,
    "strict tape": partial(TapeDriver, strict=True),
}


def _replays(
    name: str,
    mode: str,
    driver: Driver,
    *,
    strict: bool = False,
    device: torch.device = CPU,
    smallest: bool = False,
) -> Rig:
    """Replay batches through a variant of the suite's runner, compare with the oracle, and return the rig.

    Args:
        name: Name of the variant.
        mode: Mode of the batches.
        driver: Makes the lane's driver.
        strict: See `Rig`.
        device: See `Rig`.
        smallest: Capture only the smallest shape, and replay only batches that fit it.
    """
    variant = next(v for v in VARIANTS if v.name == name)
    config = next(
        c for c in configs_of(ReferenceBackend.capabilities) if str(c) == f"{mode}-page16-gqa-float32"
    )
    rig = Rig(
        config,
        backend=ReferenceBackend,
        runner=variant.make(ReferenceRunner),
        driver=driver,
        strict=strict,
        device=device,
        pact="always",
        capture=False,
    )
    shapes = rig.lane.shapes[:1] if smallest else rig.lane.shapes
    for shape in shapes:
        rig.lane.capture(shape)
    (steps,) = draw(config, 1, 0)
    for problem in steps:
        if rig.lane.fit(rig.batch_of(problem)) not in shapes:
            continue
        step = rig.step(problem)
        assert step.error is None, step.error
        assert step.replays == 1
        assert not differences(rig, step, rig.answer(problem))
        eager = rig.step(problem, eagerly=True)
        assert not differences(rig, eager, rig.answer(problem))
    return rig


def _is_composed(rig: Rig, name: str) -> None:
    """Verify that every graph has the composition of its runner: segments, or outputs of three passes."""
    for captured in rig.lane.captured.values():
        if name == SEGMENTS:
            assert captured.graph.num_segments == len(rig.layers) + 1
        else:
            assert captured.graph.num_segments == 1
            every = {f"{which}{name}" for which in ("", "first_", "second_") for name in GIVEN}
            assert {*captured.graph.outputs} == every


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [SEGMENTS, PASSES])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_tape_replays_what_a_runner_composes(driver: str, name: str, mode: str) -> None:
    """Replays and eager runs agree with the oracle, on a fast and on a strict tape."""
    _is_composed(_replays(name, mode, DRIVERS[driver], strict=driver == "strict tape"), name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [SEGMENTS, PASSES])
def test_inductor_records_what_a_runner_composes(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules that the driver would compile, run uncompiled, agree with the oracle."""
    interpret(monkeypatch)
    _is_composed(_replays(name, mode, InductorDriver), name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [SEGMENTS, PASSES])
@pytest.mark.usefixtures("compiler")
def test_inductor_compiles_what_a_runner_composes(name: str) -> None:
    """Compiled graphs agree with the oracle: segments with attention between them, or three passes."""
    _is_composed(_replays(name, "decode", InductorDriver, smallest=True), name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [SEGMENTS, PASSES])
def test_cuda_graphs_replay_what_a_runner_composes(name: str, mode: str) -> None:
    """CUDA graphs agree with the oracle."""
    _is_composed(_replays(name, mode, CudaDriver, device=torch.device("cuda")), name)
