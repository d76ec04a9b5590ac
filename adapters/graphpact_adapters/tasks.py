"""`Tasks`: kernels of a builder whose arguments an engine updates in the graph, as on an NPU.

Such a kernel takes lengths as a list of the host, and a graph keeps lists by value. So an engine does not
drop what ``build()`` returns: for each replay it updates the recorded kernels, or tasks, with the metadata of
the step. A task may be given another tensor too, such as a block table in new memory.

    def update_graph_params(graph, attn_metadata):
        for task in graph:
            metadata = attn_metadata[task.layer]
            task.update(seq_lens=metadata.seq_lens_list, block_table=metadata.block_tables)

    checked = Builders(make, read=read, tasks=Tasks(("seq_lens", "block_table"), update_graph_params))

`UpdatableGraph` is what an update gets: the tasks of the graph that is replayed, in captured order. The tape
checks them, see `graphpact_tape.tasks`: each is updated once for each replay, in that order.

Does not: model the kernel; its reads do, see `graphpact_adapters.kernel_reads`.
"""

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphpact.attention import KVBuffers, LayerSpec
from graphpact.errors import CaptureError, ConfigError, ReplayError, named_options
from graphpact.graphs import GraphDriver, Line, TaskKey
from graphpact.shapes import GraphShape
from graphpact_adapters.kernel_reads import Reads, field_name, leaves, with_leaves
from graphpact_kernels import define_kernel
from graphpact_tape.host import WeakTensor

__tracebackhide__ = True  # errors name the line of an author's update


class Update(Protocol):
    """An engine's update of a graph's tasks."""

    def __call__(self, graph: "UpdatableGraph", metadata: Any, /) -> None:
        """Update each task of ``graph`` once, in its order.

        Args:
            graph: The tasks of the graph that is replayed.
            metadata: What the builders made for the step: see the adapter.
        """


@named_options
@dataclass(frozen=True)
class Tasks:
    """Which arguments of a builder's kernel an engine updates for each replay, and how.

    Args:
        arguments: Their names, as in the metadata: see `graphpact_adapters.kernel_reads.Part`. Numbers and
            tuples of numbers are updated by value; device tensors are rebound, so each update gives an
            address.
        update: The engine's update; None to update each task with what the reader takes of the step's
            metadata, as a provider of parameters does.
        key: The key of a captured shape's graph; two graphs of one key are an error. By default the shape.
    """

    arguments: tuple[str, ...]
    update: Update | None = None
    key: Callable[[GraphShape], Hashable] = lambda shape: shape

    def __post_init__(self) -> None:
        """Refuse tasks without an argument that is updated."""
        if not self.arguments:
            raise ConfigError(
                "Tasks(arguments=()): no argument is updated",
                hint="name the arguments that the engine updates, or leave tasks out",
            )


@dataclass
class KernelTask:
    """A recorded kernel.

    Args:
        layer: The name of its layer.
        group: What its layer's reads belong to: the KV-cache group.
        key: Its key in the driver.
        driver: The driver.
        paths: The leaf of the reads of each argument, by name.
        captured: The arguments of the capture, by name.
    """

    layer: str
    group: int
    key: TaskKey
    driver: GraphDriver = field(repr=False)
    paths: Mapping[str, str] = field(repr=False)
    captured: Mapping[str, Any] = field(repr=False)
    _now: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # by the leaf

    def update(self, **arguments: Any) -> None:
        """Give the arguments of the next replay, all of them, by name.

        Raises:
            ReplayError: GP21: it is not the turn of this task, or the arguments are not those of its kernel.
        """
        values, rebound = _by_kind(arguments, self.captured)
        self.driver.update_task(self.key, values, rebound=rebound)
        # As in a graph: numbers by value, memory by its address.
        self._now = {self.paths[name]: _kept(value) for name, value in arguments.items()}

    @property
    def now(self) -> dict[str, Any]:
        """The arguments of the last update that are still there, by the leaf of the reads."""
        found = {path: v.revive() if isinstance(v, WeakTensor) else v for path, v in self._now.items()}
        return {path: value for path, value in found.items() if value is not None}


class UpdatableGraph(Sequence[KernelTask]):
    """The tasks of one graph, in captured order.

    Args:
        key: The key of the graph.
    """

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._tasks: list[KernelTask] = []

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"UpdatableGraph({self.key}: {', '.join(task.layer for task in self)})"

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Update all tasks as ``torch.npu.NPUGraph.update`` does.

        Args:
            cpu_update_input: Arguments by name: one mapping for all tasks, or one for each, in order.

        Raises:
            ReplayError: There are as many mappings as neither; see `KernelTask.update` too.
        """
        given = [*cpu_update_input] * (len(self) if len(cpu_update_input) == 1 else 1)
        if len(given) != len(self):
            raise ReplayError(
                f"{self!r} is updated with {len(given)} mappings, at {Line()}; it has {len(self)} tasks",
                hint="give one mapping for all tasks, or one for each, in captured order",
                rule="GP21",
            )
        for task, arguments in zip(self, given, strict=True):
            task.update(**arguments)

    def record(self, task: KernelTask) -> None:
        """Add the next task of the capture."""
        self._tasks.append(task)


class TaskRecorder:
    """Records the kernels of a backend as tasks, and updates them.

    Args:
        tasks: What is updated, and how.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._graphs: dict[GraphShape, UpdatableGraph] = {}
        self._calls: dict[GraphShape, list[_Call]] = {}
        self._shape: GraphShape | None = None

    def begin(self, shape: GraphShape) -> None:
        """Begin the capture of a shape.

        Raises:
            CaptureError: The graph of another shape has its key.
        """
        key = self._tasks.key(shape)
        for other, graph in self._graphs.items():
            if other != shape and graph.key == key:
                raise CaptureError(
                    f"the graphs of {other} and {shape} have one key, {key}: an update finds both",
                    hint="give each graph a key of its own: a count of tokens is that of several graphs, if"
                    " they differ in requests or kind of step",
                    rule="GP21",
                )
        self._shape = shape
        self._graphs[shape], self._calls[shape] = UpdatableGraph(key), []

    def attend(
        self,
        driver: GraphDriver,
        name: str,
        group: int,
        reads: Reads,
        tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Record the kernel of a layer as a task, and return its output.

        Raises:
            ConfigError: An argument that is to be updated is none of the kernel's.
        """
        assert self._shape is not None  # noqa: S101  a capture is under way
        graph = self._graphs[self._shape]
        paths = paths_of(reads, self._tasks.arguments)
        call = _Call(reads, paths, layer, page_size)
        self._calls[self._shape].append(call)  # the operator finds it as long as the graph is there
        q = tensors[0]
        out = q.new_zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        values, rebound = _by_kind(call.arguments, call.arguments)
        caches = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        key = TaskKey(graph.key, name)
        args = (*tensors, *caches, call.fixed, call.number, out)
        driver.task(key, _operator(_parameters(call.arguments)), args, values, rebound=rebound)
        graph.record(KernelTask(name, group, key, driver, paths, call.arguments))
        call.forget()
        return out

    def update(self, shape: GraphShape, metadata: Any, reads: Sequence[Reads]) -> None:
        """Update the tasks of a shape's graph.

        Args:
            shape: The shape that is replayed.
            metadata: What an engine's update gets of the step.
            reads: What the reader takes of it, for each group.
        """
        graph = self._graphs[shape]
        if self._tasks.update is not None:
            self._tasks.update(graph, metadata)
            return
        for task in graph:
            found = dict(leaves(reads[task.group]))
            task.update(**{name: found[path] for name, path in task.paths.items()})

    def now(self, shape: GraphShape, reads: Sequence[Reads]) -> tuple[Reads, ...]:
        """Return the reads of a captured shape with the arguments of its tasks as they are now."""
        found = list(reads)
        for task in self._graphs.get(shape, ()):
            found[task.group] = with_leaves(found[task.group], task.now)
        return tuple(found)

    def updates(self, path: str, reads: Sequence[Reads]) -> bool:
        """Return whether a leaf, by its path in the reads of all groups, is an argument of tasks."""
        group, _, rest = path.removeprefix("reads[").partition("].")
        return rest in paths_of(reads[int(group)], self._tasks.arguments).values()


def paths_of(reads: Reads, names: Sequence[str]) -> dict[str, str]:
    """Return the leaf of each argument of a kernel, by the name that its metadata has for it.

    Raises:
        ConfigError: The kernel has no such argument, or it is None.
    """
    there = {field_name(reads, path): path for path, value in leaves(reads) if value is not None}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"Tasks(arguments=...) has {', '.join(unknown)}, which is no argument of the kernel; its reads"
            f" have {', '.join(there)}",
            hint="name what the reader returns: a field of its parts, or the name that Part(names=...) gives"
            " it",
        )
    return {name: there[name] for name in names}


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return WeakTensor(value)
    return tuple(value) if isinstance(value, list) else value


def _by_kind(
    arguments: Mapping[str, Any], like: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return arguments by their parameters: those by value, and tensors where ``like`` has tensors."""
    values: dict[str, Any] = {}
    rebound: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        where = rebound if isinstance(like.get(name), torch.Tensor) else values
        where[_parameter(name)] = value
    return values, rebound


# -- the operator of a task ------------------------------------------------------------------------------


@dataclass
class _Cache:
    """The cache of one layer."""

    k: Any
    v: Any


class _Call:
    """What the operator of a task needs beside tensors and updated arguments.

    Args:
        reads: The reads of the capture.
        paths: The leaf of each updated argument, by name.
        layer: The layer.
        page_size: Slots of a page.

    Attributes:
        number: By which the operator finds it.
        arguments: The updated arguments of the capture, by name.
        fixed: The other tensors, which the graph reads by their addresses; none once it is recorded.
    """

    def __init__(self, reads: Reads, paths: Mapping[str, str], layer: LayerSpec, page_size: int) -> None:
        self.number = next(_NUMBERS)
        self.layer, self.page_size = layer, page_size
        found = dict(leaves(reads))
        self.arguments = {name: found[path] for name, path in paths.items()}
        self._paths = {_parameter(name): path for name, path in paths.items()}
        others = {path: value for path, value in found.items() if path not in paths.values()}
        fixed = {path: value for path, value in others.items() if isinstance(value, torch.Tensor)}
        self.fixed = list(fixed.values())
        self._fixed_paths = list(fixed)
        # It has host numbers alone: a graph keeps those, and memory by its address.
        self._template = with_leaves(reads, dict.fromkeys([*fixed, *paths.values()]))
        _CALLS[self.number] = self

    def forget(self) -> None:
        """Drop the tensors: the graph has them."""
        self.fixed = []

    def reads(self, fixed: Sequence[torch.Tensor], updated: Mapping[str, Any]) -> Reads:
        """Return the reads of a replay."""
        values: dict[str, Any] = dict(zip(self._fixed_paths, fixed, strict=True))
        for name, value in updated.items():
            values[self._paths[name]] = tuple(value) if isinstance(value, list) else value
        found: Reads = with_leaves(self._template, values)
        return found


_NUMBERS = itertools.count()
_CALLS: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()


def _run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    fixed: Sequence[torch.Tensor],
    call: int,
    out: torch.Tensor,
    **updated: Any,
) -> None:
    """Attend, with the reads of this replay."""
    found = _CALLS[call]
    layer = found.layer
    cache = _Cache({layer.cache_layer: k_cache}, {layer.cache_layer: v_cache})
    out.copy_(found.reads(fixed, updated).attend(q, k, v, layer, cache, found.page_size))


@functools.cache
def _operator(parameters: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """Return the operator of kernels with some updated arguments, each a name and its type."""
    updated = "".join(f", {kind} {name}" for name, kind in parameters)
    return define_kernel(
        f"attend_task_{next(_NUMBERS)}(Tensor q, Tensor? k, Tensor? v, Tensor(a!) k_cache,"
        f" Tensor(b!) v_cache, Tensor[] fixed, int call, Tensor(c!) out, *{updated}) -> ()",
        _run,
        namespace="graphpact_adapters",
    )


def _parameters(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((_parameter(name), _kind(name, value)) for name, value in arguments.items())


def _parameter(name: str) -> str:
    """Return the name of an argument as a schema may have it: ``decode.seq_lens`` has a point."""
    return re.sub(r"\W", "_", name)


_KINDS = {bool: "bool", int: "int", float: "float"}


def _kind(name: str, value: Any) -> str:
    """Return the type of an argument in a schema.

    Raises:
        ConfigError: It is no number, no tuple of integers and no tensor.
    """
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    if isinstance(value, (tuple, list)) and all(type(each) is int for each in value):
        return "int[]"
    raise ConfigError(
        f"{name} is updated, and is {value!r} at the capture",
        hint="return a number, a tuple of integers or a tensor for it from the reader",
    )
