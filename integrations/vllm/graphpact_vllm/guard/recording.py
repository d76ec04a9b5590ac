"""`StepRecorder`: gives each step of vLLM to a recording, as its scheduler made it.

A step is recorded, without its padding, when the metadata of its first group of layers with keys is made.
Each kind of step is a lane: ``decode``, ``target_verify``, where every request has all its drafts, and
``mixed``. Other groups of layers, and the steps of a draft model, are not recorded.

Does not: write a file; `graphpact_guard.StepRecording` does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.recording import LaneLine
from graphpact_guard import Guard
from graphpact_vllm.seams.batches import StepBatches
from graphpact_vllm.seams.builders import Builders, Built
from graphpact_vllm.seams.graphs import V1_RUNNER, V2_RUNNER
from graphpact_vllm.seams.hooking import wrap


class StepRecorder:
    """The recorder of this process.

    Args:
        guard: Returns the guard; None before the first capture. Steps before it are vLLM's own warm-ups.
        builders: The metadata builders.
    """

    def __init__(self, guard: Callable[[], Guard | None], builders: Builders) -> None:
        self._guard, self._builders = guard, builders
        self._runner: Any = None  # whose step is not recorded yet
        self._batches: StepBatches | None = None
        self._lanes: dict[ForwardMode, LaneLine] = {}

    def register(self) -> None:
        """Record from now on."""
        for runner in (V1_RUNNER, V2_RUNNER):
            wrap(f"{runner}.execute_model", self._step)
        self._builders.watchers.append(self._built)

    def _step(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self._guard()
        is_recorded = guard is not None and not guard.log.is_starting and not self._builders.is_dummy
        self._runner = runner if is_recorded else None
        try:
            return original(runner, *args, **kwargs)
        finally:
            self._runner = None

    def _built(self, builder: Any, built: Built) -> None:
        del builder
        common = built.common
        if self._runner is None or common is None or built.is_recurrent or not built.page_size:
            return
        if common.encoder_seq_lens_cpu is not None:  # cross attention
            return
        runner, self._runner = self._runner, None
        guard = self._guard()
        assert guard is not None and guard.recording is not None  # noqa: S101, PT018  it is asked for
        if self._batches is None:
            self._batches = _batches(runner, built.page_size)
        batch = self._batches.batch(common)
        lane = self._lanes.get(batch.forward_mode)
        if lane is None:
            lane = self._lanes[batch.forward_mode] = _lane(runner, batch.forward_mode, self._batches)
        guard.recording.record(lane, batch, self._batches.req_to_token)


def _batches(runner: Any, page_size: int) -> StepBatches:
    shape = runner.max_num_reqs + 1, runner.max_model_len
    with torch.inference_mode(mode=False):  # its memory outlives the step
        table = torch.zeros(shape, dtype=torch.int32, device=runner.device)
    return StepBatches(
        req_to_token=table, page_size=page_size, width=1 + runner.vllm_config.num_speculative_tokens
    )


def _lane(runner: Any, mode: ForwardMode, batches: StepBatches) -> LaneLine:
    rows, context = batches.req_to_token.shape
    lane = LaneLine(
        lane=mode.value,
        mode=mode,
        page_size=batches.page_size,
        context=context,
        slots=runner.kv_cache_config.num_blocks * batches.page_size,
        rows=rows,
        shapes=[],
        draft=[1, 1, 1],
        frozen=False,
    )
    if mode is ForwardMode.TARGET_VERIFY:
        lane = replace(lane, draft=[batches.width - 1, 1, batches.width])
    width = lane.tokens_per_request
    if width is None:
        return lane
    sizes = sorted(runner.compilation_config.cudagraph_capture_sizes or ())
    shapes = [[size // width, size] for size in sizes if not size % width and size // width < rows]
    return replace(lane, shapes=shapes)
