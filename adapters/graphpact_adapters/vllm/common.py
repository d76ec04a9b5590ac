"""`CommonAttentionMetadata`: the batch that vLLM's model runner gives to every builder in a step.

It has the fields and methods of vLLM's class of the same name (``vllm/v1/attention/backend.py``), so that
builders accept it. It also has those that later releases removed, from release 0.11 on. Fields for features
that no lane of the suite covers are None.

Does not: fill them; see `graphpact_adapters.vllm.runner`.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from graphpact_adapters.needs import assume_missing
from graphpact_adapters.vllm.plain_values import NotGivenError


@dataclass
class CommonAttentionMetadata:
    """The batch of a step, padded to a graph's shape.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32: where each request's queries begin. Padding rows have none.
        query_start_loc_cpu: The same on the host.
        seq_lens: ``[num_reqs]`` int32: keys of each request, those of this step included; 0 in padding rows.
        num_reqs: Requests, padding rows included.
        num_actual_tokens: Tokens, padding tokens included. The name is vLLM's; its own comment calls it
            misleading.
        max_query_len: The most queries of a request.
        max_seq_len: An upper bound on the keys of a request.
        block_table_tensor: ``[num_reqs, blocks]`` int32: block ids; 0 in padding rows, and past the last.
        slot_mapping: ``[T]`` int64: the KV slot that each token writes; -1 for padding tokens.
        causal: Whether queries see no later keys.
        logits_indices_padded: None; for fast prefill with a shared KV cache.
        num_logits_indices: None, as above.
        max_logits_per_req: None, as above.
        encoder_seq_lens: None; for cross attention.
        encoder_seq_lens_cpu: None, as above.
        dcp_local_seq_lens: None; for decode context parallelism.
        dcp_local_seq_lens_cpu: None, as above.
        dcp_local_seq_lens_cpu_upper_bound: None, as above.
        seq_lens_cpu_upper_bound: ``[num_reqs]`` int32 on the host: at least ``seq_lens``.
        is_prefilling: ``[num_reqs]`` bool on the host: whether a prompt is not yet computed.
        positions: ``[T]`` int64.
        req_idx: None; for prefill context parallelism, the rows of the requests in the runner's tables.
        mm_req_doc_ranges: None; for multimodal prefixes.
        rswa_prefix_lens: None; for a reference window.
        replayssm_decode_base_cpu: None; for replayed state space models.
        _seq_lens_cpu: ``[num_reqs]`` int32 on the host: exactly ``seq_lens``, in releases since 0.11. None if
            the runner speculates and so does not know them; `seq_lens_cpu` then copies them from the device.
        _num_computed_tokens_cpu: ``[num_reqs]`` int32 on the host: keys that are in the cache already; None
            as above.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: Any = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    req_idx: Any = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    replayssm_decode_base_cpu: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """``[num_reqs]`` int32 on the host: exactly ``seq_lens``, after speculation too."""
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.to("cpu")
        return self._seq_lens_cpu

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """``[num_reqs]`` int32 on the host: exactly the keys of each request in the cache."""
        if self._num_computed_tokens_cpu is None:
            self._num_computed_tokens_cpu = self.seq_lens_cpu - self.query_start_loc_cpu.diff()
        return self._num_computed_tokens_cpu

    def __getattr__(self, name: str) -> Any:
        """Raise, because Python calls this only for a name that is not a field."""
        if name.startswith("__"):  # Python's protocols, such as copying
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return assume_missing(
            "common_attn_metadata",
            name,
            f"common_attn_metadata.{name}: the suite has no value for it",
            hint=f"read it with getattr(common_attn_metadata, {name!r}, ...) if an engine may lack it, or"
            " pass it to the builder in its factory",
            error=NotGivenError,
        )

    def batch_size(self) -> int:
        """Return the number of requests."""
        return len(self.seq_lens)

    def naive_query_lens(self) -> torch.Tensor:
        """Return ``[num_reqs]``: the queries of each request."""
        return self.query_start_loc.diff()

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """Return ``[num_reqs]``: the keys of each request that are in the cache already."""
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the head of ``buffer`` with each token's request index; padding gets the last index."""
        tokens = torch.arange(self.num_actual_tokens, dtype=torch.int32, device=buffer.device)
        found = torch.searchsorted(self.query_start_loc[1:], tokens, right=True)
        out = buffer[: self.num_actual_tokens]
        out.copy_(found.clamp_(max=self.num_reqs - 1))
        return out

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return replace(self, **changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> Self:
        """Return a copy without padding rows and padding tokens."""
        rows, tokens = slice(num_actual_reqs), slice(num_actual_tokens)
        by_request = (
            "seq_lens",
            "block_table_tensor",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
            "_seq_lens_cpu",
            "_num_computed_tokens_cpu",
            "req_idx",
        )
        cut = {name: value[rows] for name in by_request if (value := getattr(self, name)) is not None}
        return replace(
            self,
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            slot_mapping=self.slot_mapping[tokens],
            **cut,
        )
