"""Right metadata builders that keep what they make in ten styles, over the same kernel."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graphpact_vllm.attention.paged import PagedMetadata, PagedMetadataBuilder


class NewObject(PagedMetadataBuilder):
    """A new dataclass in every step, with views of vLLM's own memory."""


class ObjectOfASize(PagedMetadataBuilder):
    """One object for each number of requests and tokens, whose fields are set anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: dict[tuple[int, int], PagedMetadata] = {}

    def build(self, *args: Any, **kwargs: Any) -> PagedMetadata:
        """Return the metadata of a step."""
        new = super().build(*args, **kwargs)
        kept = self.made.setdefault((len(new.seq_lens), len(new.slot_mapping)), new)
        vars(kept).update(vars(new))
        return kept


class _Other(PagedMetadataBuilder):
    """Metadata of another kind."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return ``metadata`` as this builder has it."""
        raise NotImplementedError

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Any:
        """Return the metadata of a step."""
        return self.other(
            super().build(common_prefix_len, common_attn_metadata, **kwargs), common_attn_metadata
        )


class TupleMetadata(NamedTuple):
    """`PagedMetadata` as a named tuple."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    causal: bool


class Tuples(_Other):
    """A named tuple."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return a tuple."""
        return TupleMetadata(**vars(metadata))


class Namespaces(_Other):
    """A namespace, as many scripts have it."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return a namespace."""
        return SimpleNamespace(**vars(metadata))


class PlainMetadata:
    """A class without declared fields."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class PlainClasses(_Other):
    """An object of a plain class."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return an object."""
        return PlainMetadata(**vars(metadata))


@dataclasses.dataclass(slots=True, frozen=True)
class SlottedMetadata:
    """`PagedMetadata` with slots, frozen."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    causal: bool


class Slots(_Other):
    """A frozen dataclass with slots."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return a frozen object."""
        return SlottedMetadata(**vars(metadata))


class OwnMemory(_Other):
    """Copies of all tensors in memory of the builder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory: dict[str, torch.Tensor] = {}

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return the metadata over own memory."""
        return dataclasses.replace(
            metadata,
            **{
                name: self.kept(name, value)
                for name, value in vars(metadata).items()
                if isinstance(value, torch.Tensor)
            },
        )

    def kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``value`` in memory that stays."""
        memory = self.memory.setdefault(name, value.new_zeros(1 << 16))
        copy = memory[: value.numel()].view(value.shape)
        return copy.copy_(value)


@dataclasses.dataclass
class PlannedMetadata(PagedMetadata):
    """Metadata with numbers and tensors of the host, which no kernel reads.

    Args:
        num_tokens: Tokens of the step.
        lengths: The lengths as numbers.
        host_lengths: The lengths on the host.
        note: A text.
    """

    num_tokens: int
    lengths: list[int]
    host_lengths: torch.Tensor
    note: str


class HostNumbers(_Other):
    """New numbers and tensors of the host in every step, beside what the graph reads."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return the metadata with more fields."""
        lengths = common.seq_lens.tolist()
        return PlannedMetadata(
            **vars(metadata),
            num_tokens=common.num_actual_tokens,
            lengths=lengths,
            host_lengths=torch.tensor(lengths),
            note=f"{sum(lengths)} keys",
        )


class ShorterViews(_Other):
    """A view of as many columns of the block table as the step needs."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return the metadata of a capture, with all columns."""
        return PagedMetadataBuilder.build(self, 0, common_attn_metadata)

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return the metadata of a replay."""
        return dataclasses.replace(metadata, block_table=metadata.block_table[:, :2])


class OptionalFields(_Other):
    """Fields that only some steps have, and that the kernel does not read."""

    def other(self, metadata: PagedMetadata, common: Any) -> Any:
        """Return a namespace with a plan in every second step."""
        plan = None if int(common.seq_lens.sum()) % 2 else torch.zeros(8)
        return SimpleNamespace(**vars(metadata), plan=plan)


STYLES = (
    NewObject,
    ObjectOfASize,
    Tuples,
    Namespaces,
    PlainClasses,
    Slots,
    OwnMemory,
    HostNumbers,
    ShorterViews,
    OptionalFields,
)
