"""`PreparationWatch`: what the preparation of a replay may do on a strict driver.

Does not: watch a capture; see `graphpact_tape.strict`.
"""

from typing import Any

import torch

from graphpact.errors import ReplayError
from graphpact.graphs.lines import Line
from graphpact.tensors import storage_id
from graphpact_tape.host_guard import HostReadGuard, Watcher
from graphpact_tape.operators import Contents, may_hide_writes, written_by
from graphpact_tape.order import Order
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True


class PreparationWatch(Watcher):
    """A dispatch mode for the preparation of a replay. It refuses writes to protected memory and orders work.

    Args:
        guard: The function mode that is active together with it.
        order: The streams of the driver.
        protected: Names of the tensors that the preparation may only read, by storage.
    """

    def __init__(
        self,
        guard: HostReadGuard,
        order: Order,
        protected: dict[int, str],
    ) -> None:
        super().__init__(guard)
        self._order = order
        self._protected = protected

    def perform(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run ``func`` as work of the current stream."""
        written = written_by(func, args, kwargs)
        self._check_writes(f"{func} writes", written)
        self._order.carry_out()
        contents = Contents(given if may_hide_writes(func) else (), disturb=False)
        result = func(*args, **kwargs)
        self.check_kinds(func, "makes", tensors_of(result))
        changed = contents.written()
        hidden = [t for t in given if storage_id(t) in changed]
        self._check_writes(f"{func}, whose schema does not declare it, writes", hidden)
        self._order.operation(func, given, [*written, *hidden], result, Line(), ReplayError)
        return result

    def _check_writes(self, what: str, written: list[torch.Tensor]) -> None:
        for tensor in written:
            if (name := self._protected.get(storage_id(tensor))) is not None:
                raise self.guard.refusal(
                    f"{what} {name}, which the preparation of a replay may only read,",
                    "write only slots: the batch and other memory that graphs read are read-only here; a "
                    "slot of the role constant is written once, by its contents",
                    "GP19",
                )
