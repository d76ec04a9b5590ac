"""Faults planted in a metadata builder of the real vLLM, by builders that are wrong in one way each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from graphpact_vllm.attention.paged import PagedBackend, PagedImpl, PagedMetadata, PagedMetadataBuilder
from graphpact_vllm.load.in_process import InProcessEngine


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

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> PagedMetadata:
        """Return the metadata of a step."""
        self.is_stale = common_attn_metadata.max_query_len == 1
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)


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


# -- faults of the engine, as they were reported ------------------------------------------------------


@dataclasses.dataclass
class SplitMetadata(PagedMetadata):
    """Metadata with the numbers of decodes and prefills, as most backends have.

    Args:
        num_decodes: Requests past their prompts.
        num_prefills: Requests with prompt tokens in the step.
    """

    num_decodes: int
    num_prefills: int


class Split(PagedMetadataBuilder):
    """Splits a batch into decodes and prefills by what vLLM says of each request."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> SplitMetadata:
        """Return the metadata of a step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, **kwargs)
        prefills = int(common_attn_metadata.is_prefilling.sum())
        decodes = common_attn_metadata.num_reqs - prefills
        return SplitMetadata(**vars(metadata), num_decodes=decodes, num_prefills=prefills)


class SplitImpl(PagedImpl):
    """Takes another kernel for prefills."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend, and read which kernel is taken."""
        metadata = args[5]
        output = super().forward(*args, **kwargs)
        return output.mul_(1) if metadata is not None and metadata.num_prefills else output


def take_prompts_as_decodes() -> None:
    """Take a prompt that is as long as a request with its drafts as a decode."""
    from vllm.v1.worker.gpu import model_runner

    right = model_runner.get_uniform_decode_token_count
    model_runner.get_uniform_decode_token_count = lambda *args: right(*args[:3], True)  # noqa: FBT003
    use(Split, SplitImpl)()


def keep_host_lengths(engine: InProcessEngine) -> None:
    """Leave the lengths on the host behind the live requests as an earlier step had them."""
    runner = engine.model_runner
    before = torch.zeros(64, dtype=torch.int32)

    def stale(lengths: torch.Tensor, live: int) -> None:
        lengths[live:] = before[live : len(lengths)]
        before[: len(lengths)] = lengths

    if hasattr(runner, "optimistic_seq_lens_cpu"):  # V1
        build = runner._build_attention_metadata

        def built(*args: Any, num_reqs: int, **kwargs: Any) -> Any:
            stale(runner.optimistic_seq_lens_cpu, num_reqs)
            return build(*args, num_reqs=num_reqs, **kwargs)

        runner._build_attention_metadata = built
        return
    prepare = runner.prepare_inputs

    def prepared(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        stale(batch.seq_lens_cpu_upper_bound, batch.num_reqs)
        return batch

    runner.prepare_inputs = prepared


def move_slots(engine: InProcessEngine) -> None:
    """Put the KV slots of each step into new memory, and clear the memory that graphs read."""
    runner = engine.model_runner

    def moved(slots: torch.Tensor) -> torch.Tensor:
        new = slots.clone()
        slots.fill_(-1)
        return new

    if hasattr(runner, "_get_slot_mappings"):  # V1
        get = runner._get_slot_mappings

        def got(*args: Any, **kwargs: Any) -> Any:
            by_group, by_layer = get(*args, **kwargs)
            if by_group is None:
                return by_group, by_layer
            new = {id(slots): moved(slots) for slots in by_group.values()}
            return (
                {group: new[id(slots)] for group, slots in by_group.items()},
                {layer: new[id(slots)] for layer, slots in by_layer.items()},
            )

        runner._get_slot_mappings = got
        return
    prepare = runner.prepare_attn

    def prepared(*args: Any, **kwargs: Any) -> Any:
        tables, slots = prepare(*args, **kwargs)
        return tables, moved(slots)

    runner.prepare_attn = prepared
