"""`LoadedVllm`: a started engine of vLLM for generated load.

A run is the same each time. vLLM's own sources of other runs, and what is done about them:

    random names of requests           switched off by a variable
    sets of names, and hashes          ``PYTHONHASHSEED``, and names in order in what the scheduler gives
    a start of block hashes            follows from ``PYTHONHASHSEED``
    threads of torch and numba         one thread
    sampling                           greedy
    the clock                          only in statistics, timestamps and time limits of starts

Does not: choose arguments; `graphpact_vllm.load.arguments` does.
"""

from collections.abc import Callable, Sequence

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
from graphpact_vllm.load.injected import Injector
from graphpact_vllm.load.leaks import leaks_of
from graphpact_vllm.load.ownership import BlockOwnership
from graphpact_vllm.load.steps import StepLog
from graphpact_vllm.runs.in_process import InProcessEngine


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
        self.engine = engine = InProcessEngine(**arguments_of(how))
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
        core = self.engine.core
        injector = Injector(faults, core.scheduler.kv_cache_manager.block_pool, hooks.InProcess.counts)

        def begin(at: int) -> None:
            on_pass(at)
            self._log.at = at
            injector.begin(at)

        self.engine.run(requests, most_passes, begin, self._log.name)
        # The model runner hears of the last ended requests in the next batch, which may be an empty one. With
        # asynchronous scheduling a batch of ended requests may be on its way.
        while core.batch_queue or core.scheduler.has_requests():
            self.engine.engine.engine_core.get_output()

    def faults(self) -> list[GraphFault]:
        """Return what the guard found so far."""
        guard = None if hooks.InProcess.guard is None else hooks.InProcess.guard.guard
        return [
            GraphFault(
                rule=fault.rule, field=f"{fault.owner}.{fault.field}", graph=str(fault.key), text=fault.text
            )
            for fault in (() if guard is None else guard.log.faults.values())
        ]

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
