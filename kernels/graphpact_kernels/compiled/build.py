"""Build the C++ kernels with torch's extension builder, once, and load them.

The library is kept under a key of everything that it depends on: sources, flags, compiler, torch, and the
vector instructions of the CPU. So if one of them changes, another library is built, and machines that share a
home directory do not use each other's libraries. A build runs in its own process. A lock lets one process
build while the others wait.

Does not: keep libraries; see `graphpact_kernels.compiled.cache`.
"""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from graphpact.errors import GraphpactError
from graphpact_kernels.compiled import cache
from graphpact_kernels.compiled.waiting import announced

_NAME = "graphpact_compiled"
_HERE = Path(__file__).parent
_HEADERS, _SOURCES = (
    ("attend.h", "index.h", "text.h"),
    ("attention.cpp", "indices.cpp", "linear.cpp", "paged_cache.cpp"),
)
_SECONDS, _USUAL = 600, 120  # the time limit of a build, and the usual maximum on a busy machine

_FLAGS = ("-O3", "-fopenmp", "-fno-math-errno")
_FLAGS_OF = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}
"""Compiler flags by torch's name for the CPU's vector instructions; torch's kernels are built with them."""


_KERNELS = cache.LibraryCache("kernels", "the library of compiled kernels")

_failed: str | None = None
"""Why `load` failed in this process."""


def missing() -> str | None:
    """Return why the kernels cannot be built here, or None. Builds nothing.

    The reason is a tool that the machine lacks, or why `load` failed in this process.
    """
    if _failed is not None:
        return _failed
    if sys.platform != "linux":
        return f"compiled kernels are built on Linux only, not on {sys.platform}"
    path = _search_path()
    compiler = _compiler()
    if shutil.which(compiler, path=path) is None:
        return f"no C++ compiler: {compiler!r} is not found; install g++, or name a compiler in CXX"
    if shutil.which("ninja", path=path) is None:
        return "ninja is not found: `pip install ninja`"
    return None


@functools.cache
def load() -> str | None:
    """Build the kernels if the cache has none, load the library, which registers operators, and return None.

    If that fails, return the reason. A failed build is not tried again in the same process.
    """
    reason = missing()
    if reason is not None:
        return reason
    try:
        _load(_key())
    except (OSError, subprocess.SubprocessError, GraphpactError) as error:
        global _failed  # noqa: PLW0603  a fact of the process
        _failed = f"they cannot be built and loaded: {_reason(error)}"
    return _failed


def _load(key: str) -> None:
    library = _KERNELS.find(key)
    if library is not None:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:  # for example, from a machine with another C library
            _KERNELS.discard(key, _first_line(error))
        else:
            return
    with _KERNELS.building(key, _SECONDS + 60):  # the other process needs time to load it
        library = _KERNELS.find(key) or _build(key)
    ctypes.CDLL(str(library))


def multiplies_pairs() -> bool:
    """Return whether the CPU multiplies bfloat16 numbers in pairs, and the kernels are built to do so."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_wide and torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001  no public name before torch 2.13


def _flags() -> tuple[str, ...]:
    of_pairs = ("-mavx512bf16",) if multiplies_pairs() else ()
    return (*_FLAGS, *_FLAGS_OF.get(torch.backends.cpu.get_cpu_capability(), ()), *of_pairs)


def _key() -> str:
    """Return the key of the library, from everything that it depends on."""
    compiler = _compiler()
    parts = [torch.__version__, platform.machine(), compiler, cache.version_of(compiler), *_flags()]
    return cache.key_of([*parts, *((_HERE / name).read_text("utf-8") for name in (*_HEADERS, *_SOURCES))])


def _compiler() -> str:
    """Return the name of the compiler that torch's extension builder calls."""
    return os.environ.get("CXX", "c++")


def _search_path() -> str:
    """Return the path to search, with the scripts of this environment: ninja may be installed there."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def _build(key: str) -> Path:
    """Build the library in a temporary folder, copy it to the cache, and return the copy."""
    what = (
        f"compiling the kernels, once for this machine and torch; 10 to {_USUAL} seconds: {_KERNELS.folder}"
    )
    with announced(what), tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, *_flags()]
        environment = os.environ | {"PATH": _search_path()}
        done = subprocess.run(
            command, env=environment, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
        built = Path(folder, f"{_NAME}.so")
        if done.returncode or not built.exists():
            raise OSError(_fault(done.stdout + done.stderr))
        return _KERNELS.keep(key, built)


def _fault(output: str) -> str:
    """Return the first error in a compiler's output, or its last line if it has none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else "it ended early")


def _reason(error: Exception) -> str:
    if isinstance(error, GraphpactError) and error.hint is not None:
        return f"{error.message}; {error.hint}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main(folder: str, *flags: str) -> None:
    """Build the library in ``folder``, with the flags of the compiler."""
    from torch.utils import cpp_extension  # noqa: PLC0415  heavy, and needed to build only

    cpp_extension.load(
        _NAME,
        [str(_HERE / name) for name in _SOURCES],
        extra_cflags=list(flags),
        build_directory=folder,
        is_python_module=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
