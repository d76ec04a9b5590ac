"""The algorithms `Eagle` and `FrozenKvMtp`: the order of their lanes, and the batch of each.

A step writes the request state last, so that a failed step leaves it unchanged.

Does not: capture, verify or commit; the lanes and the engine do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.speculation import (
    HIDDEN_STATES,
    SCORES,
    DecodeStep,
    ExtendStep,
    LaneRole,
    SpeculationAlgorithm,
    SpeculationContext,
    Verified,
)
from graphpact_speculative.tree import best_tokens

_VERIFY = LaneRole(ForwardMode.TARGET_VERIFY, "target", "cuda_graph")


class Eagle(SpeculationAlgorithm):
    """EAGLE: a draft model that reads tokens and the hidden states of the target, and has a KV cache.

    At position ``i`` it reads token ``i + 1`` and the target's hidden state of position ``i``. Its keys have
    the same KV slot numbers as the target's. After the prompt, ``draft_prefill`` runs. Every step then runs
    ``draft``, ``verify``, and ``draft_extend`` over all verified tokens. The last accepted token begins the
    next draft.
    """

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "draft_prefill": LaneRole(ForwardMode.EXTEND, "draft", "eager"),
        "draft": LaneRole(ForwardMode.DRAFT_DECODE, "draft", "eagle_draft"),
        "verify": _VERIFY,
        "draft_extend": LaneRole(ForwardMode.DRAFT_EXTEND, "draft", "eagle_draft_extend"),
    }

    def __init__(self, context: SpeculationContext) -> None:
        super().__init__(context)
        self._offsets: torch.Tensor | None = None
        """``[num_draft_tokens]`` int64: 0, 1, ..; made in the first step, on its device."""

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the first level of the next draft, and the draft model's hidden state before it."""
        topk = self.context.draft.topk
        return {
            "next_tokens": ((topk,), torch.int64),
            "scores": ((topk,), torch.float32),
            "hidden_states": ((self.context.draft_hidden_size,), self.context.dtype),
        }

    def extend(self, step: ExtendStep) -> None:
        """Let the draft model read the same positions as the target."""
        extra = {HIDDEN_STATES: step.hidden_states}
        batch = replace(step.batch, input_ids=step.next_token_ids, extra=extra)
        outputs = step.run("draft_prefill", batch)
        tokens, scores = best_tokens(outputs.logits, self.context.draft.topk)
        first = {"next_tokens": tokens, "scores": scores, "hidden_states": outputs["hidden_states"]}
        _keep(step.state, batch.req_pool_indices, first)

    def decode(self, step: DecodeStep) -> None:
        """Draft, verify, and read the verified tokens."""
        drafts = step.run("draft", self._draft_batch(step))
        parents = None if self.context.draft.topk == 1 else drafts["parents"]
        verified = step.verify(drafts["draft_tokens"], parents)
        _keep(step.state, step.req_pool_indices, step.run("draft_extend", self._extend_batch(step, verified)))

    def _draft_batch(self, step: DecodeStep) -> ForwardBatch:
        """Return ``topk`` branches for each request, each with separate KV slots for every step."""
        num_steps, topk = self.context.draft.num_steps, self.context.draft.topk
        state = {name: tensor.index_select(0, step.req_pool_indices) for name, tensor in step.state.items()}
        return ForwardBatch(
            forward_mode=ForwardMode.DRAFT_DECODE,
            batch_size=len(step.token_ids),
            input_ids=state["next_tokens"].flatten(),
            positions=_repeated(step.seq_lens, topk),
            out_cache_loc=step.cache_loc[:, : topk * num_steps].reshape(-1, num_steps),
            req_pool_indices=step.req_pool_indices,
            seq_lens=step.seq_lens,
            seq_lens_cpu=step.seq_lens_cpu,
            extra={
                HIDDEN_STATES: _repeated(state["hidden_states"], topk),
                SCORES: state["scores"].flatten(),
            },
        )

    def _extend_batch(self, step: DecodeStep, verified: Verified) -> ForwardBatch:
        """Return all verified tokens, ``num_draft_tokens`` for each request, accepted or not."""
        width = self.context.draft.num_draft_tokens
        if self._offsets is None:
            self._offsets = torch.arange(width, device=step.seq_lens.device)
        return ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            batch_size=len(step.token_ids),
            input_ids=verified.next_token_ids,
            positions=(step.seq_lens.unsqueeze(1) + self._offsets).flatten(),
            out_cache_loc=step.cache_loc[:, :width].flatten(),
            req_pool_indices=step.req_pool_indices,
            seq_lens=step.seq_lens + width,
            seq_lens_cpu=step.seq_lens_cpu + width,
            num_correct_drafts=verified.num_correct_drafts,
            extra={HIDDEN_STATES: verified.hidden_states},
        )


class FrozenKvMtp(SpeculationAlgorithm):
    """Multi-token prediction on frozen KV: the draft model attends to the target's keys and writes none.

    Every step runs ``draft``, then ``verify``. The prompt needs no step of the draft model. Rejected drafts
    leave no keys behind.
    """

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "draft": LaneRole(ForwardMode.DECODE, "draft", "frozen_kv_mtp"),
        "verify": _VERIFY,
    }

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the target's hidden state of the last token in the KV cache."""
        return {"hidden_states": ((self.context.target_hidden_size,), self.context.dtype)}

    def extend(self, step: ExtendStep) -> None:
        """Keep the hidden state of the last token of each request."""
        last = step.hidden_states[step.batch.selected_rows]
        _keep(step.state, step.batch.req_pool_indices, {"hidden_states": last})

    def decode(self, step: DecodeStep) -> None:
        """Draft and verify, and keep the hidden state of the last accepted token."""
        topk = self.context.draft.topk
        drafts = step.run("draft", self._draft_batch(step))
        tokens, parents = (drafts[name][::topk] for name in ("draft_tokens", "parents"))
        verified = step.verify(tokens, None if topk == 1 else parents)
        width, rows = self.context.draft.num_draft_tokens, verified.hidden_states
        first = torch.arange(0, len(rows), width, device=rows.device)
        last = rows.index_select(0, first + verified.num_correct_drafts)
        _keep(step.state, step.req_pool_indices, {"hidden_states": last})

    def _draft_batch(self, step: DecodeStep) -> ForwardBatch:
        """Return the newest token of each request, in ``topk`` equal rows."""
        topk = self.context.draft.topk
        rows = _repeated(step.req_pool_indices, topk)
        lens = _repeated(step.seq_lens, topk)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=_repeated(step.token_ids, topk),
            positions=lens,
            out_cache_loc=torch.zeros_like(rows),  # scratch: nothing is written
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=_repeated(step.seq_lens_cpu, topk),
            extra={HIDDEN_STATES: step.state["hidden_states"].index_select(0, rows)},
        )


def _keep(state: Mapping[str, torch.Tensor], rows: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Write ``values`` into the rows of the request state."""
    for name, tensor in state.items():
        tensor.index_copy_(0, rows, values[name])


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``[bs * count, ..]``: each row ``count`` times in a row."""
    return tensor if count == 1 else tensor.repeat_interleave(count, dim=0)
