"""The acts as checks of strict drivers: faults under CUDA must be visible, and legal work must be repeated.

A strict driver may refuse more acts than CUDA. If it does not refuse an act, its results must be those of
CUDA, or must visibly differ from those of eager execution.

Does not: perform an act (see `acts`), or check drivers without a strict mode.
"""

import tomllib
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, TypeAlias

import torch

from graphpact.errors import CaptureError
from graphpact.graphs import DeclaredMemory
from graphpact.plugin_calls import describe_error
from graphpact_conformance.contracts.requirement import Requirement, expect_equal, require
from graphpact_conformance.drivers.acts import ACTS, ActMemory, lines_of_act
from graphpact_conformance.drivers.driver_requirement import DriverRequirement, Make

ActOutcome: TypeAlias = Literal["refused", "same", "shows", "hidden"]
"""The outcome of an act: an error, the results of CUDA, results that differ from eager, or a hidden fault."""

ROWS: dict[str, dict[str, str]] = {
    row["id"]: row
    for row in tomllib.loads(
        resources.files("graphpact_conformance.drivers").joinpath("graph_acts.toml").read_text("utf-8")
    )["act"]
}
"""The rows of ``graph_acts.toml`` by their ids."""

ALLOWED: dict[str, frozenset[ActOutcome]] = {
    "fails": frozenset({"refused"}),
    "wrong result": frozenset({"refused", "shows", "same"}),  # same: the wrong result of CUDA
    "undefined": frozenset({"refused", "shows"}),
    "frozen": frozenset({"same", "refused"}),
    "legal": frozenset({"same", "refused"}),
}
"""The outcomes that are allowed for a strict driver, by the verdict of CUDA."""

_REQUIRED = {
    "fails": ("refuses it", "raise `CaptureError` or `ReplayError`, and name the line in the message"),
    "wrong result": (
        "refuses it, or gives other results than eager execution",
        "raise `CaptureError` or `ReplayError`, or poison the memory that is read too late or too early",
    ),
    "undefined": (
        "refuses it, or gives other results than eager execution",
        "raise `CaptureError` or `ReplayError`, or poison the memory before each replay",
    ),
    "frozen": (
        "gives the results of CUDA graphs, or refuses it",
        "record operations with copies of their host numbers, and run no Python of the region in a replay",
    ),
    "legal": (
        "gives the results of eager execution, or refuses it",
        "repeat the recorded operations on the recorded memory",
    ),
}


_SAID: dict[ActOutcome, str] = {
    "refused": "refused",
    "same": "accepted, with the results of CUDA graphs",
    "shows": "accepted, with other results",
    "hidden": "accepted, and the fault stays hidden",
}


@dataclass(frozen=True, slots=True)
class Performed:
    """The outcome of an act, with its evidence.

    Args:
        outcome: See `ActOutcome`.
        evidence: A text with the error or the results.
        error: The error of a refused act.
    """

    outcome: ActOutcome
    evidence: str
    error: Exception | None = None


def cuda_verdict(row: dict[str, str]) -> str:
    """Return the verdict of CUDA on the act of a row: fails, wrong result, undefined, frozen or legal."""
    return row["cuda"].removeprefix("Not documented: ").partition(":")[0]


def perform(name: str, memory: ActMemory) -> Performed:
    """Perform an act on the driver of ``memory``, and return its outcome.

    Raises:
        Exception: The act raised an error of a type that is not allowed for a refusal.
    """
    try:
        seen = ACTS[name].perform(memory)
    except ACTS[name].error as error:
        return Performed("refused", describe_error(error), error)
    cuda = seen.eager if seen.cuda is None else seen.cuda
    answers = f"replays gave {seen.replayed}, eager execution {seen.eager or 'no result'}"
    is_legal = cuda_verdict(ROWS[name]) == "legal"
    if _same(seen.replayed, cuda) and _same(cuda, seen.eager) == is_legal:
        return Performed("same", answers)
    hidden = not seen.eager or any(map(_same, seen.replayed, seen.eager))
    return Performed("hidden" if hidden else "shows", answers)


def require_line(name: str, error: Exception) -> None:
    """Raise `AssertionError` unless the error names a line of the act and contains a help text."""
    text = str(error)
    is_named = any(f"{file}:{number}: " in text for file, number in lines_of_act(name))
    require(f"a message with the line of the act and a help text: {text}", is_named and "help: " in text)


def require_capture(memory: ActMemory) -> None:
    """Raise `AssertionError` unless the driver can still capture and replay after it refused an act."""
    x = torch.ones(2, device=memory.device)
    memory.driver.declare(DeclaredMemory())
    graph = memory.driver.capture(lambda: x + 1)
    graph.replay()
    expect_equal(graph.outputs.tolist(), [2, 2])


def _same(a: Any, b: Any) -> bool:
    """Return whether two trees of values are equal bit for bit and contain no empty list."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return bool(a) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _judge(name: str, make: Make) -> None:
    """Raise `AssertionError` unless the act has an outcome that its verdict allows."""
    memory = ActMemory(make)
    done = perform(name, memory)
    if done.outcome not in ALLOWED[cuda_verdict(ROWS[name])]:
        raise AssertionError(f"{_SAID[done.outcome]}: {done.evidence}")
    if done.error is None:
        return
    if ACTS[name].line and isinstance(done.error, CaptureError) and memory.device.type == "cpu":
        require_line(name, done.error)  # only on a CPU: errors of a GPU's runtime do not name a line
    require_capture(memory)


_OF_FREED_MEMORY = (
    "refer to memory that the graph does not own weakly, and raise `ReplayError` at a replay if it is gone or"
    " has moved: a strong reference in graph or driver keeps it alive, and hides the fault"
)
_FIXES = dict.fromkeys(
    ("input_freed", "input_freed_checked", "input_set", "autocast_cache", "workspace_grown"), _OF_FREED_MEMORY
)
"""Acts with advice of their own."""


def _check(name: str) -> DriverRequirement:
    row = ROWS[name]
    required, fix = _REQUIRED[cuda_verdict(row)]
    return Requirement(
        name=name,
        sentence=f"A strict driver {required}: {row['act']}. CUDA graphs: {row['cuda']}.",
        rule=row["rule"],
        at="a strict driver",
        fix=_FIXES.get(name, fix),
        perform=partial(_judge, name),
    )


CHECKS: dict[str, DriverRequirement] = {name: _check(name) for name in ACTS}
"""A check for each act, by name."""
