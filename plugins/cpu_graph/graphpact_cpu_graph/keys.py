"""`key_of_graph`: returns the key under which the library of a compiled graph is stored.

A key is a hash of the graph, of the versions of torch and graphpact, of inductor's configuration, of the
compiler, of the number of threads, and of the CPU. Of the graph it contains operators with their schemas,
numbers, layouts of inputs and results, and the places where each tensor is used. So the library of another
machine, torch or graph is never found.

Does not: store libraries; see `graphpact_kernels.compiled.cache`.
"""

import functools
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import graphpact
from graphpact_kernels.compiled import cache


def key_of_graph(graph: fx.Graph, inputs: Sequence[torch.Tensor], options: dict[str, Any]) -> str:
    """Return the key of a graph's library. Graphs with equal keys compile to the same code on this machine.

    Args:
        graph: The graph; its placeholders are the inputs, in order.
        inputs: The tensors that it reads and writes. Only their layouts matter.
        options: The options of the compiler.
    """
    from torch._inductor import config  # noqa: PLC0415  heavy to import

    numbers = {node: f"%{at}" for at, node in enumerate(graph.nodes)}
    parts = [
        *(graphpact.__version__, torch.__version__, torch.version.git_version),
        *(sys.implementation.cache_tag, torch.get_num_threads(), torch.get_default_dtype()),
        *(config.get_hash().hex(), sorted(options.items()), *_machine(), *map(layout_of, inputs)),
        *(text for node in graph.nodes for text in _texts(node, numbers)),
    ]
    return cache.key_of(parts)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a compiler sees: dtype, shape and strides."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride()


@functools.cache
def _machine() -> tuple[str, ...]:
    """Return the properties of the machine and the compiler that compiled code depends on."""
    from torch._inductor import cpp_builder  # noqa: PLC0415  heavy to import

    compiler = cpp_builder.get_cpp_compiler()
    facts = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # code is compiled for all instructions of the CPU
        lines = cpuinfo.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return (*facts, compiler, cache.version_of(compiler))


def _texts(node: fx.Node, numbers: dict[fx.Node, str]) -> Iterable[str]:
    """Yield texts that define a node: operator, schema, arguments, and layouts of its recorded results."""
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
    if isinstance(value, (list, tuple)):  # torch treats both alike
        return f"[{', '.join(_text(each, numbers) for each in value)}]"
    return f"{type(value).__name__} {value!r}"
