"""Idle ranks that take another graph than the others, and wrong dispatchers, planted in the real vLLM.

Does not: plant anything in a builder; `plants` does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import vllm.v1.worker.gpu.model_runner as v2
import vllm.v1.worker.gpu_model_runner as v1
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu_worker import Worker


def diverge(graph_tokens: int) -> Callable[[], None]:
    """Return a plant for a rank: its dummy batches take a graph of other tokens than was agreed; 0: none.

    Whatever the ranks agreed on, this rank then has as many tokens as its own graph, or only its own.
    """

    def before() -> None:
        dummies: list[bool] = []
        dummy = Worker.execute_dummy_batch
        agree, decide = v2.dispatch_cg_and_sync_dp, v1.GPUModelRunner._determine_batch_execution_and_padding

        def execute_dummy_batch(worker: Any) -> None:
            dummies.append(True)
            dummy(worker)
            dummies.clear()

        def agreed(manager: Any, requests: int, tokens: int, *args: Any, **kwargs: Any) -> Any:
            desc, sync = agree(manager, requests, tokens, *args, **kwargs)
            if not dummies or desc.cg_mode != CUDAGraphMode.FULL:
                return desc, sync
            if graph_tokens:
                desc = manager.dispatch(graph_tokens, graph_tokens, 1, 0)
            else:
                desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, tokens, requests)
            across = _with_own(sync.num_tokens_across_dp, desc)
            return desc, dataclasses.replace(sync, num_tokens_across_dp=across, eager=not graph_tokens)

        def decided(runner: Any, num_tokens: int, **kwargs: Any) -> Any:
            mode, desc, splits, across, stats = decide(runner, num_tokens, **kwargs)
            if not dummies or mode != CUDAGraphMode.FULL:
                return mode, desc, splits, across, stats
            if graph_tokens:
                mode, desc = runner.cudagraph_dispatcher.dispatch(graph_tokens, uniform_decode=True)
            else:
                mode, desc = CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
            return mode, desc, splits, _with_own(across, desc), stats

        Worker.execute_dummy_batch = execute_dummy_batch  # type: ignore[method-assign]
        v2.dispatch_cg_and_sync_dp = agreed
        v1.GPUModelRunner._determine_batch_execution_and_padding = decided  # type: ignore[method-assign]

    return before


def _with_own(across: Any, desc: Any) -> Any:
    across = across.clone()
    across[1] = desc.num_tokens
    return across


def take_for(tokens: int, instead: int) -> Callable[[], None]:
    """Return a plant: both dispatchers take the graph for ``instead`` tokens for a batch of ``tokens``."""

    def before() -> None:
        by_manager, by_keys = CudaGraphManager.dispatch, CudagraphDispatcher.dispatch

        def of_manager(manager: Any, requests: int, given: int, *args: Any, **kwargs: Any) -> Any:
            if given == tokens:
                requests, given = min(requests, instead), instead
            return by_manager(manager, requests, given, *args, **kwargs)

        def of_keys(dispatcher: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            return by_keys(dispatcher, instead if num_tokens == tokens else num_tokens, *args, **kwargs)

        CudaGraphManager.dispatch = of_manager  # type: ignore[method-assign]
        CudagraphDispatcher.dispatch = of_keys  # type: ignore[method-assign]

    return before


def take_decodes_for_prefills() -> None:
    """Let both dispatchers take graphs of decodes for batches with a prefill."""
    by_manager, by_keys = CudaGraphManager.dispatch, CudagraphDispatcher.dispatch

    def of_manager(
        manager: Any, requests: int, tokens: int, uniform_token_count: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return by_manager(manager, requests, tokens, uniform_token_count or 1, *args, **kwargs)

    def of_keys(dispatcher: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return by_keys(dispatcher, num_tokens, *args, **kwargs | {"uniform_decode": True})

    CudaGraphManager.dispatch = of_manager  # type: ignore[method-assign]
    CudagraphDispatcher.dispatch = of_keys  # type: ignore[method-assign]
