"""Hooks that SGLang does not apply end the start, instead of a guard that is silently absent."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from engines import in_child, run_engine
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from graphpact_kernels.interpreter import record_launches
from graphpact_sglang.attention import fa3
from graphpact_sglang.seams.steps import SEGMENTS


def _start_with(plant: Callable[[], None]) -> None:
    """Start an engine after ``plant``; what ends the process becomes an error, which the parent sees."""
    plant()
    try:
        run_engine([], {"cuda_graph_backend_prefill": "disabled"})
    except SystemExit as ended:
        raise RuntimeError(f"the process ended with status {ended.code}: {ended.__cause__}") from ended


def _gone() -> None:
    """Take a method away, as another release of SGLang may."""
    del breakable_cuda_graph.BreakableCUDAGraphCapture._begin_new_segment


def _wrapped_class() -> None:
    """Register a hook on a class, which SGLang refuses together with our own hook on that class."""
    HookRegistry.register(SEGMENTS, lambda *args, **kwargs: None, HookType.BEFORE)


def _replaced_later() -> None:
    """Let another plugin replace what we replace."""
    apply = HookRegistry.apply_hooks.__func__

    def applied(registry: type[HookRegistry]) -> None:
        HookRegistry.register(fa3.KERNEL, lambda *args, **kwargs: None, HookType.REPLACE)
        apply(registry)

    HookRegistry.apply_hooks = classmethod(applied)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (
            _gone,
            rf"status 3: GRAPHPACT needs {SEGMENTS}._begin_new_segment, which .* does not have",
        ),
        (_wrapped_class, rf"EngineError: .* are not applied: {SEGMENTS}"),
        (_replaced_later, rf"EngineError: .* are not applied: {fa3.KERNEL}"),
    ],
    ids=["gone", "refused", "replaced"],
)
def test_a_hook_that_is_not_applied_ends_the_start(plant: Callable[[], None], message: str) -> None:
    """The error names the target before a model is loaded."""
    with pytest.raises(AssertionError, match=message):
        in_child(_start_with, plant, words="tape,guard")


def _start_without_interpreter(arguments: dict[str, Any]) -> None:
    """Start an engine as a process without ``TRITON_INTERPRET`` does."""
    del os.environ["TRITON_INTERPRET"]
    run_engine([], arguments)


def test_a_tape_without_the_interpreter_refuses_triton_at_the_start() -> None:
    """The Triton backend is refused with what to do, before a model is loaded."""
    with pytest.raises(
        AssertionError, match=r"(?s)_choose_attention.*ConfigError: .*'triton'.*TRITON_INTERPRET=1"
    ):
        in_child(_start_without_interpreter, {"attention_backend": "triton"}, words="tape")


def _launch() -> None:
    """Launch a kernel that Triton would compile."""
    del os.environ["TRITON_INTERPRET"]
    record_launches(lambda: False)

    @triton.jit
    def kernel(x: Any) -> None:
        pass

    kernel[(1,)](torch.zeros(1))


def test_a_tape_without_the_interpreter_refuses_each_launch() -> None:
    """A compiled kernel would not be on the tape; the error names it."""
    with pytest.raises(AssertionError, match=r"ConfigError: .* the kernel kernel needs Triton"):
        in_child(_launch, words="tape")
