"""The graphs of vLLM: where they are captured and replayed, and their names.

    model runner V2     ``CudaGraphManager`` captures and replays full graphs
    model runner V1     ``CUDAGraphWrapper`` captures and replays the full graphs of a model
    both                ``CUDAGraphWrapper`` does so for each piece of a compiled model, and
                        ``BreakableCUDAGraphWrapper`` for a model whose graph is broken at attention

Does not: watch a capture or a replay.
"""

import itertools
import weakref
from typing import Any, NamedTuple

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from graphpact_guard import GraphKey
from graphpact_vllm.seams.shapes import shape_of

_V2 = "vllm.v1.worker.gpu.cudagraph_utils"
CAPTURE = f"{_V2}.CudaGraphManager.capture"
REPLAY = f"{_V2}.CudaGraphManager.run_fullgraph"
MODEL_CAPTURE = f"{_V2}.ModelCudaGraphManager.capture"
MODEL_REPLAY = f"{_V2}.ModelCudaGraphManager.run_fullgraph"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WRAPPER = "vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__"
BREAKABLE = "vllm.compilation.breakable_cudagraph.BreakableCUDAGraphWrapper.__call__"
CONTEXT = "vllm.forward_context.create_forward_context"
"""Makes what layers and wrappers read of a forward: its metadata, its mode and its shape."""
SEGMENTS = "vllm.compilation.breakable_cudagraph.BreakableCUDAGraphCapture"

_NUMBERS: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""The number of each object that captures graphs, among those of its class, in the order of their first
graphs."""


class GraphCall(NamedTuple):
    """A call of a wrapper that captures or replays a graph.

    Args:
        key: The graph.
        num_tokens: Its tokens, with padding.
        graph: The captured graph; None before the capture.
    """

    key: GraphKey
    num_tokens: int
    graph: Any


def key_of(manager: Any, desc: Any) -> GraphKey:
    """Return the name of a graph of model runner V2."""
    return GraphKey(runner=_numbered(manager), shape=shape_of(desc))


def call_of(wrapper: Any) -> GraphCall | None:
    """Return the graph that a call of a wrapper captures or replays now; None if the call runs eagerly."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    mode, desc = context.cudagraph_runtime_mode, context.batch_descriptor
    if mode == CUDAGraphMode.NONE or wrapper.runtime_mode not in (None, mode):
        return None
    if isinstance(wrapper, CUDAGraphWrapper):
        entry = wrapper.concrete_cudagraph_entries.get(desc)
        graph = None if entry is None else entry.cudagraph
    else:
        entry = wrapper.entries.get(desc)
        graph = None if entry is None else entry.capture
    return GraphCall(GraphKey(runner=_numbered(wrapper), shape=shape_of(desc)), desc.num_tokens, graph)


def _numbered(holder: Any) -> str:
    """Return the class of an object that captures graphs, with a number from the second one on."""
    kind = type(holder)
    number = _NUMBERS.get(holder)
    if number is None:
        used = {its for each, its in _NUMBERS.items() if type(each) is kind}
        number = _NUMBERS[holder] = next(free for free in itertools.count() if free not in used)
    return f"{kind.__name__}[{number}]" if number else kind.__name__
