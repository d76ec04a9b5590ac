"""`TRTLLMMLAMetadata`: the tensors and host numbers of one step.

Does not: fill them; `graphpact_trtllm_mla.backend` does.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TRTLLMMLAMetadata:
    """The metadata of TRT-LLM's kernels for one step of ``bs`` requests.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        block_kv_indices: ``[bs, blocks]`` int32: page numbers, 0 past a request's keys; its capacity in keys
            is a multiple of 128.
        seq_lens_k: ``[bs]`` int32: keys of each request, drafts included.
        cu_seqlens_q: ``[bs + 1]`` int32: where each request's queries begin.
        max_seq_len_q: Queries of each request; a bound on them in ragged modes.
        sum_seq_lens_q: Rows of queries.
        max_seq_len_k: Bound on the keys of a request.
        is_uniform: Whether every request has ``max_seq_len_q`` queries.
        workspace: The native kernels' memory; None for portable ones.
    """

    out_cache_loc: torch.Tensor
    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seq_len_q: int
    sum_seq_lens_q: int
    max_seq_len_k: int
    is_uniform: bool
    workspace: torch.Tensor | None
