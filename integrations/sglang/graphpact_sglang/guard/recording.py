"""`StepHooks`: gives each step of SGLang to a recording, from the live batch, before it is padded.

Every pass of a model goes through ``ModelRunner.forward``; graphs of drafts and of their extends do not, so
the hooks of their runners see these. Each kind of step is a lane: ``decode``, ``extend``, ``mixed``,
``target_verify``, ``draft_decode``, ``draft_extend``. Steps of other kinds are left out and counted.

Does not: write a file; `graphpact_guard.StepRecording` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_spec

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.recording import LaneLine, LineError
from graphpact_guard import StepRecording
from graphpact_sglang.seams.hooking import register_hook
from graphpact_sglang.seams.runners import is_a
from graphpact_sglang.seams.steps import BREAKABLE, DRAFT, DRAFT_EXTEND, FULL, RUNNERS, SRT

_FORWARD = f"{SRT}.model_runner.ModelRunner.forward"


class StepHooks:
    """The hooks that record.

    Args:
        recording_of: Returns the recording for a model runner; None while a graph is captured.
    """

    def __init__(self, recording_of: Callable[[Any], StepRecording | None]) -> None:
        self._recording_of = recording_of
        self._lanes: dict[str, LaneLine] = {}

    def register(self) -> None:
        """Register the hooks."""
        for target, hook in (
            (_FORWARD, self._forward),
            (f"{DRAFT}.execute", self._draft),
            (f"{DRAFT_EXTEND}.execute", self._draft_extend),
            (f"{FULL}.replay", self._replay),
            (f"{BREAKABLE}.replay", self._replay),
        ):
            register_hook(target, hook, HookType.BEFORE)

    # -- hooks -----------------------------------------------------------------------------------

    def _forward(self, model_runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if getattr(batch, "graphpact_verifies", False):  # no step of the engine
            return
        mode, drafts = batch.forward_mode, model_runner.is_draft_worker
        if mode.is_target_verify():
            self._record(model_runner, "target_verify", _verify, batch)
        elif mode.is_draft_extend_v2():
            self._record(model_runner, "draft_extend", _draft_extend, batch)
        elif drafts:
            self._record(model_runner, f"{mode.name.lower()} of the draft model", _of_draft_model, batch)
        elif mode.is_decode_or_idle():
            self._record(model_runner, "decode", _decode, batch)
        else:
            self._record(model_runner, mode.name.lower(), _extend, batch)

    def _draft(self, runner: Any, batch: Any) -> None:
        self._record(runner.model_runner, "draft_decode", _draft_decode, batch, runner)

    def _draft_extend(self, runner: Any, batch: Any, *args: Any) -> None:
        del args
        self._record(runner.model_runner, "draft_extend", _draft_extend, batch, runner)

    def _replay(self, graph_backend: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001  both backends have it
        if not any(is_a(runner, seen) for seen in RUNNERS):
            self._record(runner.model_runner, type(runner).__name__, _unknown, None)

    def _record(
        self,
        model_runner: Any,
        name: str,
        step: Callable[..., tuple[LaneLine, ForwardBatch]],
        batch: Any,
        runner: Any = None,
    ) -> None:
        recording = self._recording_of(model_runner)
        if recording is None:
            return
        try:
            lane, ours = step(model_runner, batch, runner)
        except LineError as error:
            recording.leave_out(name, str(error))
        else:
            lane = self._lanes.setdefault(lane.lane, lane)
            recording.record(lane, ours, model_runner.req_to_token_pool.req_to_token)


# -- kinds of steps ----------------------------------------------------------------------------------


def _decode(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    del runner
    shapes = _captured(model_runner.decode_cuda_graph_runner, width=1)
    lane = _lane(model_runner, ForwardMode.DECODE, shapes=shapes)
    return lane, _batch(ForwardMode.DECODE, batch, width=1)


def _extend(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    del runner
    try:
        mode = {"EXTEND": ForwardMode.EXTEND, "MIXED": ForwardMode.MIXED}[batch.forward_mode.name]
    except KeyError as error:
        raise LineError("no recording has steps of this kind") from error
    counts = batch.extend_seq_lens_cpu
    counts = batch.extend_seq_lens.tolist() if counts is None else list(counts)
    ours = _batch(mode, batch, width=None, extend_seq_lens_cpu=torch.tensor(counts))
    return _lane(model_runner, mode), ours


def _verify(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    del runner
    spec = batch.spec_info
    width, topk = getattr(spec, "draft_token_num", None), getattr(spec, "tree_topk", None)
    if width is None or topk is None:
        raise LineError(f"the drafts of {type(spec).__name__}, whose tree is not known")
    mask = None
    if topk != 1 and batch.batch_size:
        mask = _tree_mask(spec.retrieve_next_token.tolist(), spec.retrieve_next_sibling.tolist())
    branches = width if topk < 0 else topk  # -1: any number
    lane = _lane(
        model_runner,
        ForwardMode.TARGET_VERIFY,
        draft=[max(spec.max_tree_depth - 1, 1), branches, width],
        shapes=_captured(model_runner.decode_cuda_graph_runner, width),
    )
    return lane, _batch(ForwardMode.TARGET_VERIFY, batch, width, tree_mask=mask)


def _draft_decode(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    topk, num_steps = runner.topk, runner.speculative_num_steps
    slots = _slots(batch)
    if slots.numel() != batch.batch_size * topk * num_steps:
        raise LineError(f"{slots.numel()} KV slots of a draft for {batch.batch_size} requests")
    slots = slots.view(-1, num_steps)[:, :-1]  # the last step only samples
    lane = _lane(
        model_runner,
        ForwardMode.DRAFT_DECODE,
        draft=[num_steps - 1, topk, get_spec().speculative_num_draft_tokens],
        shapes=_captured(runner, runner.captured_req_width),
    )
    return lane, _batch(ForwardMode.DRAFT_DECODE, batch, topk, slots=slots)


def _draft_extend(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    spec = batch.spec_info
    width = spec.num_tokens_per_req
    shapes = _captured(runner, width)
    lane = _lane(model_runner, ForwardMode.DRAFT_EXTEND, draft=[1, 1, width], shapes=shapes)
    return lane, _batch(ForwardMode.DRAFT_EXTEND, batch, width, num_correct_drafts=spec.num_correct_drafts)


def _of_draft_model(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    del model_runner, batch, runner
    raise LineError("of a draft model only graphs of drafts and extends after a verification are recorded")


def _unknown(model_runner: Any, batch: Any, runner: Any) -> tuple[LaneLine, ForwardBatch]:
    del model_runner, batch, runner
    raise LineError("the batches of this graph runner are not known")


# -- parts of steps ----------------------------------------------------------------------------------


def _lane(
    model_runner: Any,
    mode: ForwardMode,
    *,
    draft: list[int] | None = None,
    shapes: list[list[int]] | None = None,
) -> LaneLine:
    table, size = model_runner.req_to_token_pool.req_to_token, model_runner.page_size
    sizes = f"_{'x'.join(map(str, draft))}" if draft else ""
    return LaneLine(
        lane=f"{mode.value}{sizes}",
        mode=mode,
        page_size=size,
        context=table.shape[1],
        slots=(model_runner.max_total_num_tokens // size + 1) * size,
        rows=table.shape[0],
        shapes=shapes or [],
        draft=draft or [1, 1, 1],
        frozen=False,
    )


def _captured(runner: Any, width: int) -> list[list[int]]:
    """Return the captured shapes of a graph runner for requests of ``width`` tokens; none if it has none."""
    if getattr(runner, "captured_req_width", None) != width:
        return []
    return [[bs, bs * width] for bs in runner.capture_bs]


def _slots(batch: Any) -> torch.Tensor:
    """Return the KV slots of the new tokens as ``req_to_token`` names them."""
    virtual = getattr(batch, "out_cache_loc_virtual", None)
    slots: torch.Tensor = batch.out_cache_loc if virtual is None else virtual
    return slots


def _batch(
    mode: ForwardMode,
    batch: Any,
    width: int | None,
    *,
    slots: torch.Tensor | None = None,
    **fields: Any,
) -> ForwardBatch:
    """Return SGLang's batch as ours; ``width`` tokens for each request, or those of the field."""
    slots = _slots(batch) if slots is None else slots
    bs = batch.batch_size
    expected = int(fields["extend_seq_lens_cpu"].sum()) if width is None else bs * width
    if (len(slots), len(batch.seq_lens), len(batch.req_pool_indices)) != (expected, bs, bs):
        raise LineError(f"{len(slots)} KV slots for {expected} new tokens of {bs} requests")
    return ForwardBatch(
        forward_mode=mode if bs else ForwardMode.IDLE,
        batch_size=bs,
        input_ids=slots[:, 0] if slots.dim() > 1 else slots,  # one for each token; ids are not recorded
        positions=batch.positions,
        out_cache_loc=slots,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens.cpu(),
        **fields,
    )


def _tree_mask(children: list[list[int]], siblings: list[list[int]]) -> torch.Tensor:
    """Return ``[bs * width, width]`` bool: which drafts each draft sees: itself, and those that it follows.

    Args:
        children: For each request, the first child of each draft, or -1.
        siblings: For each request, the next sibling of each draft, or -1.
    """
    bs, width = len(children), len(children[0])
    mask = torch.eye(width, dtype=torch.bool).repeat(bs, 1, 1)
    for at in range(bs):
        for parent in range(width):  # a draft comes after the one that it follows
            child = children[at][parent]
            while child >= 0:
                mask[at, child] |= mask[at, parent]
                child = siblings[at][child]
    return mask.view(bs * width, width)
