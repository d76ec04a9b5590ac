"""Tests of the consistency of a batch, and that lanes refuse contradictions."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact import ForwardBatch, ForwardMode
from graphpact.errors import EngineError, ReplayError
from rigs.lane import LaneRig


def _batch(mode: ForwardMode, bs: int, tokens: int, **more: Any) -> ForwardBatch:
    lens = torch.full((bs,), 9)
    slots = torch.zeros(tokens, dtype=torch.int64)
    fields: dict[str, Any] = {
        "out_cache_loc": slots[:, None].expand(-1, 2) if mode is ForwardMode.DRAFT_DECODE else slots,
        "extend_seq_lens": torch.full((bs,), tokens // bs) if mode.is_ragged else None,
        "extend_seq_lens_cpu": torch.full((bs,), tokens // bs) if mode.is_ragged else None,
    }
    return ForwardBatch(
        forward_mode=mode,
        batch_size=bs,
        input_ids=slots,
        positions=slots,
        req_pool_indices=torch.zeros(bs, dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        **(fields | more),
    )


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.IDLE])
def test_right_batches_are_let_in(mode: ForwardMode) -> None:
    """In any mode, a batch with consistent fields is accepted."""
    _batch(mode, 2, 2 if mode.is_decode else 6).require_consistent()


def test_a_tree_of_the_right_shape_is_let_in() -> None:
    """A target verify may have a mask with one row per token and one column per draft token of a request."""
    mask = torch.ones(6, 3, dtype=torch.bool)
    _batch(ForwardMode.TARGET_VERIFY, 2, 6, tree_mask=mask).require_consistent()


MASK = torch.ones(6, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "tokens", "changes", "words"),
    [
        (ForwardMode.DECODE, 6, {}, "has 6 tokens"),
        (ForwardMode.TARGET_VERIFY, 5, {}, "the same number for each of 2 requests"),
        (ForwardMode.EXTEND, 6, {"extend_seq_lens_cpu": torch.tensor([9, 9])}, "adds up to 18"),
        (ForwardMode.MIXED, 6, {"extend_seq_lens_cpu": None}, "must carry extend_seq_lens"),
        (ForwardMode.DRAFT_DECODE, 6, {"out_cache_loc": torch.zeros(6)}, r"\[T, num_steps\]"),
        (ForwardMode.DRAFT_EXTEND, 6, {"out_cache_loc": torch.zeros(6, 1)}, r"expected \[T\]"),
        (ForwardMode.TARGET_VERIFY, 6, {"tree_mask": MASK[:, :2]}, r"expected \[6, 3\]"),
        (ForwardMode.TARGET_VERIFY, 6, {"tree_mask": MASK.int()}, r"\[6, 3\] torch.bool"),
        (ForwardMode.DRAFT_EXTEND, 6, {"tree_mask": MASK}, "only target verify has one"),
    ],
)
def test_contradictions_are_refused(
    mode: ForwardMode, tokens: int, changes: dict[str, Any], words: str
) -> None:
    """Contradictory fields, which no kernel could detect, are refused with what is expected."""
    with pytest.raises(EngineError, match=words):
        _batch(mode, 2, tokens, **changes).require_consistent()


def test_a_lane_lets_in_no_contradiction() -> None:
    """A lane checks a batch before it counts a replay or an eager run."""
    rig = LaneRig()
    batch = rig.batch(3, 2)
    wrong = replace(batch, out_cache_loc=batch.out_cache_loc[:, None])
    for run in (rig.lane.run, rig.lane.run_eager):
        with pytest.raises(EngineError, match="out_cache_loc"):
            run(wrong)
    assert rig.lane.stats.replays == 0
    assert not rig.lane.stats.eager


def test_a_sequence_longer_than_its_row_is_refused() -> None:
    """A sequence that is longer than a row of the page table is refused with its length and the limit."""
    rig = LaneRig()
    batch = rig.batch(3, 2)
    batch.seq_lens_cpu[0] = 9
    with pytest.raises(EngineError, match=r"a sequence has 9 tokens .* holds 8"):
        rig.lane.run(batch)


def test_lengths_of_host_and_device_have_to_agree() -> None:
    """A strict lane refuses a batch whose host lengths differ from the device's, and runs others."""
    rig = LaneRig(strict=True)
    batch = rig.batch(3, 2)
    rig.lane.run(batch)
    batch.seq_lens_cpu[1] = 4
    with pytest.raises(ReplayError, match=r"seq_lens_cpu of the batch is \[3, 4\], seq_lens is \[3, 2\]"):
        rig.lane.run(batch)
    assert rig.lane.stats.replays == 1


def test_a_tree_is_refused_by_a_lane_of_chains() -> None:
    """A tree mask is not ignored: a lane that has no slot for it refuses the batch."""
    rig = LaneRig(ForwardMode.TARGET_VERIFY, strict=True)
    batch = rig.batch(3, 5)
    rig.lane.run(batch)
    with pytest.raises(EngineError, match="the batch carries 'tree_mask'"):
        rig.lane.run(replace(batch, tree_mask=torch.ones(6, 3, dtype=torch.bool)))
    assert rig.lane.stats.replays == 1
