"""The decorator of promises."""

from collections.abc import Callable
from typing import TypeAlias

from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import Requirement
from graphpact_conformance.drivers.driver_requirement import DriverRequirement

Check: TypeAlias = Callable[[GraphDriver], None]


def promise_decorator(
    checks: dict[str, DriverRequirement],
) -> Callable[[str | None, str, str], Callable[[Check], Check]]:
    """Return a decorator that adds a function to ``checks``; its docstring is the promise.

    The decorator takes ``rule``, ``at`` and ``fix`` of the `Requirement`.

    Args:
        checks: The promises by name, in order.
    """

    def promise(rule: str | None, at: str, fix: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            name, sentence = check.__name__, " ".join((check.__doc__ or "").split())
            checks[name] = Requirement(name, sentence, rule, at, fix, lambda make: check(make()))
            return check

        return add

    return promise
