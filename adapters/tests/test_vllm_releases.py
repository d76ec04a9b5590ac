"""Builders in the forms of vLLM releases since 0.11: host lengths, declared support, unpadded replays."""

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapter_checks import assert_found, assert_right, findings_of
from vllm_builders import LANES, OwnedBuilder, OwnSlots, PagedBuilder, read_with_own_slots, under_test

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata
from graphpact_conformance.targets import Options


class Earlier(enum.Enum):
    """Graph support as in 0.10; the value 2 has another meaning later."""

    NEVER = 0
    PURE_DECODE_ONLY = 1
    ALWAYS = 2


# -- lengths on the host -------------------------------------------------------------------------------


class HostLengths(OwnedBuilder):
    """Takes lengths from the host; the runner of its release corrects them after speculation."""

    def lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the exact lengths."""
        return common.seq_lens_cpu

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata with the host's numbers."""
        metadata = super().metadata(common)
        lens = self.lens(common)
        self.seq_lens[: len(lens)].copy_(lens)
        return metadata


class HostComputed(HostLengths):
    """Takes the keys that are in the cache already, and adds the queries."""

    def lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the exact lengths."""
        return common.num_computed_tokens_cpu + common.query_start_loc_cpu.diff()


class HostLengthsIfKnown(HostLengths):
    """Looks first whether the runner knows the lengths, and copies them from the device if not."""

    def lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the exact lengths."""
        known = common._seq_lens_cpu
        return common.seq_lens.cpu() if known is None else known


class Asserts(PagedBuilder):
    """Asserts on the fields of every batch that it gets."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata of a batch whose lengths agree with those of the device."""
        assert torch.equal(common.seq_lens_cpu, common.seq_lens)
        assert len(common.num_computed_tokens_cpu) == common.num_reqs
        if torch.equal(common.query_start_loc_cpu, common.query_start_loc):
            assert torch.equal(common.num_computed_tokens_cpu, common.compute_num_computed_tokens())
        assert common.dcp_local_seq_lens_cpu is None
        return super().metadata(common)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [HostLengths, HostComputed, HostLengthsIfKnown])
@pytest.mark.parametrize("lane", ["decode", "extend", "verify"])
def test_exact_lengths_on_the_host_are_no_fault(make: type[PagedBuilder], lane: str) -> None:
    """``seq_lens_cpu`` is exact, so a builder that plans with it is right after speculation too."""
    assert_right(Builders(make), LANES[lane])


@pytest.mark.sweep
def test_the_host_fields_agree_with_the_device_in_every_kind_of_step() -> None:
    """Dummies, replays, eager steps and drafts give exact lengths, and computed tokens, on the host."""
    plans = [*Builders(Asserts).lanes(Options(size="quick"))]
    kinds = {plan.lane.config.case: str(plan) for plan in reversed(plans)}
    assert {case.mode for case in kinds} >= {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED}
    for name in kinds.values():
        assert findings_of(Builders(Asserts), name) == []


# -- declared support ----------------------------------------------------------------------------------


def declaring(**attributes: Any) -> type[PagedBuilder]:
    """Return a builder that declares its support only by attributes."""
    methods = {"get_cudagraph_support": property(lambda _: (_ for _ in ()).throw(AttributeError))}
    return type("Declaring", (PagedBuilder,), methods | attributes)


@pytest.mark.parametrize("attribute", ["cudagraph_support", "attn_cudagraph_support"])
@pytest.mark.parametrize(
    ("declared", "support"),
    [
        (Earlier.NEVER, GraphSupport.NEVER),
        (Earlier.PURE_DECODE_ONLY, GraphSupport.UNIFORM_DECODE),
        (Earlier.ALWAYS, GraphSupport.ALWAYS),
    ],
)
def test_support_is_understood_by_its_earlier_names(
    attribute: str, declared: Earlier, support: GraphSupport
) -> None:
    """A builder without the method declares support in an attribute, and names count, not values."""
    builders = Builders(declaring(**{attribute: declared}))
    plan = next(p for p in builders.lanes(Options(size="quick")) if str(p) == LANES["decode"])
    assert plan.lane.graph_support is support


def test_no_support_and_an_unknown_one_are_refused() -> None:
    """For a missing or unknown declaration, the error lists the valid values."""
    for make, said in (
        (declaring(), "has no get_cudagraph_support, and no cudagraph_support"),
        (declaring(cudagraph_support="SOMETIMES"), "'SOMETIMES'; there are ALWAYS, UNIFORM_BATCH"),
    ):
        with pytest.raises(ConfigError, match=said):
            next(iter(Builders(make).lanes(Options(size="quick"))))


def test_the_largest_capture_has_both_names() -> None:
    """``max_capture_size`` is what later releases call ``max_cudagraph_capture_size``."""

    class Sized(PagedBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            compilation = args[2].compilation_config
            assert compilation.max_capture_size == compilation.max_cudagraph_capture_size > 0

    assert_right(Builders(Sized), LANES["decode"])


# -- unpadded replays ----------------------------------------------------------------------------------


class PadsSlots(OwnSlots):
    """Fills the slots after those of a batch, which a graph reads for padding tokens."""

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return metadata whose padding tokens write nowhere."""
        self.slots.fill_(-1)
        return super().metadata(common)


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "read"), [(PagedBuilder, None), (PadsSlots, read_with_own_slots)])
@pytest.mark.parametrize("lane", ["decode", "verify"])
def test_a_builder_that_pads_for_itself_is_right_without_padding(
    make: type[PagedBuilder], read: Callable[..., Any] | None, lane: str
) -> None:
    """Lent rows after the batch are padding, and so are the builder's own rows if it fills them."""
    assert_right(replace(under_test(make, read), pads_replays=False), LANES[lane])


def test_rows_behind_an_unpadded_batch_are_found() -> None:
    """A builder that writes only the rows that it gets leaves rows of an earlier batch after them."""
    padded = Builders(OwnSlots, read=read_with_own_slots)
    assert_right(padded, LANES["decode"])
    assert_found(findings_of(replace(padded, pads_replays=False), LANES["decode"]), "GP03", "slot_mapping")


def test_only_replays_are_unpadded() -> None:
    """Captures get the graph's rows, and replays of fewer requests get only the rows of the batch."""
    seen: list[tuple[str, int, int]] = []

    class Counts(PagedBuilder):
        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            live = int((common.seq_lens_cpu > 0).sum())
            seen.append(("build", common.num_reqs, live))
            return super().build(common_prefix_len, common, fast_build)

        def build_for_cudagraph_capture(self, common: Any) -> Any:
            seen.append(("capture", common.num_reqs, common.num_reqs))
            return super().metadata(common)

    for pads, some_padding in ((False, False), (True, True)):
        seen.clear()
        findings_of(Builders(Counts, pads_replays=pads), LANES["decode"])
        assert {name for name, *_ in seen} == {"build", "capture"}
        assert any(rows > live for name, rows, live in seen if name == "build") is some_padding
