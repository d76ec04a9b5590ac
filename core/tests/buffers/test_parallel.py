"""Real tokens among the rows of one attention-TP rank, always computed from the padded count."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    build_decode_registry,
    build_prefill_registry,
    compute_local_num_token_non_padded,
    get_parallel,
    inputs,
)
from graphpact.errors import ConfigError, SlotError
from graphpact.parallel import ParallelContext, local_num_token_non_padded

BUCKET, REAL, SIZE = 1024, 1018, 2
SHARES = {0: 512, 1: 506}
RAW_SHARE = (
    509  # the share of the raw length would be wrong, because padding moves the boundary between the ranks
)
EXAMPLES = settings(derandomize=True, max_examples=100)


@dataclasses.dataclass
class _Counted:
    batch_size: int = 1
    num_token_non_padded: torch.Tensor | None = None


both = pytest.mark.parametrize("build", ["decode", "prefill"])


def _registry(preset: str, **more: Any) -> CudaGraphBufferRegistry:
    common: dict[str, Any] = {"device": "cpu", "max_bs": BUCKET, "max_num_token": BUCKET}
    flags = {"enable_num_token_non_padded": True, "require_gathered_buffer": True} | more
    if preset == "decode":
        return build_decode_registry(**common, seq_len_fill_value=1, **flags)
    return build_prefill_registry(**common, **flags)


def _filled(
    registry: CudaGraphBufferRegistry,
    raw: int = REAL,
    padded: int = BUCKET,
    *,
    device_count: int | None = RAW_SHARE,
    host_count: int | None = REAL,
) -> int:
    """Return the value of the count's slot after a fill."""
    count = None if device_count is None else torch.tensor([device_count], dtype=torch.int32)
    registry.fill_from(
        SimpleNamespace(num_token_non_padded=count, num_token_non_padded_cpu=host_count),
        raw_bs=1,
        padded_bs=1,
        raw_num_tokens=raw,
        padded_num_tokens=padded,
    )
    return int(registry.get_slot("num_token_non_padded").slice_for(1, 1).item())


# -- the numbers of the defect ---------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "share"), SHARES.items())
def test_the_share_of_a_rank(rank: int, share: int) -> None:
    """Of 1018 tokens in a bucket of 1024, two ranks have 512 and 506, for a tensor and for a number."""
    with get_parallel().override(attn_tp_rank=rank, attn_tp_size=SIZE):
        assert local_num_token_non_padded(REAL, BUCKET) == share
        for given_count in (REAL, torch.tensor([REAL], dtype=torch.int32)):
            local = compute_local_num_token_non_padded(given_count, BUCKET)
            assert local.tolist() == [share]
            assert local.dtype is torch.int32
        assert compute_local_num_token_non_padded(torch.tensor([REAL]), BUCKET).dtype is torch.int64


@both
@pytest.mark.parametrize(("rank", "share"), SHARES.items())
def test_a_fill_writes_the_share(rank: int, share: int, build: str) -> None:
    """A gathered registry holds the rank's share of the bucket, not the 509 of the batch."""
    registry = _registry(build)
    with get_parallel().override(attn_tp_rank=rank, attn_tp_size=SIZE):
        assert _filled(registry) == share
        assert _filled(registry, device_count=REAL, host_count=None) == share


@both
@pytest.mark.parametrize(
    "flags",
    [
        {"require_gathered_buffer": False},
        {"nsa_enable_prefill_cp": True},
        {"require_gathered_buffer": False, "nsa_enable_prefill_cp": True},
    ],
)
def test_a_count_that_is_the_batchs_own(flags: dict[str, bool], build: str) -> None:
    """Without a gathered buffer, or with context parallelism, the count is that of the batch."""
    registry = _registry(build, **flags)
    with get_parallel().override(attn_tp_rank=1, attn_tp_size=SIZE):
        assert _filled(registry) == RAW_SHARE


@both
def test_no_ranks_no_shares(build: str) -> None:
    """Rank 0 of 1 has every real token."""
    assert _filled(_registry(build)) == REAL


@both
def test_a_batch_without_a_count_is_refused(build: str) -> None:
    """A batch without a count is refused, since an earlier count would mask real tokens."""
    registry = _registry(build)
    assert _filled(registry, host_count=7) == 7
    with pytest.raises(SlotError, match="num_token_non_padded"):
        _filled(registry, device_count=None, host_count=None)


@both
def test_a_lane_needs_one_count(build: str) -> None:
    """A gathered lane needs only the host's count: it does not copy the device's."""
    registry = _registry(build, lane="decode")
    missing = [slot.name for slot in registry if slot.copy_from_fb]
    assert "num_token_non_padded" not in missing
    batch = SimpleNamespace(
        **{name: registry.get_slot(name).slice_for(1, 7).clone() for name in missing},
        num_token_non_padded_cpu=7,
    )
    registry.fill_from(batch, raw_bs=1, padded_bs=1, raw_num_tokens=7, padded_num_tokens=8)
    assert registry.get_slot("num_token_non_padded").slice_for(1, 8).tolist() == [7]


@both
def test_a_view_always_shows_the_count(build: str) -> None:
    """A view has the count's slot, gathered or not, even if the template lacks it: the count is computed."""
    for gathered in (True, False):
        registry = _registry(build, require_gathered_buffer=gathered)
        view = registry.extract_buffer(padded_bs=1, padded_num_tokens=8, forward_batch_template=_Counted())
        assert view.num_token_non_padded is registry.get_slot("num_token_non_padded").buffer


@both
def test_a_count_of_zero_is_a_count(build: str) -> None:
    """A batch without real tokens, on an idle rank, has a count of 0."""
    registry = _registry(build)
    assert _filled(registry) == REAL
    assert _filled(registry, raw=0, host_count=0) == 0


@both
def test_planted_share_of_the_raw_length(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that is computed from the raw count is 509 for both ranks, which two tests detect."""

    def of_raw(count: int, _: int) -> int:
        return local_num_token_non_padded(count, REAL)

    monkeypatch.setattr(inputs, "local_num_token_non_padded", of_raw)
    shares = {}
    for rank in SHARES:
        with get_parallel().override(attn_tp_rank=rank, attn_tp_size=SIZE):
            shares[rank] = _filled(_registry(build))
    assert shares == {0: RAW_SHARE, 1: RAW_SHARE}
    with pytest.raises(AssertionError):
        test_a_fill_writes_the_share(0, SHARES[0], build)
    with pytest.raises(AssertionError):
        test_capture_and_replay_write_by_one_rule.hypothesis.inner_test(build, 2, 0, 2, [(5, 7)])


# -- every rank and size ---------------------------------------------------------------------------


@EXAMPLES
@given(size=st.integers(1, 8), rows=st.integers(0, 64), data=st.data())
def test_shares_sum_to_the_count(size: int, rows: int, data: st.DataObject) -> None:
    """If the size divides the bucket, the shares sum to the count and do not increase with the rank."""
    bucket = size * rows
    count = data.draw(st.integers(0, bucket))
    shares = []
    for rank in range(size):
        with get_parallel().override(attn_tp_rank=rank, attn_tp_size=size):
            shares.append(local_num_token_non_padded(count, bucket))
            for given_count in (count, torch.tensor([count], dtype=torch.int32)):
                local = compute_local_num_token_non_padded(given_count, bucket)
                assert local.tolist() == [shares[-1]]
    assert sum(shares) == count
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= rows for share in shares)


@EXAMPLES
@given(size=st.integers(1, 8), bucket=st.integers(0, 64), count=st.integers(0, 200))
def test_no_rank_has_more_than_its_rows(size: int, bucket: int, count: int) -> None:
    """For any count and bucket, a rank's share is at most its rows, and tensor and number agree."""
    for rank in range(size):
        with get_parallel().override(attn_tp_rank=rank, attn_tp_size=size):
            share = local_num_token_non_padded(count, bucket)
            assert 0 <= share <= bucket // size
            assert compute_local_num_token_non_padded(torch.tensor([count]), bucket).item() == share


@both
@settings(derandomize=True, max_examples=40)
@given(
    size=st.integers(1, 4),
    rank=st.integers(0, 3),
    rows=st.integers(1, 16),
    counts=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=5),
)
def test_capture_and_replay_write_by_one_rule(
    build: str, size: int, rank: int, rows: int, counts: list[tuple[int, int]]
) -> None:
    """A fill's value follows from count, bucket, rank and size, not from raw counts or earlier fills."""
    bucket, rank = size * rows, rank % size
    registry = _registry(build)
    with get_parallel().override(attn_tp_rank=rank, attn_tp_size=size):
        for raw, count in counts:
            expected = min(max(min(count, bucket) - rank * rows, 0), rows)
            captured = _filled(registry, bucket, bucket, host_count=min(count, bucket))
            replayed = _filled(registry, min(raw, bucket), bucket, host_count=min(count, bucket))
            from_device = _filled(
                registry,
                min(raw, bucket),
                bucket,
                device_count=min(count, bucket),
                host_count=None,
            )
            assert captured == replayed == from_device == expected


# -- the rank of this process ----------------------------------------------------------------------


def test_a_process_is_rank_0_of_1() -> None:
    """By default this process is rank 0 of 1."""
    assert get_parallel() == ParallelContext(0, 1)
    assert get_parallel() is get_parallel()


def test_an_override_ends_with_its_block() -> None:
    """Overrides can be nested, and each restores the previous rank and size, even after an exception."""
    context = get_parallel()
    with context.override(attn_tp_size=4, attn_tp_rank=3) as outer:
        assert outer is context
        with context.override(attn_tp_rank=1):
            assert context == ParallelContext(1, 4)
        assert context == ParallelContext(3, 4)
        with pytest.raises(KeyError), context.override(attn_tp_rank=2):
            raise KeyError
        assert context == ParallelContext(3, 4)
    assert context == ParallelContext(0, 1)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (2, 2), (-1, 2), (0, 0), (0, -1)])
def test_impossible_ranks_are_refused(rank: int, size: int) -> None:
    """A rank below 0 or not below the size is refused, and a refused override changes nothing."""
    with pytest.raises(ConfigError, match=f"attn_tp_rank {rank} of attn_tp_size {size}"):
        ParallelContext(rank, size)
    context = get_parallel()
    with context.override(attn_tp_size=8, attn_tp_rank=5):
        with pytest.raises(ConfigError), context.override(attn_tp_rank=rank, attn_tp_size=size):
            pass
        with pytest.raises(ConfigError), context.override(attn_tp_size=5):
            pass
        assert context == ParallelContext(5, 8)
