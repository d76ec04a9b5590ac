"""`RankSteps`: the graph that this rank takes in a step, compared with those of the ranks that step with it.

Ranks of data parallelism that share experts agree in each step on a graph, an idle one with a dummy batch;
ranks of tensor parallelism come to the same choice each for itself. A rank that takes another graph, or none,
leaves the others in a collective. So the choices are compared before the first forward of a step, that of the
target model, and a step in which they differ ends on all ranks.

Does not: see the graphs of drafts, or a rank that never comes to its forward.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode

from graphpact_guard import GraphKey, Guard, RankComparison, ReplayFault, describe_ranks
from graphpact_vllm.seams.graphs import CONTEXT, MODEL_REPLAY, V1_RUNNER, V2_RUNNER, key_of
from graphpact_vllm.seams.hooking import wrap
from graphpact_vllm.seams.shapes import shape_of

_STEPS = (f"{V1_RUNNER}.execute_model", f"{V1_RUNNER}._dummy_run", f"{V2_RUNNER}.execute_model")
_ADVICE = (
    "all ranks must come to the same graph: decide by numbers that are exchanged, in dummy batches of idle"
    " ranks too"
)


class RankSteps:
    """The comparison of the steps of this process.

    Args:
        guard: Returns the guard; None before the first capture.
    """

    def __init__(self, guard: Callable[[], Guard | None]) -> None:
        self._guard = guard
        self._comparison: RankComparison | None = None
        self._runner: Any = None  # whose step has not come to its forward yet

    def register(self) -> None:
        """Compare from now on; steps before the end of the capture are left out."""
        for target in _STEPS:
            wrap(target, self._step)
        wrap(MODEL_REPLAY, self._replay)
        wrap(CONTEXT, self._context)

    def begin(self, comparison: RankComparison) -> None:
        """Begin to compare, after all ranks have captured their graphs."""
        self._comparison = comparison

    def _step(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        outer, self._runner = self._runner, runner if self._comparison is not None else None
        try:
            return original(runner, *args, **kwargs)
        finally:
            self._runner = outer

    def _replay(self, original: Callable[..., Any], manager: Any, desc: Any) -> Any:
        if self._runner is not None:
            key = key_of(manager, desc)
            self._compare(_choice(desc.cg_mode, desc), f"replays {key}", key)
        return original(manager, desc)

    def _context(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if self._runner is None or not _has_forward(context, self._runner.parallel_config):
            return context
        mode, desc = context.cudagraph_runtime_mode, context.batch_descriptor
        tokens = 0 if desc is None else desc.num_tokens
        if mode == CUDAGraphMode.NONE:
            key = GraphKey(runner="eager", shape=f"{tokens}")
            self._compare("eager", f"runs {tokens} tokens eagerly", key)
        else:
            key = GraphKey(runner=mode.name, shape=shape_of(desc))
            self._compare(_choice(mode, desc), f"replays {key}", key)
        return context

    def _compare(self, choice: str, text: str, key: GraphKey) -> None:
        self._runner = None  # later forwards of the step are those of drafts
        guard = self._guard()
        assert guard is not None and self._comparison is not None  # noqa: S101, PT018  begun
        said = self._comparison.differing(choice, text)
        if said is not None:
            guard.end(
                ReplayFault(
                    rule="GP17",
                    owner="ranks",
                    field="step",
                    key=key,
                    text=f"ranks take different graphs: {describe_ranks(said)}",
                    advice=_ADVICE,
                )
            )


def _choice(mode: CUDAGraphMode, desc: Any) -> str:
    """Return what ranks must have in common; each may have its own number of LoRAs."""
    return f"{mode.name} {desc.num_tokens} {desc.num_reqs} {getattr(desc, 'num_ubatches', 1)}"


def _has_forward(context: Any, parallel_config: Any) -> bool:
    """Return whether a context is that of a forward; vLLM enters one for a transfer of one rank's KV too."""
    return context.dp_metadata is not None or parallel_config.data_parallel_size == 1
