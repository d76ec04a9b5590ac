"""The guard in a small engine: right backends of several styles pass in silence, wrong ones are named."""

import dataclasses
import logging
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_engine import Backend, Metadata, SmallEngine

from graphpact_guard import GraphKey, Guard, GuardError, Ignored, ReplayFault, Settings
from graphpact_guard.closing import closing_line


def _guard(**settings: Any) -> Guard:
    return Guard(
        Settings(guard=True, **settings),
        {"engine": "small 1.0", "rank": "0"},
        metadata=("forward_metadata",),
        limits=("max_keys",),
    )


def _steps(engine: SmallEngine, count: int = 40) -> bool:
    """Run steps of several sizes, and return whether all gave the right numbers."""
    draw = torch.Generator().manual_seed(0)
    right = True
    for at in range(count):
        raw = 1 + at % max(engine.sizes)
        q = torch.randn(raw, generator=draw)
        lengths = torch.randint(1, 16, (raw,), generator=draw)
        right &= torch.allclose(engine.step(q, lengths), engine.expected(q, lengths))
    return right


# -- right backends ----------------------------------------------------------------------------------


class NewObjects(Backend):
    """Makes a new metadata object for every replay, over the same memory."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        self.captured[len(lengths)] = self.make(len(lengths))
        super().prepare(lengths, in_capture=in_capture)


class OnlyMemory(Backend):
    """Refreshes memory in a replay, and leaves the metadata of another step bound."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
        else:
            self.lengths[: len(lengths)].copy_(lengths)


class ShorterViews(Backend):
    """Binds views of the requests that have keys, shorter than those of the capture."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
            return
        self.lengths[: len(lengths)].copy_(lengths)
        self.forward_metadata = Metadata(self.lengths[:1], self.scale)


class OwnUse(Backend):
    """Makes eager metadata too, with equal numbers in new memory, for code of its own."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata = Metadata(lengths.clone(), self.scale.clone())


class Limits(Backend):
    """Has a limit that is smaller at replay than at capture, and reads it."""

    def make(self, bs: int) -> Any:
        """Return the metadata of a size."""
        return SimpleNamespace(
            lengths=self.lengths[:bs], scale=self.scale, max_keys=16, flag=False, sizes=[1, 2], max_len=0
        )

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata.max_keys = int(lengths.max())

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention."""
        assert self.forward_metadata.max_keys <= 16
        return super().attend(q)


class CountsSteps(Backend):
    """Counts its steps on itself and in its metadata, which no region reads."""

    steps = 0

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        self.steps += 1
        self.forward_metadata.step = self.steps
        self.forward_metadata.history = [*range(self.steps)]


@dataclass
class Nested:
    """Metadata with a part.

    Args:
        inner: The part.
        unread: New in every step.
    """

    inner: Metadata
    unread: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    max_len = 0


class Parts(Backend):
    """Has metadata in a part of its metadata."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            self.captured[len(lengths)] = Metadata(self.lengths[: len(lengths)], self.scale)
        self.forward_metadata = Nested(self.captured[len(lengths)], lengths.clone())
        self.lengths[: len(lengths)].copy_(lengths)


Frozen = namedtuple("Frozen", ["lengths", "scale", "flag", "sizes"])  # noqa: PYI024  a plain one


class NamedTuples(Backend):
    """Has metadata whose class cannot be watched, so that all of it counts as read."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        del in_capture
        self.lengths[: len(lengths)].copy_(lengths)
        self.forward_metadata = Frozen(self.lengths[: len(lengths)], self.scale, False, (1, 2))  # noqa: FBT003


RIGHT = [Backend, NewObjects, OnlyMemory, ShorterViews, OwnUse, Limits, CountsSteps, Parts, NamedTuples]


@pytest.mark.parametrize("kind", RIGHT)
def test_right_backends_of_every_style_pass_in_silence(
    kind: type[Backend], caplog: pytest.LogCaptureFixture
) -> None:
    """A backend whose replays are right is never reported, however it keeps its metadata."""
    guard = _guard()
    engine = SmallEngine(kind(4), guard)
    assert _steps(engine, 1000)
    assert guard.summary()["faults"] == []
    assert [r.message for r in caplog.records if r.levelno > logging.WARNING] == []
    assert sum(graph["replays"] for graph in guard.summary()["graphs"].values()) == 1000


# -- wrong backends ----------------------------------------------------------------------------------


class Rebinds(Backend):
    """Binds a new tensor of lengths."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
        else:
            self.captured[len(lengths)].lengths = lengths.clone()


class RebindsInNewObjects(Backend):
    """Binds new metadata with a new tensor of lengths."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
        else:
            self.forward_metadata = Metadata(lengths.clone(), self.scale)


class Narrows(Backend):
    """Binds lengths of another dtype."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
        else:
            self.forward_metadata = Metadata(lengths.to(torch.int32), self.scale)


class Strides(Backend):
    """Binds every second length."""

    def make(self, bs: int) -> Any:
        """Return the metadata of a size."""
        wide = torch.zeros(2 * bs, dtype=torch.int64)
        return Metadata(wide[:bs], self.scale)

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        if in_capture:
            super().prepare(lengths, in_capture=True)
            return
        memory = self.captured[len(lengths)].lengths
        self.forward_metadata = Metadata(memory.as_strided(memory.shape, (2,)), self.scale)
        self.forward_metadata.lengths.copy_(lengths)


def _changing(change: dict[str, Any]) -> type[Backend]:
    """Return a backend that changes attributes of its metadata at replay."""

    class Changes(Backend):
        def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
            super().prepare(lengths, in_capture=in_capture)
            if not in_capture:
                self.forward_metadata = dataclasses.replace(self.forward_metadata, **change)

    return Changes


class GrowsALimit(Limits):
    """Exceeds the limit of its capture."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata.max_keys = 17


class OtherType(Backend):
    """Replays with metadata of another class."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata = SimpleNamespace(**vars(self.forward_metadata))


class Reallocates(Backend):
    """Allocates its workspace again."""

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay."""
        super().prepare(lengths, in_capture=in_capture)
        if not in_capture:
            self.keys = self.keys * 2


WRONG: list[tuple[type[Backend], str, str]] = [
    (Rebinds, "GP01", "forward_metadata.lengths"),
    (RebindsInNewObjects, "GP01", "forward_metadata.lengths"),
    (Narrows, "GP01", "forward_metadata.lengths"),
    (Strides, "GP07", "forward_metadata.lengths"),
    (_changing({"flag": True}), "GP08", "forward_metadata.flag"),
    (_changing({"sizes": (3, 2)}), "GP08", "forward_metadata.sizes[0]"),
    (_changing({"sizes": (1, 2, 3)}), "GP05", "forward_metadata.sizes"),
    (_changing({"scale": None}), "GP10", "forward_metadata.scale"),
    (GrowsALimit, "GP08", "forward_metadata.max_keys"),
    (OtherType, "GP10", "forward_metadata"),
    (Reallocates, "GP01", "keys"),
]


@pytest.mark.parametrize(
    ("kind", "rule", "field"), WRONG, ids=lambda value: getattr(value, "__name__", value)
)
def test_wrong_backends_are_named_at_their_first_replay(kind: type[Backend], rule: str, field: str) -> None:
    """The first replay of each graph names rule, owner and field, and later ones are counted."""
    guard = _guard()
    engine = SmallEngine(kind(4), guard)
    assert guard.summary()["faults"] == []
    _steps(engine, 1)
    assert (rule, "Backend", field) in [
        (f["rule"], f["owner"], f["field"]) for f in guard.summary()["faults"]
    ]
    _steps(engine, 8)
    counts = {f["graph"]: f["count"] for f in guard.summary()["faults"] if f["field"] == field}
    assert counts == {"Runner[4]": 4, "Runner[2]": 5}


@pytest.mark.parametrize("kind", [Rebinds, RebindsInNewObjects, Narrows, Strides, Reallocates])
def test_the_planted_faults_are_wrong(kind: type[Backend]) -> None:
    """Without the guard, such a backend gives wrong numbers and no message."""
    assert not _steps(SmallEngine(kind(4), _guard()), 8)


def test_inputs_that_are_bound_again_are_named() -> None:
    """A new static input is a fault of the engine itself."""
    guard = _guard()
    engine = SmallEngine(Backend(4), guard)
    engine.inputs.q = torch.zeros(4)
    _steps(engine, 1)
    assert [(f["rule"], f["owner"], f["field"]) for f in guard.summary()["faults"]] == [
        ("GP01", "Inputs", "q")
    ]


# -- what follows a fault ----------------------------------------------------------------------------


def test_a_fault_is_written_once_with_its_provenance(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one message for each fault and graph, with what runs, what was captured, and what to do."""
    engine = SmallEngine(Rebinds(4), _guard())
    _steps(engine, 20)
    messages = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(messages) == 2
    assert "GP01 Backend.forward_metadata.lengths in Runner[2]: address captured 0x" in messages[0]
    assert "help: copy into the captured tensor" in messages[0]
    assert "(engine small 1.0, rank 0)" in messages[0]


def test_the_guard_announces_itself_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first capture says that the guard is on, so that a missing guard is noticed."""
    SmallEngine(Backend(4), _guard(verify=8))
    (message,) = [r.message for r in caplog.records]
    assert "graphpact guard: on; every replay is held to its pact, " in message
    assert "an eager run of every 8th replay" in message


def test_one_of_several_ranks_names_itself_in_every_line(caplog: pytest.LogCaptureFixture) -> None:
    """The announcement and the last line have the name of the rank."""
    guard = Guard(Settings(guard=True), {}, rank="dp0.tp7")
    SmallEngine(Backend(4), guard)
    assert "graphpact guard: on for dp0.tp7; " in caplog.records[0].message
    assert closing_line(guard).startswith("dp0.tp7: 0 replays of ")


def test_a_disagreement_of_ranks_ends_the_step_whatever_was_asked_for() -> None:
    """`Guard.end` raises with ``log`` too, unless the fault is ignored."""
    key = GraphKey(runner="Runner", shape="4")
    fault = ReplayFault(rule="GP17", owner="ranks", field="step", key=key, text="differ", advice="agree")
    guard = Guard(Settings(guard=True), {})
    with pytest.raises(GuardError, match=r"ranks.step in Runner\[4\]: differ") as caught:
        guard.end(fault)
    assert caught.value.rule == "GP17"
    assert guard.summary()["faults"][0]["rule"] == "GP17"
    Guard(Settings(guard=True, ignore=(Ignored("GP17", "*", "a test"),)), {}).end(fault)


def test_raise_ends_the_step() -> None:
    """With ``raise``, the replay does not run."""
    engine = SmallEngine(Rebinds(4), _guard(on_fault="raise"))
    with pytest.raises(GuardError, match=r"Backend.forward_metadata.lengths in Runner\[2\]") as caught:
        _steps(engine, 1)
    assert caught.value.rule == "GP01"


def test_eager_refuses_the_shape_from_then_on() -> None:
    """With ``eager``, the graph of a fault is refused, and no other."""
    guard = _guard(on_fault="eager")
    engine = SmallEngine(Rebinds(4), guard)
    _steps(engine, 1)
    assert guard.refused == {SmallEngine.key(2)}


def test_ignored_faults_are_counted_only() -> None:
    """A fault that the settings ignore is neither reported nor followed by anything."""
    ignore = (Ignored("GP01", "Backend.forward_metadata.*", "a test"),)
    guard = _guard(on_fault="raise", ignore=ignore)
    _steps(SmallEngine(Rebinds(4), guard), 5)
    assert (guard.summary()["faults"], guard.summary()["ignored"]) == ([], 5)


def test_objects_are_as_before_after_a_capture() -> None:
    """The watch of a capture leaves classes and attributes as they were, after an error too."""
    backend = Backend(4)
    SmallEngine(backend, _guard())
    assert type(backend) is Backend
    assert type(backend.captured[4]) is Metadata
    with pytest.raises(ZeroDivisionError), _guard().capturing(SmallEngine.key(4), {"Backend": backend}, {}):
        backend.keys.sum() / (1 // 0)
    assert type(backend) is Backend
    assert type(backend.captured[4]) is Metadata


def test_an_owner_may_have_several_metadata() -> None:
    """New metadata is held to what was captured of the same attribute."""
    guard = Guard(Settings(guard=True), {}, metadata=("forward_metadata", "draft_metadata"))
    backend, key = Backend(2), SmallEngine.key(2)
    backend.forward_metadata = backend.make(2)
    backend.draft_metadata = Metadata(torch.ones(2), torch.ones(1))  # type: ignore[attr-defined]
    with guard.capturing(key, {"Backend": backend}, {}):
        assert backend.forward_metadata.lengths is not backend.draft_metadata.lengths  # type: ignore[attr-defined]
    guard.prepared("Backend", backend.make(2), "forward_metadata")
    guard.prepared("Backend", Metadata(torch.zeros(2), torch.ones(1)), "draft_metadata")
    guard.replaying(key)
    (fault,) = guard.log.faults.values()
    assert (fault.rule, fault.field) == ("GP01", "draft_metadata.lengths")
