"""`ExternalsWatch`: finds the external tensors of a region, from the operations that torch dispatches.

It is for drivers whose graphs do not report external tensors, such as CUDA graphs: the addresses are
arguments of kernels, which torch does not inspect. A custom operator is dispatched once, so its tensor
arguments are seen.

Does not: see work below torch's dispatcher, such as a Triton kernel that is launched directly, kernels inside
compiled code, or a library function that is not a torch operator.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from graphpact.tensors import storage_id
from graphpact_tape.host_tensors import WeakTensor
from graphpact_tape.trees import tensors_of


class ExternalsWatch(TorchDispatchMode):
    """A dispatch mode that collects the tensors that operations use but no operation of the region made.

    It has only weak references to tensors, because a graph does not keep external memory alive.

    Args:
        device: The device of the recorded work. Host tensors without dimensions are left out, because
            operations take them by value.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._device = device
        # The key is the storage id. Only a later storage of the region can reuse the id of a freed storage.
        self._made: set[int] = set()
        self._found: dict[tuple[Any, ...], WeakTensor] = {}
        self._is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile works as it does without this mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and note its external inputs and its new tensors."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        given, results = _plain((args, kwargs)), _plain(result)
        made = self._new(results, given)
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        is_view = not made and results and schema is not None and not schema.is_mutable
        if not is_view:  # a view reads nothing
            self.note(given)
        self._made |= made
        return result

    def note(self, tree: Any) -> None:
        """Note the tensors of ``tree`` that the region did not make."""
        for t in _plain(tree):
            is_number = t.device.type != self._device.type and not t.dim()
            if is_number or not t.numel():
                continue
            storage = storage_id(t)
            if storage not in self._made:
                key = (storage, t.storage_offset(), t.shape, t.stride(), t.dtype)
                self._found.setdefault(key, WeakTensor(t))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing during the context, because the graph does not record its work."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def takes_over(self, result: Any, args: Any) -> None:
        """Treat new tensors in an eager call's result as memory of the graph, which keeps them."""
        self._made |= self._new(_plain(result), _plain(args))

    def tensors(self) -> list[torch.Tensor]:
        """Return the noted tensors that are still alive, in the order of their first use."""
        revived = (weak.revive() for weak in self._found.values())
        return [t for t in revived if t is not None]

    @staticmethod
    def _new(results: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> set[int]:
        """Return the storages of ``results`` that are not storages of ``given``."""
        return {storage_id(t) for t in results} - {storage_id(t) for t in given}


def _plain(tree: Any) -> list[torch.Tensor]:
    """Return the strided tensors in a tree, including those inside wrappers such as DTensor."""
    found: list[torch.Tensor] = []
    tensors: list[Any] = [*tensors_of(tree)]
    for t in tensors:
        if is_traceable_wrapper_subclass(t):
            found += _plain([getattr(t, name) for name in t.__tensor_flatten__()[0]])
        elif t.layout is torch.strided:
            found.append(t)
    return found
