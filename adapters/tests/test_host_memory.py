"""Builders on a machine without a device: host copies are new memory, pinned memory is host memory."""

from typing import Any

import pytest
import torch
from adapter_checks import assert_found, assert_right, findings_of
from sglang_backends import PagedBackend
from vllm_builders import LANES, OwnedBuilder, PagedBuilder

from graphpact_adapters.sglang import Backends
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata
from graphpact_conformance.targets import Options

# -- planted bugs, which do not show if host and device share memory ----------------------------------


class KeepsHostCopies(OwnedBuilder):
    """Keeps the host's copy of the first step of a size, as if it were a view of the runner's lengths."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[int, torch.Tensor] = {}

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the lengths of the first step of this size."""
        metadata = super().metadata(common)
        lens = self.kept.setdefault(common.num_reqs, common.seq_lens.cpu())
        self.seq_lens[: common.num_reqs].copy_(lens)
        return metadata


class ReadsHostCopies(PagedBuilder):
    """Sends lengths to the host and back, so that each build makes a new copy; a graph reads the first."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with lengths that were on the host."""
        metadata = super().metadata(common)
        metadata.seq_lens = self.back(common.seq_lens.to("cpu", non_blocking=True))
        return metadata

    def back(self, lens: torch.Tensor) -> torch.Tensor:
        """Return lengths on the device again."""
        return lens.to(self.device, non_blocking=True)


class ReadsHostCopiesByTensor(ReadsHostCopies):
    """The same class, with ``.to(tensor)`` instead of ``.to(device)``."""

    def back(self, lens: torch.Tensor) -> torch.Tensor:
        """Return lengths on the device again."""
        return torch.as_tensor(lens, device=self.int32(1).device)


class SendsHostBuffer(PagedBuilder):
    """Fills a host buffer in each build, but copies it to the device only at the capture."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_host = torch.zeros(self.max_reqs, dtype=torch.int32)
        self.sent: dict[int, torch.Tensor] = {}

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with what was sent first."""
        metadata = super().metadata(common)
        rows = common.num_reqs
        self.on_host[:rows].copy_(common.seq_lens_cpu)
        metadata.seq_lens = self.sent.setdefault(rows, self.on_host[:rows].to(self.device))
        return metadata


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (KeepsHostCopies, "GP02"),
        (ReadsHostCopies, "GP01"),
        (ReadsHostCopiesByTensor, "GP01"),
        (SendsHostBuffer, "GP02"),
    ],
)
def test_a_copy_to_the_other_memory_is_no_alias(make: type[PagedBuilder], rule: str) -> None:
    """Code that is right only because ``.cpu()`` or ``.to(device)`` returns the same tensor is found."""
    assert_found(findings_of(Builders(make), LANES["decode"]), rule, "seq_lens")


# -- right ---------------------------------------------------------------------------------------------


class Pinned(OwnedBuilder):
    """Stages lengths in pinned memory, as builders of recurrent layers and of NPUs do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.staged = torch.zeros(self.max_reqs, dtype=torch.int32, pin_memory=True)
        self.table = torch.zeros_like(self.block_table, device="cpu").pin_memory()
        assert self.staged.is_pinned()
        assert self.table.is_pinned()

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata of what was staged."""
        metadata = super().metadata(common)
        rows = common.num_reqs
        self.staged[:rows].copy_(common.seq_lens.cpu())
        self.seq_lens[:rows].copy_(self.staged[:rows], non_blocking=True)
        self.table.numpy()[:rows] = common.block_table_tensor.cpu().numpy()
        self.block_table[:rows].copy_(self.table[:rows], non_blocking=True)
        return metadata


class KnowsItsDevice(OwnedBuilder):
    """Allocates on the device of its tensors, and distinguishes it from the host."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with lengths that went by the host."""
        assert common.seq_lens.device == self.device == self.seq_lens.device
        assert common.query_start_loc_cpu.device == torch.device("cpu") != self.device
        metadata = super().metadata(common)
        lens = torch.empty_like(self.seq_lens[: common.num_reqs], device="cpu")
        lens.copy_(common.seq_lens)
        self.seq_lens[: common.num_reqs] = torch.as_tensor(lens.numpy(), device=self.seq_lens.device)
        return metadata


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Pinned, KnowsItsDevice])
@pytest.mark.parametrize("lane", ["decode", "extend", "verify"])
def test_a_builder_that_copies_in_each_build_is_right(make: type[PagedBuilder], lane: str) -> None:
    """Pinned memory is made and is host memory, and copies into persistent memory are right."""
    assert_right(Builders(make), LANES[lane])


def test_an_error_in_a_builder_has_its_own_line() -> None:
    """Memories are tracked below the builder's code, and that code is not named as the place of an error."""

    class Raises(OwnedBuilder):
        def metadata(self, common: CommonAttentionMetadata) -> Any:
            return common.seq_lens.view(0, 7)

    (told, *_) = findings_of(Builders(Raises), LANES["decode"])
    assert "test_host_memory.py" in str(told.raised_at)


# -- SGLang --------------------------------------------------------------------------------------------


def test_a_backend_of_sglang_has_two_memories() -> None:
    """A model runner's ``device`` is the device's name; the lengths on the host are on the host."""
    seen: list[tuple[Any, ...]] = []

    class Looks(PagedBackend):
        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            table = model_runner.req_to_token_pool.req_to_token
            self.staged = torch.zeros(4, pin_memory=True)
            made = torch.zeros(2, device=model_runner.device)
            seen.append((made.device == table.device, self.staged.is_pinned(), made.cpu() is made))

        def init_forward_metadata(self, forward_batch: Any) -> None:
            lens = forward_batch.seq_lens
            seen.append((lens.device != forward_batch.seq_lens_cpu.device, True, lens.cpu() is lens))
            super().init_forward_metadata(forward_batch)

    assert_right(Backends(Looks), "decode-page16-gqa-float32")
    assert len(seen) > 2
    assert {*seen} == {(True, True, False)}
    assert [*Backends(Looks).needs(Options(size="quick"))] == []
