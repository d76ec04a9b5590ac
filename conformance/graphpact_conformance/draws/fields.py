"""The values of the fields of batches: in live rows, and those allowed in padding rows and dummies.

    field                  live rows                 padding rows and dummies
    input_ids, positions   from the problem          in the vocabulary, within the context
    out_cache_loc          from the problem          the scratch page
    req_pool_indices       from the problem          request row 0
    mrope_positions        within the context        the same
    input_embeds           random                    finite numbers
    encoder_lens           0 to `ENCODER`            0 or more
    mamba_track_indices    from 1                    0, where the mask is set
    mamba_track_mask       random                    any
    mamba_track_seqlens    within the context        the same

A batch has a value for every optional field with a slot (`drawn_value`). If a slot is declared optional, some
batches lack the field. A missing field means the initial value of the slot (`completed`).

Does not: draw the fields that every batch of a mode has; see `graphpact_conformance.draws.problems`.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.problems import Problem

ENCODER = 40
"""The most tokens of an encoder's input in the suite's batches."""
COUNT = "num_token_non_padded"
GATHERED = "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"
"""Counts of tokens in the buffer that ranks gather. In the static inputs of a graph, padding is included."""
MROPE = "mrope_positions"

Values: TypeAlias = Callable[[Config], range]


@dataclass(frozen=True)
class Field:
    """The values of one field that the suite draws.

    Args:
        axis: Whether it has one row per request or per token.
        dtype: Its dtype.
        live: The values of live rows.
    """

    axis: Literal["bs", "tokens"]
    dtype: torch.dtype
    live: Values


@dataclass(frozen=True)
class Safe:
    """The values that padding rows and dummies may hold.

    Args:
        values: The values.
        why: A text with the reason.
        where: The name of a mask field, if there is one. Rows whose mask is False are not read.
    """

    values: Values
    why: str
    where: str | None = None

    def wrong(self, values: torch.Tensor, mask: torch.Tensor | None, config: Config) -> torch.Tensor:
        """Return a bool mask of the entries of ``values`` that are not allowed.

        Args:
            values: The field.
            mask: The field `where`, in the same shape, or None.
            config: The configuration of the lane.
        """
        safe = self.values(config)
        wrong = (values < safe[0]) | (values > safe[-1])
        return wrong if mask is None else wrong & mask

    def words(self, config: Config) -> str:
        """Return a text with the allowed values and the reason."""
        safe = self.values(config)
        numbers = f"{safe[0]}" if len(safe) == 1 else f"{safe[0]} to {safe[-1]}"
        return f"{numbers}: {self.why}"


DRAWN: Mapping[str, Field] = {
    MROPE: Field("tokens", torch.int64, lambda c: range(c.context - c.case.num_steps + 1)),
    "encoder_lens": Field("bs", torch.int32, lambda _: range(ENCODER + 1)),
    "mamba_track_indices": Field("bs", torch.int64, lambda c: range(1, c.num_rows)),
    "mamba_track_mask": Field("bs", torch.bool, lambda _: range(2)),
    "mamba_track_seqlens": Field("bs", torch.int32, lambda c: range(c.context + 1)),
}
"""The optional fields for which the suite draws values, if a slot for them is declared."""
SAFE: Mapping[str, Safe] = {
    "req_pool_indices": Safe(lambda _: range(1), "request row 0 is scratch"),
    "out_cache_loc": Safe(lambda c: range(c.page_size), "KV slots of the scratch page"),
    "input_ids": Safe(lambda _: range(VOCAB), "tokens of the vocabulary"),
    "positions": Safe(lambda c: range(c.context), "positions within the context"),
    MROPE: Safe(lambda c: range(c.context), "positions within the context"),
    "num_correct_drafts": Safe(
        lambda c: range(c.case.tokens_per_request or 1), "drafts of the request, which select one of its rows"
    ),
    "extend_seq_lens": Safe(lambda c: range(c.limits.max_num_tokens + 1), "a number of new tokens"),
    "extend_seq_lens_cpu": Safe(lambda c: range(c.limits.max_num_tokens + 1), "a number of new tokens"),
    "encoder_lens": Safe(lambda _: range(2**31), "a number of tokens"),
    "mamba_track_indices": Safe(
        lambda _: range(1), "index 0 is scratch, and mamba_track_mask is set", "mamba_track_mask"
    ),
    "mamba_track_seqlens": Safe(lambda c: range(c.context + 1), "a number of tokens within the context"),
}
"""The values that padding rows and dummies may hold, by field."""


def wrong_rows(name: str, tensors: Mapping[str, torch.Tensor], config: Config) -> torch.Tensor:
    """Return a bool mask, in the shape of a field, of the values that padding rows and dummies may not hold.

    Embeddings must be finite. Fields of `SAFE` must hold the values there. Other fields may hold any value.

    Args:
        name: The field.
        tensors: The fields of a batch by name.
        config: The configuration of the lane.
    """
    values = tensors[name]
    if values.dtype.is_floating_point:
        return ~values.isfinite()
    safe = SAFE.get(name)
    if safe is None:
        return torch.zeros_like(values, dtype=torch.bool)
    return safe.wrong(values, None if safe.where is None else tensors.get(safe.where), config)


def words(name: str, config: Config) -> str:
    """Return a text with the values that padding rows and dummies may hold in a field.

    The field must be one of `SAFE`, or embeddings.
    """
    return SAFE[name].words(config) if name in SAFE else "finite numbers"


# -- drawing ---------------------------------------------------------------------------------------


def is_drawn(slot: GraphSlot) -> bool:
    """Return whether the suite's batches have a value for a slot: for a known field, or a plugin's field."""
    if not slot.enabled:
        return False
    if slot.name in DRAWN or slot.name in (COUNT, *GATHERED):
        return True
    return "." in slot.name and slot.copy_from_fb and slot.source_fn is None


def drawn_value(problem: Problem, slot: GraphSlot, config: Config) -> torch.Tensor | None:
    """Return a random value of a field of `DRAWN` or of a plugin's field, on the host.

    Returns None if the slot is optional and this batch lacks the field, which depends on the problem's seed.
    Batches of a draft with several passes have all fields, because positions grow from pass to pass.
    """
    alone = config.case.num_steps == 1
    if slot.optional and alone and _generator(problem, f"absent:{slot.name}").initial_seed() % 2:
        return None
    if slot.name not in DRAWN:
        return problem.value_of(slot)
    field, equal = DRAWN[slot.name], problem.case.rows_per_request
    rows = len(problem.requests) if field.axis == "bs" else len(problem.tokens) // equal
    values = field.live(config)
    shape = (3, rows) if slot.name == MROPE else (rows,)
    rng = _generator(problem, slot.name)
    value = torch.randint(values.start, values.stop, shape, generator=rng)
    return value.repeat_interleave(equal, dim=-1).to(field.dtype)


def _generator(problem: Problem, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{problem.seed}:{name}".encode()))


def completed(batch: ForwardBatch, slots: Sequence[GraphSlot]) -> ForwardBatch:
    """Return the batch with each missing optional field set to the initial value of its slot."""
    optional = [slot for slot in slots if slot.optional]
    if not optional:  # so that torch.compile does not trace a loop over all fields for each captured graph
        return batch
    there = batch.tensors()
    absent = [slot for slot in optional if slot.name not in there]
    if not absent:
        return batch
    whole = batch.with_tensors({slot.name: _initial(slot, batch) for slot in absent if "." not in slot.name})
    whole.extra = {**batch.extra, **{slot.name: _initial(slot, batch) for slot in absent if "." in slot.name}}
    return whole


def _initial(slot: GraphSlot, batch: ForwardBatch) -> torch.Tensor:
    shape = slot.shape_fn(batch.batch_size, batch.num_tokens)
    return torch.full(shape, slot.initial_value, dtype=slot.dtype, device=batch.device)
