"""Exhibits and variants of host memory: host tensors of the view, and copies to the host: GP02 to GP04, GP16.

Plans read host tensors in every step. The suite's own backend reads few of them, so wrong rows change no
output.

Does not: plant bugs in copies from the host; see `graphpact_museum.plans`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy, metadata_slot
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.edits.runners import keeps, keeps_tails, pads
from graphpact_museum.exhibit import Make, exhibit, variant

# -- host tensors of the view ------------------------------------------------------------------------


@exhibit("GP03", "sgl-project/sglang#22958", on="breakable_cuda_graph", lanes="extend")
def breakable_keeps_new_tokens_of_padding_on_the_host(base: type[Any]) -> type[Any]:
    """extend_seq_lens_cpu of padding rows is that of an earlier batch; on the device it is reset."""
    return keeps_tails(base, "extend_seq_lens_cpu")


@exhibit("GP04", "sgl-project/sglang#22958", on="reference_runner", lanes="mixed")
@pads("extend_seq_lens_cpu")
def mixed_runner_pads_new_tokens_on_the_host_with_one(_: Any, __: torch.Tensor) -> int:
    """Padding requests have one new token on the host, and none on the device."""
    return 1


@exhibit("GP02", "sgl-project/sglang#25512", on="reference_runner", lanes="extend")
def extend_runner_misses_new_tokens_on_the_host(base: type[Any]) -> type[Any]:
    """extend_seq_lens_cpu stays that of the capture; on the device it is that of the batch."""
    return keeps(base, "extend_seq_lens_cpu")


@variant(on="reference_runner", lanes="extend")
@overrides("slots")
def host_rows_kept_for_a_reason(_: Any, right: Any) -> list[GraphSlot]:
    """The new tokens on the host keep their padding rows, for a declared reason: plans read live rows."""
    keeps_rows = {
        "padding_policy": PaddingPolicy.KEEP_PAD,
        "pad_value": None,
        "reason": "plans read the rows of the batch only",
    }
    return [replace(slot, **keeps_rows) if slot.name == "extend_seq_lens_cpu" else slot for slot in right()]


@variant(on="reference_runner", lanes="extend")
@overrides("slots")
def host_lengths_of_32_bits(_: Any, right: Any) -> list[GraphSlot]:
    """The host lengths are int32, for a planner in C; those on the device are int64."""
    narrow = {"dtype": torch.int32, "narrows": True}
    return [replace(slot, **narrow) if slot.name.endswith("_cpu") else slot for slot in right()]


# -- copies to the host ------------------------------------------------------------------------------


_KEPT = "museum.kept_lens"

Use: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""``(backend, memory, lens) -> read``: copies lengths to host memory, and returns what it read there."""


def _through_the_host(use: Use) -> Make:
    """Return an edit of backends that copy lengths to the host; attention gets those that ``use`` returns.

    Args:
        use: See `Use`.
    """

    def declare_slots(_: Any, right: Any, limits: Any) -> list[GraphSlot]:
        return [*right(limits), metadata_slot(_KEPT, lambda bs, _: (bs,), torch.int64, role="staging")]

    def init_metadata_replay(self: Any, right: Any, view: ForwardBatch, shape: Any, captured: Any) -> Any:
        fresh = right(view, shape, captured)
        memory = self._registry.get_slot(_KEPT).buffer[: view.batch_size]
        read = use(self, memory, view.seq_lens)
        if read is not None:
            self.driver.copy_async(fresh.cache_seqlens, read.int())
        return fresh

    members: dict[str, Any] = {"fill_is_device_only": False, "alias": None}
    return named_after(use, lambda base: override(base, declare_slots, init_metadata_replay, **members))


def _waits(backend: Any) -> None:
    event = backend.driver.event()
    event.record()
    event.synchronize()


@exhibit("GP16", "pytorch/pytorch#19571", on="fa3", lanes="decode")
@_through_the_host
def fa3_counts_copied_lengths_before_the_wait(
    backend: Any, memory: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor | None:
    """The longest request, for a statistic, is read from pinned memory before the wait for its copy."""
    backend.driver.copy_async(memory, lens)
    backend.longest = int(memory.max())
    _waits(backend)
    return None


@exhibit("GP16", "NVIDIA/TensorRT-LLM#14008", on="fa3", lanes="decode")
@_through_the_host
def fa3_clears_memory_before_the_copy_has_ended(
    backend: Any, memory: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor | None:
    """Pinned memory is cleared for the next step while the copy of this step may still write it."""
    backend.driver.copy_async(memory, lens)
    memory.zero_()
    _waits(backend)
    return None


@exhibit("GP16", "RBLN-SW/torch-rbln#13", on="fa3", lanes="decode")
@_through_the_host
def fa3_reads_copied_lengths_by_numpy(
    backend: Any, memory: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor | None:
    """Lengths in pinned memory are read by an array of numpy, while those of an earlier batch are there."""
    if backend.alias is None:
        backend.alias = backend._registry.get_slot(_KEPT).buffer.numpy()  # noqa: SLF001  as above
    backend.driver.copy_async(memory, lens)
    found = torch.from_numpy(backend.alias[: len(memory)].clip(1))
    _waits(backend)
    return found


@variant(on="fa3", lanes="decode")
@_through_the_host
def lengths_copied_to_the_host(backend: Any, memory: torch.Tensor, lens: torch.Tensor) -> torch.Tensor | None:
    """Lengths are copied to pinned memory, and read there after an event that follows the copy."""
    backend.driver.copy_async(memory, lens)
    _waits(backend)
    return memory.clone()
