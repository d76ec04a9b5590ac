"""Build the C++ kernels, once, and load them.

The library is kept under a key of everything that it depends on: sources, flags, compiler, torch, and the
vector instructions of the CPU. So if one of them changes, another library is built, and machines that share a
home directory do not use each other's libraries. A lock lets one process build while the others wait.

The compiler is called directly, for four units at the same time. Torch's extension builder would need ninja,
and a second process that imports torch. Most of the time of a unit is for torch's headers. So small sources
share a unit, and only one unit includes torch/library.h.

Does not: keep libraries; see `graphpact_kernels.compiled.cache`.
"""

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from graphpact.errors import GraphpactError
from graphpact_kernels.compiled import cache
from graphpact_kernels.compiled.waiting import announced

_NAME = "graphpact_compiled"
_HERE = Path(__file__).parent
_HEADERS = ("attend.h", "index.h", "kernels.h", "sums.h", "text.h")
_UNITS = (("linear.cpp",), ("attention.cpp",), ("indices.cpp", "paged_cache.cpp", "library.cpp"))
"""The sources that are compiled together; each unit parses torch's headers once, in 3 to 6 seconds."""
_SOURCES = tuple(name for unit in _UNITS for name in unit)
_SECONDS, _USUAL = 600, 60  # the time limit of a build, and the usual maximum on a busy machine

_FLAGS = ("-std=c++20", "-fPIC", "-O3", "-fopenmp", "-fno-math-errno")
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
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not found; install g++, or name a compiler in CXX"
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
    """Return the name of the compiler, as torch's extension builder chooses it."""
    return os.environ.get("CXX", "c++")


def _build(key: str) -> Path:
    """Build the library in a temporary folder, copy it to the cache, and return the copy."""
    what = (
        f"compiling the kernels, once for this machine and torch; 10 to {_USUAL} seconds: {_KERNELS.folder}"
    )
    with announced(what), tempfile.TemporaryDirectory() as folder:
        return _KERNELS.keep(key, _compiled(Path(folder)))


def _compiled(folder: Path) -> Path:
    """Compile and link the library in ``folder``, and return its path."""
    until = time.monotonic() + _SECONDS
    of_torch = Path(torch.__file__).parent
    objects = [str(folder / f"{unit[0]}.o") for unit in _UNITS]
    compile_ = [_compiler(), *_flags(), "-isystem", str(of_torch / "include")]
    _run(
        [
            [*compile_, *_included(first), "-c", str(_HERE / last), "-o", made]
            for (*first, last), made in zip(_UNITS, objects, strict=True)
        ],
        until,
    )
    library = folder / f"{_NAME}.so"
    libraries = [f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run([[_compiler(), "-shared", *objects, *libraries, "-o", str(library)]], until)
    return library


def _included(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in ("-include", str(_HERE / name))]


def _run(commands: Sequence[Sequence[str]], until: float) -> None:
    """Run ``commands`` at the same time, and wait for them until the time ``until``.

    Raises:
        OSError: one cannot be run, or fails; says the first error. The others are ended.
        subprocess.TimeoutExpired: one takes too long.
    """
    running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    with contextlib.ExitStack() as files:
        files.callback(_end, running)
        for command in commands:
            output: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            running.append((process, output))
        for process, output in running:
            if process.wait(max(0.0, until - time.monotonic())):
                output.seek(0)
                raise OSError(_fault(output.read().decode("utf-8", "replace")))


def _end(running: Sequence[tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
    for process, _ in running:
        if process.poll() is None:
            process.terminate()  # g++ removes its temporary files then
            process.wait()


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
