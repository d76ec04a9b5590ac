"""`Pact`: the promises of one captured shape, and the check that a replay keeps them.

A pact stores what a walk over the static inputs and the metadata of a capture finds: address, shape, stride,
dtype and device of tensors; values of host numbers, or the maximum for `bounded` fields; exact types and
fields of objects. `Pact.check` runs in every step, so it is one generated expression. If that is False, the
walk is repeated to find every field that differs.

Does not: read the contents of tensors, so it never waits for a device, and equal addresses do not prove equal
contents; or store pacts in files (`graphpact_engine.saved_pacts` does).
"""

import enum
import numbers
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import BREACHES, Breach, BreachKind, PactBreach
from graphpact.pact.compiled import compile_promises
from graphpact.pact.promises import ANY, BY_VALUE, Promise, TensorFacts, promise_of, show_value, type_name
from graphpact.pact.walk import Form, parts_of
from graphpact.shapes import GraphShape

_MAX_ROWS = 12  # largest number of rows in the table of breaches
_TENSOR_RULES: tuple[BreachKind, ...] = ("address", "shape", "stride", "dtype", "device")


class Pact:
    """The promises of one captured shape. `of` makes a pact from the parts of a capture."""

    def __init__(
        self, shape: GraphShape, roots: Mapping[str, Promise], registry: CudaGraphBufferRegistry | None = None
    ) -> None:
        self.shape = shape
        self._roots = roots
        self._registry = registry
        self._holds = compile_promises(roots)

    @classmethod
    def of(
        cls,
        shape: GraphShape,
        registry: CudaGraphBufferRegistry | None = None,
        forms: Collection[str] = (),
        **parts: Any,
    ) -> "Pact":
        """Return the pact of the captured ``shape`` with its named ``parts``: ``view=..., metadata=...``.

        If ``registry`` is given, promises and breaches name the slot and the owner of a tensor. The parts in
        ``forms`` are not read by a graph: for them only types and fields are promised, and lists are leaves.

        Raises:
            EngineError: A `bounded` field is not a number or a list or tuple of numbers.
        """
        roots = {
            name: promise_of(name, part, shape, registry, root=True, form_only=name in forms)
            for name, part in parts.items()
        }
        return cls(shape, roots, registry)

    @property
    def promises(self) -> list[Promise]:
        """Every container and every leaf, in the order of the walk."""
        return [promise for root in self._roots.values() for promise in root]

    def check(self, **parts: Any) -> None:
        """Check the same named ``parts`` of a replay.

        Raises:
            PactBreach: They differ. The error lists every difference with field, both values, owner and
            advice.
        """
        try:
            if self._holds(parts):
                return
        except (AttributeError, LookupError):  # a captured part is missing
            pass
        found = self.breaches(**parts)
        if found:
            raise PactBreach(_message(self.shape, found), hint=found[0].advice, breaches=found)

    def breaches(self, **parts: Any) -> tuple[Breach, ...]:
        """Return every difference between the named ``parts`` of a replay and the pact.

        `check` calls this if its compiled expression is False. That expression may be too strict (NaN is not
        equal to NaN there), but never too lax.
        """
        found: list[Breach] = []
        for name in {**self._roots, **parts}:
            if name in self._roots and name in parts:
                found += self._differences(self._roots[name], parts[name], root=True)
            else:
                lost, new = (name, "none") if name in self._roots else ("none", name)
                found.append(
                    Breach(name, "fields", f"missing {lost}", f"new {new}", None, BREACHES["fields"][1])
                )
        return tuple(found)

    def _differences(self, promise: Promise, value: Any, *, root: bool = False) -> Iterator[Breach]:
        parts = parts_of(value, root=root)
        form = None if parts is None else parts.form
        if type(value) is not promise.type:
            yield _breach(promise, "type", *_type_names(promise.type, type(value)))
        elif parts is None:
            yield from self._leaf_differences(promise, value)
        now = {} if parts is None else parts.items
        lost = [key for key in promise.parts if key not in now]
        new = [key for key in now if key not in promise.parts]
        if form == promise.form == "items":
            if lost or new:
                yield _breach(promise, "length", str(len(promise.parts)), str(len(now)))
        elif (lost or new) and "items" not in (form, promise.form):
            missing, extra = _names(promise.form, lost), _names(form, new)
            yield _breach(promise, "fields", f"missing {missing}", f"new {extra}")
        if form == promise.form:
            for key, part in promise.parts.items():
                if key in now:
                    yield from self._differences(part, now[key])

    def _leaf_differences(self, promise: Promise, value: Any) -> Iterator[Breach]:
        if promise.value is ANY:
            return
        if isinstance(value, torch.Tensor):
            facts = zip(_TENSOR_RULES, promise.value, TensorFacts.of(value), strict=True)
            for rule, captured, now in facts:
                if rule == "address" and captured != now:
                    yield _breach(promise, rule, hex(captured), self._place(promise, value))
                elif captured != now:
                    yield _breach(promise, rule, str(captured), str(now))
        elif promise.bounded:
            if not value <= promise.value:
                yield _breach(promise, "bound", f"<= {promise.value!r}", repr(value))
        elif not _is_same(promise.value, value):
            yield _breach(promise, "value", show_value(promise.value), show_value(value))

    def _place(self, promise: Promise, tensor: torch.Tensor) -> str:
        """Return the address of a replayed tensor, and its slot if it is not the captured slot."""
        slot = None if self._registry is None else self._registry.slot_of(tensor)
        where = "" if slot is None or slot.label == promise.owner else f" in {slot.label}"
        return f"{tensor.data_ptr():#x}{where}"


def _is_same(captured: Any, now: Any) -> bool:
    """Return whether a host value equals the captured one; objects such as plans are compared by identity."""
    if captured is now:
        return True
    if not isinstance(captured, BY_VALUE) or isinstance(captured, enum.Enum):
        return False
    return bool(captured == now) or bool(captured != captured and now != now)  # noqa: PLR0124  NaN


# -- messages ------------------------------------------------------------------------------------------


def _breach(promise: Promise, rule: BreachKind, captured: str, replayed: str) -> Breach:
    advice = BREACHES[rule][1]
    if rule == "value" and not isinstance(promise.value, numbers.Number):
        advice = "the graph was recorded with the captured object; pass the same object to every replay"
    elif rule == "type" and type(None) is promise.type:
        advice = "the graph was recorded without it: set it at capture too, or keep it None"
    elif rule == "type" and replayed == "NoneType":
        advice = "the graph was recorded with it: keep the captured one, refreshed in place"
    return Breach(promise.path, rule, captured, replayed, promise.owner, advice)


def _names(form: Form | None, keys: Iterable[Hashable]) -> str:
    return ", ".join(map(repr if form == "keys" else str, keys)) or "none"


def _type_names(captured: type, replayed: type) -> tuple[str, str]:
    """Return the names of two types, with their modules if the names are equal."""
    if captured.__name__ == replayed.__name__:
        return type_name(captured), type_name(replayed)
    return captured.__name__, replayed.__name__


def _message(shape: GraphShape, breaches: Sequence[Breach]) -> str:
    """Return the message of a breach: one line for the first field, then a table of all fields."""
    first = breaches[0]
    of_first = [breach.text for breach in breaches if breach.path == first.path]
    owner = f" ({first.owner})" if first.owner else ""
    more = len(breaches) - len(of_first)
    tail = f"; and {more} more in other fields" if more else ""
    lines = [f"{shape}: {first.path}{owner}: {'; '.join(of_first)}{tail}"]
    rows = [("field", "rule", "captured", "replayed", "owner")]
    rows += [(b.path, b.rule, b.captured, b.replayed, b.owner or "-") for b in breaches[:_MAX_ROWS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "".join(f"  {{:{width}}}" for width in widths)
    lines += [layout.format(*row).rstrip() for row in rows]
    if len(breaches) > _MAX_ROWS:
        lines.append(f"  ... and {len(breaches) - _MAX_ROWS} more")
    return "\n".join(lines)
