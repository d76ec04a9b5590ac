"""Backends of SGLang for layers with a window, whose keys are in a pool with a numbering of its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from adapter_checks import assert_found, assert_right, findings_of
from sglang_backends import LANES, PagedBackend, PagedMetadata

from graphpact.errors import ConfigError
from graphpact_adapters.sglang import Backends


@dataclass
class WindowMetadata(PagedMetadata):
    """What a paged attention kernel reads in both pools."""

    swa_page_table: Any = None
    swa_out_cache_loc: Any = None

    def rows(self, requests: int) -> "WindowMetadata":
        """Return views of the first requests."""
        width = self.max_seq_len_q
        made = super().rows(requests)
        assert isinstance(made, WindowMetadata)
        made.swa_page_table = self.swa_page_table[:requests]
        made.swa_out_cache_loc = self.swa_out_cache_loc[: requests * width]
        return made


class WindowPool(PagedBackend):
    """The right backend: a second table has the pages of the window pool, and new keys their slots there."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        assert model_runner.is_hybrid_swa
        self.translate = model_runner.token_to_kv_pool.translate_loc_from_full_to_swa

    def new(self, requests: int, width: int) -> Any:
        """Return metadata in new memory."""
        slots = torch.zeros(requests * width, dtype=torch.int64, device=self.device)
        made = super().new(requests, width)
        return WindowMetadata(
            **vars(made), swa_page_table=self.int32(requests, self.columns), swa_out_cache_loc=slots
        )

    def fill(self, metadata: Any, batch: Any) -> None:
        """Write both tables, and the slots of new keys; the rest are slots of scratch."""
        super().fill(metadata, batch)
        metadata.swa_page_table.copy_(self.window_pages(batch))
        slots = self.translate(batch.out_cache_loc)
        if len(slots) > len(metadata.swa_out_cache_loc):  # an eager extend
            metadata.swa_out_cache_loc = slots.long()
        metadata.swa_out_cache_loc[: len(slots)].copy_(slots)
        metadata.swa_out_cache_loc[len(slots) :].zero_()

    def window_pages(self, batch: Any) -> torch.Tensor:
        """Return the pages of each request in the window pool: of a page's first slot."""
        rows = batch.req_pool_indices[: batch.batch_size]
        pages: torch.Tensor = self.translate(self.table[rows, :: self.page_size]) // self.page_size
        return pages


class TranslatesPages(WindowPool):
    """Translates page ids as if they were slots in graphs: right only with pages of one slot (#38187)."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date."""
        super().refresh(metadata, batch, in_capture=in_capture)
        metadata.swa_page_table.copy_(self.translate(self.pages(batch)))


class NoWindowInDraftExtend(WindowPool):
    """Leaves the second table of a draft extend as the capture made it (#29858)."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date."""
        kept = metadata.swa_page_table.clone()
        super().refresh(metadata, batch, in_capture=in_capture)
        if batch.forward_mode.is_draft_extend_v2() and not in_capture:
            metadata.swa_page_table.copy_(kept)


class KeepsTheTail(WindowPool):
    """Writes the slots of live tokens only: padding tokens write where an earlier batch wrote."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date, and keep the slots after those of live tokens."""
        kept, live = metadata.swa_out_cache_loc.clone(), len(batch.out_cache_loc)
        super().refresh(metadata, batch, in_capture=in_capture)
        if not in_capture:
            metadata.swa_out_cache_loc[live:].copy_(kept[live:])


class NarrowSlots(WindowPool):
    """Keeps the slots of new keys in 8 bits, which hold the slots of dummies."""

    def refresh(self, metadata: Any, batch: Any, *, in_capture: bool) -> None:
        """Bring captured metadata up to date, through a narrow integer."""
        super().refresh(metadata, batch, in_capture=in_capture)
        metadata.swa_out_cache_loc.copy_(metadata.swa_out_cache_loc.to(torch.int8))


def under_test(make: type[WindowPool], page_size: int = 16) -> Backends:
    """Return a backend class under the adapter, with a window pool."""
    return Backends(make, window_pool=True, page_sizes=(page_size,))


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode", "verify", "draft_extend"])
def test_a_right_second_table_passes(lane: str) -> None:
    """A backend that translates slots, and then makes pages of them, is right in every lane."""
    assert_right(under_test(WindowPool), LANES[lane])


@pytest.mark.few(1)
def test_pages_of_one_slot_pass_and_hide_a_translation_of_pages() -> None:
    """With pages of one slot a page is a slot, so the wrong translation is right there."""
    assert_right(under_test(WindowPool, 1), LANES["verify_slots"])
    assert findings_of(under_test(TranslatesPages, 1), LANES["verify_slots"]) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "lane", "rule", "field"),
    [
        (TranslatesPages, "decode", "GP02", "KV pool 1: swa_page_table"),
        (NoWindowInDraftExtend, "draft_extend", "GP02", "KV pool 1: swa_page_table"),
        (KeepsTheTail, "decode", "GP03", "KV pool 1: slot_mapping"),
        (NarrowSlots, "decode", "GP02", "KV pool 1: slot_mapping"),
    ],
)
def test_a_wrong_second_table_is_found(make: Any, lane: str, rule: str, field: str) -> None:
    """The finding names the pool and the field."""
    assert_found(findings_of(under_test(make), LANES[lane]), rule, field)


def test_a_window_pool_is_refused_where_no_lane_has_one() -> None:
    """Latents have no window pool."""
    with pytest.raises(ConfigError, match="window_pool"):
        Backends(WindowPool, kind="mla", window_pool=True)
