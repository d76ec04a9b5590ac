"""The metadata builder of a typical new vLLM backend, with lengths and blocks in its own buffers."""

import enum
from dataclasses import dataclass
from typing import Any

import torch


class GraphSupport(enum.Enum):
    """Which batches a full graph may serve; in vLLM this is `AttentionCGSupport`."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass
class AcmeMetadata:
    """What the kernel reads.

    Args:
        num_actual_tokens: Tokens of the step, padding included.
        max_query_len: The most queries of a request.
        max_seq_len: An upper bound on the keys of a request.
        query_start_loc: ``[num_reqs + 1]`` int32: where each request's queries begin.
        seq_lens: ``[num_reqs]`` int32: keys of each request.
        block_table: ``[num_reqs, blocks]`` int32: the blocks of each request.
        causal: Whether a query sees no later key.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool


class AcmeMetadataBuilder:
    """Builds the metadata of a step for the layers of one KV-cache group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.layer_names = layer_names
        rows = vllm_config.scheduler_config.max_num_seqs
        blocks = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)
        # A graph keeps the addresses of its capture, so the buffers live as long as the builder.
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> GraphSupport:
        """Return which batches the kernel can serve in a full graph."""
        del vllm_config, kv_cache_spec
        return GraphSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> AcmeMetadata:
        """Return the metadata of a step, padding rows included: they have no queries and no keys."""
        del common_prefix_len
        common, rows = common_attn_metadata, common_attn_metadata.num_reqs
        self.seq_lens[:rows].copy_(common.seq_lens)
        self.block_table[:rows].copy_(common.block_table_tensor)
        return AcmeMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=self.seq_lens[:rows],
            block_table=self.block_table[:rows],
            causal=common.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AcmeMetadata:
        """Return the metadata that a graph keeps."""
        return self.build(0, common_attn_metadata)
