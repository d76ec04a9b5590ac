"""Tasks: recorded operators whose host arguments are updated before each replay.

`RecordedTask` is the recorded call, an operator to the recorder and to replays. `TaskTable` has the tasks of
one driver's graphs, finds them by their keys, and takes updates. In strict mode it refuses a replay unless
each of its tasks was updated once, in captured order, by work that the replay waits for. In fast mode a task
that was not updated keeps its arguments, as on a device.

Does not: know the correct arguments of a step; the conformance suite compares outputs.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch._library.custom_ops import CustomOpDef

from graphpact.errors import ContractError, ReplayError
from graphpact.graphs.driver import TaskKey
from graphpact.graphs.lines import Line

__tracebackhide__ = True

RULE = "GP21"
"""The rule that wrong use of tasks breaks."""

_NUMBERS = (bool, int, float)


class RecordedTask:
    """A recorded operator, called as ``task(*args)``: its other arguments are those of the last update.

    It has the attributes of its operator that recorders and nodes read.

    Args:
        key: Its name.
        op: A torch operator that returns no new memory.
        arguments: The host arguments of the capture; copied.
        line: The caller's line.

    Raises:
        TypeError: ``op`` is no such operator, lacks an argument, or an argument is no host argument.
    """

    def __init__(self, key: TaskKey, op: Any, arguments: Mapping[str, Any], line: Line) -> None:
        op = op._opoverload if isinstance(op, CustomOpDef) else op  # noqa: SLF001  no public way
        if not isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
            raise TypeError(f"{op!r} is no torch operator")
        self._schema: Any = op._schema  # noqa: SLF001  no public way
        if any(each.alias_info is None or not each.alias_info.is_write for each in self._schema.returns):
            raise TypeError(f"{op} returns new memory")
        unknown = arguments.keys() - {each.name for each in self._schema.arguments}
        if unknown:
            raise TypeError(f"{op} has no argument {', '.join(sorted(unknown))}")
        self.key, self.operator, self.line = key, op, line
        self.tags, self.overloadpacket = op.tags, op.overloadpacket
        self.captured = {name: by_value(value) for name, value in arguments.items()}
        """The host arguments of the capture."""
        self.arguments: dict[str, Any] = self.captured
        """The host arguments of the next replay."""
        self._op: Callable[..., Any] = self.__call__

    def __call__(self, *args: Any) -> Any:
        """Run the operator."""
        return self.operator(*args, **self.arguments)

    def __str__(self) -> str:
        return f"a task of {self.operator}"

    @property
    def name(self) -> str:
        """Its key and operator, for messages."""
        return f"task {self.key.layer!r} of {self.key.graph} ({self.operator})"


def operator_of(func: Any) -> Any:
    """Return the operator of a recorded call: of a task its own, else ``func``."""
    return func.operator if isinstance(func, RecordedTask) else func


def by_value(value: Any) -> Any:
    """Return a copy of a host argument: a number, a list or tuple of numbers, or a host tensor.

    Raises:
        TypeError: It is none of them.
    """
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, _NUMBERS) for each in value):
        return type(value)(value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.detach().clone()
    raise TypeError(f"{type(value).__name__} is no host number, no list of them and no host tensor")


def form_of(value: Any) -> str:
    """Return the form of a host argument in words: its type and length."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"{len(value)} numbers" if isinstance(value, (list, tuple)) else "a number"


class GraphTasks:
    """The tasks of one graph.

    Attributes:
        graph: The key of the graph.
        tasks: The tasks by layer, in captured order.
        updated: The layers that were updated since the last replay.
        preparation: The number of the preparation in which one was updated last.
        memory: Stands for the arguments: memory that updates write and replays read.
    """

    def __init__(self, tasks: list[RecordedTask]) -> None:
        self.graph = tasks[0].key.graph
        self.tasks = {task.key.layer: task for task in tasks}
        self.updated: set[Hashable] = set()
        self.preparation = 0
        self.memory = torch.zeros(1)

    def due(self) -> RecordedTask | None:
        """Return the task that is to be updated next; None if all of them are updated."""
        return next((task for layer, task in self.tasks.items() if layer not in self.updated), None)


Work: TypeAlias = Callable[[str, Iterable[torch.Tensor], Iterable[torch.Tensor]], None]
"""``(what, read, written)``: gives the current stream work, or raises for a missing wait."""


class TaskTable:
    """The tasks of one driver's graphs, by their keys.

    Args:
        work: Orders updates and replays among the streams of a strict driver. None in fast mode, where only
            keys and names of arguments are checked.

    Attributes:
        preparation: The number of the current preparation. In a later one a graph may be updated again that
            was not replayed: a step may be prepared and not launched.
    """

    def __init__(self, work: Work | None = None) -> None:
        self._work = work
        self._graphs: weakref.WeakValueDictionary[Hashable, GraphTasks] = weakref.WeakValueDictionary()
        self.preparation = 0

    def add(self, tasks: GraphTasks | None) -> None:
        """Find the tasks of a new graph, if it has any, by their keys, as long as the graph keeps them."""
        if tasks is not None:
            self._graphs[tasks.graph] = tasks

    def update(self, key: TaskKey, arguments: Mapping[str, Any]) -> None:
        """Give a task the host arguments of the next replay.

        Raises:
            ReplayError: There is no such task, or it has other arguments; in strict mode also if another task
                is to be updated now, or a replay may still read the arguments.
        """
        line = Line()
        graph = self._graphs.get(key.graph)
        if graph is None or key.layer not in graph.tasks:
            known = self._graphs.keys() if graph is None else graph.tasks.keys()
            which = "the graphs with tasks" if graph is None else "the tasks of this graph"
            raise ReplayError(
                f"{key.layer!r} of {key.graph} is no task, at {line}; {which}:"
                f" {', '.join(map(str, known)) or 'none'}",
                hint="update by the key that task() got at the capture: that of the graph which is replayed"
                " next, and of the layer",
                rule=RULE,
            )
        task = graph.tasks[key.layer]
        given = self._required_form(task, arguments, line)
        if self._work is not None:
            self._require_turn(graph, task, line)
            with _a_missing_wait_is(f"{task.name} is updated"):
                self._work(f"an update of {task.name}", (), (graph.memory,))
            graph.updated.add(key.layer)
            graph.preparation = self.preparation
        task.arguments = given

    def _required_form(self, task: RecordedTask, arguments: Mapping[str, Any], line: Line) -> dict[str, Any]:
        """Return copies of the arguments; refuse other names, and in strict mode another form."""
        mine = task.captured
        try:
            given = {name: by_value(value) for name, value in arguments.items()}
        except TypeError as error:
            raise ReplayError(
                f"{task.name} is updated at {line}: a {error}",
                hint="pass host numbers, lists of them, or host tensors",
                rule=RULE,
            ) from error
        same = mine.keys() == given.keys()
        if self._work is not None:
            same = same and all(form_of(given[name]) == form_of(value) for name, value in mine.items())
        if not same:
            raise ReplayError(
                f"{task.name}, recorded at {task.line} with {_show(mine)}, is updated at {line} with"
                f" {_show(given)}",
                hint="give each task the arguments of its own layer: of the names and lengths of the capture",
                rule=RULE,
            )
        return given

    def _require_turn(self, graph: GraphTasks, task: RecordedTask, line: Line) -> None:
        """Refuse an update that is not the next one in captured order."""
        first = next(iter(graph.tasks.values()))
        if task is first and graph.preparation != self.preparation:
            graph.updated.clear()
        due = graph.due()
        if task is due:
            return
        how = "for the second time" if task.key.layer in graph.updated else "before its turn"
        turn = "every task is updated already" if due is None else f"the next one is {due.key.layer!r}"
        raise ReplayError(
            f"{task.name} is updated {how} since the last replay, at {line}: {turn}; captured order:"
            f" {', '.join(map(repr, graph.tasks))}",
            hint="before each replay update every task of its graph once, in the order of the capture",
            rule=RULE,
        )

    def begin_replay(self, graph: GraphTasks | None) -> None:
        """Check that every task of a graph was updated for its replay; all tasks need new updates then.

        Raises:
            ReplayError: One was not, or the replay does not wait for its update.
        """
        others = [g for g in self._graphs.values() if g is not graph and g.updated]
        try:
            if graph is not None and self._work is not None:
                _require_updated(graph, others)
                with _a_missing_wait_is(f"a task of {graph.graph} is replayed"):
                    self._work(f"a replay of {graph.graph}", (graph.memory,), ())
        finally:
            for each in (*others, *([] if graph is None else [graph])):
                each.updated.clear()


def _require_updated(graph: GraphTasks, others: list[GraphTasks]) -> None:
    task = graph.due()
    if task is None:
        return
    instead = f"; tasks of {', '.join(str(g.graph) for g in others)} were updated instead" if others else ""
    raise ReplayError(
        f"{task.name}, recorded at {task.line}, was not updated before this replay and keeps"
        f" {_show(task.arguments)}; {len(graph.updated)} of the graph's {len(graph.tasks)} tasks were"
        f" updated{instead}",
        hint="call driver.update_task() for every task of the graph that is replayed next, under the graph's"
        " own key, in init_metadata_replay or wherever the replay is prepared",
        rule=RULE,
    )


@contextlib.contextmanager
def _a_missing_wait_is(what: str) -> Iterator[None]:
    """Return a context in which a missing wait between streams is a fault of tasks; ``what`` happens."""
    try:
        yield
    except ContractError as error:
        raise type(error)(
            f"{what}, and its arguments are in use: {error.message.partition(': ')[2]}",
            hint="let the stream of updates wait for the replay before, and the next replay for that stream",
            rule=RULE,
        ) from error


def _show(arguments: Mapping[str, Any]) -> str:
    parts = (f"{n}={v.tolist() if isinstance(v, torch.Tensor) else v}" for n, v in arguments.items())
    return ", ".join(parts) or "no host arguments"
