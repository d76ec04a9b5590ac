"""What a strict tape records in place of memory that it does not own, and the calls of its replays.

Does not: keep that memory alive; a replay of `StrictNode` gets the tensors that `External.revive` returns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import ContractError, PoisonError, ReplayError
from graphpact.graphs.lines import Line
from graphpact_tape.host_tensors import WeakTensor
from graphpact_tape.nodes import make_node
from graphpact_tape.poison import poison_of
from graphpact_tape.recorder import RecordedCall
from graphpact_tape.trees import NO_CONTAINERS

__tracebackhide__ = True


class External:
    """A weak reference to an external tensor, with the address and size of its storage at capture."""

    def __init__(self, tensor: torch.Tensor, name: str | None, first_use: str) -> None:
        storage = tensor.untyped_storage()
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.tensor = WeakTensor(tensor)
        self.name = name or f"a tensor of {tensor.dtype} {tuple(tensor.shape)}"
        self.first_use = first_use

    def revive(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ReplayError: Its memory was freed, moved or shrank.
        """
        tensor = self.tensor.revive()
        if tensor is None:
            raise self.gone("was freed")
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.nbytes:
            raise self.gone(f"shrank from {self.nbytes} to {storage.nbytes()} bytes")
        if storage.data_ptr() != self.address:
            raise self.gone(f"moved from {self.address:#x} to {storage.data_ptr():#x}")
        return tensor

    def gone(self, how: str, error: type[ContractError] = ReplayError) -> ContractError:
        """Return the error for memory that the graph uses and that ``how``, such as "was freed"."""
        return error(
            f"{self.name} {how}, but the graph uses its captured address: {self.first_use}",
            hint="keep the tensor for as long as the graph, allocate it at its largest size before capture,"
            " and copy into it",
            rule="GP14",
        )


class Rebound(External):
    """A weak reference to a tensor that an update rebound, used until the replay."""

    def gone(self, how: str, error: type[ContractError] = ReplayError) -> ContractError:
        """Return the error for memory that the replay reads. ``how`` says what happened to it."""
        return error(
            f"{self.name} {how}, but the replay reads its address: {self.first_use}",
            hint="keep the tensor until the replay has run, for instance until the next update, and update"
            " the task with a tensor that stays in place",
            rule="GP14",
        )


def hold_weakly(what: str, tensor: torch.Tensor) -> Rebound:
    """Return a weak reference to a rebound tensor of a task, as a graph has for its memory."""
    return Rebound(tensor, what, f"the update at {Line()} gave it")


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A placeholder in the record for an external tensor, to which only a weak reference exists.

    Args:
        which: Index of the external tensor.
    """

    which: int


@dataclass(slots=True)
class StrictNode:
    """A call that a replay makes. The replay inserts its external tensors.

    Args:
        op: The function to call.
        args: Its arguments, with a `Borrowed` in place of each external tensor.
        kwargs: Its arguments by name, likewise.
        what: The name of the operator, for errors.
        line: The line that made the call.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    what: str
    line: Line

    @classmethod
    def of(cls, call: RecordedCall) -> "StrictNode":
        """Return the node that runs ``call`` again."""
        return cls(*make_node(call), str(call.op), call.line)

    def run(self, external: list[torch.Tensor]) -> None:
        """Run the call with the given external tensors; raise `PoisonError` if it fails on poison."""
        args = [_inserted(each, external) for each in self.args]
        kwargs = {name: _inserted(each, external) for name, each in self.kwargs.items()}
        try:
            self.op(*args, **kwargs)
        except ContractError:
            raise
        except Exception as error:
            raise PoisonError(
                f"{self.what}, recorded at {self.line}, fails at replay: {error}",
                hint=(
                    "at capture its tensors had other contents; poison is NaN, or a number near "
                    f"{poison_of(torch.int32)}"
                ),
            ) from error


def _inserted(tree: Any, external: list[torch.Tensor]) -> Any:
    """Return an argument with the external tensors in place of their placeholders."""
    kind = type(tree)
    if kind is Borrowed:
        return external[tree.which]
    if kind is list or kind is tuple:
        return kind([_inserted(each, external) for each in tree])
    if isinstance(tree, torch.Tensor) or kind in NO_CONTAINERS:
        return tree
    return pytree.tree_map_only(Borrowed, lambda each: external[each.which], tree)
