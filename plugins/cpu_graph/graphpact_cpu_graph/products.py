"""Products with weights: torch's or oneDNN's, whichever is faster for their shape on this machine.

In float32, torch calls its BLAS library. Which library wins depends on the CPU and the shape: on a CPU that
MKL was not made for, oneDNN took 0.5 to 0.7 of its time from 576 features on, and twice its time at 128. So
both are timed when a region is compiled, on the weights of the region in their order. So each finds in the
caches what it finds there in a step.

Weights are not packed, so they may be written between two replays. The results of the libraries differ by
rounding.

Does not: change products of two results, or of other dtypes, for which torch calls oneDNN itself.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpact_cpu_graph.opaque import linear

_aten = torch.ops.aten

_PASSES = 5
_WORTH = 0.9  # of the time of torch's product: less is no reason to change


class _Product(NamedTuple):
    """A product of rows and a transposed weight, in a graph."""

    node: fx.Node
    rows: fx.Node
    weight_node: fx.Node
    bias: fx.Node | None
    weight: torch.Tensor
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.weight.shape)


def choose_products(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Replace products in ``graph`` by oneDNN's where they are faster on this machine.

    Args:
        graph: The graph; changed in place. Its placeholders are the inputs, in order.
        inputs: Their tensors.

    Returns:
        The shapes that were replaced: rows, features of the result, features of the rows.
    """
    products = _products(graph, inputs)
    faster = _faster(products, linear, torch.mm) if products else []
    for each in products:
        if each.shape not in faster:
            continue
        with graph.inserting_before(each.node):
            new = graph.call_function(linear, (each.rows, each.weight_node, each.bias))
        new.meta.update(each.node.meta)
        each.node.replace_all_uses_with(new)
        graph.erase_node(each.node)
    return faster


def _products(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> list[_Product]:
    """Return the products of ``graph`` that oneDNN can compute."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return []
    tensors = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    found = []
    for node in graph.nodes:
        if node.target is _aten.mm.default:
            bias = None
            rows, turned = node.args
        elif node.target is _aten.addmm.default and not node.kwargs:  # no factors
            bias, rows, turned = node.args
        else:
            continue
        if turned.target is not _aten.t.default or turned.args[0] not in tensors:
            continue
        weight = tensors[turned.args[0]]
        is_bias = bias is None or (bias in tensors and tensors[bias].dim() == 1)
        if weight.dtype is torch.float32 and weight.is_contiguous() and is_bias and weight.numel():
            _, (num_rows, _), _ = node.meta["layout"]
            found.append(_Product(node, rows, turned.args[0], bias, weight, num_rows))
    return found


def _faster(
    products: list[_Product], new: Callable[..., object], old: Callable[..., object]
) -> list[tuple[int, ...]]:
    """Return the shapes for which ``new(rows, weight)`` is faster than ``old(rows, weight.t())``."""
    seconds: dict[Any, list[float]] = defaultdict(list)  # by shape and function: of each pass
    rows = {each.shape: torch.randn(each.num_rows, each.weight.shape[1]) for each in products}
    for _ in range(_PASSES):
        for function in (old, new):
            spent: dict[tuple[int, ...], float] = defaultdict(float)
            for each in products:
                weight = each.weight.t() if function is old else each.weight
                given = rows[each.shape]
                start = time.perf_counter()
                function(given, weight)
                spent[each.shape] += time.perf_counter() - start
            for shape, taken in spent.items():
                seconds[shape, function].append(taken)
    return [shape for shape in rows if min(seconds[shape, new]) < _WORTH * min(seconds[shape, old])]
