"""Logits of a replay equal an eager run of the same padded batch, bit for bit."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import PROMPTS, requests, run_in_child
from sglang.srt.model_executor.forward_context import get_forward_context, set_forward_context
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from test_backends import FA3, TRITON
from test_drafts import TREE

from graphpact_sglang.seams.runners import named_backends


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a graph's output."""
    values = output if isinstance(output, tuple) else vars(output).values()
    yield from (value for value in values if isinstance(value, torch.Tensor))


def _bind(metadata: list[tuple[Any, Any]]) -> None:
    """Bind metadata to attention backends."""
    for backend, its in metadata:
        backend.forward_metadata = its


def compare_every_replay() -> None:
    """After every replay, run what was captured again, eagerly on its memory, and compare the outputs."""
    capture, replay = FullCudaGraphBackend.capture_one, FullCudaGraphBackend.replay
    captured: dict[Any, Any] = {}

    @functools.wraps(capture)  # so that the hooks around it are found
    def capture_one(self: Any, key: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        backends = [each for _, each in named_backends(self._cuda_graph_runner)]
        read = [(each, getattr(each, "forward_metadata", None)) for each in backends]
        captured[self, key] = forward, read, get_forward_context()
        return capture(self, key, forward, *args, **kwargs)

    @functools.wraps(replay)
    @torch.inference_mode()
    def replayed(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        output = replay(self, key, *args, **kwargs)
        kept = [tensor.clone() for tensor in _tensors(output)]
        for tensor in _tensors(output):
            tensor.zero_()
        forward, read, context = captured[self, key]
        now = [(backend, getattr(backend, "forward_metadata", None)) for backend, _ in read]
        _bind(read)
        before = set_forward_context(context)
        eager = [*_tensors(forward())]
        set_forward_context(before)
        _bind(now)
        assert len(kept) == len(eager) > 0
        assert all(map(torch.equal, kept, eager)), f"{key}: a replay differs from an eager run"
        for tensor, its in zip(_tensors(output), kept, strict=True):
            tensor.copy_(its)
        return output

    FullCudaGraphBackend.capture_one = capture_one  # type: ignore[method-assign]
    FullCudaGraphBackend.replay = replayed  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("arguments", "prompts", "most"),
    [({}, 8, 16), (TREE, 8, 16), (FA3, 8, 16), (TRITON, 2, 3)],
    ids=["ours", "drafts", "fa3", "triton"],
)
def test_a_replay_equals_an_eager_run_of_the_same_padded_batch(
    arguments: dict[str, Any], prompts: int, most: int
) -> None:
    """Every output of decode, draft and verify graphs has the bits of an eager run on the same memory."""
    given = requests(PROMPTS[:prompts], max_new_tokens=most, every=1)
    run = run_in_child("tape", given, before=compare_every_replay, **arguments)
    assert run.replays("DecodeCudaGraphRunner") >= min(most - 1, 5)
    assert all(len(tokens) == most for tokens in run.tokens)
