"""`Recorder`: runs every dispatched operation and keeps what a replay has to run again.

How a recorded operation is run again:

- a view is not run: the recorded view keeps pointing at the recorded storage;
- an operation that writes its arguments is run as it is;
- an operation that makes new tensors is run as its out-variant, into the recorded tensors, where its
  schema has one, and otherwise run and copied into the recorded tensors;
- an operation that only calls others (``linear``, ``reshape``) is recorded as those, so that a host read
  inside it is seen;
- an operation on host tensors alone is host work, which a replay does not repeat; a host number that
  a device operation takes is kept by value;
- a constant made while recording is restored before what follows it reads or overwrites it;
- uninitialised memory (``empty``) is not run: it is memory of the graph's pool.

Does not: replay, or hold the work to rules beyond those of recording; `graphpact_tape.strict` does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import ReplayError
from graphpact_tape.host import HostReadGuard, Line, Watcher, storage_id, tensors_of

Node: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A call that a replay makes."""

_aten = torch.ops.aten

# Memory without content: nothing to run.
_UNINITIALISED = frozenset(
    getattr(_aten, name)
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)

_RESIZES = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_})

# What an out-variant does not take because its output already has it.
_OUTPUT_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


class TracedCall(NamedTuple):
    """One dispatched operation, without the memory that it worked on.

    Args:
        op: Its name, with the overload.
        arguments: Its arguments, flattened: of a tensor dtype, shape and stride, of others the value.
        line: Where the caller's code asked for it.
    """

    op: str
    arguments: tuple[object, ...]
    line: str

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "TracedCall":
        """Return what is told of a call."""
        leaves = pytree.tree_leaves((args, kwargs))
        told = tuple(
            (str(leaf.dtype), tuple(leaf.shape), leaf.stride())
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        )
        return cls(str(func), told, str(Line()))


class Recorder(Watcher):
    """Keeps the operations of one region as nodes.

    Args:
        guard: The function mode that stands beside it; it knows which tensors are the host's.

    Attributes:
        nodes: What a replay runs, in order; eager calls among them.
        num_segments: One more than the eager calls.
        allocated: The storages that the region allocated, by identity.
        results: The storages that its eager calls returned.
        touched: The tensors of the nodes, some of which hide them in a closure.
        trace: Every operation that was dispatched, views too; None where nobody asked.
    """

    def __init__(self, guard: HostReadGuard, *, traced: bool = False) -> None:
        super().__init__(guard)
        self.trace: list[TracedCall] | None = [] if traced else None
        self.nodes: list[Any] = []
        self.num_segments = 1
        self.touched: list[torch.Tensor] = []
        # Held until the end, so that no later storage is taken for one that was freed.
        self.allocated: dict[int, torch.UntypedStorage] = {}
        self.results: dict[int, torch.UntypedStorage] = {}

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and keep what runs it again."""
        if self.trace is not None:
            self.trace.append(TracedCall.of(func, args, kwargs))
        if torch.Tag.inplace_view in func.tags:
            return self._reshape(func, args, kwargs)
        # Containers are copied, so that a list changed later is not the one that was recorded, and
        # host numbers are kept by value.
        args, kwargs = pytree.tree_map(self.kept, (args, kwargs))
        result = func(*args, **kwargs)
        if func.overloadpacket in _UNINITIALISED:
            self.allocates(tensors_of(result))
        else:
            self._record(func, args, kwargs, result)
        return result

    def eager_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run ``fn(*args)`` outside the graph, and begin another segment after it."""
        self.guard.paused = True
        try:
            result = fn(*args)
        finally:
            self.guard.paused = False
        known = {storage_id(t) for t in tensors_of(args)}
        self.results.update(
            (storage_id(t), t.untyped_storage())
            for t in tensors_of(result)
            if storage_id(t) not in known
        )
        self.add_call(EagerCall(fn, args, result))
        return result

    # -- what a strict recorder does otherwise ---------------------------------------------------

    def kept(self, leaf: Any) -> Any:
        """Return the leaf of an argument as the graph keeps it: host numbers by value."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() or leaf not in self.host:
            return leaf
        value = leaf.clone()
        self.allocates([value])
        return value

    def add(
        self, node: Node, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Keep a node.

        Args:
            node: The call.
            func: The operation that it stands for.
            given: The tensors of the call that it was not the one to make.
            made: The tensors that it made.
        """
        del func
        self.touched += given + made
        self.nodes.append(node)

    def replaced(self, node: Any, tensor: torch.Tensor, by: torch.Tensor) -> Any:
        """Return ``node`` with another tensor where it had ``tensor``."""
        return pytree.tree_map(lambda leaf: replaced(leaf, tensor, by), node)

    def add_call(self, call: "EagerCall") -> None:
        """Keep an eager call between two segments."""
        self.nodes.append((call, (), {}))
        self.num_segments += 1

    def allocates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` as the graph's."""
        self.allocated.update((storage_id(t), t.untyped_storage()) for t in tensors)

    # -- inside ----------------------------------------------------------------------------------

    def _reshape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the shape of a tensor in place: of one that the region made, and once for all."""
        tensor = args[0]
        if func.overloadpacket in _RESIZES or storage_id(tensor) not in self.allocated:
            raise self.guard.refusal(
                f"{func} changes a tensor's shape in place",
                "use the variant that returns a view: the recorded tensor keeps its shape",
            )
        before = tensor.as_strided(tensor.shape, tensor.stride())
        self.nodes[:] = [self.replaced(node, tensor, before) for node in self.nodes]
        return func(*args, **kwargs)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if func is _aten.lift_fresh.default:
            # A constant of the host, which later operations may overwrite: restored in every replay.
            kept = result.clone()
            self.allocates([result, kept])
            restore = _aten.copy_.default._op  # noqa: SLF001
            self.add((restore, (result, kept), {}), func, [kept], [result])
            return
        given, outputs = tensors_of((args, kwargs)), tensors_of(result)
        inputs = {storage_id(t) for t in given}
        fresh = [storage_id(t) not in inputs for t in outputs]
        if not (any(fresh) or func._schema.is_mutable):  # noqa: SLF001
            return  # a view, or no tensor at all
        made = [t for t, is_fresh in zip(outputs, fresh, strict=True) if is_fresh]
        self.allocates(made)
        self.add(make_node(func, args, kwargs, outputs, fresh), func, given, made)


def make_node(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    fresh: list[bool],
) -> Node:
    """Return what runs ``func`` again, into the tensors that it made."""
    writes_arguments = func._schema.is_mutable  # noqa: SLF001
    if writes_arguments and not any(fresh):
        return func._op, args, kwargs  # noqa: SLF001  without a Python layer
    variant = None if writes_arguments or not all(fresh) else _out_variant(func)
    if variant is None or len(variant[1]) != len(outputs):
        return _run_and_copy(func, args, kwargs, outputs, fresh)
    overload, names = variant
    taken = {a.name for a in overload._schema.arguments}  # noqa: SLF001
    kept = {name: value for name, value in kwargs.items() if name in taken}
    into = dict(zip(names, outputs, strict=True))
    return overload._op, args, {**kept, **into}  # noqa: SLF001


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """Return the overload that writes ``func``'s results into given tensors, and their names."""
    wanted = {a.name: str(a.type) for a in func._schema.arguments}  # noqa: SLF001  no public way
    bare = {n: t for n, t in wanted.items() if n not in _OUTPUT_OPTIONS}
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs: list[str] = []
        rest: dict[str, str] = {}
        for a in candidate._schema.arguments:  # noqa: SLF001
            if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write:
                if str(a.type) != "Tensor":
                    break  # a list of outputs is run and copied
                outs.append(a.name)
            else:
                rest[a.name] = str(a.type)
        if len(outs) == len(func._schema.returns) and outs and rest in (wanted, bare):  # noqa: SLF001
            return candidate, outs
    return None


def _run_and_copy(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    fresh: list[bool],
) -> Node:
    """Return a node that runs ``func`` and copies its new tensors into the recorded ones."""
    return RunAndCopy(func._op, outputs, fresh), args, kwargs  # noqa: SLF001  as above


@dataclass(frozen=True, slots=True)
class RunAndCopy:
    """Runs an operation again, and copies those of its results that are ``fresh`` to ``outputs``."""

    op: Callable[..., Any]
    outputs: list[torch.Tensor]
    fresh: list[bool]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run it on these arguments."""
        results = tensors_of(self.op(*args, **kwargs))
        for target, new, is_fresh in zip(self.outputs, results, self.fresh, strict=True):
            if is_fresh:
                target.copy_(new)


def replaced(leaf: Any, tensor: torch.Tensor, by: torch.Tensor) -> Any:
    """Return the leaf of a node, with another tensor where it is, or holds, ``tensor``, the very one."""
    if isinstance(leaf, RunAndCopy):
        return replace(leaf, outputs=[by if t is tensor else t for t in leaf.outputs])
    return by if leaf is tensor else leaf


class EagerCall:
    """A call that a replay makes eagerly, between two segments.

    Args:
        fn: What is called.
        args: With what; tensors among them lie where the segments leave them.
        result: What it returned at capture; the next segment reads its tensors there.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        self._fn = fn
        self._args = args
        self.result = result
        self._leaves, self._spec = pytree.tree_flatten(result)

    def __call__(self) -> None:
        """Call again, and copy what it returns to where the recorded work reads it.

        Raises:
            ReplayError: It returned another structure, or a tensor of another shape or dtype.
        """
        leaves, spec = pytree.tree_flatten(self._fn(*self._args))
        if spec != self._spec:
            raise self._other(f"a result of the form {self._spec}", spec)
        for target, new in zip(self._leaves, leaves, strict=True):
            if _describe(new) != _describe(target):
                raise self._other(_describe(target), _describe(new))
            if not isinstance(target, torch.Tensor):
                continue
            if new.data_ptr() != target.data_ptr() or new.stride() != target.stride():
                target.copy_(new)

    def _other(self, captured: object, now: object) -> ReplayError:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return ReplayError(
            f"the eager call {name} between two segments returned {captured} at capture and {now} now",
            hint="the next segment was recorded with the captured one: return the same shapes, padded",
            rule="GP07",
        )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)
