"""Tests of the strict observer: what it poisons, what it refuses, and that a correct lane still works."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, GraphShape, GraphSlot, Limits, PaddingPolicy, hookimpl
from graphpact.errors import ConfigError, PoisonError, ReplayError
from graphpact.graphs import Event, GraphDriver
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.poison import is_poison, poison_of
from graphpact_tape.strict_observer import StrictObserver
from graphpact_tape.tape import TapeDriver
from rigs.lane import CPU, SHAPE_OF, LaneRig


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, in which a test may overwrite the outputs of a graph."""
    with torch.inference_mode():
        yield


class Owner:
    """A fake `Ownership` that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def poison_free(self) -> None:
        """Record the call."""
        self.calls.append("poison")

    def check_free(self) -> None:
        """Record the call."""
        self.calls.append("check")


def buffers_of(rig: LaneRig) -> dict[str, torch.Tensor]:
    """Return the memory of the slots by name, except staging, from which a copy may be in flight."""
    assert rig.lane.registry is not None
    return {
        slot.name: slot.buffer
        for slot in rig.lane.registry
        if slot.buffer is not None and not slot.name.endswith("_staging")
    }


class Sees:
    """An observer inside the strict one that calls ``look`` after the poisoning, before the fill."""

    def __init__(self, look: Any) -> None:
        self.look = look

    @hookimpl(wrapper=True, trylast=True)
    def populate(self) -> Any:
        """Call ``look`` before the slots are filled."""
        self.look()
        return (yield)


@pytest.mark.few(1)
@settings(derandomize=True, max_examples=40)
@given(steps=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=4))
@pytest.mark.parametrize("in_graph", [True, False])
def test_a_right_lane_gives_the_same_logits(*, in_graph: bool, steps: list[list[int]]) -> None:
    """On poisoned memory, a lane with correct plugins gives the logits of eager execution."""
    with torch.inference_mode():
        owner = Owner()
        rig = LaneRig(strict=True, ownership=owner, metadata_in_graph=in_graph)
        for lengths in steps:
            batch = rig.batch(*lengths)
            replayed = rig.lane.run(batch).clone().logits
            assert torch.allclose(replayed, rig.lane.run_eager(batch).logits, rtol=0, atol=1e-9)
        assert rig.lane.stats.replays == len(steps)
        assert owner.calls == ["poison", "check"] * len(steps)


def test_every_slot_is_poison_before_it_is_filled() -> None:
    """When the fill begins, every slot except staging contains only poison."""
    seen: list[torch.Tensor] = []

    def look() -> None:
        seen.extend(t.clone() for t in buffers_of(rig).values())

    rig = LaneRig(strict=True, observers=(Sees(look),), capture=False)
    rig.lane.capture_all()
    rig.lane.run(rig.batch(3, 2))
    rig.lane.run(rig.batch(1))
    assert len(seen) == 5 * len(buffers_of(rig))  # three captures and two steps
    assert all(bool(is_poison(t).all()) for t in seen)


class FillsOnce(FlashInferBackend):
    """A backend that declares its page list with the policy FILL_ONCE."""

    def declare_slots(self, limits: Limits) -> list[GraphSlot]:
        """Return FlashInfer's slots, one of them with another policy."""
        once = {"padding_policy": PaddingPolicy.FILL_ONCE, "pad_value": 0}
        return [
            replace(slot, **once) if slot.name == "flashinfer.kv_indices" else slot
            for slot in super().declare_slots(limits)
        ]


def test_what_is_filled_once_is_left_alone() -> None:
    """A slot with the policy FILL_ONCE is not poisoned and keeps its contents from step to step."""
    rig = LaneRig(strict=True, backend=FillsOnce)
    assert rig.lane.registry is not None
    slot = rig.lane.registry.get_slot("flashinfer.kv_indices")
    assert slot.buffer is not None
    slot.buffer[-1] = 77
    rig.lane.run(rig.batch(3, 2))
    assert slot.buffer[-1] == 77


def test_rows_that_no_step_wrote_are_named() -> None:
    """If a replay returns NaN, the error names the slots that still contain poison, with their rows."""
    rig = LaneRig(strict=True)
    graph = rig.lane.captured[SHAPE_OF[4]].graph

    def forgets_everything() -> None:
        graph.outputs.logits.fill_(float("nan"))
        graph.outputs_stand = True

    graph.replay = forgets_everything
    with pytest.raises(PoisonError) as error:
        rig.lane.run(rig.batch(3, 2, 4))
    assert "logits of request 0 are NaN" in error.value.message
    assert "rows 0:5 of slot 'flashinfer.qo_indptr' of flashinfer" in error.value.message
    assert "input_ids" not in error.value.message


class Reads(FlashInferBackend):
    """A backend whose replay hook reads ``field`` of the view on the host; here it is the host copy."""

    field = "seq_lens_cpu"

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Read, then refresh."""
        lengths = getattr(view, self.field)
        assert int(lengths.max()) >= 1
        assert lengths.tolist()
        return super().init_metadata_replay(view, shape, captured)


class ReadsDevice(Reads):
    """A backend whose replay hook reads the device tensor on the host."""

    field = "seq_lens"


def test_the_hosts_copy_may_be_read_in_a_hook() -> None:
    """A hook may read ``seq_lens_cpu`` of the view, because it is host memory."""
    rig = LaneRig(strict=True, backend=Reads)
    assert rig.lane.run(rig.batch(3, 2)).logits.shape[0] == 2


def test_a_host_read_in_a_hook_is_refused_by_its_line() -> None:
    """A hook that reads the device's lengths is refused; the message has the line of the read."""
    rig = LaneRig(strict=True, backend=ReadsDevice)
    with pytest.raises(ReplayError, match=r"while a replay is prepared.*int\(lengths\.max\(\)\)"):
        rig.lane.run(rig.batch(3, 2))
    assert rig.lane.stats.replays == 0


class Fails(FlashInferBackend):
    """A backend whose replay hook indexes with a slot before the slot is filled."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Index a table with memory that the step has not written yet."""
        self.context.req_to_token[captured.kv_last_page_len.long()]
        return super().init_metadata_replay(view, shape, captured)


def test_a_hook_that_fails_on_poison_is_reported_as_such() -> None:
    """A single message has the hook, its error, and the slot that was not written."""
    rig = LaneRig(strict=True, backend=Fails)
    with pytest.raises(PoisonError) as error:
        rig.lane.run(rig.batch(3, 2, 1))
    assert error.value.message.startswith("init_metadata_replay fails on poisoned slots: ")
    assert str(poison_of(torch.int32)) in error.value.message
    assert "slot 'flashinfer.kv_last_page_len' of flashinfer" in error.value.message
    assert isinstance(error.value.__cause__, IndexError)


def test_an_eager_step_is_looked_at_too() -> None:
    """Unowned memory is poisoned before an eager step too, and checked after it."""
    owner = Owner()
    rig = LaneRig(strict=True, ownership=owner)
    rig.lane.run(rig.batch(2, 2, 2, 2, 2))
    assert rig.lane.stats.replays == 0
    assert owner.calls == ["poison", "check"]


def test_host_tensors_are_those_whose_name_says_so() -> None:
    """`host_tensors` returns the tensors in fields whose names end in ``_cpu``, and no numbers."""
    rig = LaneRig()
    batch = rig.batch(3, 2)
    batch.num_token_non_padded_cpu = 2
    assert [t.tolist() for t in batch.host_tensors()] == [[3, 2]]


def test_a_host_tensor_kept_from_step_to_step_stays_the_hosts() -> None:
    """A replay may read a host tensor that a hook cloned in an earlier capture, eager step or replay."""

    class Remembers(FlashInferBackend):
        """A backend that counts, on the host, the requests that have grown."""

        fill_is_device_only = False
        before: torch.Tensor | None = None
        grown = 0

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and count."""
            super().fill_metadata(view, metadata)
            before, self.before = self.before, view.seq_lens_cpu.clone()
            if before is not None and before.shape == self.before.shape:
                self.grown += int((self.before > before).sum())

    rig = LaneRig(backend=Remembers, strict=True)
    run = rig.lane.run
    smallest = [*rig.lane.captured][-1]  # the shape captured last, whose dummy was the last batch
    run(rig.batch(*[3] * smallest.batch_size))
    assert rig.backend.grown == smallest.batch_size  # type: ignore[attr-defined]
    rig.lane.run_eager(rig.batch(1, 1, 1, 1))
    for length in (2, 3, 4):
        run(rig.batch(length, length, length, length))
    assert rig.lane.stats.replays == 4
    assert rig.backend.grown == smallest.batch_size + 12  # type: ignore[attr-defined]


class CopiesLengths:
    """An observer that copies the host lengths of each batch to the device, asynchronously.

    Args:
        stages: Whether it copies them through its own staging memory.
        waits: Whether it waits for each copy.
    """

    def __init__(self, *, stages: bool = False, waits: bool = False) -> None:
        self.stages = stages
        self.waits = waits
        self.driver: GraphDriver | None = None
        self.lengths, self.staging = torch.zeros(4, dtype=torch.int32), torch.zeros(4).int()
        self.copied: Event | None = None

    @hookimpl(wrapper=True, trylast=True)
    def prepare_replay(self, batch: ForwardBatch) -> Any:
        """Copy the lengths."""
        assert self.driver is not None
        if self.copied is not None:
            self.copied.synchronize()
        source = batch.seq_lens_cpu
        if self.stages:
            source = self.staging[: batch.batch_size].copy_(source)
        self.driver.copy_async(self.lengths[: batch.batch_size], source)
        if self.stages:
            self.copied = self.driver.event()
            self.copied.record()
        if self.waits:
            self.driver.synchronize()
        return (yield)


def _two_steps(copies: CopiesLengths) -> None:
    """Run two steps, and rewrite the host tensors of each batch after it, as an engine does."""
    rig = LaneRig(strict=True, observers=(copies,), capture=False)
    copies.driver = rig.lane.driver
    assert copies.driver is not None
    memory = copies.driver.memory
    copies.driver.declare(replace(memory, host=[*memory.host, copies.staging]))
    rig.lane.capture_all()
    copies.driver.synchronize()
    for lengths in ((3, 2), (1, 4)):
        batch = rig.batch(*lengths)
        rig.lane.run(batch)
        batch.seq_lens_cpu.fill_(99)
    assert rig.lane.stats.replays == 2


def test_a_copy_from_the_batch_in_flight_at_the_end_of_a_step_is_refused() -> None:
    """A step that leaves a copy from a host tensor of its batch in flight raises, with the field's name."""
    with pytest.raises(ReplayError, match=r"from seq_lens_cpu of the batch is in flight .*\n.*") as error:
        _two_steps(CopiesLengths())
    assert error.value.rule == "GP16"
    assert f"{__file__}:" in str(error.value)


@pytest.mark.parametrize("how", ["stages", "waits"])
def test_a_copy_that_leaves_the_batch_alone_is_no_copy_in_flight(how: str) -> None:
    """A plugin may stage the host tensor in its own memory, or wait for the copy."""
    _two_steps(CopiesLengths(**{how: True}))


def test_a_strict_tape_supplies_its_observer() -> None:
    """The observer of a strict driver uses the given ownership; other drivers have no observer."""
    owner = Owner()
    driver = TapeDriver(CPU, strict=True)
    assert isinstance(driver.strict_observer(owner), StrictObserver)
    rig = LaneRig(driver=driver, ownership=owner)
    rig.lane.run(rig.batch(3, 2))
    assert owner.calls == ["poison", "check"]
    with pytest.raises(ConfigError, match="'tape' has no strict observer outside its strict mode"):
        TapeDriver(CPU).strict_observer()
