"""`Tracer`: splits a forward pass at its attention calls, by a backend of torch.compile that runs pieces.

Dynamo traces the pass into one FX graph. Its inputs are the tensors that the pass reads: weights, and the
static inputs of a shape. They all keep their addresses, so the pieces can run again without the Python of the
pass. In the trace, attention is one opaque operator. One trace is used for all token counts that the model
treats alike, and for all equal models; each region runs with the token count of its shape and its own inputs.

Does not: record anything, or split at other places than attention calls.
"""

import threading
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from graphpact import ForwardBatch, LayerSpec
from graphpact.errors import CaptureError
from graphpact.step import Forward, Region, StepOutputs

AttendLayer: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int], torch.Tensor]
"""``(q, k, v, layer_id) -> out``."""

_library = torch.library.Library("graphpact_cuda_graph", "DEF")
_library.define("attend(Tensor q, Tensor? k, Tensor? v, int layer_id, int v_head_dim) -> Tensor")
torch.library.register_fake(
    "graphpact_cuda_graph::attend",
    lambda q, _k, _v, _layer_id, v_head_dim: q.new_empty(q.shape[0], q.shape[1], v_head_dim),
    lib=_library,
)
_ATTEND = torch.ops.graphpact_cuda_graph.attend
_ATTENDS = (_ATTEND, _ATTEND.default)


_SETTINGS: dict[str, Any] = {
    # Only marked dimensions vary; a number is not made an input because another model had another number.
    "automatic_dynamic_shapes": False,
    "specialize_float": True,
    # A shape that needs a separate trace gets one.
    "recompile_limit": 2**16,
    "accumulated_recompile_limit": 2**16,
}
"""Settings of torch._dynamo."""


def _attend(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
) -> torch.Tensor:
    """Represent attention in the trace, as one node."""
    del metadata
    out: torch.Tensor = _ATTEND(q, k, v, layer.layer_id, layer.v_head_dim)
    return out


def _forward_once(forward: Forward, view: ForwardBatch) -> StepOutputs:
    """Run the pass that is traced. The model gets no metadata; the attention function has it."""
    return forward(view, None, _attend)


class _Traced:
    """The function that torch traces, and its traces: for the same code of models with equal attributes one.

    Torch stores compiled code with the code object, with a small limit for each, and never frees a backend or
    its results. So the code object is a copy, which is freed with this object, and both refer to the traces
    and the pieces weakly.

    Args:
        compiled: As of `Tracer`.
    """

    def __init__(self, *, compiled: bool) -> None:
        self.traces: list[fx.GraphModule] = []
        code = _forward_once.__code__.replace()
        function = types.FunctionType(code, _forward_once.__globals__, "traced")
        self.call: Any = torch.compile(
            function, backend=_backend, fullgraph=True, dynamic=False if compiled else None
        )


_traced: "weakref.WeakValueDictionary[bool, _Traced]" = weakref.WeakValueDictionary()
"""What the tracers of this process share, by their ``compiled``, while there are any."""


class Tracer:
    """Traces one model. It keeps traces, but no tensors; tracers of equal models share them.

    Args:
        compiled: Whether inductor compiles the pieces, which are then traced separately for each shape.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.compiled = compiled
        self._has_run = False
        traced = _traced.get(compiled)
        if traced is None:
            traced = _traced[compiled] = _Traced(compiled=compiled)
        self._shared = traced

    @property
    def traces(self) -> list[fx.GraphModule]:
        """The traces of this and other models."""
        return self._shared.traces

    def split(self, forward: Forward, view: ForwardBatch, attend: AttendLayer) -> Region:
        """Return a region that runs the pass over ``view`` in pieces. The pass also runs once now.

        Args:
            forward: The model.
            view: The static inputs.
            attend: The attention between the pieces.

        Raises:
            CaptureError: The pass cannot be traced as one graph, or inductor cannot compile a piece.
        """
        from torch._dynamo import config, maybe_mark_dynamic  # noqa: PLC0415  heavy to import

        for tensor in view.tensors().values():
            for dim, size in enumerate(tensor.shape):
                if size in (view.num_tokens, view.batch_size):
                    maybe_mark_dynamic(tensor, dim)
        if not self._has_run:  # work that a model does only in its first pass is not part of the trace
            self._has_run = True
            forward(view, None, lambda q, k, v, layer, _: attend(q, k, v, layer.layer_id))
        _current.pieces = pieces = _Pieces(attend, self.traces, compiled=self.compiled)
        try:
            with config.patch(**_SETTINGS):
                outputs = self._shared.call(forward, view)
        except Exception as error:
            if pieces.failed is not None:
                raise pieces.failed from None
            raise CaptureError(
                f"torch.compile cannot trace the forward pass as one graph: {type(error).__name__}:"
                f" {str(error).strip().partition(chr(10))[0]}",
                hint='use runner = "breakable_cuda_graph", which traces nothing',
                rule="GP20",
            ) from error
        finally:
            _current.pieces = None
        return pieces.region(outputs)


_current = threading.local()


def _backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Split a trace before and after every attention. This is a backend of torch.compile."""
    del examples  # the examples have no memory
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        attends = _is_attention(node)
        part += attends
        parts[node] = part
        part += attends
    trace = split_module(module, module, parts.__getitem__, keep_original_order=True)
    pieces: _Pieces = _current.pieces
    pieces.traces.append(trace)
    return partial(_run_first, weakref.ref(trace))


def _run_first(trace: "weakref.ref[fx.GraphModule]", *inputs: Any) -> Sequence[Any]:
    pieces: _Pieces = _current.pieces
    module = trace()
    assert module is not None  # noqa: S101  the tracer that calls this keeps the pieces
    return pieces.run_first(module, inputs)


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _ATTENDS


class _Pieces:
    """The pieces of a trace, with the inputs of one shape.

    Args:
        attend: The attention between the pieces.
        traces: Receives new traces.
        compiled: Whether inductor compiles the pieces.

    Attributes:
        failed: The error of their first run, if it failed.
    """

    def __init__(self, attend: AttendLayer, traces: list[fx.GraphModule], *, compiled: bool) -> None:
        self.traces = traces
        self.failed: Exception | None = None
        self._attend, self._compiled = attend, compiled
        self._run: Callable[[], Sequence[Any]] | None = None
        self._returned: Sequence[Any] = ()

    def run_first(self, trace: fx.GraphModule, inputs: tuple[Any, ...]) -> Sequence[Any]:
        """Compile the pieces if this was requested, and run them. Keep the trace and the inputs."""

        def run() -> Sequence[Any]:
            results: Sequence[Any] = _Run(trace, self._attend).run(*inputs)
            return results

        try:
            if self._compiled:
                _Compile(trace, self._attend).run(*inputs)
            self._run, self._returned = run, run()
        except Exception as error:
            self.failed = error
            raise
        return self._returned

    def region(self, outputs: StepOutputs) -> Region:
        """Return a function that runs the pieces again and returns their results in the form of ``outputs``.

        Raises:
            CaptureError: An output is not a result of the graph.
        """
        run = self._run
        leaves, spec = pytree.tree_flatten(outputs)
        at = {id(tensor): index for index, tensor in enumerate(self._returned)}
        if run is None or any(id(leaf) not in at for leaf in leaves):
            raise CaptureError(
                "the forward pass returns tensors that it does not compute",
                hint="return only results of the model; an input need not be returned",
                rule="GP20",
            )
        order = [at[id(leaf)] for leaf in leaves]
        self._returned = ()

        def pieces() -> StepOutputs:
            results = run()
            outputs: StepOutputs = pytree.tree_unflatten([results[index] for index in order], spec)
            return outputs

        return pieces


class _Run(fx.Interpreter):
    """Runs a split trace: its pieces, with the attention of one region between them."""

    def __init__(self, module: fx.GraphModule, attend: AttendLayer) -> None:
        super().__init__(module)
        self._attend = attend

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a piece, or the part of the trace that computes attention."""
        del kwargs  # split_module passes none
        part: Any = self.fetch_attr(target)
        if isinstance(part, fx.GraphModule) and any(map(_is_attention, part.graph.nodes)):
            return _Run(part, self._attend).run(*args)
        return self.run_piece(target, part, args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute attention, or call another function."""
        if target in _ATTENDS:
            return self._attend(*args[:4])
        return super().call_function(target, args, kwargs)

    def run_piece(self, target: str, piece: Any, args: tuple[Any, ...]) -> Any:
        """Run a piece."""
        del target
        return piece(*args)


class _Compile(_Run):
    """Runs a split trace once, and replaces each piece by code that is compiled for its inputs."""

    def run_piece(self, target: str, piece: Any, args: tuple[Any, ...]) -> Any:
        """Compile a piece and run it."""
        if not isinstance(piece, _Compiled):
            piece = _Compiled(piece, args)
            setattr(self.module, target, piece)
        return piece(*args)


class _Compiled(torch.nn.Module):
    """A piece that inductor compiled.

    Raises:
        CaptureError: Inductor cannot compile it.
    """

    def __init__(self, piece: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__()
        from torch import _inductor  # noqa: PLC0415  heavy to import
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415  heavy to import

        output = piece.graph.output_node()
        self._is_single = not isinstance(output.args[0], tuple)
        if self._is_single:  # inductor compiles only graphs that return a tuple
            output.args = ((output.args[0],),)
            piece.recompile()
        with torch.inference_mode(mode=False), torch.no_grad():
            # The shapes are numbers, but torch looks for an equal graph in its cache only if there is a
            # ShapeEnv.
            with FakeTensorMode(shape_env=ShapeEnv()):
                examples = pytree.tree_map_only(
                    torch.Tensor,
                    lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
                    list(inputs),
                )
            try:
                self._code = _inductor.compile(piece, examples)
            except Exception as error:
                raise CaptureError(
                    f"inductor cannot compile a piece of the model: {type(error).__name__}:"
                    f" {str(error).strip().partition(chr(10))[0]}",
                    hint='use runner = "breakable_cuda_graph", which compiles nothing',
                    rule="GP20",
                ) from error

    def forward(self, *inputs: Any) -> Any:
        """Run the compiled code, and return its result in the form of the piece's."""
        results = self._code(*inputs)
        return results[0] if self._is_single else results
