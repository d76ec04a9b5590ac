"""The strict tape finds counters that nothing resets in every segment, and accepts other regions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphpact.errors import CaptureError
from graphpact.graphs import DeclaredMemory, Graph
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


class CountedWorkspace:
    """A driver with a slot, a KV cache and a workspace, as a lane declares them."""

    def __init__(self) -> None:
        self.driver = TapeDriver(CPU, strict=True)
        self.x = torch.ones(4)
        self.unread = torch.zeros(4)
        self.cache = torch.zeros(8)
        self.workspace = torch.zeros(1)
        self.driver.declare(
            DeclaredMemory(refreshed=[self.x, self.unread], caches=[self.cache], workspaces=[self.workspace])
        )

    def count(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in the first run after the workspace was reset, and zeros in later ones."""
        self.workspace.add_(1)
        return torch.where(self.workspace == 1, x, 0)

    def broken(self, call: Callable[..., Any], *args: torch.Tensor) -> Graph:
        """Capture work, an eager call, and work on its result."""
        return self.driver.capture(lambda: self.driver.eager_call(call, self.x * 2, *args) + self.x, warmup=0)


@pytest.mark.parametrize("planted", [0, 1, 2, None])
def test_a_counter_is_found_in_any_segment(planted: int | None) -> None:
    """A graph of three segments is refused if one of them has a counter, and captured if none has."""
    w = CountedWorkspace()

    def region() -> torch.Tensor:
        x = w.x
        for segment in range(3):
            x = w.count(x) if segment == planted else x + 1
            x = w.driver.eager_call(torch.neg, x) if segment < 2 else x
        return x

    if planted is None:
        assert w.driver.capture(region, warmup=0).num_segments == 3
        return
    with pytest.raises(CaptureError, match="second replay on the same inputs"):
        w.driver.capture(region, warmup=0)


def test_a_counter_in_a_workspace_is_found_in_an_eager_call() -> None:
    """An eager call is refused if its result depends on workspace contents of the last replay."""
    w = CountedWorkspace()
    with pytest.raises(CaptureError, match="second replay on the same inputs"):
        w.broken(w.count)


def test_a_counter_in_what_an_eager_call_returned_is_found() -> None:
    """A counter in memory that an eager call returns every time is refused, because nothing resets it."""
    w, kept = CountedWorkspace(), torch.zeros(4)

    def region() -> torch.Tensor:
        return w.driver.eager_call(lambda: kept).add_(1) + w.x

    with pytest.raises(CaptureError, match="second replay on the same inputs"):
        w.driver.capture(region, warmup=0)


@pytest.mark.parametrize("name", ["cache", "x", "unread"])
def test_an_eager_call_may_write_declared_memory(name: str) -> None:
    """An eager call may add to the KV cache or to a slot, because each step writes them again."""
    w = CountedWorkspace()
    memory = getattr(w, name)

    def attend(q: torch.Tensor) -> torch.Tensor:
        memory.add_(1)
        return q + memory[:4]

    before = memory.clone()
    w.broken(attend)
    memory.sub_(1)  # undoes the call of the capture; the check already undid its calls
    assert torch.equal(memory, before)


@pytest.mark.parametrize("name", ["undeclared", "unread", "cache"])
def test_an_eager_call_may_write_what_it_is_given(name: str) -> None:
    """An eager call may write to an argument: undeclared memory, a slot, or the KV cache."""
    w = CountedWorkspace()
    given = torch.zeros(4) if name == "undeclared" else getattr(w, name)[:4]
    w.broken(lambda q, out: out.add_(q).clone(), given)
    assert given.tolist() == [2.0] * 4  # written by the call in the capture


def test_a_workspace_that_an_eager_call_is_given_is_no_exception() -> None:
    """An eager call that adds to a workspace argument is refused, because nothing resets the workspace."""
    w = CountedWorkspace()
    with pytest.raises(CaptureError, match="second replay on the same inputs"):
        w.broken(lambda q, out: q + out.add_(1), w.workspace)


def test_what_an_eager_call_leaves_unwritten_is_no_difference() -> None:
    """Rows that an eager call allocates but does not write have the same poison in both replays."""
    w = CountedWorkspace()
    contents = iter(range(100))

    def attend(q: torch.Tensor) -> torch.Tensor:
        torch.full((4,), float(next(contents)))  # freed at once: `out` may reuse its memory
        out = torch.empty(4)
        out[:2] = q[:2]
        return out

    graph = w.broken(attend)
    assert graph.num_segments == 2


@pytest.mark.parametrize("place", ["first segment", "eager call", "second segment"])
def test_what_is_random_is_no_difference(place: str) -> None:
    """Segments and eager calls draw the same random numbers in both replays of the check."""
    w = CountedWorkspace()

    def drawn(q: torch.Tensor, here: str) -> torch.Tensor:
        return torch.rand_like(q) + q if here == place else q + 1

    def region() -> torch.Tensor:
        x = w.driver.eager_call(drawn, drawn(w.x, "first segment"), "eager call")
        return drawn(x, "second segment")

    assert w.driver.capture(region, warmup=0).num_segments == 2
