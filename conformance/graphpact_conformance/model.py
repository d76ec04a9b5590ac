"""`Model`: a small model whose outputs show every input. `Passes`: the forward passes of a region.

The model has two layers of attention. Token ids and positions index tables, accepted drafts select rows, the
count of live tokens masks a sum over rows, which the counts of gathered tokens divide. Other optional fields
with a slot, and a runner's own (`ForwardBatch.extra`), scale queries, keys and values, and are a column of
the outputs each. Multimodal positions turn queries and keys beside positions; embeddings replace token ids,
and then positions too. Both are columns of the outputs. So a wrong value in any of these fields changes the
outputs.

Does not: attend, or check anything.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from graphpact.attention import DraftMetadata, LayerSpec
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.parallel import get_parallel
from graphpact.step import Attend, Forward, Region, StepOutputs
from graphpact_conformance.draws.fields import COUNT, GATHERED, MROPE, SAFE, completed
from graphpact_conformance.draws.lanes import HIDDEN, VOCAB, Config
from graphpact_conformance.draws.problems import next_id

_GAP, _JITTER, _SHARE = 0.5, 0.2, 0.05
"""Of logits: the least distance of their ranks, what is added by token, and the share of attention.

The best tokens of a row do not depend on rounding, nor on attention. Sums of several steps' logits differ by
the other two, by far more than rounding.
"""


class Model:
    """The suite's model.

    Args:
        config: The configuration of the lane.
        layers: Its layers, on ``device``.
        device: Device of the weights.
        fields: The slots of optional fields, the runner's own among them.
        composed: Whether it runs in a region of the runner's own, which gets ``logits`` and ``hidden_states``
            too.

    Attributes:
        weights: Of each layer the tables of queries, keys and values, ``[VOCAB, heads, width]``.
        num_steps: Draft steps of the last pass.
        counts: Whether it reads the count of live tokens.
        copies_attention: Whether it copies each result of attention at once, so that it does not matter what
            else is written to the memory of the result.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[LayerSpec],
        device: torch.device,
        fields: Sequence[GraphSlot] = (),
        *,
        composed: bool = False,
    ) -> None:
        self.config, self.layers = config, layers
        self._fields = fields
        self._columns = [slot for slot in fields if slot.name not in (COUNT, MROPE, *GATHERED)]
        self._has_mrope = config.case.embeds or any(slot.name == MROPE for slot in fields)
        self.counts = config.counts or any(slot.name == COUNT for slot in fields)
        mode, dtype = config.case.mode, config.dtype
        self.is_draft = composed and (
            mode in (ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND) or config.case.frozen
        )
        self.num_steps = 1
        self.copies_attention = False
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.weights = [
            [
                random(VOCAB, at.num_q_heads, at.head_dim),
                random(VOCAB, at.num_kv_heads, at.head_dim),
                random(VOCAB, at.num_kv_heads, at.v_head_dim),
            ]
            for at in layers
        ]
        turns = torch.rand(config.context, 1, 1, generator=generator) + 0.5
        self.turns = turns.to(device, dtype)
        self._mixes: dict[str, torch.Tensor] = {}
        """A vector for each field, of length 1: by it the numbers of a row are added up."""
        for slot in self._columns:
            mix = torch.randn(math.prod(slot.shape_fn(1, 1)), generator=generator, dtype=torch.float64)
            self._mixes[slot.name] = (mix / mix.norm()).to(device)
        self._tables: tuple[torch.Tensor, ...] = ()
        if not composed:
            return
        columns = sum(at.num_q_heads * at.v_head_dim for at in layers) + self.num_own
        ranks = torch.rand(VOCAB, VOCAB, generator=generator).argsort(dim=1)
        by_token = torch.rand(VOCAB, VOCAB, generator=generator).double() * _JITTER
        parts = (
            ranks,
            torch.arange(VOCAB).double() * (_GAP + _JITTER) + by_token,
            torch.randn(columns, VOCAB, generator=generator).double() / columns**0.5,
            torch.randn(VOCAB, HIDDEN, generator=generator).double(),
            torch.randn(columns, HIDDEN, generator=generator).double() / columns**0.5,
        )
        self._tables = tuple(part.to(device) for part in parts)

    def tensors(self) -> list[torch.Tensor]:
        """Return all weights."""
        per_layer = [each for layer in self.weights for each in layer]
        return [*per_layer, self.turns, *self._mixes.values(), *self._tables]

    def __call__(
        self, batch: ForwardBatch, metadata: Any, attend: Attend, *, padded_tokens: int | None = None
    ) -> StepOutputs:
        """Return ``rows``, ``[T, columns]``: all layers, the runner's own fields, then work across rows.

        With the metadata of a whole draft it runs all steps, otherwise one. Keys and values are None with
        frozen KV, and for a layer that only reads the cache of another one (`Config.reads`).

        To a runner's own region it also returns ``logits``, ``[n, VOCAB]`` float32, and ``hidden_states``,
        ``[n, HIDDEN]``: of `ForwardBatch.selected_rows`, or of all tokens.

        Args:
            batch: The batch.
            metadata: Of the backend.
            attend: Attention.
            padded_tokens: Tokens of the shape that ranks share; by default those of ``batch``.
        """
        steps = metadata.steps if isinstance(metadata, DraftMetadata) else (metadata,)
        self.num_steps = len(steps)
        batch = completed(batch, self._fields)
        ids, positions, columns = batch.input_ids, batch.positions, []
        own = self._own(batch)
        for step, part in enumerate(steps):
            if step:
                ids, positions = next_id(ids, step - 1), positions + 1
            for layer in self.layers:
                q, k, v = self.project(layer.layer_id, ids, positions, batch, step)
                if own is not None:
                    scale = (1 + own.mean(dim=1) / 4).to(q.dtype)[:, None, None]
                    q, k, v = q * scale, k * scale, v * scale
                if self.config.case.frozen or (self.config.reads and layer.kv_layer is not None):
                    attended = attend(q, None, None, layer, part)
                else:
                    attended = attend(q, k, v, layer, part)
                columns.append((attended.clone() if self.copies_attention else attended).flatten(1))
        out = torch.cat(columns, dim=1)
        shown = [] if own is None else [own.to(out.dtype)]
        if batch.input_embeds is not None:
            shown.append(batch.input_embeds)
        if batch.mrope_positions is not None:
            shown.append((batch.mrope_positions.T / self.config.context).to(out.dtype))
        shared = self._shared(batch, out, batch.num_tokens if padded_tokens is None else padded_tokens)
        outputs: dict[str, Any] = {"rows": (torch.cat([out, *shown, *shared], dim=1), "tokens")}
        if self._tables:
            features = torch.cat([*columns[-len(self.layers) :], *shown], dim=1).double()
            outputs |= self._of_draft(batch, ids, positions, features)
        return StepOutputs(**outputs)

    def project(
        self, layer: int, ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of tokens; queries and keys depend on the position.

        With ``input_embeds`` they are no rows of the tables, but sums of the first ones. Of
        ``mrope_positions``, one more in each draft step, the first turn queries, and the two others keys;
        without embeddings, positions turn both too.
        """
        w_q, w_k, w_v = self.weights[layer]
        mrope, rank = batch.mrope_positions, self.config.heads.kv_lora_rank
        if mrope is None:
            turn_q = turn_k = self.turns[positions]
        else:
            of_q, *of_k = self.turns[mrope + step if step else mrope]
            turn_q, turn_k = of_q, (of_k[0] + of_k[1]) / 2
            if batch.input_embeds is None:
                turn = self.turns[positions]
                turn_q, turn_k = (turn_q + turn) / 2, (turn_k + turn) / 2
        k = _inputs(w_k, ids, batch) * turn_k
        v = _inputs(w_v, ids, batch) if rank is None else k[..., :rank]
        return _inputs(w_q, ids, batch) * turn_q, k, v

    def _own(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return ``[T, fields]`` float64 from -1 to 1, with 0 for an absent field; None without fields."""
        if not self._columns:
            return None
        columns, there = [], batch.tensors()
        for slot in self._columns:
            value = there.get(slot.name)
            if value is None:
                columns.append(torch.zeros(batch.num_tokens, dtype=torch.float64, device=batch.device))
                continue
            safe = SAFE.get(slot.name)
            if safe is not None and safe.where in there:
                value = torch.where(there[safe.where], value, 0)
            summed = (_by_row(value, slot, batch).double() * self._mixes[slot.name]).sum(dim=1)
            columns.append(torch.sin(_of_tokens(summed, slot, batch)))
        return torch.stack(columns, dim=1)

    @property
    def num_own(self) -> int:
        """Columns of optional fields: each has one, embeddings their width, multimodal positions three."""
        return len(self._columns) + HIDDEN * self.config.case.embeds + 3 * self._has_mrope

    @property
    def num_shared(self) -> int:
        """Columns of work across rows, the last ones."""
        return (self.config.case.mode is ForwardMode.DRAFT_EXTEND) + self.counts

    @contextmanager
    def other_weights(self, which: Collection[int], ids: Collection[int]) -> Iterator[None]:
        """Give tokens of ``ids`` other queries (0), keys (1) or values (2) inside the context."""
        weights = [layer[part] for layer in self.weights for part in which]
        kept = [w.clone() for w in weights]
        try:
            for w in weights:
                w[list(ids)] *= -2
            yield
        finally:
            for w, value in zip(weights, kept, strict=True):
                w.copy_(value)

    def where(self, name: str, column: int) -> str:
        """Return the meaning of a column of an output, in words."""
        if name != "rows" and not name.startswith(ROWS_OF_PASS):
            return f"output {name!r}" + (f", column {column}" if column else "")
        prefix = f"{name}, " if name != "rows" else ""
        steps, widths = self.num_steps, [at.num_q_heads * at.v_head_dim for at in self.layers]
        for step, layer in product(range(steps), range(len(widths))):
            if column < widths[layer]:
                at = f"layer {layer}, head {column // self.layers[layer].v_head_dim}"
                return prefix + (f"step {step}, {at}" if steps > 1 else at)
            column -= widths[layer]
        return prefix + ("fields of the batch" if column < self.num_own else "work across rows")

    def _of_draft(
        self, batch: ForwardBatch, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor
    ) -> dict[str, Any]:
        """Return logits and hidden states, computed in float64 so that choices from them are stable."""
        ranks, values, to_logits, hidden, to_hidden = self._tables
        selected, axis = batch.selected_rows, "tokens"
        if selected is not None:
            ids, positions, features, axis = ids[selected], positions[selected], features[selected], "bs"
        rank = (ranks[ids] + 7 * positions[:, None]) % VOCAB
        logits = values[ids].gather(1, rank) + _SHARE * torch.tanh(features @ to_logits)
        states = torch.tanh(hidden[ids] + features @ to_hidden)
        return {
            "logits": (logits.float(), axis),
            "hidden_states": (states.to(self.config.dtype), axis),
        }

    def _shared(self, batch: ForwardBatch, out: torch.Tensor, padded_tokens: int) -> list[torch.Tensor]:
        """Return columns of work across rows: pooling, and the row of the last accepted draft."""
        shared = []
        if self.config.case.mode is ForwardMode.DRAFT_EXTEND and batch.batch_size:
            if batch.num_correct_drafts is not None:
                width = batch.tokens_per_request
                requests = torch.arange(batch.batch_size, device=out.device)
                last = out[:, :1].view(-1, width)[requests, batch.num_correct_drafts.long()]
                shared.append(last.repeat_interleave(width)[:, None])
            else:
                shared.append(out[:, :1])
        elif self.config.case.mode is ForwardMode.DRAFT_EXTEND:
            shared.append(out[:, :1])
        if self.counts:
            first, rows = own_rows(self.config, padded_tokens)
            mine = out[first : first + rows, :1]
            count = batch.num_token_non_padded
            if count is None:
                count = torch.full((1,), len(mine), device=out.device)
            real = torch.arange(len(mine), device=out.device)[:, None] < count
            # One more, since eager attention leaves zeros in padding rows.
            pooled = torch.where(real, mine + 1, 0).sum(dim=0, keepdim=True)
            if self.config.counts and self.config.gathers:
                pooled = pooled / _gathered(batch, padded_tokens)
            shared.append(pooled.expand(out.shape[0], 1))
        return shared


def _inputs(table: torch.Tensor, ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Return the rows of a table for token ids; with embeddings the weighed sums of its first rows."""
    if batch.input_embeds is None:
        return table[ids]
    return (batch.input_embeds[:, :, None, None] * table[:HIDDEN]).sum(dim=1)


def _gathered(batch: ForwardBatch, padded_tokens: int) -> torch.Tensor | int:
    """Return the tokens that ranks gather: the mean of the batch's counts, or without any the padded ones."""
    counts = [count for name in GATHERED if (count := getattr(batch, name)) is not None]
    return torch.cat(counts).float().mean() if counts else padded_tokens


def own_rows(config: Config, num_tokens: int) -> tuple[int, int]:
    """Return the first row that this rank pools, and the number of its rows: all if ranks do not gather."""
    parallel = get_parallel()
    if not config.gathers:
        return 0, num_tokens
    rows = num_tokens // parallel.attn_tp_size
    return parallel.attn_tp_rank * rows, rows


def _by_row(value: torch.Tensor, slot: GraphSlot, batch: ForwardBatch) -> torch.Tensor:
    """Return ``[rows, numbers]``: a field by request or token; one row without an axis."""
    if slot.axis == "none":
        return value.reshape(1, -1)
    count = batch.batch_size if slot.axis == "bs" else batch.num_tokens
    if slot.slice_fn is not None and count in value.shape:
        value = value.movedim(value.shape.index(count), 0)
    return value.flatten(1) if value.dim() > 1 else value[:, None]


def _of_tokens(summed: torch.Tensor, slot: GraphSlot, batch: ForwardBatch) -> torch.Tensor:
    """Return ``[T]`` from a number for each row of a field."""
    tokens = batch.num_tokens
    if slot.axis == "none":
        return summed.expand(tokens)
    if slot.axis == "tokens" or not batch.batch_size:
        return summed[:tokens]
    if batch.extend_seq_lens is None:
        return summed.repeat_interleave(batch.tokens_per_request)
    ends = batch.extend_seq_lens.cumsum(0)
    request = torch.searchsorted(ends, torch.arange(tokens, device=ends.device), right=True)
    return summed[request.clamp(max=batch.batch_size - 1)]


# -- several passes ----------------------------------------------------------------------------------

ROWS_OF_PASS, IDS_OF_PASS = "rows of pass ", "ids of pass "
"""Beginnings of the names of outputs that a record has in addition, with the number of a pass."""


class Passes:
    """The forward passes of a region.

    Args:
        forward: The model.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self._is_watched = False
        self._done: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Run the model; in a region that is watched, keep what it read and attended to.

        A pass that a runner traces before is the same for all shapes: torch.compile would trace it again for
        a list of another length.
        """
        outputs = self.forward(batch, metadata, attend)
        if self._is_watched:
            self._done.append((batch.input_ids, outputs["rows"]))
        return outputs

    def watching(self, region: Region) -> Region:
        """Return ``region`` with the ids and rows of each pass as outputs, unless it returns the rows."""

        def watched() -> StepOutputs:
            self._done.clear()
            self._is_watched = True
            try:
                outputs: Any = region()
            finally:
                self._is_watched = False
            if not isinstance(outputs, StepOutputs):
                return outputs  # type: ignore[no-any-return]  # the lane refuses it
            given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
            returned = {id(tensor) for tensor in outputs.values()}
            for at, (ids, rows) in enumerate(self._done):
                if id(rows) not in returned:
                    given[f"{IDS_OF_PASS}{at}"] = ids.clone(), "tokens"
                    given[f"{ROWS_OF_PASS}{at}"] = rows, "tokens"
            self._done.clear()
            return StepOutputs(**given) if len(given) > len(outputs) else outputs

        return watched
