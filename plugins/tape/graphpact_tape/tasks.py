"""Tasks: recorded operators whose arguments are updated for each replay.

`RecordedTask` is the recorded call, an operator to the recorder and to replays. `TaskTable` has the tasks of
one driver's graphs, finds them by their keys, takes updates, and launches replays. In strict mode it refuses
a replay unless each of its tasks was updated once, in captured order, by work that the replay waits for. In
fast mode a task that was not updated keeps its arguments, as on a device.

A graph may wait for updates in front of its tasks. Its replay is then launched before they came, and runs
when the last one comes. One that never comes would block a device for good: what needs the replay raises.

Does not: know the correct arguments of a step; the conformance suite compares outputs.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch._library.custom_ops import CustomOpDef

from graphpact.errors import ReplayError
from graphpact.graphs.driver import NONE_REBOUND, Event, Stream, TaskKey
from graphpact.graphs.lines import Line

__tracebackhide__ = True

RULE = "GP21"
"""The rule that wrong use of tasks breaks."""

_NUMBERS = (bool, int, float)


class Held(Protocol):
    """A device tensor that a task reads by its address, held weakly."""

    def revive(self) -> torch.Tensor:
        """Return the tensor; raise `ReplayError` if its memory was freed or moved."""


Hold: TypeAlias = Callable[[str, torch.Tensor], Held]
"""``(what, tensor)``: holds a rebound tensor of a strict tape; ``what`` names it in messages."""


class RecordedTask:
    """A recorded operator, called as ``task(*args)``: its other arguments are those of the last update.

    It has the attributes of its operator that recorders and nodes read.

    Args:
        key: Its name.
        op: A torch operator that returns no new memory.
        updated: The arguments that updates replace by value; copied.
        rebound: The device tensors whose address updates replace.
        line: The caller's line.
        waits: Whether a replay waits for the update.
        hold: How to hold rebound tensors; None to keep them alive.

    Attributes:
        captured: The updated arguments of the capture.
        forms: The form of each updated and rebound argument, in words.
        arguments: The arguments of the next replay; rebound tensors too, unless they are held weakly.
        held: Rebound tensors that are held weakly.
        updated_at: The work of the last update; None before, and in fast mode.
        event: Marks the last update of a task that waits.

    Raises:
        TypeError: ``op`` is no such operator, lacks an argument, or an argument is none of these.
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
            raise TypeError(f"{op!r} is no torch operator")
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
        self.arguments: dict[str, Any] = {**self.captured, **rebound}  # kept alive while it is recorded
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
        """Its key and operator, for messages."""
        return f"task {self.key.layer!r} of {self.key.graph} ({self.operator})"

    def was_recorded(self) -> None:
        """Hold the rebound tensors of the capture as those of updates are held."""
        rebound = {name: value for name, value in self.arguments.items() if name not in self.captured}
        self.take(self.captured, rebound)

    def take(self, values: dict[str, Any], rebound: Mapping[str, torch.Tensor]) -> None:
        """Use arguments in the next replay; ``values`` belong to the task, of ``rebound`` the memory."""
        if not rebound:
            self.arguments = values
        elif self._hold is None:
            self.arguments = {**values, **{name: tensor.detach() for name, tensor in rebound.items()}}
        else:
            self.arguments = values
            hold = self._hold
            self.held = {name: hold(f"{name} of {self.name}", tensor) for name, tensor in rebound.items()}


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


def _forms(values: Mapping[str, Any], rebound: Mapping[str, Any]) -> dict[str, str]:
    """Return the forms of arguments. A rebound tensor may have another size: kernels take its shape."""
    forms = {name: form_of(value) for name, value in values.items()}
    for name, tensor in rebound.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is rebound to a {type(tensor).__name__}, which is no tensor")
        forms[name] = f"a tensor of {tensor.dtype} with {tensor.dim()} axes on {tensor.device.type}"
    return forms


class Point(NamedTuple):
    """A piece of work of a stream.

    Args:
        stream: The number of the stream.
        place: Its number in the stream.
        what: What it is, in words.
        line: The caller's line.
    """

    stream: int
    place: int
    what: str
    line: Line


class Streams(Protocol):
    """The streams of a strict driver."""

    @property
    def current(self) -> Stream:
        """The stream that new work of this thread goes to."""

    def event(self) -> Event:
        """Return a new event."""

    def point(self, what: str) -> Point:
        """Give the current stream work that uses no memory, and return it."""

    def comes_after(self, point: Point) -> bool:
        """Return whether the current stream's next work waits for a piece of work."""


class GraphTasks:
    """The tasks of one graph.

    Attributes:
        graph: The key of the graph.
        tasks: The tasks by layer, in captured order.
        waits: Whether the graph waits for any update.
        updated: The layers that were updated since the last replay. In fast mode only those that wait.
        preparation: The number of the preparation in which one was updated last.
        replayed: The last replay; None before, and in fast mode.
        table: The table that has them; None for a graph of no driver.
        taken_by: Where a later graph took the key; None while the key is this graph's own.
    """

    def __init__(self, tasks: list[RecordedTask]) -> None:
        self.graph = tasks[0].key.graph
        self.tasks = {task.key.layer: task for task in tasks}
        self.waits = any(task.waits for task in tasks)
        self.updated: set[Hashable] = set()
        self.preparation = 0
        self.replayed: Point | None = None
        self.table: TaskTable | None = None
        self.taken_by: Line | None = None

    def due(self) -> RecordedTask | None:
        """Return the task that is to be updated next; None if all of them are updated."""
        return next((task for layer, task in self.tasks.items() if layer not in self.updated), None)

    def still_waits(self) -> bool:
        """Return whether a task that waits was not updated yet."""
        return self.waits and any(
            task.waits and layer not in self.updated for layer, task in self.tasks.items()
        )

    def missed(self) -> RecordedTask | None:
        """Return the first task that had to be updated before a launch, and was not."""
        late = (task for layer, task in self.tasks.items() if layer not in self.updated)
        return next((task for task in late if not task.waits), None)

    def rebound(self) -> list[torch.Tensor]:
        """Return the rebound tensors of the next replay; raise `ReplayError` if one is gone."""
        return [each.revive() for task in self.tasks.values() for each in task.held.values()]


class _Launch(NamedTuple):
    """A replay that was launched, and waits for updates."""

    graph: GraphTasks
    run: Callable[[], None]
    stream: Stream | None
    point: Point | None


class TaskTable:
    """The tasks of one driver's graphs, by their keys.

    Args:
        streams: Orders updates and replays in a strict driver. None in fast mode, where only keys and names
            of arguments are checked.

    Attributes:
        preparation: The number of the current preparation. In a later one a graph may be updated again that
            was not replayed: a step may be prepared and not launched.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = streams
        self._graphs: weakref.WeakValueDictionary[Hashable, GraphTasks] = weakref.WeakValueDictionary()
        self._launched: _Launch | None = None  # that which waits for updates
        self._launched_at: Line | None = None
        self._lock = threading.RLock()  # a thread may update while another one launches
        self.preparation = 0

    def add(self, tasks: GraphTasks | None) -> None:
        """Find the tasks of a new graph, if it has any, by their keys, as long as the graph keeps them."""
        if tasks is None:
            return
        earlier = self._graphs.get(tasks.graph)
        if earlier is not None:
            earlier.taken_by = next(iter(tasks.tasks.values())).line
        self._graphs[tasks.graph] = tasks
        tasks.table = self

    # -- updates ---------------------------------------------------------------------------------

    def update(
        self,
        key: TaskKey,
        updated: Mapping[str, Any],
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,
    ) -> None:
        """Give a task the arguments of the next replay, or of the one that waits for them.

        Raises:
            ReplayError: There is no such task, or it has other arguments; in strict mode also if another task
                is to be updated now, or a replay may still read the arguments.
        """
        with self._lock:
            graph, task = self._find(key)
            values = self._required_form(task, updated, rebound)
            if self._streams is not None:
                self._require_turn(graph, task)
                _require_after(self._streams, graph, task)
                task.updated_at = self._streams.point(f"an update of {task.name}")
                graph.preparation = self.preparation
                if task.waits:
                    task.event = self._streams.event()
                    task.event.record()
            task.take(values, rebound)
            if task.waits or self._streams is not None:
                graph.updated.add(key.layer)
            launch = self._launched
            if launch is not None and launch.graph is graph and not graph.still_waits():
                self._launched = None
                self._finish(launch)

    def _find(self, key: TaskKey) -> tuple[GraphTasks, RecordedTask]:
        graph = self._graphs.get(key.graph)
        if graph is not None and key.layer in graph.tasks:
            return graph, graph.tasks[key.layer]
        known = self._graphs.keys() if graph is None else graph.tasks.keys()
        which = "the graphs with tasks" if graph is None else "the tasks of this graph"
        raise ReplayError(
            f"{key.layer!r} of {key.graph} is no task, at {Line()}; {which}:"
            f" {', '.join(map(str, known)) or 'none'}",
            hint="update by the key that task() got at the capture: that of the graph which is replayed"
            " next, and of the layer",
            rule=RULE,
        )

    def _required_form(
        self, task: RecordedTask, updated: Mapping[str, Any], rebound: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return copies of host arguments; refuse other names, and in strict mode another form."""
        try:
            values = {name: by_value(value) for name, value in updated.items()}
            is_strict = self._streams is not None
            forms = _forms(values, rebound) if is_strict or rebound else {}
        except TypeError as error:
            raise ReplayError(
                f"{task.name} is updated at {Line()}: a {error}",
                hint="pass host numbers, lists of them, or host tensors; device tensors in rebound",
                rule=RULE,
            ) from error
        same = task.captured.keys() == values.keys()
        same = same and task.forms.keys() - values.keys() == rebound.keys()
        if is_strict:
            same = same and task.forms == forms
        if not same:
            of_capture = {n: form for n, form in task.forms.items() if n not in task.captured}
            given = {n: form for n, form in forms.items() if n not in values}
            raise ReplayError(
                f"{task.name}, recorded at {task.line} with {_show(task.captured, of_capture)}, is updated at"
                f" {Line()} with {_show(values, given)}",
                hint="give each task the arguments of its own layer: of the names and lengths of the capture,"
                " and as rebound what was rebound there",
                rule=RULE,
            )
        return values

    def _require_turn(self, graph: GraphTasks, task: RecordedTask) -> None:
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
            f"{task.name} is updated {how} since the last replay, at {Line()}: {turn}; captured order:"
            f" {', '.join(map(repr, graph.tasks))}",
            hint="for each replay update every task of its graph once, in the order of the capture",
            rule=RULE,
        )

    # -- replays ---------------------------------------------------------------------------------

    def launch(self, graph: GraphTasks | None, submit: Callable[[], None], run: Callable[[], None]) -> None:
        """Replay a graph: now, or when the last update comes that it waits for.

        Args:
            graph: Its tasks; None without any.
            submit: Orders the replay after earlier work.
            run: Does its work.

        Raises:
            ReplayError: A task was not updated, the replay does not wait for its update, its key is that of a
                later graph, or an earlier replay still waits.
        """
        with self._lock:
            self.settle()
            with self._cleared_on_error(graph):
                self.begin_replay(graph)
                submit()
            if graph is None:
                run()
                return
            if self._streams is None:
                stream = point = None
            else:
                stream, point = self._streams.current, self._streams.point(f"a replay of {graph.graph}")
            launch = _Launch(graph, run, stream, point)
            if graph.still_waits():
                self._launched, self._launched_at = launch, Line()
            else:
                self._finish(launch)

    def begin_replay(self, graph: GraphTasks | None) -> None:
        """Check that every task of a graph was updated for its replay, but those that it waits for.

        Raises:
            ReplayError: One was not, the replay does not wait for its update, or a later graph has the key.
        """
        others = [g for g in self._graphs.values() if g is not graph and g.updated]
        try:
            if graph is not None:
                _require_own_key(graph)
                if self._streams is not None:
                    _require_updated(graph, others)
                    _require_awaited(self._streams, graph)
        finally:
            for each in others:
                each.updated.clear()

    def settle(self, clock: Mapping[int, int] | None = None) -> None:
        """Raise if a replay was launched and still waits for an update; forget it then.

        Args:
            clock: The work that is waited for, by stream, if not all: a launch after it may go on waiting.
        """
        with self._lock:
            launch = self._launched
            if launch is None:
                return
            point = launch.point
            if clock is not None and point is not None and clock.get(point.stream, 0) < point.place:
                return
            graph, self._launched = launch.graph, None
            late = (task for layer, task in graph.tasks.items() if layer not in graph.updated)
            task = next(task for task in late if task.waits)
            done = len(graph.updated)
            graph.updated.clear()
        raise ReplayError(
            f"{task.name}, recorded at {task.line}, was not updated for the replay that was launched at"
            f" {self._launched_at} and waits for it: a device would wait forever; {done} of the graph's"
            f" {len(graph.tasks)} tasks were updated",
            hint="call driver.update_task() for every task right after the launch; join a thread that does so"
            " before the outputs are used, or the driver is",
            rule=RULE,
        )

    def _finish(self, launch: _Launch) -> None:
        """Run a launched replay, whose updates have come."""
        graph, stream = launch.graph, launch.stream
        with contextlib.nullcontext() if stream is None else stream, self._cleared_on_error(graph):
            if stream is not None:
                for task in graph.tasks.values():
                    if task.event is not None:
                        stream.wait_event(task.event)
            launch.run()
        graph.replayed = launch.point
        graph.updated.clear()

    @contextlib.contextmanager
    def _cleared_on_error(self, graph: GraphTasks | None) -> Iterator[None]:
        """Return a context that lets a graph be updated anew after an error."""
        try:
            yield
        except BaseException:
            if graph is not None:
                graph.updated.clear()
            raise


def _require_own_key(graph: GraphTasks) -> None:
    if graph.taken_by is None:
        return
    first = next(iter(graph.tasks.values()))
    raise ReplayError(
        f"{first.name}, recorded at {first.line}, cannot be updated: a graph that was captured later has the"
        f" same key, {graph.graph}, at {graph.taken_by}",
        hint="give each graph a key of its own, such as its shape: a count of tokens is that of several"
        " graphs, if they differ in requests or kind of step; release a graph that is captured again",
        rule=RULE,
    )


def _require_updated(graph: GraphTasks, others: list[GraphTasks]) -> None:
    task = graph.missed()
    if task is None:
        return
    instead = f"; tasks of {', '.join(str(g.graph) for g in others)} were updated instead" if others else ""
    given = {name: form for name, form in task.forms.items() if name not in task.captured}
    values = {name: task.arguments[name] for name in task.captured}
    raise ReplayError(
        f"{task.name}, recorded at {task.line}, was not updated before this replay and keeps"
        f" {_show(values, given)}; {len(graph.updated)} of the graph's {len(graph.tasks)} tasks were"
        f" updated{instead}",
        hint="call driver.update_task() for every task of the graph that is replayed next, under the graph's"
        " own key, in init_metadata_replay or wherever the replay is prepared",
        rule=RULE,
    )


def _require_after(streams: Streams, graph: GraphTasks, task: RecordedTask) -> None:
    """Refuse an update that does not wait for the last replay."""
    if graph.replayed is not None and not streams.comes_after(graph.replayed):
        raise _in_use(f"{task.name} is updated", graph.replayed, "reads", f"an update of {task.name} writes")


def _require_awaited(streams: Streams, graph: GraphTasks) -> None:
    """Refuse a replay that waits neither for an update nor for its event."""
    for task in graph.tasks.values():
        if task.updated_at is not None and not task.waits and not streams.comes_after(task.updated_at):
            what = f"a task of {graph.graph} is replayed"
            raise _in_use(what, task.updated_at, "writes", f"a replay of {graph.graph} reads")


def _in_use(what: str, earlier: Point, how: str, later: str) -> ReplayError:
    return ReplayError(
        f"{what}, and its arguments are in use: {earlier.what} {how} them at {earlier.line}, and {later} them"
        f" at {Line()}",
        hint="let the stream of updates wait for the replay before, and the next replay for that stream",
        rule=RULE,
    )


def _show(values: Mapping[str, Any], rebound: Mapping[str, str]) -> str:
    shown = (f"{n}={v.tolist() if isinstance(v, torch.Tensor) else v}" for n, v in values.items())
    return ", ".join([*shown, *(f"{n}={form}" for n, form in rebound.items())]) or "no arguments"
