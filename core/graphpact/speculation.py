"""Speculative decoding: `SpeculationAlgorithm`, which decides which lanes run in which order.

An algorithm is a plugin of the group ``graphpact.speculation``. It keeps no state: data that outlives a step
is in the engine's request state, and every forward pass is a step of a lane. The engine verifies drafts, and
commits tokens after the step has ended, so a step that fails changes no request.

    extend(step)    after the target model has read prompt tokens
    decode(step)    draft; verify, once; then prepare the next draft

Does not: run a model, schedule, or choose tokens; engines do.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.step import StepOutputs

HIDDEN_STATES = "draft.hidden_states"
"""The field of `ForwardBatch.extra` that draft models read: ``[T, hidden_size]``, a row for each token."""
SCORES = "draft.scores"
"""The field with the log probability of each branch of a draft: ``[T]`` float32."""

RunLane = Callable[[str, ForwardBatch], StepOutputs]
"""``(lane, batch) -> outputs``, valid until the next step of that lane."""


@dataclass(frozen=True, slots=True)
class LaneRole:
    """One lane of an algorithm: its ``mode``, the ``model`` that it runs, and its default ``runner``."""

    mode: ForwardMode
    model: Literal["target", "draft"]
    runner: str


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """The constructor argument of an algorithm.

    Args:
        draft: Steps, branches and verified tokens, which include the newest token of the sequence.
        max_model_len: Tokens of the longest sequence.
        target_hidden_size: Width of the target's hidden states that the draft model reads; 0 if there is
            none.
        draft_hidden_size: Width of the draft model's hidden states; 0 without a draft model.
        dtype: Dtype of both hidden states.
    """

    draft: DraftLimits
    max_model_len: int
    target_hidden_size: int
    draft_hidden_size: int
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class ExtendStep:
    """A step in which the target model read prompt tokens.

    Args:
        batch: The target's batch: ``bs`` requests, ``T`` tokens.
        hidden_states: ``[T, target_hidden_size]``: the hidden states of the target model.
        next_token_ids: ``[T]`` int64: the token that follows each token.
        state: The request state by name, ``[rows, ...]``. ``req_pool_indices`` selects rows; row 0 is
        scratch.
        run: Runs a step of a lane.
    """

    batch: ForwardBatch
    hidden_states: torch.Tensor
    next_token_ids: torch.Tensor
    state: Mapping[str, torch.Tensor]
    run: RunLane


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a verification. Every request has ``num_draft_tokens`` consecutive rows.

    In each request, row 0 is the newest token of the sequence, and row ``j`` is the ``j``-th accepted draft.
    Rows after ``num_correct_drafts`` contain valid values without meaning.

    Args:
        hidden_states: ``[bs * num_draft_tokens, target_hidden_size]``: hidden states of the target model.
        next_token_ids: ``[bs * num_draft_tokens]`` int64: the token that follows each token.
        num_correct_drafts: ``[bs]`` int32: accepted drafts of each request, from 0.
    """

    hidden_states: torch.Tensor
    next_token_ids: torch.Tensor
    num_correct_drafts: torch.Tensor


@dataclass(slots=True, kw_only=True)
class DecodeStep:
    """A step in which every request drafts and verifies.

    Args:
        token_ids: ``[bs]`` int64: the newest token of each request. Its keys are not in a cache yet.
        req_pool_indices: ``[bs]`` int64: the row of each request.
        seq_lens: ``[bs]`` int64: tokens of each sequence in the KV cache.
        seq_lens_cpu: ``[bs]`` int64 on the host: the same numbers.
        cache_loc: ``[bs, n]`` int64: the KV slots of the next ``n`` positions of each request, including
            those of drafts: ``n >= num_draft_tokens``, and ``n >= num_steps * topk``.
        state: See `ExtendStep`.
        run: Runs a step of a lane.
        verify: ``(drafts, parents) -> Verified``: lets the target model read ``drafts``, ``[bs,
            num_draft_tokens - 1]`` int64, and accepts the longest path that it would have generated.
            ``parents``, of the same shape: the index of the token that each draft follows, 0 for the newest
            token, ``j`` for draft ``j - 1``; None for a chain. Call it once.
    """

    token_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    cache_loc: torch.Tensor
    state: Mapping[str, torch.Tensor]
    run: RunLane
    verify: Callable[[torch.Tensor, torch.Tensor | None], Verified]


class SpeculationAlgorithm(abc.ABC):
    """Base class of algorithms. A subclass sets `lanes` and implements `state`, `extend` and `decode`."""

    lanes: ClassVar[Mapping[str, LaneRole]]
    """The lanes by name. One lane has the mode target verify and runs the target model. The others run the
    draft model, which is then needed.
    """

    def __init__(self, context: SpeculationContext) -> None:
        self.context = context

    @abc.abstractmethod
    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the request state: the shape and dtype of one request's row, by name."""

    @abc.abstractmethod
    def extend(self, step: ExtendStep) -> None:
        """Prepare the first draft of requests whose prompt, or a chunk of it, was read."""

    @abc.abstractmethod
    def decode(self, step: DecodeStep) -> None:
        """Draft, verify, and prepare the next draft."""
