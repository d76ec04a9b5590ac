"""The tables of ``docs/explanation/speculation.md``: every slot of the speculation lanes, read from engines.

The engines run the shipped model and heads on the backend `flashinfer`, drafting a tree. Each shape is
computed by its slot's declaration from symbolic counts.

Does not: describe metadata; `docs/explanation/attention.md` does that.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from graphpact import Lane
from graphpact.buffers import BoundSlot
from graphpact_engine import Engine
from graphpact_engine.config import EngineConfig

MODELS = Path(__file__).parents[2] / "examples/models"
HEADS = {"eagle": "tiny-llama-eagle", "frozen_kv_mtp": "tiny-llama-mtp"}
NAMES: Mapping[int, str] = {3: "num_steps", 4: "topk", 9: "W", 192: "H"}
"""The sizes of the engines below and their symbols. All sizes differ, so each value identifies its symbol."""


def tables(algorithm: str, *lanes: str) -> str:
    """Return a table of slots for each of the ``lanes`` of an algorithm."""
    options = [
        f"model.path='{MODELS / 'tiny-llama'}'",
        'engine.attention_backend="flashinfer"',
        'engine.device="cpu"',
        "engine.max_num_seqs=8",
        "engine.num_pages=64",
        f'speculative.algorithm="{algorithm}"',
        f"speculative.draft_model='{MODELS / HEADS[algorithm]}'",
        "speculative.num_steps=3",
        "speculative.topk=4",
        "speculative.num_draft_tokens=9",
        *(f"lanes.{lane}.batch_sizes=[8]" for lane in lanes),
    ]
    with Engine(EngineConfig.load(None, env={}, overrides=options)) as engine:
        named = {lane.name: lane for lane in engine.lanes}
        return "\n".join(_table(algorithm, named[name]) for name in lanes)


def _table(algorithm: str, lane: Lane) -> str:
    """Return the table of one lane; slots that repeat for each draft step share one row."""
    lines = [
        f"Lane `{lane.name}` of `{algorithm}`, mode `{lane.runner.context.mode.value}`:",
        "",
        "| slot | shape | dtype | padding |",
        "|---|---|---|---|",
    ]
    for slot in lane.registry or ():
        if not re.search(r"\.step\d+$", slot.name):
            steps = (
                ", and `.stepN` of each later step"
                if f"{slot.name}.step1" in lane.registry.slot_names()
                else ""
            )
            lines.append(f"| `{slot.name}`{steps} | {_shape(slot)} | {_dtype(slot)} | {_padding(slot)} |")
    return "\n".join([*lines, ""])


class _Count(int):
    """A count that remembers how it was computed."""

    label: str

    def __new__(cls, value: int, label: str) -> Self:
        """Return ``value``, called ``label``."""
        count = super().__new__(cls, value)
        count.label = label
        return count

    def __add__(self, other: int) -> "_Count":
        return _Count(int(self) + int(other), f"{self.label} + {int(other)}" if other else self.label)

    def __mul__(self, other: int) -> "_Count":
        return _Count(int(self) * int(other), f"{self.label} * {int(other)}")

    __radd__, __rmul__ = __add__, __mul__


def _shape(slot: BoundSlot) -> str:
    if slot.axis == "none":
        return "capacity"
    sizes: Any = slot.shape_fn(_Count(8, "bs"), _Count(72, "T"))
    named = [getattr(size, "label", str(size)).replace("+ 1 + 1", "+ 2") for size in sizes]
    return "`[" + re.sub(r"\d+", lambda n: NAMES.get(int(n[0]), n[0]), ", ".join(named)) + "]`"


def _dtype(slot: BoundSlot) -> str:
    host = ", on the host" if slot.device is not None and slot.device.type == "cpu" else ""
    return f"{slot.dtype}".removeprefix("torch.") + host


def _padding(slot: BoundSlot) -> str:
    if slot.pad_value is None:
        return slot.padding_policy.value
    return f"{slot.padding_policy.value} {NAMES.get(slot.pad_value, slot.pad_value)}"
