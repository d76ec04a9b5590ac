"""`DispatchTracer`: keeps the operations that torch dispatches with the lines of the plugin that calls them.

Does not: record a graph; see `graphpact_tape.recorder`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from graphpact.graphs import Graph, GraphDriver
from graphpact.graphs.lines import Line
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.trace import TracedCall

__tracebackhide__ = True  # traced calls name the line of the plugin, not of this file


class DispatchTracer(DispatchMode):
    """A dispatch mode that keeps every dispatched operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is not torch.ops.aten.detach.default:  # torch dispatches more of them under a recorder
            self.calls.append(TracedCall.of(func, args, kwargs or {}, Line()))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def tracing_captures(driver: GraphDriver) -> Iterator[list[list[TracedCall]]]:
    """Yield a list, to which each run of a region in a capture of the driver appends its operations."""
    runs = list[list[TracedCall]]()
    capture: Callable[..., Graph] = driver.capture

    def traced(fn: Callable[[], Any], **options: Any) -> Graph:
        def region() -> Any:
            with DispatchTracer() as tracer:
                runs.append(tracer.calls)
                return fn()

        return capture(region, **options)

    driver.capture = traced  # type: ignore[method-assign]
    try:
        yield runs
    finally:
        del driver.capture
