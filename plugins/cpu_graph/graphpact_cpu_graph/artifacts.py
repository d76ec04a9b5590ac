"""Compiled graphs on disk: each is a shared library, kept under a key of all that it depends on.

The cache is ``$GRAPHPACT_CACHE_DIR``, by default ``$XDG_CACHE_HOME/graphpact`` or ``~/.cache/graphpact``. An
entry ``inductor/KEY/`` has the library ``graph.so``, and ``graph.json`` with its key and the SHA-256 of the
library. The key is a hash of the graph (operators with their schemas, numbers, layouts of inputs and results,
which tensor is which), the versions of torch and graphpact, inductor's configuration, the compiler, the
number of threads, and the CPU. So an entry of another machine, torch or graph is never found.

An entry is written to a temporary folder and moved to its place in one step. An entry that is incomplete, has
changed, belongs to another user or cannot be loaded is compiled anew, with a warning. Nothing is unpickled.
Whoever may write to the folder can run code as its user, as in every cache of compiled code.

Does not: compile, remove old entries, or find a change that was made together with its hash.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import graphpact
from graphpact.errors import GraphpactError
from graphpact.files import write_file
from graphpact_kernels.compiled import cache_folder

_log = logging.getLogger(__name__)

_FORMAT = 1
_LIBRARY, _FACTS = "graph.so", "graph.json"


def key_of(graph: fx.Graph, inputs: Sequence[torch.Tensor], options: dict[str, Any]) -> str:
    """Return the key of a graph's library: equal for graphs that compile to the same code on this machine.

    Args:
        graph: The graph; its placeholders are the inputs, in order.
        inputs: The tensors that it reads and writes. Only their layouts matter.
        options: The options of the compiler.
    """
    from torch._inductor import config  # noqa: PLC0415  heavy to import

    numbers = {node: f"%{at}" for at, node in enumerate(graph.nodes)}
    parts = [
        *(_FORMAT, graphpact.__version__, torch.__version__, torch.version.git_version),
        *(sys.implementation.cache_tag, torch.get_num_threads(), torch.get_default_dtype()),
        *(config.get_hash().hex(), sorted(options.items()), *_machine(), *map(layout_of, inputs)),
        *(text for node in graph.nodes for text in _texts(node, numbers)),
    ]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a compiler sees of a tensor: dtype, shape and strides."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride()


def find(key: str) -> Path | None:
    """Return the library of a key, or None. An entry that is not whole is removed, with a warning."""
    folder = cache_folder() / "inductor" / key
    if not folder.exists():
        return None
    try:
        fault = _fault(folder, key)
    except (OSError, ValueError) as error:
        fault = str(error)
    if fault is None:
        return folder / _LIBRARY
    discard(key, fault)
    return None


def keep(key: str, library: Path) -> Path:
    """Copy a library into the cache; return its path there, or the given path if that is impossible."""
    folder = cache_folder() / "inductor" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as name:
            new = Path(name, key)
            new.mkdir()
            shutil.copyfile(library, new / _LIBRARY)
            facts = {"key": key, "sha256": hashlib.sha256((new / _LIBRARY).read_bytes()).hexdigest()}
            write_file(new / _FACTS, json.dumps(facts))
            if not folder.exists():  # else another process was first
                new.rename(folder)
    except (OSError, GraphpactError) as error:
        if not folder.exists():
            _log.warning("a compiled graph is not kept: %s", error)
    kept = find(key)
    return library if kept is None else kept


def discard(key: str, fault: str) -> None:
    """Remove the entry of a key, with a warning that says why."""
    folder = cache_folder() / "inductor" / key
    _log.warning("the compiled graph %s is not used and compiled again: %s", folder, fault)
    shutil.rmtree(folder, ignore_errors=True)


def _fault(folder: Path, key: str) -> str | None:
    """Return why an entry cannot be used, or None."""
    library = folder / _LIBRARY
    if hasattr(os, "getuid") and library.stat().st_uid not in (os.getuid(), 0):
        return "it belongs to another user"
    facts = json.loads((folder / _FACTS).read_text("utf-8"))
    if not isinstance(facts, dict) or facts.get("key") != key:
        return "it was made for another key"
    if hashlib.sha256(library.read_bytes()).hexdigest() != facts.get("sha256"):
        return "its library was changed"
    return None


@functools.cache
def _machine() -> tuple[str, ...]:
    """Return the facts of machine and compiler that code depends on."""
    from torch._inductor import cpp_builder  # noqa: PLC0415  heavy to import

    compiler = cpp_builder.get_cpp_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout
    facts = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # code is compiled for all instructions that the CPU has
        lines = cpuinfo.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return (*facts, compiler, version)


def _texts(node: fx.Node, numbers: dict[fx.Node, str]) -> Iterable[str]:
    """Yield what a node computes: operator, schema, arguments, and the layouts of its recorded results."""
    yield node.op
    yield str(node.target) if node.op == "call_function" else ""
    yield str(getattr(node.target, "_schema", ""))
    yield _text((node.args, node.kwargs), numbers)
    yield str(node.meta.get("layout", ""))


def _text(value: Any, numbers: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):  # torch does not tell them apart
        return f"[{', '.join(_text(each, numbers) for each in value)}]"
    return f"{type(value).__name__} {value!r}"
