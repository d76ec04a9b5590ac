"""The ``tape`` driver: the semantics of CUDA graphs on any device that runs eager torch, CPUs above all.

While recording, every dispatched operation is kept with its tensors by identity and its numbers by
value. A replay runs those operations, in order, on those tensors, and none of the Python between them.
So a tape forgets what a CUDA graph forgets: a new tensor, a changed host number, a branch not taken.

How a recorded operation is run again:

- a view is not run: the recorded view keeps pointing at the recorded storage;
- an operation that writes its arguments is run as it is;
- an operation that makes new tensors is run as its out-variant, into the recorded tensors, where its
  schema has one, and otherwise run and copied into the recorded tensors;
- an operation that only calls others (``linear``, ``reshape``) is recorded as those, so that a host read
  inside it is seen;
- a constant made while recording is restored before what follows it reads or overwrites it;
- uninitialised memory (``empty``) is not run: it is memory of the graph's pool.

Does not: poison memory or order side streams; this is the fast mode.
"""

import traceback
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs.driver import Graph, GraphDriver

_Node: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# These read a tensor's memory on the host without passing the dispatcher.
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})

# These pass the dispatcher, but torch does not tag them: bool(tensor), and a split by a tensor.
_UNTAGGED_READS = frozenset(
    {
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.tensor_split.tensor_indices_or_sections,
    }
)

# Memory without content: nothing to run.
_UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  no public name

# What an out-variant does not take because its output already has it.
_OUTPUT_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  the storage's identity


def _where() -> str:
    """Return file, line and text of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/graphpact/graphs/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"


def _reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` needs a tensor's contents on the host: for a number or for a shape."""
    if func is torch.ops.aten.index.Tensor:  # of unknown length only where a mask picks the rows
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return (
        torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or func in _UNTAGGED_READS
    )


def _is_composite(func: Any) -> bool:
    """Return whether ``func`` only calls other operations; outside autograd it arrives undivided."""
    return not func._schema.is_mutable and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
        func.name(), _COMPOSITE
    )


def _host_read(what: str) -> CaptureError:
    return CaptureError(
        f"{what} reads a tensor on the host while a graph is recorded, at {_where()}",
        hint="a graph replays device work only: keep the value in a tensor, or pass a host number"
        " that is fixed for the shape",
    )


class _HostReadGuard(TorchFunctionMode):
    """Refuses the host reads that never reach the dispatcher."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS:
            raise _host_read(f"Tensor.{func.__name__}()")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs every dispatched operation and keeps what a replay has to run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.nodes: list[_Node] = []
        self._touched: list[torch.Tensor] = []  # by the nodes, some of which hide them in a closure
        # Held until the end, so that no later storage is taken for one that was freed.
        self._allocated: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_on_host(func, args, kwargs):
            raise _host_read(str(func))
        if func is torch.ops.aten.detach_.default:
            return func(*args, **kwargs)  # how torch.tensor() ends; nothing to run again
        if torch.Tag.inplace_view in func.tags:
            raise CaptureError(
                f"{func} changes a tensor's shape in place while a graph is recorded, at {_where()}",
                hint="use the variant that returns a view: the recorded tensor keeps its shape",
            )
        if _is_composite(func):
            # What it is made of is recorded: each part is seen, and most have an out-variant.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # noqa: SLF001
        # Containers are copied, so that a list changed later is not the one that was recorded.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        result = func(*args, **kwargs)
        if func.overloadpacket in _UNINITIALISED:
            self._allocates(_tensors(result))
        else:
            self._record(func, args, kwargs, result)
        return result

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            # A constant of the host, which later operations may overwrite: restored in every replay.
            kept = result.clone()
            self._allocates([result, kept])
            self._touched += result, kept
            restore = torch.ops.aten.copy_.default._op  # noqa: SLF001
            self.nodes.append((restore, (result, kept), {}))
            return
        given, outputs = _tensors((args, kwargs)), _tensors(result)
        inputs = {_storage(t) for t in given}
        fresh = [_storage(t) not in inputs for t in outputs]
        if not (any(fresh) or func._schema.is_mutable):  # noqa: SLF001
            return  # a view, or no tensor at all
        self._allocates(t for t, is_fresh in zip(outputs, fresh, strict=True) if is_fresh)
        self._touched += given + outputs
        self.nodes.append(_node(func, args, kwargs, outputs, fresh))

    def _allocates(self, tensors: Iterable[torch.Tensor]) -> None:
        self._allocated.update((_storage(t), t.untyped_storage()) for t in tensors)

    def memory(self, returned: Any) -> tuple[int, list[torch.Tensor]]:
        """Return the bytes that the nodes and what was ``returned`` keep, and the tensors of others."""
        pool: dict[int, int] = {}
        external: dict[tuple[Any, ...], torch.Tensor] = {}
        for t in [*self._touched, *_tensors(returned)]:
            storage = self._allocated.get(_storage(t))
            if storage is not None:
                pool[_storage(t)] = storage.nbytes()
            elif t.numel():
                external[t.device, t.data_ptr(), t.shape, t.stride(), t.dtype] = t
        return sum(pool.values()), list(external.values())


def _node(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    fresh: list[bool],
) -> _Node:
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


def _run_and_copy(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    fresh: list[bool],
) -> _Node:
    """Return a node that runs ``func`` and copies its new tensors into the recorded ones."""
    op = func._op  # noqa: SLF001

    def node(*args: Any, **kwargs: Any) -> None:
        for target, new, is_fresh in zip(
            outputs, _tensors(op(*args, **kwargs)), fresh, strict=True
        ):
            if is_fresh:
                target.copy_(new)

    return node, args, kwargs


def _replay_of_released() -> None:
    raise EngineError("a released tape was replayed", hint="capture the shape again")


class Tape(Graph):
    """Recorded operations, and the tensors that the recorded region returned."""

    def __init__(
        self, nodes: list[_Node], outputs: Any, pool_nbytes: int, external: list[torch.Tensor]
    ) -> None:
        self.outputs = outputs
        self.num_nodes = len(nodes)
        self.pool_nbytes = pool_nbytes
        self._nodes = nodes
        self._external = external

    def replay(self) -> None:
        """Run every recorded operation once, in order."""
        with torch.inference_mode():
            for op, args, kwargs in self._nodes:
                op(*args, **kwargs)

    def release(self) -> None:
        """Drop the operations and every tensor that only they held."""
        self._nodes = [(_replay_of_released, (), {})]
        self._external = []
        self.outputs = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the recorded operations, and of the outputs, that are not the tape's."""
        return list(self._external)


class TapeDriver(GraphDriver):
    """Records tapes. The memory of a tape is its own; tapes of one driver do not overlap."""

    name: ClassVar[str] = "tape"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:  # noqa: ARG003  it runs anywhere
        """Return None: eager torch is all that a tape needs."""
        return None

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Tape:
        """Run ``fn`` ``warmup`` times, then once more while every operation is kept."""
        with torch.inference_mode():
            for _ in range(warmup):
                fn()
            recorder = _Recorder()
            with _HostReadGuard(), recorder:
                outputs = fn()
        return Tape(recorder.nodes, outputs, *recorder.memory(outputs))
