"""Recorded operators whose arguments are updated for each replay: `RecordedTask`.

Recorders and replays treat a task as an operator.

Does not: know when a task may be updated, see `graphpact_tape.task_table`; or know the correct arguments of a
step, whose outputs the conformance suite compares.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch._library.custom_ops import CustomOpDef

from graphpact.graphs.driver import Event, TaskKey
from graphpact.graphs.lines import Line

__tracebackhide__ = True

RULE = "GP21"
"""The rule that wrong use of tasks breaks."""

_NUMBERS = (bool, int, float)


class Held(Protocol):
    """A weak reference to a device tensor that a task reads by its address."""

    def revive(self) -> torch.Tensor:
        """Return the tensor; raise `ReplayError` if its memory was freed or moved."""


Hold: TypeAlias = Callable[[str, torch.Tensor], Held]
"""A function ``(what, tensor) -> Held`` for rebound tensors of a strict tape; ``what`` names one in
messages.
"""


class RecordedTask:
    """A recorded operator, called as ``task(*args)``. Its other arguments come from the last update.

    It has those attributes of its operator that recorders and nodes read.

    Args:
        key: The name of the task.
        op: A torch operator that returns no new memory.
        updated: The arguments that updates replace by value. They are copied.
        rebound: The device tensors that updates replace by address.
        line: The caller's line.
        waits: Whether a replay waits for the update.
        hold: Makes weak references to rebound tensors; None to keep the tensors alive.

    Attributes:
        captured: The updated arguments at capture.
        forms: A description of the form of each updated and rebound argument.
        arguments: The arguments of the next replay, including rebound tensors unless they are in ``held``.
        held: Weak references to rebound tensors.
        updated_at: The work of the last update; None before the first update, and in fast mode.
        event: Marks the last update of a task that waits.

    Raises:
        TypeError: ``op`` is not such an operator, lacks an argument, or an argument has a wrong type.
    """

    def __init__(
        self,
        key: TaskKey,
        op: Any,
        updated: Mapping[str, Any],
        rebound: Mapping[str, torch.Tensor],
        line: Line,
        *,
        waits: bool = False,
        hold: Hold | None = None,
    ) -> None:
        op = op._opoverload if isinstance(op, CustomOpDef) else op  # noqa: SLF001  no public way
        if not isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
            raise TypeError(f"{op!r} is not a torch operator")
        self._schema: Any = op._schema  # noqa: SLF001  no public way
        if any(each.alias_info is None or not each.alias_info.is_write for each in self._schema.returns):
            raise TypeError(f"{op} returns new memory")
        named = {each.name: each for each in self._schema.arguments}
        if unknown := (updated.keys() | rebound.keys()) - named.keys():
            raise TypeError(f"{op} has no argument {', '.join(sorted(unknown))}")
        if both := updated.keys() & rebound.keys():
            raise TypeError(f"{', '.join(sorted(both))} of {op} cannot be both updated and rebound")
        if written := [name for name in rebound if (info := named[name].alias_info) and info.is_write]:
            raise TypeError(f"{op} writes {', '.join(written)}, which cannot be rebound")
        self.key, self.operator, self.line, self.waits = key, op, line, waits
        self.tags, self.overloadpacket = op.tags, op.overloadpacket
        self.captured = {name: by_value(value) for name, value in updated.items()}
        self.forms = _forms(self.captured, rebound)
        self.arguments: dict[str, Any] = {**self.captured, **rebound}  # kept alive while the task is recorded
        self.held: dict[str, Held] = {}
        self.updated_at: Point | None = None
        self.event: Event | None = None
        self._hold = hold
        self._op: Callable[..., Any] = self.__call__

    def __call__(self, *args: Any) -> Any:
        """Run the operator."""
        rebound = {name: each.revive() for name, each in self.held.items()} if self.held else {}
        return self.operator(*args, **self.arguments, **rebound)

    def __str__(self) -> str:
        return f"a task of {self.operator}"

    @property
    def name(self) -> str:
        """The key and operator of the task, for messages."""
        return f"task {self.key.layer!r} of {self.key.graph} ({self.operator})"

    def was_recorded(self) -> None:
        """Store the rebound tensors of the capture in the same way as those of updates."""
        rebound = {name: value for name, value in self.arguments.items() if name not in self.captured}
        self.take(self.captured, rebound)

    def take(self, values: dict[str, Any], rebound: Mapping[str, torch.Tensor]) -> None:
        """Set the arguments of the next replay: ``values`` by value, ``rebound`` by address."""
        if not rebound:
            self.arguments = values
        elif self._hold is None:
            self.arguments = {**values, **{name: tensor.detach() for name, tensor in rebound.items()}}
        else:
            self.arguments = values
            hold = self._hold
            self.held = {name: hold(f"{name} of {self.name}", tensor) for name, tensor in rebound.items()}


def operator_of(func: Any) -> Any:
    """Return the operator of a recorded call: the operator of a task, otherwise ``func``."""
    return func.operator if isinstance(func, RecordedTask) else func


def by_value(value: Any) -> Any:
    """Return a copy of a host argument: a number, a list or tuple of numbers, or a host tensor.

    Raises:
        TypeError: ``value`` has another type.
    """
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, _NUMBERS) for each in value):
        return type(value)(value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.detach().clone()
    raise TypeError(f"{type(value).__name__} is not a host number, a list of host numbers, or a host tensor")


def form_of(value: Any) -> str:
    """Return a description of the form of a host argument: its type and length."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"{len(value)} numbers" if isinstance(value, (list, tuple)) else "a number"


def _forms(values: Mapping[str, Any], rebound: Mapping[str, Any]) -> dict[str, str]:
    """Return the forms of arguments. They leave out the size of rebound tensors, which may change."""
    forms = {name: form_of(value) for name, value in values.items()}
    for name, tensor in rebound.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is rebound to a {type(tensor).__name__}, which is not a tensor")
        forms[name] = f"a tensor of {tensor.dtype} with {tensor.dim()} axes on {tensor.device.type}"
    return forms


class Point(NamedTuple):
    """A piece of work of a stream.

    Args:
        stream: The number of the stream.
        place: Its number in the stream.
        what: Description of the work.
        line: The caller's line.
    """

    stream: int
    place: int
    what: str
    line: Line
