"""What is wrong with what an algorithm gives: `batch_faults` and `slot_faults` of a lane, `verify_faults`.

Does not: judge the tokens of a batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import EngineError
from graphpact.speculation import LaneRole
from graphpact_conformance.algorithms.random_models import VOCAB


@dataclass(frozen=True)
class StepMemory:
    """What the requests of a step own.

    Args:
        slots: The KV slots that the step was given, by request row and position.
        lengths: Tokens of each request with a KV slot before a decode step; after an extend step.
        correct: Accepted drafts by row; None before the verification.
    """

    slots: Mapping[int, Mapping[int, int]]
    lengths: Mapping[int, int]
    correct: Mapping[int, int] | None = None


def batch_faults(
    role: LaneRole, batch: object, draft: DraftLimits, memory: StepMemory, *, frozen: bool
) -> Iterator[str]:
    """Yield in words what is wrong with the fields of a batch.

    Args:
        role: The role of its lane.
        batch: The batch.
        draft: The largest draft.
        memory: What the requests of the step own.
        frozen: Whether the lane reads the target's keys.
    """
    if not isinstance(batch, ForwardBatch):
        yield f"a {type(batch).__name__}, not a ForwardBatch"
        return
    if batch.forward_mode is not role.mode:
        yield f"its mode is {batch.forward_mode.value}, and that of the lane {role.mode.value}"
        return
    wrong_fields = [*_wrong_fields(batch)]
    yield from wrong_fields
    if wrong_fields:
        return
    try:
        batch.require_consistent()
    except EngineError as error:
        yield error.message
        return
    rows = batch.req_pool_indices.tolist()
    if unknown := sorted(set(rows) - set(memory.lengths)):
        yield f"req_pool_indices has rows {unknown}; the step has {sorted(memory.lengths)}"
        return
    if not bool(((batch.input_ids >= 0) & (batch.input_ids < VOCAB)).all()):
        yield f"input_ids has {batch.input_ids.tolist()}; the vocabulary has {VOCAB} tokens"
    if not torch.equal(batch.seq_lens, batch.seq_lens_cpu):
        yield f"seq_lens is {batch.seq_lens.tolist()}, and seq_lens_cpu {batch.seq_lens_cpu.tolist()}"
    yield from _wrong_lengths(batch, rows, draft, memory, frozen=frozen)


def _wrong_fields(batch: ForwardBatch) -> Iterator[str]:
    bs, tokens = batch.batch_size, batch.num_tokens
    shapes = {
        "input_ids": (tokens,),
        "positions": (tokens,),
        "req_pool_indices": (bs,),
        "seq_lens": (bs,),
        "seq_lens_cpu": (bs,),
    }
    for name, shape in shapes.items():
        field = getattr(batch, name)
        has = (tuple(field.shape), field.dtype) if isinstance(field, torch.Tensor) else type(field).__name__
        if has != (shape, torch.int64):
            yield f"{name} is {has}, not {shape} int64"
    if batch.out_cache_loc.shape[0] != tokens or batch.out_cache_loc.dtype is not torch.int64:
        yield f"out_cache_loc is {tuple(batch.out_cache_loc.shape)} {batch.out_cache_loc.dtype}"


def _wrong_lengths(
    batch: ForwardBatch, rows: list[int], draft: DraftLimits, memory: StepMemory, *, frozen: bool
) -> Iterator[str]:
    """Yield wrong numbers of tokens, lengths, positions and accepted drafts."""
    mode = batch.forward_mode
    if mode in (ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND):
        has = torch.tensor([memory.lengths[row] for row in rows])
        yield from _wrong_drafts(batch, has, draft)
    elif mode.is_ragged:
        new = batch.required_extend_lens()[0]
        before = (batch.seq_lens - new.cumsum(0)).repeat_interleave(new)
        expected = before + torch.arange(batch.num_tokens)
        if not torch.equal(batch.positions, expected):
            yield f"positions is {batch.positions.tolist()}, not {expected.tolist()}"
    elif not torch.equal(batch.positions, batch.seq_lens - (0 if frozen else 1)):
        yield f"positions is {batch.positions.tolist()} with seq_lens {batch.seq_lens.tolist()}"
    most = torch.tensor([memory.lengths[row] + len(memory.slots[row]) for row in rows])
    if bool((batch.seq_lens > most).any()) or bool((batch.seq_lens < 0).any()):
        yield f"seq_lens is {batch.seq_lens.tolist()}; the requests own KV slots up to {most.tolist()}"
    if mode is ForwardMode.DRAFT_EXTEND:
        yield from _wrong_counts(batch, rows, memory)


def _wrong_drafts(batch: ForwardBatch, has: torch.Tensor, draft: DraftLimits) -> Iterator[str]:
    """Yield wrong lengths and positions in draft decode and draft extend.

    Args:
        batch: The batch.
        has: ``[bs]``: tokens of each request in the KV cache before the step.
        draft: The largest draft.
    """
    reads = batch.forward_mode is ForwardMode.DRAFT_EXTEND
    width = draft.num_draft_tokens if reads else draft.topk
    if batch.tokens_per_request != width:
        yield f"{batch.tokens_per_request} tokens for each request, not {width}"
        return
    after = has + width if reads else has
    offsets = torch.arange(width) if reads else torch.zeros(width, dtype=torch.int64)
    expected = (has[:, None] + offsets).flatten()
    if not reads and batch.num_draft_steps != draft.num_steps:
        yield f"out_cache_loc has {batch.num_draft_steps} steps, not {draft.num_steps}"
    if not torch.equal(batch.seq_lens, after):
        yield f"seq_lens is {batch.seq_lens.tolist()}, not {after.tolist()}"
    if not torch.equal(batch.positions, expected):
        yield f"positions is {batch.positions.tolist()}, not {expected.tolist()}"


def _wrong_counts(batch: ForwardBatch, rows: list[int], memory: StepMemory) -> Iterator[str]:
    found = None if batch.num_correct_drafts is None else batch.num_correct_drafts.tolist()
    accepted = None if memory.correct is None else [memory.correct[row] for row in rows]
    if found != accepted:
        yield f"num_correct_drafts is {found}; verify gave {accepted}"


def slot_faults(batch: ForwardBatch, memory: StepMemory) -> Iterator[str]:
    """Yield in words which KV slots of a consistent batch are not those of its requests."""
    counts = batch.tokens_per_request if batch.extend_seq_lens is None else batch.extend_seq_lens
    rows = batch.req_pool_indices.repeat_interleave(counts).tolist()
    by_token = batch.out_cache_loc.view(batch.num_tokens, -1).tolist()
    for row, position, slots in zip(rows, batch.positions.tolist(), by_token, strict=True):
        own = memory.slots.get(row, {})
        wrong = [
            slot
            for step, slot in enumerate(slots)
            if slot and (slot not in own.values() if batch.is_branched else own.get(position + step) != slot)
        ]
        if wrong:
            yield (
                f"a token of row {row} at position {position} writes KV slots {wrong}; the step gave the row"
                f" the slots {[*own.values()]} for the positions from {min(own, default=0)}"
            )
            return
    written = [slot for slots in by_token for slot in slots if slot]
    twice = sorted({slot for slot in written if written.count(slot) > 1})
    if twice:
        yield f"several tokens write KV slots {twice}"


def verify_faults(shape: tuple[int, int], drafts: object, parents: object) -> Iterator[str]:
    """Yield in words what is wrong with the arguments of `DecodeStep.verify`.

    Args:
        shape: The expected shape.
        drafts: The drafts.
        parents: The token that each draft follows; None for a chain.
    """
    tensors: list[torch.Tensor] = []
    for name, each in (("drafts", drafts), ("parents", parents)):
        if each is None and name == "parents":
            continue
        if not isinstance(each, torch.Tensor):
            yield f"{name} of the type {type(each).__name__}"
            return
        if tuple(each.shape) != shape or each.dtype is not torch.int64:
            yield f"{name} {tuple(each.shape)} {each.dtype}; expected {shape} torch.int64"
            return
        tensors.append(each)
    if not bool(((tensors[0] >= 0) & (tensors[0] < VOCAB)).all()):
        yield f"drafts {tensors[0].tolist()}; the vocabulary has the tokens 0 to {VOCAB - 1}"
    for each in tensors[1:]:
        if not bool(((each >= 0) & (each <= torch.arange(shape[1]))).all()):
            yield f"parents {each.tolist()}: a draft follows the newest token, 0, or an earlier draft"
