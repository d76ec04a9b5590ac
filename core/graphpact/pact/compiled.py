"""The comparisons of a pact as one generated function, which runs in every step.

A walk over objects takes tens of microseconds. The function is one chain of comparisons, which ends at the
first one that fails. Only then is the walk repeated, to name every difference.

Does not: explain a difference; `graphpact.pact.checks` does.
"""

import enum
import functools
import keyword
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import CodeType
from typing import Any

from graphpact.pact.promises import ANY, BY_VALUE, Promise, TensorFacts, is_within
from graphpact.pact.walk import Form, attributes_of, declared_fields


def compile_promises(roots: Mapping[str, Promise]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function ``parts -> bool`` that checks the promises ``roots``.

    The function is one chain of comparisons in generated source code, similar to the methods that
    `dataclasses` generates. It calls only torch. Captured values are constants in its namespace, so the
    source contains only plain names.
    """
    source = _Source()
    terms = [f"len(parts) == {len(roots)}"]
    for name, promise in roots.items():
        terms += source.terms(promise, f"parts[{source.constant(name)}]")
    chain = "\n        and ".join(terms)
    code = f"def holds(parts):\n    return (\n        {chain}\n    )\n"
    exec(_code_of(code), source.names)  # noqa: S102  the source has plain names only, see above
    holds: Callable[[Mapping[str, Any]], bool] = source.names["holds"]
    return holds


@functools.lru_cache(maxsize=1024)
def _code_of(source: str) -> CodeType:
    """Return the code of ``source``, cached because equal captures have equal source."""
    return compile(source, "<pact>", "exec")


class _Source:
    """The source code of a pact's comparisons, and its constants by name."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def constant(self, value: Any) -> str:
        """Return a new name for the constant ``value``."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def terms(self, promise: Promise, expression: str) -> Iterator[str]:
        """Yield the conditions for ``expression`` to keep ``promise``, as source code."""
        if _is_singleton(promise):
            yield f"{expression} is {self.constant(promise.value)}"
            return
        v = f"v{len(self.names)}"  # unique, because the type takes the next constant
        yield f"type({v} := {expression}) is {self.constant(promise.type)}"
        if promise.value is ANY:
            return
        if promise.form == "items":
            yield f"len({v}) == {len(promise.parts)}"
        elif promise.form == "keys":
            yield f"{v}.keys() == {self.constant(frozenset(promise.parts))}"
        elif promise.form == "fields":
            declared = declared_fields(promise.type)
            # Attributes may be added and removed.
            if not promise.is_open and (declared is None or len(declared) != len(promise.parts)):
                names = self.constant(lambda now: set(attributes_of(now, root=True) or ()))
                yield f"{names}({v}) == {self.constant(set(promise.parts))}"
        elif isinstance(promise.value, TensorFacts):
            yield from self._tensor_terms(promise, promise.value, v)
        else:
            yield f"{v} {'<=' if promise.bounded else '=='} {self.constant(promise.value)}"
        for key, part in promise.parts.items():
            yield from self.terms(part, self._part(promise.form, v, key))

    def _tensor_terms(self, promise: Promise, facts: TensorFacts, v: str) -> Iterator[str]:
        names = ("data_ptr() ==", "shape ==", "stride() ==", "dtype is", "device ==")
        for name, captured in zip(names, facts, strict=True):
            term = f"{v}.{name} {self.constant(captured)}"
            if promise.may_be_shorter and name == "shape ==":
                term = f"({term} or {self.constant(is_within)}({v}.shape, {self.constant(captured)}))"
            yield term

    def _part(self, form: Form | None, v: str, key: Hashable) -> str:
        if form != "fields":
            return f"{v}[{self.constant(key)}]"
        name = str(key)
        if name.isascii() and name.isidentifier() and not keyword.iskeyword(name):
            return f"{v}.{name}"
        return f"{self.constant(getattr)}({v}, {self.constant(key)})"


def _is_singleton(promise: Promise) -> bool:
    """Return whether ``promise`` is for a leaf that is compared by identity."""
    value = promise.value
    if promise.form is not None or promise.bounded or value is ANY or isinstance(value, TensorFacts):
        return False
    return not isinstance(value, BY_VALUE) or isinstance(value, (bool, enum.Enum))
