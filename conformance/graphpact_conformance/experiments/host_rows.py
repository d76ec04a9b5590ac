"""Host tensors of the view, such as ``extend_seq_lens_cpu``: GP02, GP03, GP04. A part of ``padding``.

Plans may read them at any time, and the suite's own backend reads few of them. So their rows are checked
whether a result depends on them or not: each is written in every step, and equal to that of the device tensor
of the same name. Padding rows that are kept for a declared reason may hold anything, unless a result depends
on them.

Does not: check lengths that padding rows must have; see ``padding``.
"""

from collections.abc import Iterator

import torch

from graphpact.buffers import BoundSlot
from graphpact.tensors import same
from graphpact_conformance.experiments.comparison import same_step, spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import poison_slot
from graphpact_conformance.records.steps import Leaf, StepRecord
from graphpact_tape.poison import poison_of


def host_rows(lane: LaneUnderTest, rig: Rig, base: StepRecord) -> Findings:
    """Repeat a replay with poison in host tensors before it, and check what the step wrote there."""
    on_host = {slot.name: (leaf, slot) for leaf in base.leaves.values() if (slot := _slot_on_host(leaf))}
    if not on_host:
        return

    def spoil(slot: BoundSlot) -> None:
        if slot.name in on_host:
            poison_slot(slot)

    step = rig.step(base.problem, fill=spoil)
    found = False
    for name, (leaf, slot) in on_host.items():
        for rule, wrong, expected in _wrong_rows(leaf, slot, base, step):
            found = True
            yield lane.finding(
                rule,
                hook="populate",
                field=f"view.{name}{spell(wrong)} ({slot.label})",
                expected=f"{expected}: plans may read host tensors at any time",
                actual=values_at(leaf.value, wrong),
                step=base,
                help="fill the host tensor with the device tensor: declare its slot with the same"
                " padding_policy and pad_value",
            )
    again = rig.step(base.problem)  # if it is not as before, the batch before is the cause
    first = rig.config.page_size
    if found or same_step(base, step, first_slot=first) or not same_step(base, again, first_slot=first):
        return
    kept = [slot.label for _, slot in on_host.values() if slot.reason]
    yield lane.finding(
        "GP03",
        hook="init_metadata_replay",
        field="padding rows of " + ", ".join(kept or [slot.label for _, slot in on_host.values()]),
        expected="a step that does not depend on rows that no step writes",
        actual="other results, or an error, with poison there",
        step=step,
        help="read only the live rows of these host tensors, or reset their padding rows in every step",
    )


def _slot_on_host(leaf: Leaf) -> BoundSlot | None:
    """Return the slot of a host tensor of the view with a row for each request or token; else None."""
    slot = leaf.slot
    if slot is None or slot.axis == "none" or leaf.value.dtype.itemsize == 1:
        return None  # in one byte, poison is also a valid value
    is_input = leaf.path.startswith("view.") and leaf.is_written
    return slot if is_input and slot.name.endswith("_cpu") else None


def _wrong_rows(
    leaf: Leaf, slot: BoundSlot, base: StepRecord, step: StepRecord
) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the rule, a mask of wrong rows and what is expected, for live rows and for padding rows.

    Args:
        leaf: The host tensor in ``base``.
        slot: Its slot.
        base: A replay.
        step: The same replay, over poison in host tensors.
    """
    now, name = step.leaves.get(leaf.path), slot.name.removesuffix("_cpu")
    if now is None:
        return
    asked = torch.ones_like(leaf.in_tail) if slot.reason is None else ~leaf.in_tail
    unwritten = asked & same(now.value, torch.full_like(now.value, poison_of(now.value.dtype)))
    device = base.leaves.get(f"view.{name}")
    differs = torch.zeros_like(unwritten)
    if device is not None and device.value.shape == leaf.value.shape:
        differs = asked & ~unwritten & (leaf.value != device.value.to(leaf.value.dtype))
    of_padding = (("GP03", unwritten), ("GP04", differs))
    texts = ("every row is written in this step", f"the numbers of view.{name}")
    for (rule, wrong), text in zip(of_padding, texts, strict=True):
        for each, part in (("GP02", wrong & ~leaf.in_tail), (rule, wrong & leaf.in_tail)):
            if bool(part.any()):
                yield each, part, text
