"""`StepCounts`: how often each graph was replayed, with which padding, and why other steps ran eagerly.

Every process of vLLM that runs a model has its own counts.

Does not: change a step.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from graphpact_guard import GraphCounts, GraphKey, summary_of_steps
from graphpact_vllm.seams.builders import Builders
from graphpact_vllm.seams.graphs import BREAKABLE, CAPTURE, REPLAY, WRAPPER, call_of, key_of
from graphpact_vllm.seams.hooking import wrap


class StepCounts:
    """The counts of one process.

    Args:
        builders: What the metadata of the current step was made of.

    Attributes:
        is_serving: Whether eager steps and replays are those of requests. Before that vLLM warms up.
        listeners: Are called while the engine serves, before each replay with its graph and None, and before
            each eager step with None and its reason.
    """

    def __init__(self, builders: Builders) -> None:
        self.graphs: dict[GraphKey, GraphCounts] = {}
        self.eager: Counter[tuple[str, str]] = Counter()
        self.is_serving = False
        self.listeners: list[Callable[[GraphKey | None, str | None], None]] = []
        self._builders = builders
        self._reason: str | None = None

    def register(self) -> None:
        """Count captures and replays from now on."""
        wrap(CAPTURE, self._capture)
        wrap(REPLAY, self._replay)
        wrap(WRAPPER, self._call)
        wrap(BREAKABLE, self._call)

    def watch(self, model_runner: Any) -> None:
        """Count the eager steps of a model runner, which has its model."""
        model_runner.get_model().register_forward_pre_hook(
            lambda _, args, kwargs: self._forward(model_runner, args, kwargs), with_kwargs=True
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no steps in the context, because they are none of the engine's."""
        before, self.is_serving = self.is_serving, False
        try:
            yield
        finally:
            self.is_serving = before

    @contextlib.contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """Give the reason of an eager step in the context."""
        self._reason = reason
        try:
            yield
        finally:
            self._reason = None

    def summary(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        return summary_of_steps(self.graphs, self.eager)

    # -- hooks -----------------------------------------------------------------------------------

    def _capture(
        self, original: Callable[..., Any], manager: Any, create: Any, *args: Any, **kwargs: Any
    ) -> None:
        def create_forward_fn(desc: Any, warmup: bool) -> Callable[[Any], None]:  # noqa: FBT001  vLLM's own
            forward: Callable[[Any], None] = create(desc, warmup=warmup)
            if warmup or desc.cg_mode != CUDAGraphMode.FULL:
                return forward

            def timed(mode: Any) -> None:
                begun = time.perf_counter()
                forward(mode)
                self.graphs[key_of(manager, desc)] = GraphCounts(time.perf_counter() - begun)

            return timed

        original(manager, create_forward_fn, *args, **kwargs)
        for desc, graph in manager.graphs.items():
            if (counts := self.graphs.get(key_of(manager, desc))) is not None:
                counts.nodes = _nodes(graph)

    def _replay(self, original: Callable[..., Any], manager: Any, desc: Any) -> Any:
        self._count(key_of(manager, desc), desc.num_tokens)
        return original(manager, desc)

    def _call(self, original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        call = call_of(wrapper)
        if call is None:
            return original(wrapper, *args, **kwargs)
        if call.graph is not None:
            self._count(call.key, call.num_tokens)
            return original(wrapper, *args, **kwargs)
        begun = time.perf_counter()
        result = original(wrapper, *args, **kwargs)
        captured = call_of(wrapper)
        nodes = -1 if captured is None else _nodes(captured.graph)
        self.graphs[call.key] = GraphCounts(time.perf_counter() - begun, nodes)
        return result

    def _count(self, key: GraphKey, padded: int) -> None:
        counts = self.graphs.get(key)
        if counts is None or not self.is_serving:  # None: it was captured before the hooks were there
            return
        counts.replays += 1
        tokens = self._builders.num_tokens()
        counts.raw += padded if tokens is None else min(tokens, padded)
        counts.padded += padded
        self._tell(key, None)

    def _forward(self, model_runner: Any, args: Any, kwargs: Any) -> None:
        del args
        if not self.is_serving or not is_forward_context_available():
            return
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            return
        ids = kwargs.get("input_ids")
        tokens = len(ids if ids is not None else kwargs["positions"])
        kind = "mixed" if _has_prefill(self._builders) else "decode"
        reason = self._reason or _reason(model_runner, tokens)
        self.eager[kind, reason] += 1
        self._tell(None, reason)

    def _tell(self, key: GraphKey | None, reason: str | None) -> None:
        for listener in self.listeners:
            listener(key, reason)


def _has_prefill(builders: Builders) -> bool:
    """Return whether a request of the current step has more queries than the others may have in a graph."""
    return any(
        built.common is not None and built.common.max_query_len > 1 for built in builders.current().values()
    )


def _reason(model_runner: Any, tokens: int) -> str:
    """Return in words why a step of so many tokens runs without a graph."""
    compilation = model_runner.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return "no graph is captured"
    most = compilation.max_cudagraph_capture_size
    if tokens > most:
        return f"larger than the largest captured size, {most}"
    if compilation.cudagraph_mode.mixed_mode() == CUDAGraphMode.NONE:
        return (
            "no graph of requests with unequal numbers of tokens is captured (a prefill, or unequal drafts)"
        )
    return "vLLM's dispatcher declined the batch"


def _nodes(graph: Any) -> int:
    """Return how many operations a graph on a tape has; -1 on a GPU."""
    segments = getattr(graph, "segments", None)
    graphs = [graph] if segments is None else [getattr(each, "__self__", None) for each in segments]
    tapes = [tape for each in graphs if (tape := getattr(each, "tape", None)) is not None]
    return sum(tape.num_nodes for tape in tapes) if tapes else -1
