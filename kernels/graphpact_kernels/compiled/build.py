"""Build the C++ kernels with torch's extension builder, once, and load them.

The library lies in a folder of the cache that is named by all that it depends on: sources, flags, compiler,
torch, and the vector instructions of the CPU. So a change of one of them builds another library, and machines
that share a home directory do not take each other's. The cache is ``$GRAPHPACT_CACHE_DIR``, by default
``$XDG_CACHE_HOME/graphpact`` or ``~/.cache/graphpact``.

A build runs in a process of its own, in a temporary folder. The finished library is moved to its place in one
step, so no process ever loads half of one, and a lock lets one process build while the others wait.

Does not: decide who uses the kernels; see `graphpact_kernels.compiled`.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

_log = logging.getLogger(__name__)

_NAME = "graphpact_compiled"
_HERE = Path(__file__).parent
_HEADERS, _SOURCES = (
    ("attend.h", "index.h"),
    ("attention.cpp", "indices.cpp", "linear.cpp", "paged_cache.cpp"),
)
_SECONDS = 600  # a build takes ten seconds to a minute

_FLAGS = ("-O3", "-fopenmp", "-fno-math-errno")
_FLAGS_OF = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}
"""By torch's name of the CPU's vector instructions; torch's own kernels are built with these."""


_failed: str | None = None
"""Why `load` failed in this process."""


def missing() -> str | None:
    """Return why the kernels cannot be built here, or None. Builds nothing.

    The reason is what the machine lacks, or why `load` failed in this process.
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
    """Build the kernels if the cache has none, load their operators, and return None.

    If that is impossible, return the reason. It is tried once in a process.
    """
    reason = missing()
    if reason is not None:
        return reason
    try:
        folder = cache_folder() / "kernels" / _key()
        library = folder / f"{_NAME}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                if not library.exists():
                    _build(library)
        torch.ops.load_library(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        global _failed  # noqa: PLW0603  a fact of the process
        _failed = f"they cannot be built and loaded: {_first_line(error)}"
    return _failed


def cache_folder() -> Path:
    """Return the folder of everything that is built once and kept."""
    named = os.environ.get("GRAPHPACT_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpact"


def _flags() -> tuple[str, ...]:
    return _FLAGS + _FLAGS_OF.get(torch.backends.cpu.get_cpu_capability(), ())


def _key() -> str:
    """Return the name of the library's folder, from all that the library depends on."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout
    parts = [torch.__version__, platform.machine(), compiler, version, *_flags()]
    parts += [(_HERE / name).read_text("utf-8") for name in (*_HEADERS, *_SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compiler() -> str:
    """Return the name of the compiler that torch's extension builder calls."""
    return os.environ.get("CXX", "c++")


def _search_path() -> str:
    """Return the path to search, with the scripts of this environment: ninja may be installed there."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def _build(library: Path) -> None:
    """Build ``library`` in a temporary folder beside it, and move it to its place."""
    _log.warning("building the compiled kernels, once for this machine and torch: %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        command = [sys.executable, "-m", __name__, folder]
        environment = os.environ | {"PATH": _search_path()}
        done = subprocess.run(
            command, env=environment, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
        built = Path(folder, library.name)
        if done.returncode or not built.exists():
            raise OSError(_fault(done.stdout + done.stderr))
        built.replace(library)


def _fault(output: str) -> str:
    """Return the first error of a compiler's output, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else "it ended early")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main(folder: str) -> None:
    """Build the library in ``folder``."""
    from torch.utils import cpp_extension  # noqa: PLC0415  heavy, and needed to build only

    cpp_extension.load(
        _NAME,
        [str(_HERE / name) for name in _SOURCES],
        extra_cflags=list(_flags()),
        build_directory=folder,
        is_python_module=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
