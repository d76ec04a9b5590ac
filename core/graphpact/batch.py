"""The work of one step: `ForwardMode` and `ForwardBatch`.

A batch is flat: the tokens of all requests are packed in one axis ``T``, the requests in another axis ``bs``.
The same type is used for the live batch, the dummy batch of a capture, and the padded view of a graph.

Does not: build batches (the scheduler does) or pad them (the registry does).
"""

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import torch

from graphpact.errors import EngineError


class ForwardMode(enum.Enum):
    """The kind of a step. A graph is captured for one mode.

    Attributes:
        DECODE: One new token per request.
        EXTEND: One or more new tokens per request after a cached prefix, or none: prefill, or a chunk of it.
        MIXED: An extend in which some requests decode, with one token each. A prompt may have one token too.
        TARGET_VERIFY: The target model reads the drafts of every request, the same number of tokens each.
        DRAFT_DECODE: The draft model decodes several steps in a row, one token per branch in each.
        DRAFT_EXTEND: The draft model reads the verified tokens, the same number for every request, whether
            they were accepted or not.
        IDLE: A step without requests, on a rank that runs it because other ranks have work. The batch has the
            same fields as other batches of its lane, without rows.
    """

    DECODE = "decode"
    EXTEND = "extend"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"

    # A step asks both many times. Before Python 3.12, the look-up of a member on its class takes longer.

    @property
    def is_decode(self) -> bool:
        """Whether this is plain decode: one new token per request."""
        return self._value_ == "decode"

    @property
    def is_ragged(self) -> bool:
        """Whether requests have different numbers of tokens, given by ``extend_seq_lens``."""
        return self._value_ in ("extend", "mixed")


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """The tensors of one step.

    Shapes: ``bs`` requests, ``T`` tokens. Tensors are on the engine's device. Only those whose names end in
    ``_cpu`` are on the host, and may be read at any time.

    Args:
        forward_mode: The kind of the step.
        batch_size: Requests in the batch; in a padded view, those of the shape.
        input_ids: ``[T]`` int64: token ids.
        positions: ``[T]`` int64: position of each token in its sequence, from 0.
        out_cache_loc: ``[T]`` int64: KV slot of each token's key and value; 0 is scratch. In draft decode the
            ``T`` tokens are the branches, and the shape is ``[T, num_steps]``: the KV slot of each branch in
            each step.
        req_pool_indices: ``[bs]`` int64: row of each request in the request pool; 0 is scratch.
        seq_lens: ``[bs]`` int64: tokens of each sequence that have a KV slot after this step, including the
            new ones. In target verify and draft decode it is the number before this step, because drafts are
            not yet part of the sequence.
        seq_lens_cpu: ``[bs]`` int64 on the host: the same numbers.
        extend_seq_lens: ``[bs]`` int64: new tokens of each request; extend and mixed only.
        extend_seq_lens_cpu: ``[bs]`` int64 on the host: the same numbers.
        tree_mask: ``[T, T // bs]`` bool: whether each draft token sees each draft token of its request;
            only in target verify of draft trees. Without it drafts are a chain: each sees itself and the
            drafts before it.
        num_correct_drafts: ``[bs]`` int32: accepted drafts of each request, from 0; draft extend only.
        draft_step: Index of the draft step of this batch, from 0; see `at_draft_step`.
        draft_cache_loc: ``[T, num_steps]`` int64: the KV slots of all steps; see `at_draft_step`.
        mrope_positions: ``[3, T]`` int64: temporal, height and width positions, for multimodal rope.
        input_embeds: ``[T, hidden_size]``: embeddings instead of ``input_ids``.
        encoder_lens: ``[bs]`` int32: tokens of each request's encoder input, for cross attention.
        mamba_track_indices: ``[bs]`` int64: index at which each request's recurrent state is kept for reuse.
        mamba_track_mask: ``[bs]`` bool: whether the request's state is kept in this step.
        mamba_track_seqlens: ``[bs]`` int32: tokens of each sequence in the kept state.
        num_token_non_padded: ``[1]`` int32: real tokens, for layers that must not touch padding.
        num_token_non_padded_cpu: Real tokens of all attention-TP ranks, on the host.
        global_num_tokens_gpu: ``[1]`` or ``[dp_size]`` int32: tokens of each DP rank in the gathered buffer.
        global_num_tokens_cpu: Tokens of each DP rank in this step, on the host, if layers gather over ranks.
            All ranks then replay the shape of the rank with most tokens.
        global_batch_sizes_cpu: Requests of each DP rank in this step, on the host, with the same use.
        can_run_graph: Whether every rank of this step can replay a graph. If not, all run eagerly.
        global_num_tokens_for_logprob_gpu: The same for tokens with requested log probabilities.
        ngram_embedding_info: An object with ``column_starts`` and ``req_lens``, both ``[bs]`` int32.
        extra: Fields that not every batch has, by dotted names: the owner, then the field, such as
            ``eagle.hidden_states``. As for all other fields, a lane with graphs refuses one that has no slot.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    num_correct_drafts: torch.Tensor | None = None
    draft_step: int | None = None
    draft_cache_loc: torch.Tensor | None = None

    mrope_positions: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    mamba_track_indices: torch.Tensor | None = None
    mamba_track_mask: torch.Tensor | None = None
    mamba_track_seqlens: torch.Tensor | None = None
    num_token_non_padded: torch.Tensor | None = None
    num_token_non_padded_cpu: int | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_num_tokens_cpu: tuple[int, ...] | None = None
    global_batch_sizes_cpu: tuple[int, ...] | None = None
    can_run_graph: bool = True
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    ngram_embedding_info: Any = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch, from the shape of ``input_ids``, without a device read."""
        return self.input_ids.shape[0]

    @property
    def tokens_per_request(self) -> int:
        """Tokens of each request, if all have the same number; 1 without requests."""
        return self.num_tokens // self.batch_size if self.batch_size else 1

    @property
    def uncounted_keys(self) -> int:
        """Number of keys per request in this step that ``seq_lens`` does not count: those of drafts."""
        if self.forward_mode is ForwardMode.TARGET_VERIFY:
            return self.tokens_per_request
        return 0 if self.draft_step is None else self.draft_step + 1

    def required_extend_lens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``extend_seq_lens`` and ``extend_seq_lens_cpu``; raise `EngineError` if one is missing."""
        if self.extend_seq_lens is None or self.extend_seq_lens_cpu is None:
            raise EngineError(
                f"the {self.forward_mode.value} batch must carry extend_seq_lens and extend_seq_lens_cpu",
                hint="set both to the number of new tokens of each request",
            )
        return self.extend_seq_lens, self.extend_seq_lens_cpu

    def require_consistent(self) -> None:
        """Raise `EngineError` for conflicting fields, which no kernel can detect. It does no device work."""
        mode, bs, tokens = self.forward_mode, self.batch_size, self.num_tokens
        if mode is ForwardMode.IDLE:
            return
        if mode.is_ragged:
            new = sum(self.required_extend_lens()[1].tolist())
            if new != tokens:
                _contradiction(self, f"extend_seq_lens_cpu adds up to {new}", f"{tokens} tokens")
        elif tokens != (bs if mode.is_decode else bs * self.tokens_per_request):
            _contradiction(self, f"{tokens} tokens", f"the same number for each of {bs} requests")
        if (self.out_cache_loc.dim() == 2) is not (mode is ForwardMode.DRAFT_DECODE):
            asked = "[T, num_steps]" if mode is ForwardMode.DRAFT_DECODE else "[T]"
            _contradiction(self, f"out_cache_loc {list(self.out_cache_loc.shape)}", asked)
        if self.tree_mask is not None:
            if mode is not ForwardMode.TARGET_VERIFY:
                _contradiction(self, "a tree_mask", "none: only target verify has one")
            shape = [tokens, self.tokens_per_request]
            if list(self.tree_mask.shape) != shape or self.tree_mask.dtype is not torch.bool:
                has = f"tree_mask {list(self.tree_mask.shape)} {self.tree_mask.dtype}"
                _contradiction(self, has, f"{shape} torch.bool")

    @property
    def drafts_in_rows(self) -> int:
        """Number of drafts per request whose KV slots follow the sequence in its row of ``req_to_token``.

        Only the drafts of a target verify, and of a draft decode with top-k = 1, have such KV slots. The KV
        slots of branches are only in ``out_cache_loc``.
        """
        if self.forward_mode is ForwardMode.TARGET_VERIFY:
            return self.tokens_per_request
        is_draft = self.forward_mode is ForwardMode.DRAFT_DECODE
        return self.num_draft_steps if is_draft and not self.is_branched else 0

    @property
    def is_branched(self) -> bool:
        """Whether each request of a draft decode has more than one branch."""
        return self.forward_mode is ForwardMode.DRAFT_DECODE and self.tokens_per_request > 1

    @property
    def is_tree(self) -> bool:
        """Whether drafts are a tree. A draft token then sees keys that are not a range of positions."""
        return self.tree_mask is not None or self.is_branched

    @property
    def num_draft_steps(self) -> int:
        """Steps of a draft decode; 1 for every other batch."""
        return self.out_cache_loc.shape[1] if self.out_cache_loc.dim() > 1 else 1

    def at_draft_step(self, step: int) -> "ForwardBatch":
        """Return the batch of one step of a draft decode, with ``out_cache_loc`` ``[T]``.

        Its queries attend to ``seq_lens + step + 1`` keys: the sequence, then their branch up to the query.
        """
        slots = self.out_cache_loc
        return replace(self, draft_step=step, out_cache_loc=slots[:, step], draft_cache_loc=slots)

    @property
    def selected_rows(self) -> torch.Tensor | None:
        """``[bs]`` int64: index of the token of each request whose logits are needed; None for all tokens.

        It is the last token in a ragged batch, and the last accepted one in draft extend.
        """
        if self.extend_seq_lens is not None:
            return torch.cumsum(self.extend_seq_lens, dim=0) - 1
        if self.num_correct_drafts is None:
            return None
        width = self.tokens_per_request
        return torch.arange(0, self.num_tokens, width, device=self.device) + self.num_correct_drafts

    @property
    def device(self) -> torch.device:
        """The device of the batch's tensors."""
        return self.input_ids.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the batch by field name; those in ``extra`` by their dotted names."""
        values = {name: getattr(self, name) for name in _TENSORS} | dict(self.extra)
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "ForwardBatch":
        """Return the batch with some tensors replaced, by the names of `tensors`."""
        extra = {name: tensors.get(name, tensor) for name, tensor in self.extra.items()}
        changes: dict[str, Any] = {n: t for n, t in tensors.items() if n not in self.extra}
        return replace(self, **changes, extra=extra)

    def to(self, device: torch.device) -> "ForwardBatch":
        """Return the batch on ``device``; host tensors stay on the host."""
        tensors = self.tensors().items()
        return self.with_tensors({n: t.to(device) for n, t in tensors if not n.endswith("_cpu")})

    @property
    def kind(self) -> tuple[object, ...]:
        """The set of fields: the mode, the types of the optional fields, the names of ``extra``."""
        return (self.forward_mode, *map(type, _OPTIONAL(self)), *self.extra)

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the host, whose field names end in ``_cpu``."""
        return [tensor for name, tensor in self.tensors().items() if name.endswith("_cpu")]


_OPTIONAL = operator.attrgetter(*(f.name for f in fields(ForwardBatch) if f.default is None))
# Other fields are not read: torch.compile would trace again if a number that it has seen changes.
_TENSORS = [f.name for f in fields(ForwardBatch) if f.type in (torch.Tensor, torch.Tensor | None)]


def _contradiction(batch: ForwardBatch, has: str, expected: str) -> NoReturn:
    raise EngineError(
        f"the {batch.forward_mode.value} batch of {batch.batch_size} requests has {has}; expected {expected}",
        hint="graphpact.ForwardBatch documents the fields of each mode",
    )
