"""The dummy batches of the runner, checked like live batches: GP10, GP11, GP12.

Does not: capture live batches; see `graphpact_conformance.experiments.parity`.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import GraphpactError
from graphpact.pact import walk
from graphpact.shapes import EagerReason, GraphShape
from graphpact.tensors import same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.fields import COUNT, GATHERED, words, wrong_rows
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import matters, spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import hook_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord
from graphpact_tape.poison import poison_of


class _Asked(NamedTuple):
    """One requirement on a dummy batch."""

    field: str
    holds: bool
    expected: str
    actual: object


def dummies(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Check the runner's dummy batches like live batches, and replay each right after its capture."""
    rig = lane.rig()
    live = rig.batch_of(steps.exact)
    for shape in rig.config.shapes:
        dummy = rig.dummy(shape)
        asked = [*_form(rig, shape, dummy, live), *_lengths(rig, dummy), *_values(rig, shape, dummy)]
        for each in asked:
            if not each.holds:
                yield lane.finding(
                    "GP11",
                    hook="prepare_replay",
                    field=f"the dummy batch of {shape}: {each.field}",
                    expected=each.expected,
                    actual=str(each.actual),
                    help="make dummies like live batches, on scratch: request row 0, KV slot 0",
                )
    for way in lane.ways:
        for shape in rig.config.shapes:
            yield from _dummy_replayed(lane, way, shape)


def _form(rig: Rig, shape: GraphShape, dummy: ForwardBatch, live: ForwardBatch) -> Iterator[_Asked]:
    """Require the fields of a live batch, in the sizes of the shape.

    Fields whose slot is optional or computed may be missing in one of the two batches.
    """
    for name, count, asked in (
        ("batch_size", dummy.batch_size, shape.batch_size),
        ("input_ids", dummy.num_tokens, shape.num_tokens),
    ):
        yield _Asked(name, count == asked, f"{asked}, as in the shape", count)
    try:
        dummy.require_consistent()
    except GraphpactError as error:
        yield _Asked("its fields", False, "consistent fields", error.message)  # noqa: FBT003
    may_lack = {slot.name for slot in rig.slots if slot.optional or slot.is_computed}
    for each in fields(ForwardBatch):
        mine, theirs = getattr(dummy, each.name), getattr(live, each.name)
        if (mine is None) is not (theirs is None):
            if each.name in may_lack:
                continue
            has = ["nothing" if value is None else type(value).__name__ for value in (theirs, mine)]
            yield _Asked(each.name, False, f"{has[0]}, as in a live batch", has[1])  # noqa: FBT003
        elif isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            kinds = [(t.dtype, t.dim()) for t in (theirs, mine)]
            yield _Asked(each.name, kinds[0] == kinds[1], f"{kinds[0]}", kinds[1])


def _lengths(rig: Rig, dummy: ForwardBatch) -> Iterator[_Asked]:
    """Require lengths that are valid for live or padding rows, equal on host and device."""
    padded = rig.padded_seq_len
    most = rig.config.context - dummy.drafts_in_rows
    lens = dummy.seq_lens.tolist()
    yield _Asked(
        "seq_lens",
        all(n == padded or 1 <= n <= most for n in lens),
        f"{padded}, the length of a padding row, or 1 to {most}, without drafts",
        lens,
    )
    twin = dummy.seq_lens_cpu.tolist()
    yield _Asked("seq_lens_cpu", twin == lens, f"the lengths on the device, {lens}", twin)
    if dummy.extend_seq_lens is not None and dummy.extend_seq_lens_cpu is not None:
        new, twin = dummy.extend_seq_lens.tolist(), dummy.extend_seq_lens_cpu.tolist()
        yield _Asked("extend_seq_lens", all(n >= 1 for n in new), "1 or more", new)
        held = all(n <= length for n, length in zip(new, lens, strict=False))
        yield _Asked("extend_seq_lens", held, f"at most seq_lens, {lens}", new)
        yield _Asked("extend_seq_lens_cpu", twin == new, f"the lengths on the device, {new}", twin)


def _values(rig: Rig, shape: GraphShape, dummy: ForwardBatch) -> Iterator[_Asked]:
    """Require rows on scratch, valid values in every field, and counts that include all tokens."""
    tensors, config = dummy.tensors(), rig.config
    for name, values in tensors.items():
        wrong = wrong_rows(name, tensors, config)
        if bool(wrong.any()):
            yield _Asked(name, False, words(name, config), values_at(values, wrong))  # noqa: FBT003
    all_, count = shape.num_tokens, tensors.get(COUNT)
    for name, real in (
        (COUNT, None if count is None else int(count)),
        ("num_token_non_padded_cpu", dummy.num_token_non_padded_cpu),
    ):
        expected = f"{all_}: all tokens of a dummy are live"
        yield _Asked(name, real in (None, all_), expected, real)
    for name in GATHERED:
        counts = tensors[name].tolist() if name in tensors else []
        yield _Asked(name, all(0 <= n <= all_ for n in counts), f"0 to {all_}, tokens of the shape", counts)


@torch.inference_mode()
def _dummy_replayed(lane: LaneUnderTest, way: Way, shape: GraphShape) -> Findings:
    """Capture one shape, replay its dummy, and compare what the hooks wrote for both."""
    rig = lane.build(way, capture=False)
    problem = Problem(lane.config.case, [], 0)
    rig.load(problem)
    rig.serve_declined(shape)
    dummy = rig.dummy(shape)
    kept: dict[str, torch.Tensor] = {}
    types: list[type] = []

    def keep(view: ForwardBatch, metadata: object) -> None:
        types.append(type(metadata))
        for path, value in walk({"view": view, "metadata": metadata}):
            if isinstance(value, torch.Tensor):
                kept[path] = value.clone()

    rig.capture(shape, ready=keep)
    step = rig.step(problem, batch=dummy, ready=lambda _, metadata: types.append(type(metadata)))
    if step.error is not None:
        yield lane.of_error(
            step.error,
            expected="the dummy batch replays right after its capture",
            rule="GP11",
            step=step,
        )
        return
    if step.shape != shape:
        yield lane.finding(
            "GP12",
            field="fit()",
            expected=f"{shape} for its own dummy batch, whose longest request has"
            f" {max(dummy.seq_lens_cpu.tolist())} tokens",
            actual=_answer(rig.runner.fit(dummy)),
            help="let fit(dummy(shape)) be the shape, with its variant: a dummy has what the variant is for,"
            " such as requests of the longest length of a tier, or the ids of adapters",
        )
        return
    if len(set(types)) > 1:
        then, now = types
        yield lane.finding(
            "GP10",
            hook="init_metadata_replay",
            field="metadata",
            expected=f"{then.__name__}, the type at capture",
            actual=now.__name__,
            step=step,
            help="return the same type from both hooks: if one converts the metadata, the other must too",
        )
        return
    yield from _compare_with_dummy(lane, rig, step, kept)


def _answer(fit: GraphShape | EagerReason) -> str:
    return f"{fit}" if isinstance(fit, GraphShape) else f"{fit.name}: {fit}"


def _compare_with_dummy(
    lane: LaneUnderTest, rig: Rig, step: StepRecord, kept: dict[str, torch.Tensor]
) -> Findings:
    for path, leaf in step.leaves.items():
        then = kept.get(path)
        if then is None or leaf.slot is None or not leaf.is_resident or then.shape != leaf.value.shape:
            continue
        then = then.cpu()
        garbage = torch.full_like(then, poison_of(then.dtype))
        differs = ~same(then, leaf.value) & ~same(then, garbage)
        if leaf.slot.axis == "none":
            differs &= then != leaf.slot.initial_value
        if not bool(differs.any()) or not _has_effect(rig, step, path, differs, then):
            continue
        yield lane.finding(
            "GP11",
            hook="populate" if hook_of(leaf) == "populate" else "init_metadata_capture",
            field=f"{path}{spell(differs)} ({leaf.slot.label})",
            expected=f"the values that a replay of the same batch writes: {values_at(leaf.value, differs)}",
            actual=values_at(then, differs),
            step=step,
            help="write it by the same code for capture and replay",
        )


def _has_effect(rig: Rig, step: StepRecord, path: str, differs: torch.Tensor, then: torch.Tensor) -> bool:
    """Return whether the values that the capture wrote change the results of a replay."""
    batch = rig.dummy(step.shape) if step.shape is not None else None
    problem = step.problem
    base = rig.step(problem, batch=batch)
    leaf = base.leaves.get(path)
    if leaf is None or base.error is not None:
        return False
    if leaf.slot is not None and leaf.slot.axis == "none" and leaf.value.numel() == 1:
        return True  # report every count: it may have no effect on a dummy, whose rows are all on scratch
    return matters(rig, base, leaf, differs, then, batch=batch)
