"""`RecordedCollectives`: tells of each collective that this rank calls, to compare it with other ranks.

A collective meets its peers by order alone. If two ranks call different ones, or the same ones in another
order, each may get data that was meant for another place, or wait forever. A sequence consists of what all
ranks must have in common: operation, shapes, dtypes, and the group by its description and size. The ranks of
a group are not part of it, because each attention group has ranks of its own.

Does not: compare, record transfers between two ranks, or see collectives of operators of other libraries.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphpact.graphs.collectives import NAMESPACES, shape_and_dtype
from graphpact.graphs.lines import Line

__tracebackhide__ = True

all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""``all_gather(output, input, group=...)`` of torch: one tensor from that of every rank.

torch 2.13 renamed it, and warns of the old name. None in a torch without ``torch.distributed``.
"""

_OTHERS = ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "recv_any_source_")  # no collectives


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Args:
        op: The operation, such as ``allreduce_``.
        tensors: Shape and dtype of each tensor argument, as text.
        group: Description and size of the group, such as ``tensor, 4 ranks``.
        line: The caller's line. It is not compared.
    """

    op: str
    tensors: str
    group: str
    line: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.op} of {self.tensors} in group {self.group}"


class RecordedCollectives(TorchDispatchMode):
    """A context that tells of the collectives called inside.

    Args:
        before: Called with each collective before it is issued, so that it can refuse it.
    """

    def __init__(self, before: Callable[[Collective], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the code inside use ``torch.compile``; a mode that does not say so turns it off."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        if name.startswith(NAMESPACES):
            op = name.partition("::")[2].partition(".")[0]
            if op not in _OTHERS:
                self._before(_described(op, func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _described(op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    leaves = tree_leaves((args, kwargs))
    tensors = [shape_and_dtype(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    group = _group_of(func, args, kwargs, leaves)
    named = "unknown" if group is None else f"{group.group_desc}, {group.size()} ranks"
    return Collective(op, " and ".join(dict.fromkeys(tensors)) or "nothing", named, str(Line()))


def _group_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
) -> "dist.ProcessGroup | None":
    """Return the process group among the arguments of a collective, or None."""
    c10d = torch._C._distributed_c10d  # noqa: SLF001  no public name
    for leaf in leaves:
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
        if isinstance(leaf, torch.ScriptObject) and leaf._type().name() == "ProcessGroup":  # type: ignore[attr-defined]  # noqa: SLF001  no public way
            group: dist.ProcessGroup = c10d.ProcessGroup.unbox(leaf)
            return group
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs  # noqa: SLF001
    name = named.get("group_name")
    if not isinstance(name, str):
        return None
    resolve: Any = c10d._resolve_process_group  # noqa: SLF001  no public name
    resolved: dist.ProcessGroup = resolve(name)
    return resolved
