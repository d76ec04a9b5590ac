"""`Tasks`: kernels of a builder whose arguments an engine updates in the graph, as on an NPU.

Such a kernel takes lengths as a host list, and a graph keeps lists by value. So the engine uses what
``build()``
returns: for each replay it updates the recorded kernels, the tasks, with the metadata of the step. An update
may also give a task another tensor, such as a block table in new memory.

    def update_graph_params(graph, attn_metadata):
        for task in graph:
            metadata = attn_metadata[task.layer]
            task.update(seq_lens=metadata.seq_lens_list, block_table=metadata.block_tables)

    checked = Builders(make, read=read, tasks=Tasks(("seq_lens", "block_table"), update_graph_params))

An update gets an `UpdatableGraph`: the tasks of the graph that is replayed, in captured order. The tape
checks that each task is updated once for each replay, in that order; see `graphpact_tape.tasks`.

Does not: model the kernel; see `graphpact_adapters.kernel_reads`.
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
from graphpact_adapters.kernel_reads import Reads
from graphpact_adapters.read_leaves import field_name, leaves, with_leaves
from graphpact_kernels import define_kernel
from graphpact_tape.host_tensors import WeakTensor

__tracebackhide__ = True  # errors name the line of an author's update


class Update(Protocol):
    """An engine's update of a graph's tasks."""

    def __call__(self, graph: "UpdatableGraph", metadata: Any, /) -> None:
        """Update each task of ``graph`` once, in its order.

        Args:
            graph: The tasks of the graph that is replayed.
            metadata: The builders' metadata of the step, in the form that the adapter describes.
        """


@named_options
@dataclass(frozen=True)
class Tasks:
    """Which arguments of a builder's kernel an engine updates for each replay, and how.

    Args:
        arguments: Their names in the metadata; see `graphpact_adapters.kernel_reads.Part`. Numbers and tuples
            of numbers are updated by value. Device tensors are rebound: each update gives a new address.
        update: The engine's update. None to update each task with what the reader returns for the step's
            metadata.
        key: Returns the key of a captured shape's graph; two graphs with one key are an error. By default the
            shape.
    """

    arguments: tuple[str, ...]
    update: Update | None = None
    key: Callable[[GraphShape], Hashable] = lambda shape: shape

    def __post_init__(self) -> None:
        """Raise if no argument is named."""
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
        group: The KV-cache group of its layer.
        key: Its key in the driver.
        driver: The driver.
        paths: By argument name, the path of the leaf in the reads.
        captured: By argument name, the values of the capture.
    """

    layer: str
    group: int
    key: TaskKey
    driver: GraphDriver = field(repr=False)
    paths: Mapping[str, str] = field(repr=False)
    captured: Mapping[str, Any] = field(repr=False)
    _now: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # by path of the leaf

    def update(self, **arguments: Any) -> None:
        """Set all arguments of the next replay, by name.

        Raises:
            ReplayError: GP21: another task is next, or the arguments are not those of this kernel.
        """
        values, rebound = _by_kind(arguments, self.captured)
        self.driver.update_task(self.key, values, rebound=rebound)
        # A graph keeps numbers by value and tensors by address.
        self._now = {self.paths[name]: _kept(value) for name, value in arguments.items()}

    @property
    def now(self) -> dict[str, Any]:
        """The arguments of the last update that are still alive, by path of the leaf."""
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
            ReplayError: The number of mappings is neither one nor that of the tasks; see also
                `KernelTask.update`.
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
        tasks: The arguments to update, and how.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._graphs: dict[GraphShape, UpdatableGraph] = {}
        self._calls: dict[GraphShape, list[_Call]] = {}
        self._shape: GraphShape | None = None

    def begin(self, shape: GraphShape) -> None:
        """Begin the capture of a shape.

        Raises:
            CaptureError: The graph of another shape has the same key.
        """
        key = self._tasks.key(shape)
        for other, graph in self._graphs.items():
            if other != shape and graph.key == key:
                raise CaptureError(
                    f"the graphs of {other} and {shape} have one key, {key}: an update would find both",
                    hint="give each graph a unique key; a number of tokens is not unique if graphs differ in"
                    " requests or kind of step",
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
            ConfigError: A name in `Tasks.arguments` is not an argument of the kernel.
        """
        assert self._shape is not None  # noqa: S101  a capture is under way
        graph = self._graphs[self._shape]
        paths = paths_of(reads, self._tasks.arguments)
        call = _Call(reads, paths, layer, page_size)
        self._calls[self._shape].append(call)  # kept as long as the graph, whose operator looks it up
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
            metadata: The metadata of the step, for the engine's update.
            reads: What the reader returns for it, for each group.
        """
        graph = self._graphs[shape]
        if self._tasks.update is not None:
            self._tasks.update(graph, metadata)
            return
        for task in graph:
            found = dict(leaves(reads[task.group]))
            task.update(**{name: found[path] for name, path in task.paths.items()})

    def now(self, shape: GraphShape, reads: Sequence[Reads]) -> tuple[Reads, ...]:
        """Return the reads of a captured shape, with the current arguments of its tasks."""
        found = list(reads)
        for task in self._graphs.get(shape, ()):
            found[task.group] = with_leaves(found[task.group], task.now)
        return tuple(found)

    def updates(self, path: str, reads: Sequence[Reads]) -> bool:
        """Return whether a leaf, by its path in the reads of all groups, is an argument of tasks."""
        group, _, rest = path.removeprefix("reads[").partition("].")
        return rest in paths_of(reads[int(group)], self._tasks.arguments).values()


def paths_of(reads: Reads, names: Sequence[str]) -> dict[str, str]:
    """Return the path of the leaf for each argument of a kernel, by its name in the metadata.

    Raises:
        ConfigError: The kernel has no such argument, or its value is None.
    """
    there = {field_name(reads, path): path for path, value in leaves(reads) if value is not None}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"Tasks(arguments=...) has {', '.join(unknown)}, which is no argument of the kernel; its reads"
            f" have {', '.join(there)}",
            hint="give the names of fields that the reader returns, or their names in Part(names=...)",
        )
    return {name: there[name] for name in names}


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return WeakTensor(value)
    return tuple(value) if isinstance(value, list) else value


def _by_kind(
    arguments: Mapping[str, Any], like: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return arguments by their parameters, as values, or as tensors if ``like`` has tensors."""
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
    """What the operator of a task needs in addition to tensors and updated arguments.

    Args:
        reads: The reads of the capture.
        paths: By argument name, the path of the leaf of each updated argument.
        layer: The layer.
        page_size: KV slots in a page.

    Attributes:
        number: The number by which the operator finds it.
        arguments: By name, the values of the updated arguments at the capture.
        fixed: The other tensors, which the graph reads by their addresses. Empty after the recording.
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
        # Only host numbers are kept here; the graph keeps the tensors by address.
        self._template = with_leaves(reads, dict.fromkeys([*fixed, *paths.values()]))
        _CALLS[self.number] = self

    def forget(self) -> None:
        """Drop the tensors, which the graph holds."""
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
    """Attend with the reads of this replay."""
    found = _CALLS[call]
    layer = found.layer
    cache = _Cache({layer.cache_layer: k_cache}, {layer.cache_layer: v_cache})
    out.copy_(found.reads(fixed, updated).attend(q, k, v, layer, cache, found.page_size))


@functools.cache
def _operator(parameters: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """Return the operator for kernels with these updated arguments, each a name and a schema type."""
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
    """Return the name of an argument in a schema, where the point of ``decode.seq_lens`` is not allowed."""
    return re.sub(r"\W", "_", name)


_KINDS = {bool: "bool", int: "int", float: "float"}


def _kind(name: str, value: Any) -> str:
    """Return the type of an argument in a schema.

    Raises:
        ConfigError: The value is neither a number, nor a tuple of integers, nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    if isinstance(value, (tuple, list)) and all(type(each) is int for each in value):
        return "int[]"
    raise ConfigError(
        f"{name} is to be updated, but is {value!r} at the capture",
        hint="return a number, a tuple of integers or a tensor for it from the reader",
    )
