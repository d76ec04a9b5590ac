"""Contents of the memory that a graph reads: what must be there before a replay, and what a replay gives.

    Expected            what an integration expects in one field
    compare_outputs     the outputs of a replay against those of an eager run

Addresses are necessary and not sufficient: a table that was not refreshed keeps its address.

Does not: know what an engine reserves for padding; its integration does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from graphpact.tensors import model_tolerance, same
from graphpact_guard.faults import GraphKey, ReplayFault

VERIFY = "verify"
"""The rule of a fault that only an eager run shows: the graph reads something that no other check covers."""

_ADVICE = {
    "GP02": "write it in every replay: the graph reads what an earlier step left",
    "GP03": "reset padding rows in every replay: the graph reads them too",
    "GP05": "let offsets end at the number of rows that the kernel gets, or give it no padding rows",
    "GP07": "lay it out at replay as at capture",
    "GP11": "write at capture what a replay of a full batch writes: the graph is recorded with it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is expected in one field.

    Args:
        owner: Whose field it is.
        field: The field.
        actual: What the graph reads, ``[rows, ...]``.
        expected: What it must be, of the same shape.
        live: How many rows belong to live requests or tokens; the rest is padding.
        rule: The rule that a difference breaks; None for GP02 in a live row and GP03 in a padding row.
    """

    owner: str
    field: str
    actual: torch.Tensor
    expected: torch.Tensor
    live: int
    rule: str | None = None

    def fault(self, key: GraphKey) -> ReplayFault | None:
        """Return the fault of the first row that differs, or None."""
        if torch.equal(self.actual, self.expected):
            return None
        differs = ~same(self.actual, self.expected)
        row = int(
            differs.flatten(1).any(dim=1).int().argmax() if differs.dim() > 1 else differs.int().argmax()
        )
        is_live = row < self.live
        kind = "live" if is_live else "padding"
        rule = self.rule or ("GP02" if is_live else "GP03")
        return ReplayFault(
            rule=rule,
            owner=self.owner,
            field=self.field,
            key=key,
            text=f"row {row} ({kind}) has {_show(self.actual[row])}, expected {_show(self.expected[row])}",
            advice=_ADVICE[rule],
        )


def compare_outputs(
    key: GraphKey, replayed: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor]
) -> Iterator[ReplayFault]:
    """Yield a fault for each output of a replay that differs from an eager run by more than rounding."""
    for name, a in replayed.items():
        b = eager[name]
        if a.shape != b.shape:
            text = f"the replay gave {tuple(a.shape)}, an eager run {tuple(b.shape)}"
        elif not a.numel() or torch.equal(a, b):
            continue
        else:
            gap = (a.double() - b.double()).abs().flatten(1).amax(dim=1)
            scale = max(1.0, float(b.double().abs().nan_to_num().amax()))
            row = int(gap.nan_to_num(nan=torch.inf).argmax())
            if float(gap[row]) <= model_tolerance(b.dtype) * scale:
                continue
            text = f"row {row} differs from an eager run by {float(gap[row]):.3g} (values up to {scale:.3g})"
        yield ReplayFault(
            rule=VERIFY,
            owner="outputs",
            field=name,
            key=key,
            text=text,
            advice="the graph reads something that is not refreshed, or a number that is frozen: "
            "run `graphpact check` on the backend, or the engine on GRAPHPACT=tape:strict",
        )


def _show(row: torch.Tensor) -> str:
    """Return a row as a short text."""
    values = row.flatten().tolist()
    return str(values[0]) if row.dim() == 0 else f"{values[:8]}{'...' if len(values) > 8 else ''}"
