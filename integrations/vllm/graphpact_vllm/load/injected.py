"""`Injector`: faults that a run gets on purpose.

Does not: choose them.
"""

from collections.abc import Sequence
from typing import Any

from graphpact.engines import InjectedError, InjectedFault


class Injector:
    """The faults of one run.

    Args:
        faults: The faults.
        block_pool: vLLM's pool of KV blocks.
        counts: What sees each run of the model, before it.
    """

    def __init__(self, faults: Sequence[InjectedFault], block_pool: Any, counts: Any) -> None:
        self._raises = sorted(fault.at for fault in faults if fault.kind == "raise")
        self._full = {
            at for fault in faults if fault.kind == "full" for at in range(fault.at, fault.at + fault.passes)
        }
        self._at = 0
        if self._full:
            free = block_pool.get_num_free_blocks
            block_pool.get_num_free_blocks = lambda: 0 if self._at in self._full else free()
        if self._raises:
            counts.listeners.append(self._raise)

    def begin(self, at: int) -> None:
        """Begin a pass of the engine's loop."""
        self._at = at

    def _raise(self, key: Any, reason: str | None) -> None:
        """Raise in the model, if a fault is due: in its pass, or in the first one after it with a batch."""
        del key, reason
        if self._raises and self._raises[0] <= self._at:
            due = self._raises.pop(0)
            raise InjectedError(f"injected in pass {self._at}; it was due in pass {due}")
