"""The acts of ``graph_acts.toml``: legal and illegal work in and around graphs, performed on a driver.

An act has the id of its row as its name: a region in `_REGIONS`, or a function of that name with a leading
underscore.

Does not: say what has to come of an act; see `strictness`.
"""

import contextlib
import ctypes
import gc
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from graphpact.errors import CaptureError, EngineError, GraphpactError, ReplayError
from graphpact.graphs import DeclaredMemory, Graph, Stream
from graphpact_conformance.drivers.requirement import Make, expect_equal


class World:
    """The tensors that one act uses, on the driver's device and on the host."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.driver = make()
        self.device = device = self.driver.device
        self.x = torch.zeros(4, device=device)
        self.y = torch.zeros(4, device=device)
        self.index = torch.tensor([0, 2], device=device)
        self.lengths = torch.tensor([1, 2, 0, 1], device=device)
        self.start = torch.tensor(1, device=device)
        self.end = torch.tensor(3, device=device)
        self.mask = torch.zeros(4, dtype=torch.bool, device=device)
        self.pageable = torch.zeros(4)
        self.pinned = self.host(4)
        self.host_index = torch.tensor([3, 0])
        self.number = torch.tensor(2.0)
        self.declare()
        self.refresh(0)

    def host(self, n: int) -> torch.Tensor:
        """Return host memory of ``[n]``, pinned where there is a GPU to copy to."""
        return torch.zeros(n, pin_memory=self.device.type == "cuda")

    def declare(self, **more: Any) -> None:
        """Declare this memory, and ``more``."""
        device = [self.x, self.y, self.index, self.lengths, self.start, self.end, self.mask]
        host = [self.pageable, self.pinned, self.host_index, self.number, *more.pop("host", [])]
        self.driver.declare(DeclaredMemory(refreshed=device, host=host, **more))

    def refresh(self, turn: int) -> None:
        """Write the contents of turn 0 or 1 into the tensors."""
        x = [[1.0, 2.0, 3.0, 4.0], [-5.0, 8.0, 3.0, 0.5]]
        y = [[9.0, 8.0, 7.0, 6.0], [0.0, 1.0, -1.0, 2.0]]
        mask = [[True, False, True, False], [True, True, False, False]]
        self.x.copy_(torch.tensor(x[turn]))
        self.y.copy_(torch.tensor(y[turn]))
        self.mask.copy_(torch.tensor(mask[turn]))
        self.index.copy_(torch.tensor([[0, 2], [3, 1]][turn]))
        self.pinned.fill_(10.0 + turn)

    def fork(self) -> Stream:
        """Return a new stream that waits for the current one."""
        side = self.driver.stream()
        side.wait_stream(self.driver.current_stream())
        return side

    def join(self, side: Stream) -> None:
        """Let the current stream wait for ``side``."""
        self.driver.current_stream().wait_stream(side)


@dataclass(frozen=True)
class Seen:
    """The results of an act, as one list of values for each turn.

    Args:
        replayed: Results of the replays.
        eager: Results of eager execution on the same contents; empty if there are none.
        cuda: Results of CUDA graphs; None if they equal ``eager``.
    """

    replayed: list[Any]
    eager: list[Any]
    cuda: list[Any] | None = None


@dataclass(frozen=True)
class Act:
    """An act of the table.

    Args:
        perform: Performs the act.
        line: Whether the error that refuses it names a line of the act.
        error: Type or types of the error that refuses it.
        gpu: Whether a GPU can perform it safely, with a result that can be checked.
    """

    perform: Callable[[World], Seen]
    line: bool = True
    error: type[Exception] | tuple[type[Exception], ...] = (CaptureError, ReplayError)
    gpu: bool = True


ACTS: dict[str, Act] = {}
"""Every act that can be performed without the CUDA runtime, by its name."""


def _act(**about: Any) -> Callable[[Callable[[World], Seen]], Callable[[World], Seen]]:
    """Return a decorator that registers a function as the act of its name."""

    def register(perform: Callable[[World], Seen]) -> Callable[[World], Seen]:
        ACTS[perform.__name__.removeprefix("_")] = Act(perform, **about)
        return perform

    return register


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _values(tree: Any) -> list[torch.Tensor]:
    """Return copies of the tensors of ``tree``, on the host."""
    return [t.detach().to("cpu", copy=True) for t in _tensors(tree)]


def _clear(graph: Graph, world: World) -> None:
    """Overwrite the outputs that are not tensors of the world."""
    given = {t.untyped_storage().data_ptr() for t in _tensors([*vars(world).values()])}
    for t in _tensors(graph.outputs):
        if t.untyped_storage().data_ptr() not in given:
            t.fill_(99)


def _eager(world: World, region: Callable[[], Any]) -> list[Any]:
    """Run a region eagerly on the contents of both turns, and return its results."""
    left = []
    for turn in (0, 1):
        world.refresh(turn)
        left.append(_values(region()))
    return left


def _replays(world: World, graph: Graph) -> list[Any]:
    """Replay a graph on the contents of both turns, and return its results."""
    left = []
    for turn in (0, 1):
        world.refresh(turn)
        _clear(graph, world)
        graph.replay()
        world.driver.synchronize()
        left.append(_values(graph.outputs))
    return left


def _legal(world: World, region: Callable[[], Any]) -> Seen:
    """Return the results of replays of a region and of eager execution."""
    return Seen(_replays(world, world.driver.capture(region)), _eager(world, region))


def _frozen(world: World, region: Callable[[], Any], change: Callable[[], Any]) -> Seen:
    """Replay after ``change`` changed frozen values: CUDA gives the eager results of before the change."""
    before = _eager(world, region)
    graph = world.driver.capture(region)
    change()
    return Seen(_replays(world, graph), _eager(world, region), before)


# -- regions that use only the world ---------------------------------------------------------------


def _put(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    tensor[key] = value
    return tensor


# A region gets a `World`. Several calls are wrong by their types too.
_REGIONS: dict[str, Callable[[Any], Any]] = {
    "item": lambda w: w.x * w.start.item(),
    "tolist": lambda w: w.x * w.x.tolist()[0],
    "numpy": lambda w: w.x * float(w.x.cpu().numpy()[0]),
    "cpu": lambda w: w.x.cpu(),
    "to_cpu": lambda w: w.x.to("cpu"),
    "to_cpu_non_blocking": lambda w: w.x.to("cpu", non_blocking=True),
    "type_to_host_class": lambda w: w.x.type(torch.LongTensor),
    "bool_of_tensor": lambda w: w.x + bool(w.x[0]),
    "int_of_tensor": lambda w: w.x + int(w.start),
    "float_of_tensor": lambda w: w.x + float(w.x[0]),
    "python_index": lambda w: w.x + [5, 6, 7][w.start],
    "range_of_tensor": lambda w: [w.x + i for n in w.lengths for i in range(n)],
    "python_max": lambda w: max(w.x[0], w.x[1]) + 1,
    "print_tensor": lambda w: (w.x + 1, f"{w.x}"),
    "arange_of_tensor": lambda w: torch.arange(w.end, device=w.device),
    "slice_by_tensor": lambda w: w.x[w.start : w.end] + 1,
    "mask_read": lambda w: w.x[w.mask],
    "mask_write_tensor": lambda w: _put(w.x, w.mask, w.y[:1]),
    "mask_write_number": lambda w: _put(w.x, w.mask, 0),
    "masked_fill_number": lambda w: w.x.masked_fill_(w.mask, 0),
    "masked_fill_tensor": lambda w: w.x.masked_fill_(w.mask, w.y[0]),
    "masked_scatter": lambda w: w.x.masked_scatter_(w.mask, w.y),
    "where_three": lambda w: torch.where(w.mask, w.x, w.y),
    "where_one": lambda w: torch.where(w.mask),
    "nonzero": lambda w: torch.nonzero(w.mask),
    "nonzero_static": lambda w: torch.nonzero_static(w.mask, size=3),
    "masked_select": lambda w: torch.masked_select(w.x, w.mask),
    "repeat_interleave": lambda w: torch.repeat_interleave(w.x, w.lengths),
    "repeat_interleave_sized": lambda w: torch.repeat_interleave(w.x, w.lengths, output_size=4),
    "unique": lambda w: torch.unique(w.x),
    "unique_consecutive": lambda w: torch.unique_consecutive(w.x),
    "bincount": lambda w: torch.bincount(w.lengths, minlength=4),
    "torch_equal": lambda w: w.x + torch.equal(w.x, w.y),
    "torch_allclose": lambda w: w.x + torch.allclose(w.x, w.y),
    "tensor_split_by_tensor": lambda w: w.x.tensor_split(w.index),
    "dlpack": lambda w: from_dlpack(w.x) + 1,
    "storage_element": lambda w: w.x + w.x.untyped_storage()[0],
    "to_sparse": lambda w: w.x.to_sparse().to_dense(),
    "vmap": lambda w: torch.vmap(lambda row: row * row.sum())(w.x.view(2, 2)),
    "data_dependent_branch": lambda w: w.x + 1 if w.x.sum() > 0 else w.x - 1,
    "copy_into_pageable_host": lambda w: w.pageable.copy_(w.x),
    "copy_into_pinned_host_blocking": lambda w: w.pinned.copy_(w.x),
    "copy_into_pinned_host": lambda w: w.pinned.copy_(w.x, non_blocking=True),
    "tensor_from_python": lambda w: w.x[:2] + torch.tensor([1, 2], device=w.device),
    "pageable_to_device": lambda w: w.pageable.to(w.device) + 1,
    "pageable_to_device_non_blocking": lambda w: w.pageable.to(w.device, non_blocking=True) + 1,
    "pinned_to_device_blocking": lambda w: w.pinned.to(w.device) + 1,
    "pinned_to_device": lambda w: w.x.copy_(w.pinned, non_blocking=True),
    "index_by_cpu_tensor": lambda w: w.x[w.host_index],
    "index_by_list": lambda w: w.x[[0, 2]],
    "index_put_number": lambda w: _put(w.x, w.index, 0),
    "element_put_number": lambda w: _put(w.x, 0, 5),
    "slice_put_number": lambda w: _put(w.x, slice(2, 4), 0),
    "stream_synchronize": lambda w: (w.x + 1, w.driver.current_stream().synchronize()),
    "device_synchronize": lambda w: (w.x + 1, w.driver.synchronize()),
    "device_allocation": lambda w: torch.empty(4, device=w.device).copy_(w.x),
    "empty_graph": lambda w: w.x,
}


def _act_of(region: Callable[[Any], Any]) -> Act:
    return Act(lambda w: _legal(w, lambda: region(w)))


ACTS.update((name, _act_of(region)) for name, region in _REGIONS.items())


# -- work of the host ------------------------------------------------------------------------------


@_act()
def _event_synchronize(w: World) -> Seen:
    def region() -> torch.Tensor:
        event = w.driver.event()
        event.record()
        event.synchronize()
        return w.x + 1

    return _legal(w, region)


@_act(gpu=False)
def _pinned_source_freed(w: World) -> Seen:
    staging = [w.host(4)]
    graph = w.driver.capture(lambda: w.driver.copy_async(w.x, staging[0]))
    staging.clear()
    return Seen(_replays(w, graph), [])


@_act()
def _python_side_effect(w: World) -> Seen:
    calls: list[int] = []

    def region() -> torch.Tensor:
        calls.append(1)
        return w.x + len(calls)

    graph = w.driver.capture(region)
    w.refresh(0)
    cuda = [[w.x.cpu() + 2]]
    w.refresh(1)
    cuda.append([w.x.cpu() + 2])
    replayed = _replays(w, graph)
    expect_equal(len(calls), 2)
    return Seen(replayed, _eager(w, region), cuda)


@_act()
def _cpu_tensor_arithmetic(w: World) -> Seen:
    return _frozen(w, lambda: w.x + (w.number * 3 + 1), lambda: w.number.fill_(9))


@_act()
def _cpu_scalar_tensor(w: World) -> Seen:
    return _frozen(w, lambda: w.x * w.number, lambda: w.number.fill_(9))


@_act()
def _python_number(w: World) -> Seen:
    box = {"factor": 2}
    return _frozen(w, lambda: w.x * box["factor"], lambda: box.update(factor=9))


@_act()
def _host_branch(w: World) -> Seen:
    box = {"adds": True}
    return _frozen(w, lambda: w.x + 1 if box["adds"] else w.x - 1, lambda: box.update(adds=False))


@_act()
def _branch_on_capture(w: World) -> Seen:
    cuda = _eager(w, lambda: w.x + 1)
    return replace(
        _legal(w, lambda: w.x + 1 if w.driver.is_capturing else w.x - 1),
        cuda=cuda,
    )


@_act()
def _module_hook(w: World) -> Seen:
    box = {"factor": 2}
    module = torch.nn.ReLU()
    module.register_forward_hook(lambda _module, _args, out: out * box["factor"])
    return _frozen(w, lambda: module(w.x), lambda: box.update(factor=9))


@_act()
def _pinned_allocation(w: World) -> Seen:
    def region() -> torch.Tensor:
        torch.empty(4, pin_memory=True)
        return w.x + 1

    graph = w.driver.capture(region, warmup=0)  # without a GPU, torch would refuse it in a warm-up
    return Seen(_replays(w, graph), _eager(w, lambda: w.x + 1))


@_act()
def _empty_cache(w: World) -> Seen:
    def region() -> torch.Tensor:
        torch.cuda.empty_cache()
        return w.x + 1

    return _legal(w, region)


@_act()
def _gc_of_graph(w: World) -> Seen:
    graphs = [w.driver.capture(lambda: w.y + 1)]

    def region() -> torch.Tensor:
        graphs.clear()
        gc.collect()
        return w.x + 1

    return _legal(w, region)


@_act(error=ZeroDivisionError, line=False)
def _exception(w: World) -> Seen:
    return _legal(w, lambda: w.x + 1 // 0)


@_act()
def _go_on_after_error(w: World) -> Seen:
    def region() -> torch.Tensor:
        with contextlib.suppress(GraphpactError, RuntimeError):
            w.start.item()
        return w.x + 1

    return _legal(w, region)


# -- other threads ---------------------------------------------------------------------------------


def _elsewhere(w: World) -> torch.Tensor:
    """Work that a region has another thread do."""
    with torch.inference_mode():
        return w.y.copy_(w.x * 2)


@_act(gpu=False)
def _work_in_another_thread(w: World) -> Seen:
    def region() -> torch.Tensor:
        thread = threading.Thread(target=_elsewhere, args=(w,))
        thread.start()
        thread.join()
        return w.y + 1

    return _legal(w, region)


@_act(gpu=False)
def _work_in_a_pool(w: World) -> Seen:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread starts
        return _legal(w, lambda: pool.submit(_elsewhere, w).result() + 1)


@_act(gpu=False)
def _work_of_a_worker(w: World) -> Seen:
    given: queue.Queue[World | None] = queue.Queue()
    done: queue.Queue[torch.Tensor] = queue.Queue()

    def work() -> None:
        while (world := given.get()) is not None:
            done.put(_elsewhere(world))

    def region() -> torch.Tensor:
        given.put(w)
        return done.get() + 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        return _legal(w, region)
    finally:
        given.put(None)
        worker.join()


# -- memory ----------------------------------------------------------------------------------------


def _after(w: World, change: Callable[[list[torch.Tensor]], Any]) -> Seen:
    """Replay after ``change`` changed an input, to which its list holds the only reference."""
    box = [torch.ones(4, device=w.device)]
    graph = w.driver.capture(lambda: w.x + box[0])
    change(box)
    gc.collect()
    return Seen(_replays(w, graph), _eager(w, lambda: w.x + 1))


@_act(gpu=False)
def _input_freed(w: World) -> Seen:
    return _after(w, lambda box: box.clear())


@_act(gpu=False)
def _input_freed_checked(w: World) -> Seen:
    return _after(w, lambda box: box.clear())


@_act(gpu=False)
def _input_resized(w: World) -> Seen:
    return _after(w, lambda box: box[0].resize_(1 << 20))


@_act(gpu=False)
def _input_set(w: World) -> Seen:
    return _after(w, lambda box: box[0].set_(torch.zeros(4, device=w.device).untyped_storage()))


@_act()
def _input_rebound(w: World) -> Seen:
    held = [torch.full((4,), 2.0, device=w.device)]
    return _frozen(w, lambda: w.x * held[-1], lambda: held.append(torch.full((4,), 5.0, device=w.device)))


@_act()
def _input_cast_anew(w: World) -> Seen:
    held = [w.x.double()]
    graph = w.driver.capture(lambda: held[-1] * 2)
    w.refresh(0)
    first, replayed, eager = held[0].cpu() * 2, [], []
    for turn in (0, 1):
        w.refresh(turn)
        w.x.add_(1)
        held.append(w.x.double())
        _clear(graph, w)
        graph.replay()
        replayed.append(_values(graph.outputs))
        eager.append(_values(held[-1] * 2))
    return Seen(replayed, eager, [[first], [first]])


@_act(gpu=False)
def _compile_in_capture(w: World) -> Seen:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    graph = w.driver.capture(lambda: compiled(w.x), warmup=0)
    return Seen(_replays(w, graph), [])


@_act()
def _compiled_code(w: World) -> Seen:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    return _legal(w, lambda: compiled(w.x))


@_act(gpu=False)
def _autocast_cache(w: World) -> Seen:
    @torch.inference_mode(mode=False)  # in inference mode, autocast caches no cast
    @torch.no_grad()
    def region() -> torch.Tensor:
        return functional.linear(rows, weight)

    with torch.inference_mode(mode=False):
        weight, rows = torch.nn.Parameter(torch.ones(4, 4, device=w.device)), w.x.new_ones(2, 4)
        with torch.autocast(w.device.type, torch.bfloat16):
            functional.linear(rows, weight)  # casts the weight, and caches the cast until the end
            graph = w.driver.capture(region)
    return Seen(_replays(w, graph), [])


@_act(gpu=False)
def _pointer_array(w: World) -> Seen:
    pointers = torch.zeros(2, dtype=torch.int64, device=w.device)
    w.declare(workspaces=[pointers])
    return _legal(
        w,
        lambda: w.driver.copy_async(pointers, torch.tensor([w.x.data_ptr(), w.y.data_ptr()])),
    )


@_act(gpu=False)
def _address_of_intermediate(w: World) -> Seen:
    def read(address: int, out: torch.Tensor) -> None:
        out.copy_(torch.frombuffer((ctypes.c_float * 4).from_address(address), dtype=torch.float32))

    def region() -> torch.Tensor:
        one = w.x.abs()
        address = one.data_ptr()
        other = one.sqrt().exp().neg()
        w.driver.eager_call(read, address, w.y)
        return one * 0 + other + w.y

    return _legal(w, region)


@_act()
def _output_kept_over_replay(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    w.refresh(0)
    graph.replay()
    kept, first = graph.outputs, _values(graph.outputs)
    w.refresh(1)
    second = _values(w.x + 1)
    graph.replay()
    return Seen([_values(kept)], [first], [second])


@_act(gpu=False)
def _output_after_other_graph(w: World) -> Seen:
    one, other = w.driver.capture(lambda: w.x + 1), w.driver.capture(lambda: w.x + 2)
    eager, replayed = _eager(w, lambda: w.x + 1), []
    for turn in (0, 1):
        w.refresh(turn)
        one.replay()
        other.replay()
        replayed.append(_values(one.outputs))
    return Seen(replayed, eager)


@_act(gpu=False)
def _replay_order(w: World) -> Seen:
    one = w.driver.capture(lambda: w.x + 1)
    other = w.driver.capture(lambda: one.outputs * 2)
    replayed = []
    for turn in (0, 1):
        w.refresh(turn)
        other.replay()
        one.replay()
        replayed.append(_values(other.outputs))
    return Seen(replayed, _eager(w, lambda: (w.x + 1) * 2))


@_act(gpu=False)
def _parallel_replay(w: World) -> Seen:
    one, other = w.driver.capture(lambda: w.x + 1), w.driver.capture(lambda: w.y * 2)
    eager, replayed = _eager(w, lambda: [w.x + 1, w.y * 2]), []
    for turn in (0, 1):
        w.refresh(turn)
        sides = w.fork(), w.fork()
        for side, graph in zip(sides, (one, other), strict=True):
            with side:
                graph.replay()
        for side in sides:
            w.join(side)
        replayed.append(_values([one.outputs, other.outputs]))
    return Seen(replayed, eager)


@_act(gpu=False)
def _output_before_replay(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    return Seen([_values(graph.outputs)], [_values(w.x + 1)])


@_act()
def _capture_does_not_run(w: World) -> Seen:
    w.refresh(0)
    graph = w.driver.capture(lambda: w.x.add_(1), warmup=0)
    after = [_values(w.x)]
    w.refresh(0)
    before = [_values(w.x)]
    seen = _replays(w, graph)
    return Seen(after + seen, before + _eager(w, lambda: w.x.add_(1)))


@_act(gpu=False)
def _unwritten_empty(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + torch.empty(4, device=w.device))
    return Seen(_replays(w, graph), _eager(w, lambda: w.x + 0))


@_act(gpu=False)
def _pool_memory_between_replays(w: World) -> Seen:
    held: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        if not held:
            held.append(torch.empty(4, device=w.device))
        out = held[0] + w.x
        held[0].copy_(out)
        return out

    graph = w.driver.capture(region, warmup=0)
    held[0].zero_()
    replayed = _replays(w, graph)
    held[0] = torch.zeros(4, device=w.device)
    return Seen(replayed, _eager(w, region))


@_act(gpu=False)
def _cached_in_capture(w: World) -> Seen:
    cache: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        if not cache:
            cache.append(torch.arange(4.0, device=w.device))
        return w.x + cache[0]

    graph = w.driver.capture(region, warmup=0)
    seen = _legal(w, region)
    graph.release()
    return seen


@_act()
def _kept_region_tensor(w: World) -> Seen:
    held: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        held[:] = [w.x * 2]
        return held[0] + 1

    graph = w.driver.capture(region)
    kept, replayed = held[0], []
    eager = _eager(w, lambda: w.x * 2)
    for turn in (0, 1):
        w.refresh(turn)
        graph.replay()
        if turn:
            graph.release()
        replayed.append(_values(kept))
    return Seen(replayed, eager)


@_act()
def _stray_write(w: World) -> Seen:
    stray = torch.zeros(4, device=w.device)
    return _legal(w, lambda: stray.copy_(w.x))


@_act(gpu=False)
def _workspace_grown(w: World) -> Seen:
    box = [torch.zeros(4, device=w.device)]
    w.declare(workspaces=box)
    graph = w.driver.capture(lambda: box[0].copy_(w.x) + 1)
    w.driver.declare(DeclaredMemory())
    box[0] = torch.zeros(8, device=w.device)
    return Seen(_replays(w, graph), _eager(w, lambda: w.x + 1))


# -- streams ---------------------------------------------------------------------------------------


@_act()
def _side_stream_joined(w: World) -> Seen:
    def region() -> torch.Tensor:
        one = w.x * 2
        side = w.fork()
        with side:
            other = one + w.y
        more = one * 3
        w.join(side)
        return other + more

    return _legal(w, region)


@_act()
def _side_stream_not_joined(w: World) -> Seen:
    def region() -> torch.Tensor:
        with w.fork():
            w.x.mul_(2)
        return w.y + 1

    return _legal(w, region)


@_act()
def _side_stream_not_forked(w: World) -> Seen:
    side = w.driver.stream()

    def region() -> torch.Tensor:
        with side:
            other = w.x * 2
        w.join(side)
        return other + 1

    return _legal(w, region)


@_act(gpu=False)
def _side_stream_never_seen(w: World) -> Seen:
    side = w.driver.stream()

    def region() -> torch.Tensor:
        with side:
            return w.x * 2

    return _legal(w, region)


@_act()
def _wait_for_earlier_work(w: World) -> Seen:
    side, event = w.driver.stream(), w.driver.event()
    with side:
        w.y.add_(1)
    event.record(side)

    def region() -> torch.Tensor:
        w.driver.current_stream().wait_event(event)
        return w.x + 1

    return _legal(w, region)


@_act(gpu=False)
def _wait_for_other_capture(w: World) -> Seen:
    event = w.driver.event()

    def recorded() -> torch.Tensor:
        out = w.y + 1
        event.record()
        return out

    w.driver.capture(recorded)

    def region() -> torch.Tensor:
        w.driver.current_stream().wait_event(event)
        return w.x + 1

    return _legal(w, region)


@_act(gpu=False)
def _side_reads_later_write(w: World) -> Seen:
    def region() -> torch.Tensor:
        side = w.fork()
        w.x.mul_(2)
        with side:
            other = w.x + 1
        w.join(side)
        return other

    return _legal(w, region)


@_act(gpu=False)
def _main_reads_side_unwaited(w: World) -> Seen:
    def region() -> torch.Tensor:
        side = w.fork()
        with side:
            other = w.x + 1
        out = other * 2
        w.join(side)
        return out

    return _legal(w, region)


@_act(gpu=False)
def _two_streams_one_buffer(w: World) -> Seen:
    def region() -> torch.Tensor:
        one, other = w.fork(), w.fork()
        with one:
            w.x.copy_(w.y)
        with other:
            w.x.zero_()
        w.join(one)
        w.join(other)
        return w.x + 1

    return _legal(w, region)


@_act()
def _event_recorded_and_waited(w: World) -> Seen:
    def region() -> torch.Tensor:
        side, forked, done = w.driver.stream(), w.driver.event(), w.driver.event()
        one = w.x * 2
        forked.record()
        side.wait_event(forked)
        with side:
            other = one + w.y
            done.record()
        w.driver.current_stream().wait_event(done)
        return other + one

    return _legal(w, region)


@_act(gpu=False)
def _pinned_rewritten_in_flight(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    eager = _values(w.pinned + 1)
    w.driver.copy_async(w.x, w.pinned)
    w.pinned.fill_(77)
    graph.replay()
    return Seen([_values(graph.outputs)], [eager])


@_act(gpu=False)
def _one_pinned_buffer_two_steps(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    for step in (1, 2):
        w.pinned.fill_(step)
        w.driver.copy_async(w.x, w.pinned)
        graph.replay()
    return Seen([_values(graph.outputs)], [[torch.full((4,), 3.0)]])


@_act()
def _replay_same_graph_twice(w: World) -> Seen:
    total = torch.zeros(4, device=w.device)
    w.declare(caches=[total])
    graph = w.driver.capture(lambda: total.add_(w.x))
    replayed, eager = [], []
    for turn in (0, 1):
        w.refresh(turn)
        total.zero_()
        graph.replay()
        graph.replay()
        replayed.append(_values(total))
        eager.append(_values(w.x + w.x))
    return Seen(replayed, eager)


# -- random numbers --------------------------------------------------------------------------------


@_act()
def _default_generator(w: World) -> Seen:
    graph = w.driver.capture(lambda: torch.rand(64, device=w.device))
    drawn = []
    for _ in range(3):
        _clear(graph, w)
        graph.replay()
        drawn.append(tuple(_values(graph.outputs)[0].tolist()))
    in_range = all(0 <= number < 1 for numbers in drawn for number in numbers)
    return Seen([len(set(drawn)), in_range], [3, True])


@_act()
def _custom_generator(w: World) -> Seen:
    generator = torch.Generator(w.device)
    return _legal(w, lambda: torch.rand(4, device=w.device, generator=generator))


@_act(line=False)
def _manual_seed(w: World) -> Seen:
    def region() -> torch.Tensor:
        torch.manual_seed(1234)
        return w.x + torch.rand(4, device=w.device)

    return _legal(w, region)


@_act()
def _restored_generator(w: World) -> Seen:
    random = torch.cuda if w.device.type == "cuda" else torch.random

    def region() -> torch.Tensor:
        state = random.get_rng_state()
        noise = torch.rand_like(w.x)
        random.set_rng_state(state)
        return w.x + (noise - torch.rand_like(w.x))

    return _legal(w, region)


@_act()
def _forked_generator(w: World) -> Seen:
    def region() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            return w.x + torch.rand_like(w.x)

    return _legal(w, region)


@_act()
def _reseed_between_replays(w: World) -> Seen:
    graph = w.driver.capture(lambda: torch.rand(64, device=w.device))
    drawn = []
    for seed in (0, 7, 0):
        torch.manual_seed(seed)
        _clear(graph, w)
        graph.replay()
        drawn.append(tuple(_values(graph.outputs)[0].tolist()))
    return Seen([drawn[0] == drawn[2], drawn[0] == drawn[1]], [True, False])


@_act()
def _new_generator(w: World) -> Seen:
    def region() -> torch.Tensor:
        generator = torch.Generator(w.device)
        return w.x + torch.rand(4, device=w.device, generator=generator)

    return _legal(w, region)


# -- shapes ----------------------------------------------------------------------------------------


@_act()
def _dynamic_shape(w: World) -> Seen:
    """Capture with two rows, and replay with four."""
    out = torch.zeros(4, device=w.device)
    w.declare(caches=[out])
    rows = [2]

    def region() -> torch.Tensor:
        n = rows[0]
        out[:n].copy_(w.x[:n] * 2)
        return out

    graph = w.driver.capture(region)
    rows[0] = 4
    replayed, eager, cuda = [], [], []
    for turn in (0, 1):
        w.refresh(turn)
        out.zero_()
        graph.replay()
        replayed.append(_values(out))
        cuda.append(_values(torch.cat([w.x[:2] * 2, w.x[2:] * 0])))
        eager.append(_values(region()))
    return Seen(replayed, eager, cuda)


@_act(gpu=False)
def _input_strides_changed(w: World) -> Seen:
    table = torch.zeros(2, 2, device=w.device)
    graph = w.driver.capture(lambda: table * 2)
    table.t_()
    replayed, eager = [], []
    for turn in (0, 1):
        w.refresh(turn)
        table.copy_(w.x.view(2, 2))
        _clear(graph, w)
        graph.replay()
        replayed.append(_values(graph.outputs))
        eager.append(_values(table * 2))
    return Seen(replayed, eager)


@_act(gpu=False)
def _resize_in_region(w: World) -> Seen:
    return _legal(w, lambda: w.x.resize_(2) + 1)


@_act(gpu=False)
def _transpose_in_region(w: World) -> Seen:
    table = torch.zeros(2, 3, device=w.device)
    return _legal(w, lambda: table.t_() + 1)


# -- state -----------------------------------------------------------------------------------------


@_act(line=False, gpu=False)
def _semaphore_not_rearmed(w: World) -> Seen:
    arrived = torch.zeros(1, device=w.device)
    w.declare(workspaces=[arrived])

    def region() -> torch.Tensor:
        arrived.add_(1)
        return torch.where(arrived == 1, w.x, 0)

    graph = w.driver.capture(region)
    arrived.zero_()
    return Seen(_replays(w, graph), _eager(w, lambda: w.x + 0))


@_act()
def _device_counter(w: World) -> Seen:
    counter = torch.zeros(1, device=w.device)
    w.declare(caches=[counter])
    graph = w.driver.capture(lambda: counter.add_(1))
    counter.zero_()
    counts = []
    for _ in range(3):
        graph.replay()
        counts.append(_values(counter))
    return Seen(counts, [[torch.tensor([float(n)])] for n in (1, 2, 3)])


@_act(error=(EngineError, RuntimeError), line=False)
def _replay_released(w: World) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    graph.release()
    graph.replay()
    return Seen([], [])


@_act()
def _nested_capture(w: World) -> Seen:
    return _legal(w, lambda: w.driver.capture(lambda: w.x + 1).outputs)


@_act(gpu=False)
def _two_captures_at_once(w: World) -> Seen:
    other = w.make()
    return _legal(w, lambda: other.capture(lambda: w.x + 1).outputs)


def lines_of(name: str) -> set[int]:
    """Return the numbers of the lines of this file that may perform an act."""
    lines: set[int] = set()
    for fn in (_REGIONS.get(name, ACTS[name].perform), _put, _after, _elsewhere):
        text, first = inspect.getsourcelines(fn)
        lines |= set(range(first, first + len(text)))
    return lines
