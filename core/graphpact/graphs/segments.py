"""`EagerCall`: a call that every replay makes between two segments of a graph.

`graphpact.graphs.GraphDriver.eager_call` ends a segment and begins the next.

Does not: record or replay the segments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import ReplayError

__tracebackhide__ = True


class EagerCall:
    """A call ``fn(*args)`` that every replay makes between two segments.

    The segments keep the tensors in ``args`` in place. The next segment reads the tensors in ``result``, the
    result at capture, at their captured addresses.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        self.fn = fn
        self.args = args
        self.result = result
        self._leaves, self._spec = pytree.tree_flatten(result)

    def __call__(self) -> None:
        """Call the function again and copy the result to where the next segment reads it.

        Raises `ReplayError` if it returned another structure, or a tensor of another shape or dtype.
        """
        leaves, spec = pytree.tree_flatten(self.fn(*self.args))
        if spec != self._spec:
            raise self._mismatch(f"a result of the form {self._spec}", spec)
        for target, new in zip(self._leaves, leaves, strict=True):
            if _describe(new) != _describe(target):
                raise self._mismatch(_describe(target), _describe(new))
            if not isinstance(target, torch.Tensor):
                continue
            if new.data_ptr() != target.data_ptr() or new.stride() != target.stride():
                target.copy_(new)

    def _mismatch(self, captured: object, now: object) -> ReplayError:
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        return ReplayError(
            f"the eager call {name} between two segments returned {captured} at capture and {now} now",
            hint="return the captured structure, dtypes and padded shapes: the next segment reads them",
            rule="GP07",
        )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)
