"""Choose between the Triton form and the portable form of a kernel, for CUDA tensors.

Does not: import Triton before a kernel is called with CUDA tensors.
"""

import functools
import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


def missing() -> str | None:
    """Return why Triton cannot compile kernels here, or None if nothing seems to be missing.

    Triton compiles a small launcher in C, so it needs a compiler and Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: `pip install 'graphpact-kernels[triton]'`"
    compiler = os.environ.get("CC") or "gcc"
    if not (shutil.which(compiler) or shutil.which("clang")):
        return f"Triton needs a C compiler: {compiler!r} is not found; install gcc, or name a compiler in CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Triton does the same
    headers = Path(sysconfig.get_path("include", scheme))
    if not (headers / "Python.h").exists():
        return f"Triton needs Python's headers: {headers} has no Python.h; install python3-dev"
    return None


@functools.cache
def kernels() -> ModuleType | None:
    """Return the module of the Triton kernels; if they cannot run, warn once with the reason, return None."""
    reason = missing()
    if reason is None:
        try:
            return importlib.import_module("graphpact_kernels._triton_indices")
        except ImportError as error:
            reason = f"triton cannot be imported: {error}"
    _log.warning("portable kernels fill index tensors on the GPU, with about ten launches each: %s", reason)
    return None


def prefer_triton(portable: Callable[..., None], name: str) -> Callable[..., None]:
    """Return an implementation for CUDA tensors: Triton's kernel ``name``, or ``portable`` without it."""

    def fill(*args: Any) -> None:
        module = kernels()
        (portable if module is None else getattr(module, name))(*args)

    return fill
