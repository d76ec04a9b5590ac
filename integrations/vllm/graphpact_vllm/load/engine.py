"""`LoadedVllm`: a started engine of vLLM for generated load.

A run is the same each time. vLLM's own sources of other runs, and what is done about them:

    random names of requests           switched off by a variable
    sets of names, hashes of blocks    ``PYTHONHASHSEED``, which the interpreter reads at its start
    threads of torch and numba         one thread
    sampling                           greedy
    the clock                          only in statistics, timestamps and time limits of starts

Does not: choose arguments; `graphpact_vllm.load.arguments` does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.v1.executor import uniproc_executor

from graphpact.engines import (
    EngineStart,
    EngineStep,
    GraphFault,
    InjectedFault,
    Landmarks,
    LoadedEngine,
    PromptRequest,
)
from graphpact_vllm import hooks
from graphpact_vllm.load.arguments import arguments_of, drafts_of
from graphpact_vllm.load.in_process import InProcessEngine
from graphpact_vllm.load.injected import Injector
from graphpact_vllm.load.leaks import leaks_of
from graphpact_vllm.load.ownership import BlockOwnership
from graphpact_vllm.load.steps import StepLog


class LoadedVllm(LoadedEngine):
    """vLLM's engine in this process.

    Args:
        how: How it starts. Its environment variables are set.

    Attributes:
        engine: vLLM's engine.
    """

    def __init__(self, how: EngineStart) -> None:
        from graphpact_vllm.tape.platform import TapePlatform  # noqa: PLC0415  vLLM chose it

        TapePlatform.schedules_ahead = bool(how.choice["async_scheduling"])
        if how.choice["parallel"] == "tp2":
            _unlink_shared_memory(how)  # of a process that ended while it started
            _join_by_port(how)
        self.engine = engine = InProcessEngine(**arguments_of(how))
        _unlink_shared_memory(how)  # all ranks have it by now, and a process that is killed would leave it
        self._log = StepLog(engine, hooks.InProcess.counts)
        if how.is_strict:
            ownership = BlockOwnership(engine)
            self._log.before.append(ownership.poison_free)
            self._log.after.append(ownership.check_unowned)
        self.landmarks = self._landmarks(how)

    @property
    def steps(self) -> list[EngineStep]:  # type: ignore[override]
        """The batches of the run, in their order."""
        return self._log.steps

    def run(
        self,
        requests: Sequence[PromptRequest],
        *,
        most_passes: int,
        on_pass: Callable[[int], None],
        faults: Sequence[InjectedFault] = (),
    ) -> None:
        """Run requests to their ends; see `LoadedEngine`. With tensor parallelism each rank runs all."""
        pool = self.engine.core.scheduler.kv_cache_manager.block_pool
        injector = Injector(faults, pool, hooks.InProcess.counts)

        def begin(at: int) -> None:
            on_pass(at)
            self._log.at = at
            injector.begin(at)

        self.engine.run(requests, most_passes, begin, self._log.name)
        self.engine.drain()

    def faults(self) -> list[GraphFault]:
        """Return what the guard found so far."""
        guard = None if hooks.InProcess.guard is None else hooks.InProcess.guard.guard
        return [] if guard is None else guard.log.found()

    def leaks(self) -> list[str]:
        """Return what is still held after a run in which all requests ended."""
        return [*leaks_of(self.engine)]

    def _landmarks(self, how: EngineStart) -> Landmarks:
        config = self.engine.engine.vllm_config
        _, drafts = (None, 0) if how.is_eager else drafts_of(how.choice)
        sizes = () if how.is_eager else tuple(sorted(config.compilation_config.cudagraph_capture_sizes))
        page_size = config.cache_config.block_size
        pool = self.engine.core.scheduler.kv_cache_manager.block_pool
        return Landmarks(
            request_counts=tuple(dict.fromkeys(size // (1 + drafts) for size in sizes if size > drafts)),
            token_counts=sizes,
            page_size=page_size,
            chunk=config.scheduler_config.max_num_batched_tokens,
            verify_width=1 + drafts,
            max_len=config.model_config.max_model_len,
            max_requests=config.scheduler_config.max_num_seqs,
            cache_tokens=(pool.num_gpu_blocks - 1) * page_size,
        )


def _join_by_port(how: EngineStart) -> None:
    """Let the ranks of tensor parallelism join by their port.

    vLLM's executor for ranks that others launch has ``env://`` instead, and names the shared memory of its
    ranks by that: then there can be one such engine on a machine.
    """
    executor: Any = uniproc_executor.ExecutorWithExternalLauncher
    executor._distributed_args = lambda _: (f"tcp://127.0.0.1:{how.port}", how.rank, how.rank)  # noqa: SLF001


def _unlink_shared_memory(how: EngineStart) -> None:
    """Unlink the shared memory of this rank, which vLLM names by the port."""
    for path in Path("/dev/shm").glob(f"{how.port}-*-cpushm_{how.rank}"):  # noqa: S108  where vLLM makes it
        path.unlink(missing_ok=True)
