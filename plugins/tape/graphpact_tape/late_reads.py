"""`LateReads`: refuses host reads between the launch of a replay and the updates that it waits for.

On a device such a read waits for the replay, the replay waits for the update, and the update comes after the
read: the host never goes on. Here the memory would still hold the results of the replay before.

Only reads of memory that graphs use are refused, and of what is computed from it: static inputs, outputs,
other memory of captures, caches.

Does not: refuse waits, see `graphpact_tape.task_table`; or see a read that bypasses torch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphpact.errors import ReplayError
from graphpact.graphs.lines import Line
from graphpact.tensors import storage_id
from graphpact_tape.host_calls import READS, reads_on_host
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.task_table import TaskTable
from graphpact_tape.tasks import RULE
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True


class LateReads:
    """Two modes, one for reads that reach the dispatcher and one for those that do not.

    Args:
        tasks: The tasks of the driver.
        used: Returns the storages that graphs use.

    Attributes:
        modes: The modes, to be entered in this order.
        refused: The first error that was raised; None if there is none.
    """

    def __init__(self, tasks: TaskTable, used: Callable[[], set[int]]) -> None:
        self._tasks, self._used = tasks, used
        self.modes = _Functions(self), _Operations(self)
        self.refused: ReplayError | None = None
        self._computed: dict[int, torch.Tensor] = {}  # from such memory, by storage

    def note(self, given: Iterable[torch.Tensor], result: Any) -> None:
        """Note what an operation computes from memory of graphs while a replay waits."""
        if self._tasks.waiting() is not None and self._is_used(given):
            self._computed |= {storage_id(tensor): tensor for tensor in tensors_of(result)}

    def _is_used(self, tensors: Iterable[torch.Tensor]) -> bool:
        used = self._used()
        return any(storage_id(each) in used or storage_id(each) in self._computed for each in tensors)

    def check(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raise `ReplayError` if a launched replay waits, and one of the tensors is memory of graphs."""
        waiting = self._tasks.waiting()
        if waiting is None or self.refused is not None or not self._is_used(tensors):
            return
        task, launched_at = waiting
        self.refused = ReplayError(
            f"{what} needs a tensor's contents on the host, at {Line()}, after the launch at {launched_at}"
            f" and before the update of {task.name}, for which the replay waits: a device would wait forever",
            hint="update every task before the host reads anything of the device, or read after the step;"
            " make the arguments from host tensors such as seq_lens_cpu",
            rule=RULE,
        )
        raise self.refused


class _Functions(TorchFunctionMode):
    """The mode for functions that read on the host and dispatch nothing."""

    def __init__(self, reads: LateReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func in READS:
            self._reads.check(READS[func], tensors_of(args[:1]))
        return func(*args, **(kwargs or {}))


class _Operations(DispatchMode):
    """The mode for operations that read on the host."""

    def __init__(self, reads: LateReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._reads = reads

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        given = tensors_of((args, kwargs))
        if reads_on_host(func, args, kwargs or {}):
            self._reads.check(str(func), given)
        result = func(*args, **(kwargs or {}))
        self._reads.note(given, result)
        return result
