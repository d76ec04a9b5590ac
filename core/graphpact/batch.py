"""The words for one step's work: `ForwardMode` and `ForwardBatch`.

A batch is flat: the tokens of all requests lie one after another in one axis ``T``, the requests in
another axis ``bs``. The same type serves the live batch, a dummy batch for capture, and the padded
view of a batch that a graph sees.

Does not: build batches (the scheduler does) or pad them (the registry does).
"""

import enum
from dataclasses import dataclass, fields
from typing import Any

import torch


class ForwardMode(enum.Enum):
    """What kind of step a batch is; a graph is captured for one of these."""

    DECODE = "decode"
    """One new token a request."""
    EXTEND = "extend"
    """One or more new tokens a request, after a cached prefix of zero or more: prefill, or a chunk of it."""

    @property
    def is_decode(self) -> bool:
        """Whether every request brings exactly one token."""
        return self is ForwardMode.DECODE


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
    """``[T]`` int64: KV slot that each token's key and value are written to; 0 is scratch."""
    req_pool_indices: torch.Tensor
    """``[bs]`` int64: row of each request in the request pool; 0 is the reserved row."""
    seq_lens: torch.Tensor
    """``[bs]`` int64: tokens of each sequence that have a KV slot after this step, new ones included."""
    seq_lens_cpu: torch.Tensor
    """``[bs]`` int64 on the host: the same numbers."""
    extend_seq_lens: torch.Tensor | None = None
    """``[bs]`` int64: new tokens of each request; extend only."""
    extend_seq_lens_cpu: torch.Tensor | None = None
    """``[bs]`` int64 on the host: the same numbers."""

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
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    """``[1]`` or ``[dp_size]`` int32: the same for the tokens whose log probabilities are asked for."""
    ngram_embedding_info: Any = None
    """What an n-gram embedding reads: an object with ``column_starts`` and ``req_lens``, ``[bs]`` int32."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch, from the shape of ``input_ids``; no device read."""
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the batch's tensors."""
        return self.input_ids.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
