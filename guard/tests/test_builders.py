"""The guard in an engine of builders: new metadata in every step is right if its memory is the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from builder_engine import KEYS, Builder, BuilderEngine, CommonMetadata, Metadata

from graphpact_guard import Guard, Settings


def _guard() -> Guard:
    return Guard(
        Settings(guard=True), {"engine": "builders 1.0"}, metadata=("metadata",), limits=("max_seq_len",)
    )


def _run(builder: type[Builder], count: int = 40) -> tuple[Guard, bool]:
    """Run steps of several sizes; return the guard, and whether all gave the right numbers.

    The first group of layers has a right builder.
    """
    guard = _guard()
    engine = BuilderEngine({"first": Builder(4), "second": builder(4)}, guard)
    draw, right = torch.Generator().manual_seed(0), True
    for at in range(count):
        raw = 1 + at % max(engine.sizes)
        q = torch.randn(raw, generator=draw)
        lengths = torch.randint(1, KEYS, (raw,), generator=draw)
        right &= torch.allclose(engine.step(q, lengths), engine.expected(q, lengths))
    return guard, right


def test_new_objects_over_the_same_memory_pass_in_silence() -> None:
    """Layers read metadata that is not an attribute of its builder, and each field that they read is held."""
    guard, right = _run(Builder)
    assert right
    assert not guard.log.faults
    assert sum(record.replays for record in guard.records.values()) == 40
    for record in guard.records.values():
        assert {("first", "seq_lens"), ("second", "seq_lens")} == set(record.leaves())


class NewTensor(Builder):
    """Makes a new tensor of lengths in every step, as vLLM's own backend for a CPU does with its plan."""

    def build(self, common: CommonMetadata) -> Metadata:
        """Return metadata over new memory."""
        return replace(super().build(common), seq_lens=common.seq_lens.clone())


class OtherDtype(Builder):
    """Leaves the memory of its capture, and gives lengths of another dtype."""

    def build(self, common: CommonMetadata) -> Metadata:
        """Return metadata with 32-bit lengths."""
        metadata = super().build(common)
        if common.max_seq_len < KEYS:
            self.seq_lens.zero_()
            metadata = replace(metadata, seq_lens=common.seq_lens.int())
        return metadata


class SmallLimit(Builder):
    """Captures with the limit of its own batch, which later batches exceed."""

    def build_for_capture(self, common: CommonMetadata) -> Metadata:
        """Return the metadata of a capture with a small limit."""
        return self.build(common)


class ChangedFlag(Builder):
    """Asks for another mask than its capture had; the graph keeps that of its capture."""

    def build(self, common: CommonMetadata) -> Metadata:
        """Return metadata of the other mask."""
        metadata = super().build(common)
        return metadata if common.max_seq_len == KEYS else replace(metadata, causal=False)


WRONG: list[tuple[type[Builder], str, str, bool]] = [
    (NewTensor, "GP01", "metadata.seq_lens", False),
    (OtherDtype, "GP07", "metadata.seq_lens", False),
    (SmallLimit, "GP08", "metadata.max_seq_len", False),
    (ChangedFlag, "GP08", "metadata.causal", True),
]


@pytest.mark.parametrize(
    ("kind", "rule", "field", "is_right"), WRONG, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_wrong_builder_is_named_at_its_first_replay(
    kind: Any,
    rule: str,
    field: str,
    is_right: bool,  # noqa: FBT001
) -> None:
    """Rule, group and field are named in both graphs; the group beside it is not accused."""
    guard, right = _run(kind)
    assert right is is_right
    faults = guard.log.summary()["faults"]
    assert (rule, field) in {(fault["rule"], fault["field"]) for fault in faults}
    assert {fault["owner"] for fault in faults} == {"second"}
    assert {fault["graph"] for fault in faults} == {"CudaGraphManager[2]", "CudaGraphManager[4]"}


def test_a_static_input_that_is_passed_anew_is_named() -> None:
    """An argument of the model is the captured tensor in every replay; another one is named with its path."""
    guard = _guard()
    engine = BuilderEngine({"first": Builder(4)}, guard)
    q, lengths = torch.ones(2), torch.tensor([3, 5])
    engine.step(q, lengths)
    assert guard.log.summary()["faults"] == []
    engine.model_inputs = lambda desc: {"q": engine.inputs.q[: desc.num_tokens] + 1}  # type: ignore[method-assign]
    engine.step(q, lengths)
    (fault,) = guard.log.summary()["faults"]
    assert (fault["rule"], fault["owner"], fault["field"]) == ("GP01", "model inputs", "model inputs['q']")
