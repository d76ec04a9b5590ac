"""`TapeWorker`: vLLM's worker for CPUs, which captures graphs as its worker for GPUs does.

Does not: capture or replay; vLLM's model runners do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# isort: off
from vllm.v1.worker import cpu_worker  # the first: it replaces names of torch and of vLLM for CPUs

# isort: on
import torch
from vllm import _custom_ops
from vllm.compilation import breakable_cudagraph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper, is_breakable_cudagraph_enabled
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.workspace import init_workspace_manager

from graphpact.graphs import DeclaredMemory
from graphpact_guard import Settings
from graphpact_kernels.interpreter import record_launches
from graphpact_tape import TapeDriver, stand_in_for_cuda_graphs
from graphpact_vllm import hooks
from graphpact_vllm.guard.after_capture import dispatched
from graphpact_vllm.guard.dispatching import rows
from graphpact_vllm.seams.hooking import wrap
from graphpact_vllm.tape.memory import declared_memory
from graphpact_vllm.tape.segments import TapedSegments
from graphpact_vllm.tape.uneven import lend_uneven_collectives


class TapedModelRunner(CPUModelRunner):
    """The model runner V1, whose model is wrapped as that of GPUs is."""

    model: Any

    def load_model(self, load_dummy_weights: bool = False) -> None:  # noqa: FBT001, FBT002  vLLM's own
        """Load the model and wrap it."""
        super().load_model(load_dummy_weights)
        mode = self.compilation_config.cudagraph_mode
        if is_breakable_cudagraph_enabled() and mode != CUDAGraphMode.NONE:
            self.model = _broken(self.model, self.vllm_config)
            drafter: Any = getattr(self, "drafter", None)
            if hasattr(drafter, "model"):
                drafter.model = _broken(drafter.model, self.vllm_config)
        if mode.has_full_cudagraphs():
            self.model = CUDAGraphWrapper(self.model, self.vllm_config, runtime_mode=CUDAGraphMode.FULL)

    def get_model(self) -> Any:
        """Return the model without wrappers."""
        return self.model.unwrap() if hasattr(self.model, "unwrap") else self.model


class TapeWorker(cpu_worker.CPUWorker):
    """A worker with graphs on a tape."""

    def init_device(self) -> None:
        """Let vLLM capture on a tape, and make the model runner."""
        strict = Settings.from_environment().tape == "strict"
        if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            # vLLM compiles small functions, whose kernels no tape sees.
            torch.compiler.set_stance("force_eager")
        if strict:
            # vLLM's layers for CPUs make tensors without a device, which is no fault there. In an operator
            # that Python implements, such as vllm.short_conv, torch has no default device.
            torch.set_default_device("cpu")
            _custom_ops.onednn_mm = _with_device(_custom_ops.onednn_mm)
        driver = TapeDriver(torch.device("cpu"), strict=strict)
        stand_in_for_cuda_graphs(driver, torch.cpu, memory=self._memory)
        record_launches(lambda: driver.is_capturing)
        GroupCoordinator.graph_capture = _no_streams
        lend_uneven_collectives()
        wrap("vllm.forward_context.DPMetadata.make", _on_host(driver))
        operators: Any = torch.ops._C  # noqa: SLF001  the name of vLLM's library
        operators.weak_ref_tensor = _itself
        # The interpreter cannot run vLLM's kernel for it, in which a number of a loop is taken as a tensor.
        topk_topp_sampler.HAS_TRITON = False
        # vLLM's TRITON_ATTN asks for it, to limit the tiles of older GPUs.
        torch.cuda.get_device_capability = _capability
        breakable_cudagraph.BreakableCUDAGraphCapture = TapedSegments
        cpu_worker.CPUModelRunner = TapedModelRunner
        init_workspace_manager(torch.device("cpu"))
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and count its steps."""
        super().load_model(*args, **kwargs)
        hooks.InProcess.counts.watch(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, as the worker for GPUs does."""
        times = super().compile_or_warm_up_model()
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        hooks.InProcess.counts.is_serving = True
        return times

    def _memory(self) -> DeclaredMemory:
        guard = hooks.InProcess.guard
        with contextlib.nullcontext() if guard is None else guard.unwatched():
            return declared_memory(self.model_runner, hooks.InProcess.builders)

    def graphpact_state(self) -> dict[str, Any]:
        """Return the state of graphpact in this process; called by ``collective_rpc("graphpact_state")``."""
        return hooks.state()

    def graphpact_dispatch(self) -> dict[str, Any]:
        """Return which graph each batch takes, by the name of the dispatcher; called as `graphpact_state`."""
        return {name: rows(found) for name, found in dispatched(self.model_runner).items()}


def _broken(model: Any, vllm_config: Any) -> BreakableCUDAGraphWrapper:
    return BreakableCUDAGraphWrapper(model, vllm_config, runtime_mode=CUDAGraphMode.PIECEWISE)


def _with_device(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``function`` as it runs where a CPU is the default device.

    A compiler traces it as it is, because it cannot enter a device. What it makes of it runs where a CPU is.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return function(*args)
        with torch.device("cpu"):
            return function(*args)

    return wrapped


@contextlib.contextmanager
def _no_streams(group: Any, context: Any = None) -> Iterator[Any]:
    """Stand in for ``GroupCoordinator.graph_capture``, which prepares CUDA streams and communicators."""
    del group
    yield context


def _on_host(driver: TapeDriver) -> Callable[..., Any]:
    """Return a hook for the numbers of tokens of all ranks, which vLLM keeps on the host to read them."""

    def make(original: Callable[..., Any], parallel_config: Any, tokens: int, across: torch.Tensor) -> Any:
        driver.add_host_memory([across])
        return original(parallel_config, tokens, across)

    return make


def _capability(device: Any = None) -> tuple[int, int]:
    """Stand in for ``torch.cuda.get_device_capability``: the interpreter has no limits of a GPU."""
    del device
    return (9, 0)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Stand in for an operator of vLLM's library for CUDA: return the tensor, which keeps its memory."""
    return tensor
