"""The runners `EagleDraftRunner`, `EagleDraftExtendRunner` and `FrozenKvMtpRunner`.

Each records full graphs of one mode. Its batches carry the hidden states that a draft model reads. All inputs
of a graph are in slots. Padding rows have token 0 and hidden states of zeros, and use scratch memory.

Does not: keep anything between steps; the algorithms declare what the engine keeps for them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact.attention import GraphSupport, each_step
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.errors import ConfigError, EngineError
from graphpact.runners import DecodeRunner, RunnerContext
from graphpact.shapes import GraphShape, default_decode_batch_sizes
from graphpact.speculation import HIDDEN_STATES, SCORES
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_speculative.tree import DraftTree, best_tokens


class _HiddenStatesRunner(DecodeRunner):
    """A runner of full graphs whose batches have hidden states: ``[T, context.hidden_size]``."""

    def default_batch_sizes(self) -> list[int]:
        """Return the default capture sizes of decode, up to the largest batch size."""
        return default_decode_batch_sizes(self.context.limits.max_bs)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the fields of `ForwardBatch.extra`: the shape and dtype of one token's row, by name."""
        return {HIDDEN_STATES: ((self.context.hidden_size,), self.context.dtype)}

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots of the mode, and one for each of `fields`."""
        return [*super().slots(), *(_slot(name, *row) for name, row in self.fields().items())]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return the mode's dummy, with fields of zeros."""
        zeros = {
            name: torch.zeros(shape.num_tokens, *row, dtype=dtype, device=self.context.device)
            for name, (row, dtype) in self.fields().items()
        }
        batch = super().dummy(shape)
        return replace(batch, extra={**batch.extra, **zeros})


def _slot(name: str, row: tuple[int, ...], dtype: torch.dtype) -> GraphSlot:
    return GraphSlot(
        name,
        lambda _, num_tokens: (num_tokens, *row),
        dtype,
        padding_policy=PaddingPolicy.ZERO,
        owner="speculative",
    )


class EagleDraftExtendRunner(_HiddenStatesRunner):
    """The draft model reads the verified tokens, and proposes the first level of the next draft.

    Every request has ``num_draft_tokens`` tokens, however many were accepted: ``num_correct_drafts`` selects
    a row of each request and changes no metadata. The model returns ``logits`` ``[bs, vocab_size]`` and
    ``hidden_states`` ``[bs, H]`` of the selected rows (`ForwardBatch.selected_rows`).

    Its graphs return for each request: ``next_tokens`` ``[bs, topk]`` int64, their log probabilities
    ``scores`` ``[bs, topk]`` float32, and ``hidden_states`` ``[bs, H]``.
    """

    modes = frozenset({ForwardMode.DRAFT_EXTEND})
    needs = GraphSupport.UNIFORM

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the region: a forward pass, and the choice of the next tokens."""

        def region() -> StepOutputs:
            outputs = forward(step.view, step.metadata, step.backend.forward)
            tokens, scores = best_tokens(outputs.logits, self.context.limits.draft.topk)
            hidden = outputs["hidden_states"]
            return StepOutputs(
                next_tokens=(tokens, "bs"), scores=(scores, "bs"), hidden_states=(hidden, "bs")
            )

        return region


class _TreeRunner(_HiddenStatesRunner):
    """A runner whose graphs draft a tree.

    Raises:
        ConfigError: The tree has fewer candidates than ``num_draft_tokens - 1``.
    """

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(context)
        draft = context.limits.draft
        candidates = draft.topk + (draft.num_steps - 1) * draft.topk**2
        if draft.num_draft_tokens - 1 > candidates:
            raise ConfigError(
                f"speculative.num_draft_tokens = {draft.num_draft_tokens} asks for"
                f" {draft.num_draft_tokens - 1} drafts after the newest token, but speculative.num_steps ="
                f" {draft.num_steps} with speculative.topk = {draft.topk} generates {candidates}",
                hint=f"lower num_draft_tokens to {candidates + 1}, or raise num_steps or topk",
            )

    def require_rows(self, batch: ForwardBatch, expected: int) -> None:
        """Raise `EngineError` if the rows or fields of an eager batch do not match the slots.

        Args:
            batch: The batch.
            expected: The number of tokens that its requests must have.
        """
        topk, missing = self.context.limits.draft.topk, sorted(self.fields().keys() - batch.extra.keys())
        has = (
            f"{batch.num_tokens} rows for {batch.batch_size} requests" if not missing else f"no {missing[0]}"
        )
        if missing or batch.num_tokens != expected:
            raise EngineError(
                f"lane {self.context.lane!r}: the batch has {has}",
                hint=f"give {topk} rows (speculative.topk) for each request, each with"
                f" {' and '.join(self.fields())} in ForwardBatch.extra",
            )

    def drafts(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``draft_tokens`` and ``parents``, ``[bs, num_draft_tokens - 1]`` int64."""
        return tree.drafts(self.context.limits.draft.num_draft_tokens - 1)


class EagleDraftRunner(_TreeRunner):
    """The draft model decodes ``num_steps`` levels of a tree, all in one graph.

    A batch has ``topk`` tokens for each request: the first level, which draft extend chose. Each token has
    its log probability (`SCORES`) and the hidden state before it (`HIDDEN_STATES`). The other levels take
    ``num_steps - 1`` forward passes. Each returns ``logits`` ``[T, vocab_size]`` and ``hidden_states`` ``[T,
    H]``.

    Its graphs return for each request ``draft_tokens`` and ``parents``; see `DraftTree.drafts`.
    """

    modes = frozenset({ForwardMode.DRAFT_DECODE})
    needs = GraphSupport.UNIFORM

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the hidden states and the scores."""
        return {**super().fields(), SCORES: ((), torch.float32)}

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the loop over the levels."""
        topk = self.context.limits.draft.topk
        self.require_rows(step.view, step.view.batch_size * topk)

        def region() -> StepOutputs:
            first = (step.view.batch_size, topk)
            tree = DraftTree(step.view.input_ids.view(first), step.view.extra[SCORES].view(first))
            hidden = step.view.extra[HIDDEN_STATES]
            # The last level needs no forward pass, because no level follows it.
            passes = list(each_step(step.view, step.metadata))[:-1]
            for i, (view, metadata) in enumerate(passes):
                batch = _next_batch(view, tree, hidden, i)
                outputs = forward(batch, metadata, step.backend.forward)
                rows = tree.grow(outputs.logits)
                hidden = outputs["hidden_states"][rows]
                if topk > 1 and i + 1 < len(passes):
                    _copy_ancestors(step, rows, i + 1)
            tokens, parents = self.drafts(tree)
            return StepOutputs(draft_tokens=(tokens, "bs"), parents=(parents, "bs"))

        return region


class FrozenKvMtpRunner(_TreeRunner):
    """The draft model decodes a tree on the target's KV cache and writes no keys.

    A batch has ``topk`` equal, consecutive rows for each request: the newest token, its position, and the
    target's hidden state of the token before it. The first of ``num_steps`` forward passes reads them, and
    the first row of each request gives the first level. Each pass returns ``logits`` ``[T, vocab_size]`` and
    ``hidden_states`` ``[T, H]``. All passes see the same keys, so they have the same metadata.

    Here ``limits`` and ``batch_sizes`` count rows, ``topk`` for each request. The outputs, ``draft_tokens``
    and ``parents`` (see `DraftTree.drafts`), have the same rows, and they are equal within a request.
    """

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE
    frozen_kv = True

    def default_batch_sizes(self) -> list[int]:
        """Return the default capture sizes of decode, ``topk`` rows for each request."""
        topk = self.context.limits.draft.topk
        return [size * topk for size in default_decode_batch_sizes(self.context.limits.max_bs // topk)]

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each number of rows.

        Raises:
            ConfigError: A configured number of rows is no multiple of ``topk``.
        """
        topk, sizes = self.context.limits.draft.topk, self.context.batch_sizes or ()
        if odd := [size for size in sizes if size % topk]:
            raise ConfigError(
                f"lanes.{self.context.lane}.batch_sizes has {odd[0]}, but each request has speculative.topk ="
                f" {topk} rows in this lane",
                hint=f"give multiples of {topk}: the sizes count rows",
            )
        return super().shapes()

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the loop over the levels."""
        draft = self.context.limits.draft
        self.require_rows(step.view, step.view.num_tokens // draft.topk * draft.topk)

        def region() -> StepOutputs:
            outputs = forward(step.view, step.metadata, step.backend.forward)
            tree = DraftTree(*best_tokens(outputs.logits[:: draft.topk], draft.topk))
            hidden = outputs["hidden_states"]
            for i in range(1, draft.num_steps):
                batch = _next_batch(step.view, tree, hidden, i)
                outputs = forward(batch, step.metadata, step.backend.forward)
                hidden = outputs["hidden_states"][tree.grow(outputs.logits)]
            tokens, parents = (each.repeat_interleave(draft.topk, dim=0) for each in self.drafts(tree))
            return StepOutputs(draft_tokens=(tokens, "bs"), parents=(parents, "bs"))

        return region


def _next_batch(view: ForwardBatch, tree: DraftTree, hidden: torch.Tensor, ahead: int) -> ForwardBatch:
    """Return the batch of a forward pass over the branches of ``tree``, ``ahead`` positions later."""
    tensors = {"input_ids": tree.branches, "positions": view.positions + ahead, HIDDEN_STATES: hidden}
    if view.mrope_positions is not None:
        tensors["mrope_positions"] = view.mrope_positions + ahead
    return view.with_tensors(tensors)


def _copy_ancestors(step: RegionContext, rows: torch.Tensor, count: int) -> None:
    """Copy the draft's keys and values of ``count`` steps from each branch's parent to its own KV slots.

    A new branch may continue a branch in another row. It attends to the keys in its own row of
    ``out_cache_loc``, so these must be the keys of its ancestors. SGLang leaves the keys in place, and so a
    branch attends to the keys of the branch that had its row before.

    Args:
        step: The step of the draft decode.
        rows: ``[T]`` int64: the row that each branch continues.
        count: The number of steps whose keys are already written.
    """
    into = step.view.out_cache_loc[:, :count]
    source, target = into[rows].flatten(), into.flatten()
    context = step.backend.context
    layers = {layer.cache_layer: layer for layer in context.layers}
    for at, layer in layers.items():
        caches = [context.kv_cache.k[at]]
        if layer.kv_lora_rank is None:  # the values of latents are views of the keys
            caches.append(context.kv_cache.v[at])
        for cache in caches:
            cache.index_copy_(0, target, cache[source])  # reads all rows before it writes one
