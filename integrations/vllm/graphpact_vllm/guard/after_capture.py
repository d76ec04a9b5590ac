"""`AfterCapture`: what is checked once, when a model runner has captured its graphs.

The dispatcher is asked for its choice for each batch, and the ranks that step together compare their tables.
If it is asked for, each shape then gets synthetic steps, and from then on ranks compare their steps.

Does not: change what vLLM dispatches.
"""

import json
from collections.abc import Callable
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from graphpact_vllm.guard.dispatching import Choice, choices, difference_of_ranks, faults, rows
from graphpact_vllm.guard.guarding import VllmGuard
from graphpact_vllm.guard.rank_steps import RankSteps
from graphpact_vllm.seams.graphs import V1_RUNNER, V2_RUNNER
from graphpact_vllm.seams.hooking import wrap
from graphpact_vllm.seams.ranks import comparison_of_ranks


class AfterCapture:
    """The checks of this process at the end of its captures.

    Args:
        hooked: The hooks of the guard.
        steps: The comparison of steps, which begins then; None if none was asked for.
    """

    def __init__(self, hooked: VllmGuard, steps: RankSteps | None) -> None:
        self._hooked, self._steps = hooked, steps

    def register(self) -> None:
        """Wrap the capture of both model runners."""
        for runner in (V1_RUNNER, V2_RUNNER):
            wrap(f"{runner}.capture_model", self._capture_model)

    def _capture_model(self, original: Callable[..., Any], runner: Any, **kwargs: Any) -> Any:
        result = original(runner, **kwargs)
        guard = self._hooked.guard
        if guard is None or kwargs.get("profile_only"):
            return result
        tables, dispatchers = {}, dispatched(runner)
        for name, found in dispatchers.items():
            tables[name] = rows(found)
            wrong = [*faults(found, name)]
            if wrong and guard.settings.on_fault != "log":
                guard.end(wrong[0])
            guard.report(*wrong)
        comparison = comparison_of_ranks(runner.vllm_config)
        said = comparison.differing(json.dumps(tables), tables)
        if said is not None:
            guard.end(difference_of_ranks(said))
        if guard.settings.start:
            self._hooked.start(runner, next(iter(dispatchers.values())))  # that of the target model
        if self._steps is not None:
            self._steps.begin(comparison)
        return result


def dispatched(runner: Any) -> dict[str, list[Choice]]:
    """Return what each dispatcher of a model runner takes for each batch, by the name of the dispatcher."""
    drafter = getattr(runner, "speculator", getattr(runner, "drafter", None))
    if not hasattr(runner, "cudagraph_dispatcher"):
        held = [runner.cudagraph_manager, *(() if drafter is None else vars(drafter).values())]
        found = [(each, None) for each in held if isinstance(each, CudaGraphManager)]
    else:
        found = [(runner.cudagraph_dispatcher, _full_graphs(runner.model))]
        if (other := getattr(drafter, "cudagraph_dispatcher", None)) is not None:
            found.append((other, None))
    return {
        f"{type(dispatcher).__name__}{f'[{at}]' if at else ''}": choices(dispatcher, graphs)
        for at, (dispatcher, graphs) in enumerate(found)
    }


def _full_graphs(model: Any) -> Any:
    """Return the descriptors of the full graphs of the model runner V1; None if it has no such wrapper."""
    if not isinstance(model, CUDAGraphWrapper):
        return None
    return {desc for desc, entry in model.concrete_cudagraph_entries.items() if entry.cudagraph is not None}
