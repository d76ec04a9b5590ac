"""`TaskTable`: the tasks of one driver's graphs, by their keys.

It accepts updates, and launches replays. In strict mode it refuses a replay unless each task was updated
once, in captured order, by work that the replay waits for. In fast mode a task that was not updated keeps its
arguments, as on a device.

A graph may wait for updates before its tasks. Its replay may then be launched before the updates, and runs
when the last update comes. If an update never came, a device would wait forever; here an error is raised when
something needs the replay.

Does not: run a task; see `graphpact_tape.tasks`.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from graphpact.errors import ReplayError
from graphpact.graphs.driver import NONE_REBOUND, Event, Stream, TaskKey
from graphpact.graphs.lines import Line
from graphpact_tape.tasks import RULE, Point, RecordedTask, _forms, by_value

__tracebackhide__ = True


class Streams(Protocol):
    """The streams of a strict driver."""

    @property
    def current(self) -> Stream:
        """The stream to which new work of this thread goes."""

    def event(self) -> Event:
        """Return a new event."""

    def point(self, what: str) -> Point:
        """Submit work that uses no memory to the current stream, and return it."""

    def comes_after(self, point: Point) -> bool:
        """Return whether the current stream's next work waits for ``point``."""


class GraphTasks:
    """The tasks of one graph.

    Attributes:
        graph: The key of the graph.
        tasks: The tasks by layer, in captured order.
        waits: Whether the graph waits for any update.
        updated: The layers that were updated since the last replay; in fast mode only tasks that wait.
        preparation: The number of the preparation in which a task was last updated.
        replayed: The last replay; None before the first replay, and in fast mode.
        table: The table that contains the tasks; None if the graph belongs to no driver.
        taken_by: The line at which a later graph took over the key; None while this graph has the key.
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
        """Return the task that must be updated next; None if all tasks are updated."""
        return next((task for layer, task in self.tasks.items() if layer not in self.updated), None)

    def still_waits(self) -> bool:
        """Return whether some task that waits was not updated yet."""
        return self.waits and any(
            task.waits and layer not in self.updated for layer, task in self.tasks.items()
        )

    def missed(self) -> RecordedTask | None:
        """Return the first task that was not updated although it must be before a launch, or None."""
        late = (task for layer, task in self.tasks.items() if layer not in self.updated)
        return next((task for task in late if not task.waits), None)

    def rebound(self) -> list[torch.Tensor]:
        """Return the rebound tensors of the next replay; raise `ReplayError` if one was freed or moved."""
        return [each.revive() for task in self.tasks.values() for each in task.held.values()]


class _Launch(NamedTuple):
    """A replay that was launched and waits for updates."""

    graph: GraphTasks
    run: Callable[[], None]
    stream: Stream | None
    point: Point | None


class TaskTable:
    """The tasks of one driver's graphs, by their keys.

    Args:
        streams: Orders updates and replays in a strict driver. It is None in fast mode, which checks only
            keys and names of arguments.

    Attributes:
        preparation: The number of the current preparation. A step may be prepared without being launched, so
            a graph that was not replayed may be updated again in a later preparation.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = streams
        self._graphs: weakref.WeakValueDictionary[Hashable, GraphTasks] = weakref.WeakValueDictionary()
        self._launched: _Launch | None = None  # the launched replay that waits for updates
        self._launched_at: Line | None = None
        self._lock = threading.RLock()  # one thread may update while another one launches
        self.preparation = 0

    def add(self, tasks: GraphTasks | None) -> None:
        """Register the tasks of a new graph, if it has any, under their keys while the graph exists."""
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
        """Set the arguments of a task for the next replay, or for a launched one that waits for them.

        Raises:
            ReplayError: There is no such task, or it has other arguments. In strict mode also if another task
                must be updated first, or if a replay may still read the arguments.
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
            f"{key.layer!r} of {key.graph} is not a task, at {Line()}; {which}:"
            f" {', '.join(map(str, known)) or 'none'}",
            hint=(
                "use the key that task() got at the capture, with the graph that is replayed next and the "
                "layer"
            ),
            rule=RULE,
        )

    def _required_form(
        self, task: RecordedTask, updated: Mapping[str, Any], rebound: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return copies of host arguments; refuse other names, and in strict mode other forms."""
        try:
            values = {name: by_value(value) for name, value in updated.items()}
            is_strict = self._streams is not None
            forms = _forms(values, rebound) if is_strict or rebound else {}
        except TypeError as error:
            raise ReplayError(
                f"{task.name} is updated at {Line()}: a {error}",
                hint="pass host numbers, lists of them, or host tensors; pass device tensors in rebound",
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
                hint=(
                    "give each task the arguments of its layer, with the names and lengths of the capture, "
                    "and rebind the same arguments as there"
                ),
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
        """Replay a graph now, or when the last update comes for which it waits.

        Args:
            graph: The tasks of the graph; None if there are none.
            submit: Orders the replay after earlier work.
            run: Does the work of the replay.

        Raises:
            ReplayError: A task was not updated, the replay does not wait for its update, a later graph has
                the same key, or an earlier replay still waits.
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
        """Check that every task of a graph was updated for its replay, except tasks that wait.

        Raises:
            ReplayError: A task was not updated, the replay does not wait for an update, or a later graph has
                the key.
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

    @property
    def may_wait(self) -> bool:
        """Whether some graph has a task that waits for its update."""
        return any(graph.waits for graph in self._graphs.values())

    def waiting(self) -> tuple[RecordedTask, Line | None] | None:
        """Return the next task for whose update a launched replay waits, and the launch's line; or None.

        None also if the current stream does not wait for that replay, as a side stream.
        """
        with self._lock:
            launch, streams = self._launched, self._streams
            if launch is None:
                return None
            if streams is not None and launch.point is not None and not streams.comes_after(launch.point):
                return None
            graph = launch.graph
            late = (task for layer, task in graph.tasks.items() if layer not in graph.updated)
            return next(task for task in late if task.waits), self._launched_at

    def forget(self) -> None:
        """Discard a launched replay that still waits, after an error."""
        with self._lock:
            launch, self._launched = self._launched, None
            if launch is not None:
                launch.graph.updated.clear()

    def settle(self, clock: Mapping[int, int] | None = None) -> None:
        """Raise `ReplayError` if a launched replay still waits for an update, and discard that replay.

        Args:
            clock: The work that is waited for, by stream; None for all. A launch after this work may still
            wait.
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
            hint=(
                "call driver.update_task() for every task right after the launch; if a thread does this, "
                "join it before using the outputs or the driver"
            ),
            rule=RULE,
        )

    def _finish(self, launch: _Launch) -> None:
        """Run a launched replay after all its updates have come."""
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
        """Return a context after which, if an error is raised, all tasks of a graph may be updated again."""
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
        hint=(
            "give each graph a different key, such as its shape: several graphs may have the same count of "
            "tokens, if they differ in requests or kind of step; release a graph before it is captured again"
        ),
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
        hint=(
            "call driver.update_task() for every task of the graph that is replayed next, with that graph's "
            "key, in init_metadata_replay or wherever the replay is prepared"
        ),
        rule=RULE,
    )


def _require_after(streams: Streams, graph: GraphTasks, task: RecordedTask) -> None:
    """Refuse an update that does not wait for the last replay."""
    if graph.replayed is not None and not streams.comes_after(graph.replayed):
        raise _in_use(f"{task.name} is updated", graph.replayed, "reads", f"an update of {task.name} writes")


def _require_awaited(streams: Streams, graph: GraphTasks) -> None:
    """Refuse a replay that waits neither for the work of an update nor for its event."""
    for task in graph.tasks.values():
        if task.updated_at is not None and not task.waits and not streams.comes_after(task.updated_at):
            what = f"a task of {graph.graph} is replayed"
            raise _in_use(what, task.updated_at, "writes", f"a replay of {graph.graph} reads")


def _in_use(what: str, earlier: Point, how: str, later: str) -> ReplayError:
    return ReplayError(
        f"{what}, and its arguments are in use: {earlier.what} {how} them at {earlier.line}, and {later} them"
        f" at {Line()}",
        hint=(
            "make the stream of updates wait for the previous replay, and the next replay wait for that "
            "stream"
        ),
        rule=RULE,
    )


def _show(values: Mapping[str, Any], rebound: Mapping[str, str]) -> str:
    shown = (f"{n}={v.tolist() if isinstance(v, torch.Tensor) else v}" for n, v in values.items())
    return ", ".join([*shown, *(f"{n}={form}" for n, form in rebound.items())]) or "no arguments"
