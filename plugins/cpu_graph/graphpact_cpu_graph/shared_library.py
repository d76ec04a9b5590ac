"""Compile graphs to shared libraries, equal ones once, and call the libraries directly.

Torch's inductor generates a C++ program with fused kernels and calls of torch's kernels between them. The
program is called with the inputs of the graph. The call checks nothing, because a replay uses the tensors of
its capture. Torch's guards, copies of inputs and caches are not needed: the inputs are in separate memory and
written in place, and there are no outputs.

If inductor cannot generate such a program, its Python program runs the graph. That is slower to call and is
not stored on disk.

Does not: freeze weights. They are inputs that every replay reads.
"""

import functools
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from graphpact.errors import GraphpactError
from graphpact_cpu_graph.fx_graph import LIST_OF_ONE
from graphpact_cpu_graph.keys import key_of_graph
from graphpact_kernels.compiled import LibraryCache, announced, own_folder

_log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {
    "fallback_random": True,  # use the numbers of torch's generator, as in an eager run
    "cpp_wrapper": True,
    "size_asserts": False,
    "alignment_asserts": False,
}
"""Inductor's options."""

_ENTRY = "inductor_entry_cpp"
_POINTER = "_torchinductor_pyobject_tensor_data_ptr"

_GRAPHS = LibraryCache("inductor", "the compiled graph")

_loaded: dict[str, Callable[[Any], object]] = {}
"""The programs of this process by key. A loaded library stays in memory."""

Code: TypeAlias = tuple[fx.Graph, list[torch.Tensor]]
"""A graph, which returns nothing, and the tensors of its placeholders, each in separate memory."""


def compiled(codes: Sequence[Code]) -> list[Callable[[], object]]:
    """Compile graphs, and return for each a function that runs it on its inputs.

    Graphs with equal keys are compiled once.
    """
    keys = [key_of_graph(graph, inputs, OPTIONS) for graph, inputs in codes]
    missing: dict[str, Code] = {}
    for key, code in zip(keys, codes, strict=True):
        if key in _loaded or key in missing:
            continue
        entry = _from_cache(key)
        if entry is None:
            missing[key] = code
        else:
            _loaded[key] = entry
    programs = _compile_and_load(missing) if missing else {}
    steps: list[Callable[[], object]] = []
    for key, (_, inputs) in zip(keys, codes, strict=True):
        entry = _loaded.get(key)
        steps.append(
            functools.partial(programs[key], *inputs)
            if entry is None
            else functools.partial(_call, entry, inputs)
        )
    return steps


def _compile_and_load(missing: dict[str, Code]) -> dict[str, Callable[..., object]]:
    """Compile graphs and load their libraries; return the Python programs of those that have none."""
    programs: dict[str, Callable[..., object]] = {}
    _require_own_scratch()
    with announced(
        f"compiling graphs, each once for this machine; seconds to a minute each: {_GRAPHS.folder}"
    ) as update:
        for number, (key, (graph, inputs)) in enumerate(missing.items(), 1):
            update(f"compiling graphs: piece {number} of {len(missing)}")
            module = fx.GraphModule(torch.nn.Module(), graph)
            try:
                _check_lists(module)
                library = _library(module, inputs)
                fault = "it has other inputs, outputs or constants"
            except Exception as error:  # noqa: BLE001  after any failure the Python program is used
                library, fault = None, _first_line(error)
            if library is not None:
                _loaded[key] = _load_kept(key, library)
                continue
            _log.warning(
                "a region runs as inductor's Python program, which is slower to call, because there is no "
                "C++ program: %s",
                fault,
            )
            programs[key] = _python_program(module, inputs)
    return programs


def _check_lists(module: fx.GraphModule) -> None:
    """Raise if a call returns a list of one tensor, which inductor's C++ programs treat as the tensor."""
    for node in module.graph.nodes:
        if node.meta.get(LIST_OF_ONE):
            raise NotImplementedError(f"{node.target} returns a list of one tensor")


def _call(entry: Callable[[Any], object], inputs: list[torch.Tensor]) -> None:
    # Inductor's programs do the same. The function refuses calls while a region is recorded.
    entry(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs))  # noqa: SLF001


def _from_cache(key: str) -> Callable[[Any], object] | None:
    try:
        library = _GRAPHS.find(key)
        if library is None:
            return None
        try:
            return _load(key, library)
        except (ImportError, OSError, AttributeError) as error:
            _GRAPHS.discard(key, _first_line(error))
    except (OSError, GraphpactError) as error:
        _log.warning("cannot look up a compiled graph: %s", error)
    return None


def _load_kept(key: str, library: Path) -> Callable[[Any], object]:
    """Store a library and load the stored copy; if that fails, log a warning and load ``library`` itself."""
    try:
        library = _GRAPHS.keep(key, library)
    except (OSError, GraphpactError) as error:
        _log.warning("cannot store a compiled graph: %s", error)
    return _load(key, library)


def _require_own_scratch() -> None:
    """Check the folder in which torch compiles, because torch loads libraries that it finds there.

    Raises:
        GraphpactError: Other users can change it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415  heavy to import

    with own_folder(Path(cache_dir()), "TORCHINDUCTOR_CACHE_DIR"):
        pass


def _load(key: str, library: Path) -> Callable[[Any], object]:
    """Load a library and return its program, which takes handles of the inputs."""
    os.environ[_POINTER.upper()] = str(getattr(torch._C._dynamo.guards, _POINTER))  # noqa: SLF001  the program reads this attribute
    name = f"{key}.{_ENTRY}"
    loader = ExtensionFileLoader(name, str(library))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(library)))
    loader.exec_module(module)
    entry: Callable[[Any], object] = getattr(module, _ENTRY)
    return entry


def _library(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Path | None:
    """Compile ``module`` to a library; return None if it has other inputs, outputs or constants."""
    from torch._functorch import config as functorch_config  # noqa: PLC0415  heavy to import
    from torch._inductor import compile_fx, config  # noqa: PLC0415  heavy to import

    made: list[Any] = []
    is_plain: list[bool] = []

    def compile_inner(inner: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        outputs = next(node for node in reversed(inner.graph.nodes) if node.op == "output").args[0]
        is_plain.append(not outputs and len(examples) == len(inputs))
        made.append(compile_fx.compile_fx_inner(inner, examples, **options))
        return made[-1]

    with (
        config.patch({**OPTIONS, "fx_graph_cache": False}),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compile_fx.compile_fx(module, examples_of(inputs), inner_compile=compile_inner)
    if is_plain != [True] or made[0].constants:
        return None
    program = inspect.getclosurevars(made[0].current_callable).nonlocals.get("f")
    file = getattr(getattr(program, "__self__", None), "__file__", None)
    return None if file is None else Path(file)


def _python_program(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    from torch import _inductor  # noqa: PLC0415  heavy to import

    program: Callable[..., object] = _inductor.compile(
        module, examples_of(inputs), {**OPTIONS, "cpp_wrapper": False}
    )
    return program


def examples_of(inputs: list[torch.Tensor]) -> list[Any]:
    """Return fake tensors with the layouts of ``inputs``, each in separate memory."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415  heavy to import

    # The shapes are numbers, but torch looks for an equal graph in its cache only if there is a ShapeEnv.
    with FakeTensorMode(shape_env=ShapeEnv()):
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
