"""`let_vllm_use_triton`: vLLM's model runner V2 and its Triton backends on a CPU.

vLLM uses Triton if it finds one active driver. Triton's interpreter needs none, so one is announced.

Does not: make Triton compile for a CPU.
"""

import os
import sys
from types import SimpleNamespace

_VARIABLE = "TRITON_INTERPRET"


class _CpuDriver:
    """A driver of Triton without a compiler: vLLM asks which one is active, and what it compiles for."""

    @staticmethod
    def is_active() -> bool:
        """Return True."""
        return True

    def get_current_target(self) -> SimpleNamespace:
        """Return the target, whose name vLLM takes as the name of the device in torch."""
        return SimpleNamespace(backend="cpu", arch="interpreter", warp_size=1)


def let_vllm_use_triton() -> None:
    """Let vLLM find Triton, whose interpreter runs its kernels.

    With ``VLLM_USE_V2_MODEL_RUNNER=0`` nothing changes: the model runner V1 has kernels for a CPU, and needs
    no Triton.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return
    if os.environ.get(_VARIABLE) != "1":
        # Triton read the variable when torch imported it, before vLLM asked for a platform. No kernel is
        # defined yet, so that it can be imported again; its compiled part does not read the variable.
        for name in [*sys.modules]:
            if name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
                del sys.modules[name]
        os.environ[_VARIABLE] = "1"
    from triton.backends import backends  # noqa: PLC0415  after the variable

    backends.setdefault("cpu", SimpleNamespace(driver=_CpuDriver))
