"""Faults planted in a metadata builder of the real vLLM, by builders that are wrong in one way each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from graphpact_vllm.attention import PagedBackend, PagedImpl, PagedMetadata, PagedMetadataBuilder


class Rebound(PagedMetadataBuilder):
    """Makes a new tensor of lengths in every step."""

    def build(self, *args: Any, **kwargs: Any) -> PagedMetadata:
        """Return the metadata of a step."""
        metadata = super().build(*args, **kwargs)
        return dataclasses.replace(metadata, seq_lens=metadata.seq_lens.clone())


class OtherDtype(PagedMetadataBuilder):
    """Has lengths of another dtype in replays, over the same memory."""

    is_capture = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PagedMetadata:
        """Return the metadata of a capture."""
        return super().build(0, common_attn_metadata)

    def build(self, *args: Any, **kwargs: Any) -> PagedMetadata:
        """Return the metadata of a replay."""
        metadata = super().build(*args, **kwargs)
        return dataclasses.replace(metadata, seq_lens=metadata.seq_lens.view(torch.uint32))


class _Copies(PagedMetadataBuilder):
    """Keeps the block table in memory of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_table = torch.zeros(64, 512, dtype=torch.int32)
        self.is_stale = False

    def build(self, *args: Any, **kwargs: Any) -> PagedMetadata:
        """Return the metadata of a step."""
        metadata = super().build(*args, **kwargs)
        rows, pages = metadata.block_table.shape
        table = self.block_table[:rows, :pages]
        if not self.is_stale:
            table.copy_(metadata.block_table)
        return dataclasses.replace(metadata, block_table=table)


class Stale(_Copies):
    """Does not refresh its block table in a step of decodes."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> PagedMetadata:
        """Return the metadata of a step."""
        self.is_stale = common_attn_metadata.max_query_len == 1
        return super().build(common_prefix_len, common_attn_metadata, **kwargs)


@dataclasses.dataclass
class LimitedMetadata(PagedMetadata):
    """Metadata with a host number that the kernel uses.

    Args:
        num_keys: The most keys of a request.
    """

    num_keys: int


class Baked(PagedMetadataBuilder):
    """Has the longest length as a number: right in every eager step."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> LimitedMetadata:
        """Return the metadata of a step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, **kwargs)
        return LimitedMetadata(**vars(metadata), num_keys=int(common_attn_metadata.seq_lens.max()))


class BakedImpl(PagedImpl):
    """Scales by the host number."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend."""
        metadata = kwargs.get("attn_metadata", args[5] if len(args) > 5 else None)
        output = super().forward(*args, **kwargs)
        return output if metadata is None else output.mul_(1 + 1 / max(metadata.num_keys, 1))


def use(builder: type, impl: type = PagedImpl) -> Callable[[], None]:
    """Return a function that makes ``builder`` the one of our backend."""

    def register() -> None:
        PagedBackend.get_builder_cls = staticmethod(lambda: builder)  # type: ignore[method-assign]
        PagedBackend.get_impl_cls = staticmethod(lambda: impl)  # type: ignore[method-assign]

    return register


def declare_cpu_attention() -> None:
    """Declare that vLLM's own backend for CPUs supports graphs, against its own word."""
    CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
