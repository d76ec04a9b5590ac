"""`Act`, something that is performed on a driver, `ActMemory`, the tensors that it uses, `Seen`, its results.

`legal` performs a region as legal work. `frozen` performs a region with values that a capture freezes.

Does not: define acts, or judge their results; see `graphpact_conformance.drivers.strictness`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import CaptureError, ReplayError
from graphpact.graphs import DeclaredMemory, Graph, Stream
from graphpact_conformance.drivers.driver_requirement import Make


class ActMemory:
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
        """Return a float32 host tensor ``[n]`` of zeros, pinned if the driver's device is a GPU."""
        return torch.zeros(n, pin_memory=self.device.type == "cuda")

    def declare(self, **more: Any) -> None:
        """Declare the tensors of the act to the driver. ``more`` are further fields of `DeclaredMemory`."""
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
    """The results of an act: lists with one entry for each turn.

    Args:
        replayed: Results of the replays.
        eager: Results of eager execution on the same contents. Empty if eager execution has no result.
        cuda: Results of CUDA graphs. None means that they equal ``eager``.
    """

    replayed: list[Any]
    eager: list[Any]
    cuda: list[Any] | None = None


@dataclass(frozen=True)
class Act:
    """An act of the table.

    Args:
        perform: Performs the act.
        line: Whether an error that refuses it must name a line of the act.
        error: The allowed types of an error that refuses it.
        gpu: Whether a GPU can perform it safely, with a defined result.
        region: The function whose lines perform it. None means ``perform``.
    """

    perform: Callable[[ActMemory], Seen]
    line: bool = True
    error: type[Exception] | tuple[type[Exception], ...] = (CaptureError, ReplayError)
    gpu: bool = True
    region: Callable[[ActMemory], Any] | None = None

    def lines(self) -> set[tuple[str, int]]:
        """Return the (file, line number) pairs of the function that performs it, without called functions."""
        return lines_of(self.region or self.perform)


def lines_of(*functions: Callable[..., Any]) -> set[tuple[str, int]]:
    """Return the (file, line number) pairs of the source lines of some functions."""
    found: set[tuple[str, int]] = set()
    for function in functions:
        text, first = inspect.getsourcelines(function)
        file = function.__code__.co_filename
        found |= {(file, number) for number in range(first, first + len(text))}
    return found


Perform = Callable[[ActMemory], Seen]


def registering_in(acts: dict[str, Act]) -> Callable[..., Callable[[Perform], Perform]]:
    """Return a decorator that adds a function to ``acts``. Its keyword arguments are fields of `Act`.

    Args:
        acts: The acts by name, in order. The name of an act is the function's, without leading underscore.
    """

    def act(**about: Any) -> Callable[[Perform], Perform]:
        def register(perform: Perform) -> Perform:
            acts[perform.__name__.removeprefix("_")] = Act(perform, **about)
            return perform

        return register

    return act


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def values_of(tree: Any) -> list[torch.Tensor]:
    """Return copies of the tensors of ``tree``, on the host."""
    return [t.detach().to("cpu", copy=True) for t in _tensors(tree)]


def clear_outputs(graph: Graph, w: ActMemory) -> None:
    """Overwrite the outputs of a graph, except those in the act's memory."""
    given = {t.untyped_storage().data_ptr() for t in _tensors([*vars(w).values()])}
    for t in _tensors(graph.outputs):
        if t.untyped_storage().data_ptr() not in given:
            t.fill_(99)


def eager_results(w: ActMemory, region: Callable[[], Any]) -> list[Any]:
    """Run a region eagerly on the contents of both turns, and return copies of its results."""
    left = []
    for turn in (0, 1):
        w.refresh(turn)
        left.append(values_of(region()))
    return left


def replay_results(w: ActMemory, graph: Graph) -> list[Any]:
    """Replay a graph on the contents of both turns, and return copies of its outputs."""
    left = []
    for turn in (0, 1):
        w.refresh(turn)
        clear_outputs(graph, w)
        graph.replay()
        w.driver.synchronize()
        left.append(values_of(graph.outputs))
    return left


def legal(w: ActMemory, region: Callable[[], Any]) -> Seen:
    """Capture a region, and return the results of its replays and of eager execution."""
    return Seen(replay_results(w, w.driver.capture(region)), eager_results(w, region))


def frozen(w: ActMemory, region: Callable[[], Any], change: Callable[[], Any]) -> Seen:
    """Capture, change frozen values, and replay. CUDA gives the eager results from before the change."""
    before = eager_results(w, region)
    graph = w.driver.capture(region)
    change()
    return Seen(replay_results(w, graph), eager_results(w, region), before)
