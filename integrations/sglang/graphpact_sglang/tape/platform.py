"""`TapePlatform`: SGLang's platform whose device is a CPU, and whose graphs are tapes.

The engine runs unedited: its own graph runners and graph backends record and replay, with a driver of
graphpact in the place of CUDA's graphs.

SGLang imports this module while it is itself half imported, so it imports little.

Does not: run models faster; a tape repeats what eager torch does.
"""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from graphpact_guard import Settings
from graphpact_kernels.interpreter import record_launches
from graphpact_sglang import ATTENTION_BACKEND
from graphpact_tape import TapeDriver, stand_in_for_cuda_graphs

DRAFTS = ("EAGLE", "EAGLE3", "STANDALONE")
"""The algorithms whose drafts run on the tape; SGLang refuses the others by name."""


class TapePlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU with graph capture."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(graph_capture=True)

    def init_backend(self) -> None:
        """Make SGLang's graph backends record on a tape; SGLang calls this once in each worker."""
        from graphpact_sglang.tape.memory import declared_memory  # noqa: PLC0415  it imports SGLang

        strict = Settings.from_environment().tape == "strict"
        torch.compiler.set_stance(
            "force_eager"
        )  # SGLang compiles small functions, whose kernels no tape sees
        driver = TapeDriver(torch.device("cpu"), strict=strict)
        stand_in_for_cuda_graphs(driver, torch.cpu, memory=declared_memory)
        record_launches(lambda: driver.is_capturing)

    def get_default_attention_backend(self) -> str:
        """Return the name of the backend that can be recorded on a CPU."""
        return ATTENTION_BACKEND

    def get_graph_runner_cls(self) -> Any:
        """Return the runner of GPUs, for decode and verify."""
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner  # noqa: PLC0415  it asks for a platform
        from sglang.srt.runtime_context import get_flags  # noqa: PLC0415

        # The gate was passed, see `hooks`. A tape records what torch dispatches, so nothing may be compiled.
        get_flags().capture.enable_torch_compile = False
        return DecodeCudaGraphRunner

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether drafts of ``algorithm`` run on a CPU."""
        return algorithm in DRAFTS

    def get_speculative_cache_locs_fn(self) -> Any:
        """Return the function that finds the KV slots of drafts."""
        from graphpact_sglang.attention.drafts import extend_slots  # noqa: PLC0415  it imports SGLang

        return extend_slots

    def get_speculative_graph_runner_cls(self, algorithm: str, phase: str) -> Any:
        """Return the runner of GPUs for a phase of drafting: ``draft_decode`` or ``draft_extend``."""
        from sglang.srt.speculative import (  # noqa: PLC0415  it asks for a platform
            eagle_draft_cuda_graph_runner,
            eagle_draft_extend_cuda_graph_runner,
        )

        del algorithm
        if phase == "draft_decode":
            return eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner
        return eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Return False: there is no device to pin memory for."""
        del device
        return False
