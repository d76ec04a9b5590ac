"""`AfterCapture`: what is checked once, when a model runner has captured its graphs.

The dispatcher is asked for its choice for each batch, and the ranks that step together compare their tables.
From then on ranks compare their steps, if that is asked for.

Does not: change what vLLM dispatches.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from graphpact_guard import GraphKey, Guard, ReplayFault, describe_ranks
from graphpact_vllm.guard.dispatching import Choice, choices, faults, rows
from graphpact_vllm.guard.rank_steps import RankSteps
from graphpact_vllm.seams.graphs import V1_RUNNER, V2_RUNNER
from graphpact_vllm.seams.hooking import wrap
from graphpact_vllm.seams.ranks import comparison_of_ranks

Table = list[dict[str, Any]]
"""The choices of a dispatcher, ready for JSON."""


class AfterCapture:
    """The checks of this process at the end of its captures.

    Args:
        guard: Returns the guard; None before the first capture.
        steps: The comparison of steps, which begins then; None if none was asked for.
    """

    def __init__(self, guard: Callable[[], Guard | None], steps: RankSteps | None) -> None:
        self._guard, self._steps = guard, steps

    def register(self) -> None:
        """Wrap the capture of both model runners."""
        for runner in (V1_RUNNER, V2_RUNNER):
            wrap(f"{runner}.capture_model", self._capture_model)

    def _capture_model(self, original: Callable[..., Any], runner: Any, **kwargs: Any) -> Any:
        result = original(runner, **kwargs)
        guard = self._guard()
        if guard is None or kwargs.get("profile_only"):
            return result
        tables = {}
        for name, found in dispatched(runner).items():
            tables[name] = rows(found)
            wrong = [*faults(found, name)]
            if wrong and guard.settings.on_fault != "log":
                guard.end(wrong[0])
            guard.report(*wrong)
        comparison = comparison_of_ranks(runner.vllm_config)
        said = comparison.differing(json.dumps(tables), tables)
        if said is not None:
            guard.end(_difference(said))
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


def _difference(said: Mapping[str, Mapping[str, Table]]) -> ReplayFault:
    """Return the fault of the first batch for which ranks would take different graphs."""
    first: Mapping[str, Table] = next(iter(said.values()))
    for name, table in first.items():
        for at, row in enumerate(table):
            its = {rank: _graph_at(tables.get(name, []), at) for rank, tables in said.items()}
            if len({*its.values()}) > 1:
                return ReplayFault(
                    rule="GP17",
                    owner=name,
                    field="dispatch",
                    key=GraphKey(runner=name, shape=f"{row['tokens']}"),
                    text=f"ranks would take different graphs for {row['batch']}: {describe_ranks(its)}",
                    advice="capture the same graphs on all ranks: memory of one rank must not decide",
                )
    lengths = {rank: f"{sorted(tables)}" for rank, tables in said.items()}
    return ReplayFault(
        rule="GP17",
        owner="ranks",
        field="dispatch",
        key=GraphKey(runner="ranks", shape="all"),
        text=f"ranks have different dispatchers: {describe_ranks(lengths)}",
        advice="start all ranks with the same arguments",
    )


def _graph_at(table: Table, at: int) -> str:
    return str(table[at]["graph"]) if at < len(table) else "has no such batch"
