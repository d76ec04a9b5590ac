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
from typing import Any, Generic, TypeVar

import torch

from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import BREACHES, Breach, BreachKind, PactBreach
from graphpact.pact.compiled import compile_promises
from graphpact.pact.promises import (
    ANY,
    BY_VALUE,
    STRICT_TERMS,
    Promise,
    TensorFacts,
    Terms,
    is_within,
    promise_of,
    show_value,
    type_name,
)
from graphpact.pact.walk import Form, parts_of

K = TypeVar("K")

_MAX_ROWS = 12  # largest number of rows in the table of breaches
_TENSOR_RULES: tuple[BreachKind, ...] = ("address", "shape", "stride", "dtype", "device")


class Pact(Generic[K]):
    """The promises of one captured shape. `of` makes a pact from the parts of a capture.

    Attributes:
        shape: The shape, or another engine's key of the graph.
        roots: The promises of each part, by its name.
    """

    def __init__(
        self, shape: K, roots: Mapping[str, Promise], registry: CudaGraphBufferRegistry | None = None
    ) -> None:
        self.shape = shape
        self.roots = roots
        self._registry = registry
        self._holds = compile_promises(roots)

    @classmethod
    def of(
        cls,
        shape: K,
        registry: CudaGraphBufferRegistry | None = None,
        forms: Collection[str] = (),
        terms: Terms = STRICT_TERMS,
        **parts: Any,
    ) -> "Pact[K]":
        """Return the pact of the captured ``shape`` with its named ``parts``: ``view=..., metadata=...``.

        Args:
            shape: The shape, or the key of a graph, for messages.
            registry: Names the slot and the owner of a tensor in promises and breaches; None without names.
            forms: Parts that no graph reads: only types and fields are promised, and lists are leaves.
            terms: What is promised about the other parts.
            parts: The parts by name.

        Raises:
            EngineError: A `bounded` field is not a number or a list or tuple of numbers.
        """
        roots = {
            name: promise_of(name, part, shape, registry, terms=terms, root=True, form_only=name in forms)
            for name, part in parts.items()
        }
        return cls(shape, roots, registry)

    @property
    def promises(self) -> list[Promise]:
        """Every container and every leaf, in the order of the walk."""
        return [promise for root in self.roots.values() for promise in root]

    def check(self, **parts: Any) -> None:
        """Check the same named ``parts`` of a replay.

        Raises:
            PactBreach: They differ. The error lists every difference with field, both values, owner and
            advice.
        """
        if self.keeps(parts):
            return
        found = self.breaches(**parts)
        if found:
            raise PactBreach(_message(self.shape, found), hint=found[0].advice, breaches=found)

    def keeps(self, parts: Mapping[str, Any]) -> bool:
        """Return whether the compiled expression holds for the ``parts`` of a replay; see `breaches`."""
        try:
            return self._holds(parts)
        except (AttributeError, LookupError):  # a captured part is missing
            return False

    def breaches(self, **parts: Any) -> tuple[Breach, ...]:
        """Return every difference between the named ``parts`` of a replay and the pact.

        `check` calls this if `keeps` is False. The compiled expression may be too strict (NaN is not
        equal to NaN there), but never too lax.
        """
        found: list[Breach] = []
        for name in {**self.roots, **parts}:
            if name in self.roots and name in parts:
                found += self._differences(self.roots[name], parts[name], root=True)
            else:
                lost, new = (name, "none") if name in self.roots else ("none", name)
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
        elif (lost or new) and "items" not in (form, promise.form) and not promise.is_open:
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
            facts: Iterable[tuple[BreachKind, Any, Any]]
            facts = zip(_TENSOR_RULES, promise.value, TensorFacts.of(value), strict=True)
            for rule, captured, now in facts:
                if rule == "address" and captured != now:
                    yield _breach(promise, rule, hex(captured), self._place(promise, value))
                elif captured != now and not (
                    rule == "shape" and promise.may_be_shorter and is_within(now, captured)
                ):
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


def _message(shape: object, breaches: Sequence[Breach]) -> str:
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
