"""The words for one step's work: `ForwardMode` and `ForwardBatch`.

A batch is flat: the tokens of all requests lie one after another in one axis ``T``, the requests in
another axis ``bs``. The same type serves the live batch, a dummy batch for capture, and the padded
view of a batch that a graph sees.

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
    """What kind of step a batch is; a graph is captured for one of these."""

    DECODE = "decode"
    """One new token a request."""
    EXTEND = "extend"
    """One or more new tokens a request, after a cached prefix of zero or more: prefill, or a chunk of it."""
    MIXED = "mixed"
    """An extend in which some requests decode: each of those brings one token."""
    TARGET_VERIFY = "target_verify"
    """The target model reads the drafts of every request, the same number of tokens each."""
    DRAFT_DECODE = "draft_decode"
    """The draft model decodes several steps on end, one token a branch in each."""
    DRAFT_EXTEND = "draft_extend"
    """The draft model reads what was verified: the same number of tokens a request, accepted or not."""
    IDLE = "idle"
    """No request at all: a rank that steps along because others have work. Its batch has the fields that
    its lane's batches have, without rows."""

    @property
    def is_decode(self) -> bool:
        """Whether this is decode proper: one new token a request."""
        return self is ForwardMode.DECODE

    @property
    def is_ragged(self) -> bool:
        """Whether requests bring different numbers of tokens, as ``extend_seq_lens`` says."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """The tensors of one step.

    Shapes: ``bs`` requests, ``T`` tokens. All tensors lie on the engine's device unless they end in
    ``_cpu``; those lie on the host and may be read there at any time.
    """

    forward_mode: ForwardMode
    batch_size: int
    """Requests in the batch; in a padded view, the bucket's."""
    input_ids: torch.Tensor
    """``[T]`` int64: token ids."""
    positions: torch.Tensor
    """``[T]`` int64: position of each token in its sequence, from 0."""
    out_cache_loc: torch.Tensor
    """``[T]`` int64: KV slot that each token's key and value are written to; 0 is scratch. Draft decode,
    whose ``T`` tokens are the branches: ``[T, num_steps]``, the slot of each branch in each step."""
    req_pool_indices: torch.Tensor
    """``[bs]`` int64: row of each request in the request pool; 0 is the reserved row."""
    seq_lens: torch.Tensor
    """``[bs]`` int64: tokens of each sequence that have a KV slot after this step, new ones included; but
    for target verify and draft decode those before it, since drafts are no part of a sequence yet."""
    seq_lens_cpu: torch.Tensor
    """``[bs]`` int64 on the host: the same numbers."""
    extend_seq_lens: torch.Tensor | None = None
    """``[bs]`` int64: new tokens of each request; extend and mixed only."""
    extend_seq_lens_cpu: torch.Tensor | None = None
    """``[bs]`` int64 on the host: the same numbers."""
    tree_mask: torch.Tensor | None = None
    """``[T, T // bs]`` bool: whether each draft token sees each draft token of its request, where drafts
    are a tree; target verify only. Without it they are a chain, each seeing those before it."""
    num_correct_drafts: torch.Tensor | None = None
    """``[bs]`` int32: drafts of each request that the target accepted, 0 and more; draft extend only. Its
    queries are as many for every request, whatever was accepted."""
    draft_step: int | None = None
    """Which step of a draft, from 0, this batch stands for; see `at_draft_step`."""
    draft_cache_loc: torch.Tensor | None = None
    """``[T, num_steps]`` int64: the slots of all steps; see `at_draft_step`."""

    mrope_positions: torch.Tensor | None = None
    """``[3, T]`` int64: temporal, height and width position of each token, for multimodal rope."""
    input_embeds: torch.Tensor | None = None
    """``[T, hidden_size]``: embeddings that stand for ``input_ids``."""
    encoder_lens: torch.Tensor | None = None
    """``[bs]`` int32: tokens of each request's encoder input, for cross attention."""
    mamba_track_indices: torch.Tensor | None = None
    """``[bs]`` int64: where each request's recurrent state is kept for reuse."""
    mamba_track_mask: torch.Tensor | None = None
    """``[bs]`` bool: whose state is kept in this step."""
    mamba_track_seqlens: torch.Tensor | None = None
    """``[bs]`` int32: tokens of each sequence that the kept state has seen."""
    num_token_non_padded: torch.Tensor | None = None
    """``[1]`` int32: real tokens, for layers that must not touch padding."""
    num_token_non_padded_cpu: int | None = None
    """The same on the host, over all attention-TP ranks, never cut down to one of them."""
    global_num_tokens_gpu: torch.Tensor | None = None
    """``[1]`` or ``[dp_size]`` int32: tokens of each DP rank in the gathered buffer."""
    global_num_tokens_cpu: tuple[int, ...] | None = None
    """Tokens of each DP rank in this step, on the host, where layers gather over ranks: all of them then
    replay the bucket of the largest."""
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    """``[1]`` or ``[dp_size]`` int32: the same for the tokens whose log probabilities are asked for."""
    ngram_embedding_info: Any = None
    """What an n-gram embedding reads: an object with ``column_starts`` and ``req_lens``, ``[bs]`` int32."""
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """A plugin's own fields by dotted names, such as ``eagle.hidden_states``. Like any other field, each has
    a slot of its name or is refused by a lane with graphs."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch, from the shape of ``input_ids``; no device read."""
        return self.input_ids.shape[0]

    @property
    def tokens_per_request(self) -> int:
        """Tokens that each request brings where all bring as many; 1 where there is no request."""
        return self.num_tokens // self.batch_size if self.batch_size else 1

    @property
    def uncounted_keys(self) -> int:
        """Keys that each query's request has in this step beyond ``seq_lens``: drafts."""
        if self.forward_mode is ForwardMode.TARGET_VERIFY:
            return self.tokens_per_request
        return 0 if self.draft_step is None else self.draft_step + 1

    def required_extend_lens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``extend_seq_lens`` and ``extend_seq_lens_cpu``.

        Raises:
            EngineError: The batch lacks one of them.
        """
        if self.extend_seq_lens is None or self.extend_seq_lens_cpu is None:
            raise EngineError(
                f"the {self.forward_mode.value} batch must carry extend_seq_lens and extend_seq_lens_cpu",
                hint="set both to the new tokens of each request",
            )
        return self.extend_seq_lens, self.extend_seq_lens_cpu

    def require_consistent(self) -> None:
        """Refuse fields that contradict each other, which no kernel can see. Host work only.

        Raises:
            EngineError: Names the field, what it has and what it should have.
        """
        mode, bs, tokens = self.forward_mode, self.batch_size, self.num_tokens
        if mode is ForwardMode.IDLE:
            return
        if mode.is_ragged:
            new = sum(self.required_extend_lens()[1].tolist())
            if new != tokens:
                _contradiction(self, f"extend_seq_lens_cpu adds up to {new}", f"{tokens} tokens")
        elif tokens != bs * self.tokens_per_request or (mode.is_decode and tokens != bs):
            _contradiction(self, f"{tokens} tokens", f"as many of each of {bs} requests")
        if (self.out_cache_loc.dim() == 2) is not (mode is ForwardMode.DRAFT_DECODE):
            asked = "[T, num_steps]" if mode is ForwardMode.DRAFT_DECODE else "[T]"
            _contradiction(self, f"out_cache_loc {list(self.out_cache_loc.shape)}", asked)
        if self.tree_mask is not None:
            if mode is not ForwardMode.TARGET_VERIFY:
                _contradiction(self, "a tree_mask", "none: target verify alone has one")
            shape = [tokens, self.tokens_per_request]
            if list(self.tree_mask.shape) != shape or self.tree_mask.dtype is not torch.bool:
                has = f"tree_mask {list(self.tree_mask.shape)} {self.tree_mask.dtype}"
                _contradiction(self, has, f"{shape} torch.bool")

    @property
    def drafts_in_rows(self) -> int:
        """Drafts of a request whose slots its row of ``req_to_token`` has too, behind its sequence.

        Those of a verify, and of a draft without branches; the slots of branches are in ``out_cache_loc``
        alone.
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
        """Whether drafts are a tree: what a draft token sees is then no range of positions."""
        return self.tree_mask is not None or self.is_branched

    @property
    def num_draft_steps(self) -> int:
        """Steps of a draft decode; 1 for every other batch."""
        return self.out_cache_loc.shape[1] if self.out_cache_loc.dim() > 1 else 1

    def at_draft_step(self, step: int) -> "ForwardBatch":
        """Return what one step of a draft decode sees: it writes its own slots, ``out_cache_loc`` ``[T]``.

        Its queries attend ``seq_lens + step + 1`` keys: the sequence, and their branch up to themselves.
        """
        return replace(
            self,
            draft_step=step,
            out_cache_loc=self.out_cache_loc[:, step],
            draft_cache_loc=self.out_cache_loc,
        )

    @property
    def device(self) -> torch.device:
        """The device of the batch's tensors."""
        return self.input_ids.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name; those of ``extra`` by their dotted names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v for n, v in (values | dict(self.extra)).items() if isinstance(v, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "ForwardBatch":
        """Return the batch with other tensors in the place of some: by name, as `tensors` gives them."""
        extra = {name: tensors.get(name, tensor) for name, tensor in self.extra.items()}
        changes: dict[str, Any] = {n: t for n, t in tensors.items() if n not in self.extra}
        return replace(self, **changes, extra=extra)

    def to(self, device: torch.device) -> "ForwardBatch":
        """Return the batch on ``device``, but for what lies on the host."""
        tensors = self.tensors().items()
        return self.with_tensors({n: t.to(device) for n, t in tensors if not n.endswith("_cpu")})

    @property
    def kind(self) -> tuple[object, ...]:
        """What the batch carries: its mode, which optional fields it has, the names of ``extra``."""
        return (self.forward_mode, *map(type, _OPTIONAL(self)), *self.extra)

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that lie on the host, as the name of their field says (``_cpu``)."""
        return [tensor for name, tensor in self.tensors().items() if name.endswith("_cpu")]


_OPTIONAL = operator.attrgetter(
    *(each.name for each in fields(ForwardBatch) if each.default is None),
)


def _contradiction(batch: ForwardBatch, has: str, asked: str) -> NoReturn:
    raise EngineError(
        f"the {batch.forward_mode.value} batch of {batch.batch_size} requests has {has}, where it should have"
        f" {asked}",
        hint="graphpact.ForwardBatch says what each mode carries",
    )
