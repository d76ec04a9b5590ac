"""What SGLang's runners give to a backend for each step: forward modes, batches, and inputs of speculation.

The names are SGLang's (``srt/model_executor/forward_batch_info.py``, ``srt/speculative/eagle_info.py``), so
that backends accept these types as well as SGLang's. A backend that imports an installed SGLang compares
modes with SGLang's enum and calls methods of its inputs. For such a backend an `EngineTypes` converts these
types to SGLang's.

Does not: fill a batch; see `graphpact_adapters.sglang.runner`.
"""

import contextlib
import enum
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class SglangForwardMode(enum.IntEnum):
    """The kind of a step, with the predicates that backends call.

    Attributes:
        EXTEND: Prompts, or parts of them.
        DECODE: One new token of each request.
        MIXED: Both in one batch.
        IDLE: A batch without requests.
        TARGET_VERIFY: The drafts of each request, for the target model.
        DRAFT_EXTEND_V2: Accepted tokens, for the draft model.
    """

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND_V2 = enum.auto()

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:  # noqa: FBT001, FBT002  SGLang's own
        """Return whether requests have several new tokens; a draft extend counts only if included."""
        several = (SglangForwardMode.EXTEND, SglangForwardMode.MIXED, SglangForwardMode.TARGET_VERIFY)
        return self in several or (include_draft_extend_v2 and self.is_draft_extend_v2())

    is_prefill = is_extend

    def is_decode(self) -> bool:
        """Return whether each request has one new token."""
        return self is SglangForwardMode.DECODE

    def is_idle(self) -> bool:
        """Return whether there is no request."""
        return self is SglangForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        """Return whether requests have one new token, or there are none."""
        return self in (SglangForwardMode.DECODE, SglangForwardMode.IDLE)

    def is_mixed(self) -> bool:
        """Return whether some requests extend and some decode."""
        return self is SglangForwardMode.MIXED

    def is_target_verify(self) -> bool:
        """Return whether the target reads the drafts of every request."""
        return self is SglangForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        """Return whether the draft model reads verified tokens, the same number for every request."""
        return self is SglangForwardMode.DRAFT_EXTEND_V2

    def is_draft_extend(self, include_v2: bool = True) -> bool:  # noqa: FBT001, FBT002  SGLang's own
        """Return the same, by the name of earlier releases."""
        return include_v2 and self.is_draft_extend_v2()


@dataclass
class VerifyInput:
    """The drafts that a target verifies: SGLang's ``EagleVerifyInput``.

    Args:
        custom_mask: bool, flat: for each draft token, which of its ``seq_len + draft_token_num`` keys it
            sees. At a capture it is the runner's buffer, all True and longer than needed. At a replay it
            covers only the live requests.
        draft_token_num: Drafts of each request.
        spec_steps: Draft steps.
        topk: Branches of a draft tree; 1 is a chain.
    """

    custom_mask: torch.Tensor
    draft_token_num: int
    spec_steps: int
    topk: int = 1


@dataclass
class DraftExtendInput:
    """The verified tokens that a draft model reads: SGLang's ``EagleDraftExtendInput``.

    Args:
        num_tokens_per_req: Tokens of each request, accepted or not.
        num_correct_drafts: ``[bs]`` int32: accepted drafts.
        num_accept_tokens: ``[bs]`` int32: accepted drafts plus one.
        extend_seq_lens_tensor: ``[bs]`` int32: tokens of each request; None at a capture.
        extend_seq_lens_cpu: The same on the host; None at a capture.
    """

    num_tokens_per_req: int
    num_correct_drafts: torch.Tensor
    num_accept_tokens: torch.Tensor
    extend_seq_lens_tensor: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None


@dataclass
class DraftInput:
    """The input of a draft decode: SGLang's ``EagleDraftInput``.

    Args:
        topk: Branches of each request.
    """

    topk: int


Speculation = VerifyInput | DraftExtendInput | DraftInput


class EngineTypes(Protocol):
    """Makes objects of an installed engine; `OWN` is for backends that take the types of this module."""

    def forward_mode(self, mode: SglangForwardMode) -> Any:
        """Return the engine's value for a mode."""

    def spec_info(self, given: Speculation) -> Any:
        """Return the engine's object for an input of speculation."""

    def bind(self, batch: Any, model_runner: Any, *, in_capture: bool) -> None:
        """Add to a batch what the engine's runner binds to it."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context for each call of a backend."""


class _Own:
    def forward_mode(self, mode: SglangForwardMode) -> SglangForwardMode:
        return mode

    def spec_info(self, given: Speculation) -> Speculation:
        return given

    def bind(self, batch: Any, model_runner: Any, *, in_capture: bool) -> None:
        del batch, model_runner, in_capture

    def running(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


OWN: EngineTypes = _Own()
"""The `EngineTypes` for backends that import no engine."""
