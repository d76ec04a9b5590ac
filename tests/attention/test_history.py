"""What a replay hook writes depends on the step alone, whatever graphs and batches came before."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from attention_problems import CASES, Case, Problem, configs_of, sequences
from attention_rig import Rig
from graphpact import ForwardMode
from graphpact.attention import AttentionBackend
from graphpact.pact import walk
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_trtllm_mla import TRTLLMMLABackend

BACKENDS: tuple[type[AttentionBackend], ...] = (FlashInferBackend, FA3Backend, TRTLLMMLABackend)


def _configs(backend: type[AttentionBackend]) -> dict[Case, Any]:
    """Return the backend's first configuration of every mode that is captured."""
    found = {c.case: c for c in reversed([*configs_of(backend.capabilities)])}
    return {
        case: found[case] for case in CASES if case in found and case.mode is not ForwardMode.IDLE
    }


def _prepare(rig: Rig, problem: Problem) -> dict[str, torch.Tensor]:
    """Go through the hooks of one replay, and return copies of the metadata's tensors by path."""
    rig.load(problem)
    batch = problem.batch()
    shape = rig.lane.runner.can_run(batch)
    view = rig.lane.prepare_replay(registry=rig.lane.registry, batch=batch, shape=shape)
    captured = rig.lane._captured[shape].metadata
    metadata = rig.lane.init_metadata_replay(view=view, shape=shape, captured=captured)
    assert metadata is captured
    parts = walk({"metadata": metadata})
    return {path: t.clone() for path, t in parts if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize(
    ("backend", "case"),
    [pytest.param(b, c, id=f"{b.__name__}-{c}") for b in BACKENDS for c in _configs(b)],
)
def test_metadata_is_the_same_after_any_history(
    backend: type[AttentionBackend], case: Case
) -> None:
    """All that a step writes after other batches it writes over two kinds of garbage too, and the same."""
    config = _configs(backend)[case]
    with torch.inference_mode():
        rig = Rig(backend, config, strict=False, in_graph=False)
    assert rig.lane.registry is not None
    own = [s.buffer for s in rig.lane.registry if not s.copy_from_fb]

    @settings(derandomize=True, deadline=None, max_examples=4)
    @given(steps=sequences(config))
    def check(steps: list[Problem]) -> None:
        with torch.inference_mode():
            for problem in steps[:-1]:
                _prepare(rig, problem)
            after = _prepare(rig, steps[-1])
            over = []
            for garbage in (7, 11):
                for buffer in own:
                    assert buffer is not None
                    buffer.fill_(garbage)
                over.append(_prepare(rig, steps[-1]))
        for path, tensor in after.items():
            written = over[0][path] == over[1][path]
            assert torch.equal(tensor[written], over[0][path][written]), path
            assert written.any() or not tensor.numel(), path

    check()
