"""`ExternalsWatch`: which tensors of others a region uses, seen from the operations that torch dispatches.

For drivers whose graphs do not tell, such as CUDA graphs: their kernels have the addresses in their
arguments, where torch does not look. A custom operator is one dispatch, so its tensor arguments are seen.

Does not: see what is launched below torch's dispatcher: a Triton kernel launched by itself, the inside of
compiled code, a library's function that is no operator of torch.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from graphpact.tensors import storage_id
from graphpact_tape.host import WeakTensor, tensors_of


class ExternalsWatch(TorchDispatchMode):
    """Notes, while it is entered, the tensors that operations take and no operation of the region made.

    Tensors are held weakly: a graph keeps no memory of others alive.

    Args:
        device: Where the recorded work runs. Of host tensors a number without dimensions is left out: an
            operation takes it by value.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._device = device
        # By identity. That of a freed storage goes to none but a later one of the region.
        self._made: set[int] = set()
        self._found: dict[tuple[Any, ...], WeakTensor] = {}
        self._is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile works as without this mode, and what is recorded is what will run."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and note what it takes and what it makes."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        given, results = _plain((args, kwargs)), _plain(result)
        made = self._new(results, given)
        schema = getattr(func, "_schema", None)  # of an operator; a higher-order one has none
        if (
            made or not results or schema is None or schema.is_mutable
        ):  # else a view, which reads nothing
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
        """Note nothing inside: work that the graph does not hold."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def takes_over(self, result: Any, args: Any) -> None:
        """Count what an eager call made as the graph's own: the graph keeps it."""
        self._made |= self._new(_plain(result), _plain(args))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that were noted and are alive, in the order of their first use."""
        revived = (weak.revive() for weak in self._found.values())
        return [t for t in revived if t is not None]

    @staticmethod
    def _new(results: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> set[int]:
        """Return the storages of ``results`` that are none of ``given``."""
        return {storage_id(t) for t in results} - {storage_id(t) for t in given}


def _plain(tree: Any) -> list[torch.Tensor]:
    """Return the strided tensors of a tree, and of a wrapper (such as DTensor) those inside it."""
    found: list[torch.Tensor] = []
    tensors: list[Any] = [*tensors_of(tree)]
    for t in tensors:
        if is_traceable_wrapper_subclass(t):
            found += _plain([getattr(t, name) for name in t.__tensor_flatten__()[0]])
        elif t.layout is torch.strided:
            found.append(t)
    return found
