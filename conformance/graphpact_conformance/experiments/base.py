"""What an experiment is, and how what two steps left is compared.

Does not: know a rule.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import Breach
from graphpact.pact import walk
from graphpact.tensors import equal, excess, same, tolerance_of
from graphpact_conformance.problems import Drawn
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import Answer, Leaf, Rig, StepRecord
from graphpact_conformance.subject import LaneUnderTest
from graphpact_tape.poison import poison_of

Scope = Literal["attention_backend", "runner"]
Findings = Iterator[Finding]


@dataclass(frozen=True)
class Experiment:
    """One thing that is done with a lane.

    Args:
        name: What reports call it.
        examines: Ids of the rules about which it can tell. Its findings are of these, or of no rule.
        run: ``(lane, steps) -> findings``: what it does, with batches in a row.
        scopes: Of which plugins it tells anything.
        repeats: Whether it sees more in more batches; one that does not is made once in a lane.
        depth: In which lanes it is made: ``lightest`` in all; ``light`` not in those of a quick run that
            differ from a full one in sizes alone; ``full`` in no lane that does.
        in_pairs: Whether it is made where a backend and a runner are checked together.
    """

    name: str
    examines: tuple[str, ...]
    run: Callable[[LaneUnderTest, Drawn], Findings]
    scopes: frozenset[Scope] = frozenset({"attention_backend", "runner"})
    repeats: bool = False
    depth: Literal["lightest", "light", "full"] = "full"
    in_pairs: bool = False

    @property
    def about(self) -> str:
        """The first line of what it says of itself."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


# -- comparing ---------------------------------------------------------------------------------------


def same_rows(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two results are the same, both missing included."""
    if a is None or b is None:
        return a is b
    return equal(a, b)


def how_far(rig: Rig, rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far rows of a lane's output are off, in shares of what rounding may make of them."""
    return excess(rows, expected, tolerance_of(rig.config.dtype, "attention"))


def same_step(a: StepRecord, b: StepRecord, *, first_slot: int, padded: bool = True) -> bool:
    """Return whether two steps of one batch left the same, scratch aside.

    Args:
        a: One.
        b: The other.
        first_slot: The first KV slot after scratch.
        padded: Whether what padded rows gave counts.
    """
    if (a.error is None) is not (b.error is None):
        return False
    if a.error is not None:
        return True
    if not same_rows(a.rows, b.rows) or (padded and not same_rows(a.outputs, b.outputs)):
        return False
    return all(
        equal(cache[first_slot:], b.caches[name][first_slot:]) for name, cache in a.caches.items()
    )


@dataclass(frozen=True)
class Difference:
    """How a step differs from what it should have left.

    Args:
        kind: ``rows`` for real rows, ``cache`` for the KV cache, ``extent`` for how many rows there are.
        what: What differs, in words.
        expected: What should be there.
        actual: What is.
        slots: KV slots that differ.
    """

    kind: Literal["rows", "cache", "extent"]
    what: str
    expected: str
    actual: str
    slots: tuple[int, ...] = ()


def differences(rig: Rig, step: StepRecord, answer: Answer) -> list[Difference]:
    """Return how a step that ended differs from the oracle's answer."""
    found = []
    rows = step.rows
    assert rows is not None  # noqa: S101  it ended
    if rows.shape != answer.rows.shape:
        return [
            Difference(
                "extent",
                "the rows that the lane returns",
                f"{tuple(answer.rows.shape)}, one row for each real token",
                f"{tuple(rows.shape)}",
            )
        ]
    off = how_far(rig, rows, answer.rows)
    if off.numel() and float(off.max()) > 1:
        token, column = divmod(int(off.argmax()), off.shape[1])
        found.append(
            Difference(
                "rows",
                f"token {token} of the batch, {rig.where(column)}",
                f"{float(answer.rows[token, column]):.6g}, as attention in float64",
                f"{float(rows[token, column]):.6g}",
            )
        )
    first = rig.config.page_size
    for name, cache in step.caches.items():
        differs = ~same(cache, answer.caches[name].to(cache.dtype)).flatten(1).all(dim=1)
        slots = [slot for slot in differs.nonzero().flatten().tolist() if slot >= first]
        if slots:
            found.append(
                Difference(
                    "cache",
                    f"{name} in KV slots {slots[:8]}",
                    "what the batch's own tokens write, and nothing else",
                    "other values",
                    tuple(slots),
                )
            )
    return found


# -- perturbing --------------------------------------------------------------------------------------

TensorEdit = Callable[[torch.Tensor], None]


def altered(changes: dict[str, TensorEdit]) -> Callable[[ForwardBatch, Any], None]:
    """Return what, between hooks and replay, changes tensors of view and metadata by their paths."""

    def ready(view: ForwardBatch, metadata: Any) -> None:
        for path, value in walk({"view": view, "metadata": metadata}):
            if path in changes and isinstance(value, torch.Tensor):
                changes[path](value)

    return ready


def put(mask: torch.Tensor, value: torch.Tensor | float) -> TensorEdit:
    """Return what writes ``value`` where ``mask`` is set: a number, or a tensor of the same shape."""

    def change(tensor: torch.Tensor) -> None:
        at = mask.to(tensor.device)
        if isinstance(value, torch.Tensor):
            tensor.copy_(torch.where(at, value.to(tensor.device), tensor))
        else:
            tensor.masked_fill_(at, value)

    return change


def is_read(rig: Rig, base: StepRecord, leaf: Leaf, mask: torch.Tensor) -> bool:
    """Return whether the replay of ``base`` reads a tensor where ``mask`` is set: poison there shows."""
    changed = rig.step(
        base.problem, ready=altered({leaf.path: put(mask, poison_of(leaf.value.dtype))})
    )
    return not same_step(base, changed, first_slot=rig.config.page_size)


def matters(
    rig: Rig,
    base: StepRecord,
    leaf: Leaf,
    mask: torch.Tensor,
    other: torch.Tensor,
    *,
    batch: ForwardBatch | None = None,
) -> bool:
    """Return whether the replay of ``base`` gives anything else with ``other`` where ``mask`` is set.

    Args:
        rig: Whose step it was.
        base: The step.
        leaf: The tensor that is changed.
        mask: Where.
        other: What is there instead; of the tensor's shape.
        batch: What was run instead of the problem's own batch.
    """
    changed = rig.step(base.problem, ready=altered({leaf.path: put(mask, other)}), batch=batch)
    return not same_step(base, changed, first_slot=rig.config.page_size)


# -- words -------------------------------------------------------------------------------------------


def sides_of(breach: Breach) -> tuple[str, str]:
    """Return what was captured and what is there, in words; of two addresses that they are two."""
    if breach.rule == "address":
        return "the address that was captured", "another address"
    return f"{breach.rule} as captured: {breach.captured}", breach.replayed


def spell(mask: torch.Tensor) -> str:
    """Return which entries a mask has, as an index: the range of the first axis, or the first few."""
    at = mask.nonzero()
    if mask.dim() == 1:
        first, last = int(at[0]), int(at[-1])
        return f"[{first}]" if first == last else f"[{first}:{last + 1}]"
    entry = ", ".join(str(int(i)) for i in at[0])
    return f"[{entry}]" + ("" if len(at) == 1 else f" and {len(at) - 1} more")


def values_at(tensor: torch.Tensor, mask: torch.Tensor, most: int = 8) -> str:
    """Return the values of a tensor where ``mask`` is set, as many as are worth reading."""
    values = tensor[mask].flatten()[: most + 1].tolist()
    told = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:most])
    return f"{told}, ..." if len(values) > most else told
