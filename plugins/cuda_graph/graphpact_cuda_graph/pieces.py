"""Splits a forward pass at its attention, by torch.compile with a backend that runs pieces.

Dynamo traces the pass into one FX graph. Its inputs are the tensors that the pass reads: weights, and the
static inputs of a shape. All of them stay where they are, so the pieces run again without the Python of the
pass. Attention is one opaque operator in the trace.

Does not: record anything, or choose where to split: attention calls decide that.
"""

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from graphpact import LayerSpec
from graphpact.errors import CaptureError
from graphpact.step import Attend, Region, StepOutputs

AttendLayer: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int], torch.Tensor]
"""``(q, k, v, layer_id) -> out``."""

_library = torch.library.Library("graphpact_cuda_graph", "DEF")
_library.define("attend(Tensor q, Tensor? k, Tensor? v, int layer_id, int v_head_dim) -> Tensor")
_ATTEND = torch.ops.graphpact_cuda_graph.attend


torch.library.register_fake(
    "graphpact_cuda_graph::attend",
    lambda q, _k, _v, _layer_id, v_head_dim: q.new_empty(q.shape[0], q.shape[1], v_head_dim),
    lib=_library,
)


def _traced_attend(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
) -> torch.Tensor:
    """Attend in the trace: one node."""
    del metadata
    out: torch.Tensor = _ATTEND(q, k, v, layer.layer_id, layer.v_head_dim)
    return out


def split(forward: Callable[[Attend], StepOutputs], *, attend: AttendLayer, compiled: bool = False) -> Region:
    """Return a region that runs ``forward`` in pieces, after tracing it and running it once.

    Args:
        forward: Runs one forward pass with the given attention. All tensors that it reads have to stay in
            place.
        attend: The attention between the pieces.
        compiled: Whether inductor compiles the pieces.

    Raises:
        CaptureError: The pass cannot be traced as one graph, or inductor cannot compile a piece.
    """
    pieces = _Pieces(attend, compiled=compiled)
    traced: Any = torch.compile(_copy_of(forward), backend=_backend, fullgraph=True, dynamic=False)
    _current.pieces = pieces
    try:
        outputs = traced(_traced_attend)
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
    """Give the traced graph to the pieces that are made now; a backend of torch.compile.

    Torch forgets neither backends nor what they return, so neither holds the pieces.
    """
    del examples  # they have no memory
    _current.pieces.split(module)
    return _run_first


def _run_first(*inputs: Any) -> Sequence[Any]:
    pieces: _Pieces = _current.pieces
    return pieces.run_first(*inputs)


def _copy_of(function: Any) -> Any:
    """Return a copy of a function, with a code object of its own.

    Torch keeps what it compiled with the code object: at most a few for each, and as long as that lives.
    """
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


class _Pieces:
    """The pieces of a traced graph, with its inputs.

    Attributes:
        failed: What their first run raised, if it did.
    """

    def __init__(self, attend: AttendLayer, *, compiled: bool) -> None:
        self.failed: Exception | None = None
        self._compiled = compiled
        self._whole: fx.GraphModule | None = None
        self._inputs: tuple[Any, ...] = ()
        self._returned: Sequence[Any] = ()

        def attention(
            q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int, _: int
        ) -> torch.Tensor:
            return attend(q, k, v, layer_id)

        self._attention = attention

    def split(self, module: fx.GraphModule) -> None:
        """Split ``module`` before and after every attention, which from now on attends."""
        part = 0
        parts: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            is_attention = node.op == "call_function" and node.target in (_ATTEND, _ATTEND.default)
            part += is_attention
            parts[node] = part
            if is_attention:
                node.target = self._attention
                part += 1
        self._whole = split_module(
            module, module, parts.__getitem__, keep_original_order=True, tuple_return=True
        )

    def run_first(self, *inputs: Any) -> Sequence[Any]:
        """Compile the pieces, if asked for, and run them; keep the inputs."""
        assert self._whole is not None  # noqa: S101  split before
        try:
            if self._compiled:
                _Compiling(self._whole, self._attention).run(*inputs)
            self._inputs, self._returned = inputs, self._whole(*inputs)
        except Exception as error:
            self.failed = error
            raise
        return self._returned

    def region(self, outputs: StepOutputs) -> Region:
        """Return a function that runs the pieces again and returns their results as ``outputs`` are made.

        Raises:
            CaptureError: An output is no result of the graph.
        """
        run, inputs = self._whole, self._inputs
        leaves, spec = pytree.tree_flatten(outputs)
        at = {id(tensor): index for index, tensor in enumerate(self._returned)}
        if run is None or any(id(leaf) not in at for leaf in leaves):
            raise CaptureError(
                "the forward pass returns tensors that it does not compute",
                hint="return results of the model; an input does not have to be returned",
                rule="GP20",
            )
        order = [at[id(leaf)] for leaf in leaves]
        self._returned = ()

        def pieces() -> StepOutputs:
            results = run(*inputs)
            outputs: StepOutputs = pytree.tree_unflatten([results[index] for index in order], spec)
            return outputs

        return pieces


class _Compiling(fx.Interpreter):
    """Runs a split graph once, and replaces each piece by code that is compiled for the inputs it gets."""

    def __init__(self, whole: fx.GraphModule, attention: object) -> None:
        super().__init__(whole)
        self._attention = attention

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a piece; compile it first, unless it attends."""
        del kwargs
        piece: Any = self.fetch_attr(target)
        if not piece.graph.find_nodes(op="call_function", target=self._attention):
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

        with torch.inference_mode(mode=False), torch.no_grad():
            with FakeTensorMode():
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
        """Run the compiled code."""
        return self._code(*inputs)
