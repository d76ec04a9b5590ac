"""`StepCounts`: how often each graph was replayed, with which padding, and why other steps ran eagerly.

Every process of SGLang that runs a model has its own counts; they are part of its internal state, which
``Engine.get_server_info()`` and the endpoint ``/server_info`` return.

Does not: change a step.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner import prefill_cuda_graph_runner
from sglang.srt.plugins.hook_registry import HookType

from graphpact_guard import GraphCounts, GraphKey, summary_of_steps
from graphpact_sglang.seams.hooking import register_hook
from graphpact_sglang.seams.runners import key_of

_FACTOR = "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"
SRT = "sglang.srt.model_executor"
FULL = f"{SRT}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
BREAKABLE = f"{SRT}.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
_SPECULATIVE = "sglang.srt.speculative"
DECODE = f"{SRT}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
PREFILL = f"{SRT}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
DRAFT = f"{_SPECULATIVE}.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"
DRAFT_EXTEND = f"{_SPECULATIVE}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
RUNNERS = (DECODE, PREFILL, DRAFT, DRAFT_EXTEND)
"""The graph runners that graphpact knows."""
SEGMENTS = f"{SRT}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph.BreakableCUDAGraphCapture"


class StepCounts:
    """The counts of one process.

    Attributes:
        is_paused: Whether steps are not counted now, because they are none of the engine's.
        listeners: Functions that are called in every counted step with the runner, the graph that it replays
            or None, and the reason of an eager step or None.
    """

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, GraphCounts] = {}
        self.eager: Counter[tuple[str, str]] = Counter()
        self.is_paused = False
        self.listeners: list[Callable[[Any, GraphKey | None, str | None], None]] = []
        self._begun: float | None = None  # when the current capture began

    def register(self) -> None:
        """Register the hooks that count."""
        for backend in (FULL, BREAKABLE):
            register_hook(f"{backend}.capture_one", self._capture_begins, HookType.BEFORE)
            register_hook(f"{backend}.capture_one", self._captured, HookType.AFTER)
            register_hook(f"{backend}.replay", self._replay, HookType.BEFORE)
        register_hook(f"{SRT}.runner.eager_runner.EagerRunner.execute", self._run, HookType.BEFORE)

    def summary(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        return summary_of_steps(self.graphs, self.eager)

    def _capture_begins(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._begun = time.perf_counter()

    def _captured(self, result: None, graph_backend: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
        del result, args, kwargs
        assert self._begun is not None  # noqa: S101  the hook before set it
        seconds, self._begun = time.perf_counter() - self._begun, None
        counts = GraphCounts(seconds, _nodes_of(graph_backend._graphs[shape_key]))  # noqa: SLF001
        self.graphs[key_of(graph_backend._cuda_graph_runner, shape_key)] = counts  # noqa: SLF001

    def _replay(self, graph_backend: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001
        key = key_of(runner, shape_key)
        counts = self.graphs.get(key)
        if counts is None or self.is_paused:  # None: it was captured before the hooks were there
            return
        counts.replays += 1
        counts.raw += getattr(runner, "raw_num_tokens", None) or runner.raw_bs
        counts.padded += shape_key.size
        for listener in self.listeners:
            listener(runner, key, None)

    def _run(self, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        # A draft's graph is captured through the eager runner, and an eager run verifies.
        is_capture = self._begun is not None
        if is_capture or self.is_paused or getattr(batch, "graphpact_verifies", False):
            return
        reason = _eager_reason(runner, batch)
        self.eager[batch.forward_mode.name.lower(), reason] += 1
        for listener in self.listeners:
            listener(runner, None, reason)


def _nodes_of(graph: Any) -> int:
    """Return how many operations a graph on a tape has; -1 on a GPU."""
    segments = getattr(graph, "_segments", [graph])
    tapes = [getattr(segment, "tape", None) for segment in segments]
    return sum(tape.num_nodes for tape in tapes if tape is not None) if any(tapes) else -1


def _eager_reason(runner: Any, batch: Any) -> str:
    """Return in words why a batch runs without a graph."""
    model_runner, mode = runner.model_runner, batch.forward_mode
    is_extend = mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify()
    its_runner = (
        model_runner.prefill_cuda_graph_runner if is_extend else model_runner.decode_cuda_graph_runner
    )
    if its_runner is None or its_runner is runner:
        return "no graph of this mode is captured"
    if getattr(batch, "graphpact_refused", False):
        return "the guard refused the graph after a fault"
    size = len(batch.input_ids) if is_extend else batch.batch_size
    most = its_runner.max_num_tokens if is_extend else its_runner.max_bs
    if size > most:
        return f"larger than the largest captured size, {most}"
    if is_extend and (factor := getattr(prefill_cuda_graph_runner, _FACTOR, None)) is not None:
        bucket = min(each for each in its_runner.capture_num_tokens if each >= size)
        if bucket > size * factor:
            return f"padding to {bucket} tokens is more than SGLang's factor of {factor:g}"
    return "SGLang's runner declined the batch"
