"""Collectives of ``torch.distributed`` in a region: which ones a tape repeats, and what they write.

The schemas of collectives contain little information. Those of ``c10d`` declare no write and return an object
to wait for. Those of ``_c10d_functional`` return memory that is complete only after a wait, which is a
separate call. A replay issues each collective in recorded order, on the recorded tensors and in the recorded
group, and waits for it at once. Therefore all ranks have to replay graphs with the same collectives in the
same order.

Point-to-point transfers and barriers are refused. If a replay waits for a receive at once, the peer may in
turn wait for a send that this rank makes later. A barrier makes the host wait.

Does not: choose a backend, or check that the ranks agree. If a rank does not take part, the others wait until
the timeout of the group.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphpact.errors import CollectiveError
from graphpact.graphs.collectives import NAMESPACES, shape_and_dtype
from graphpact_tape.tasks import operator_of
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

WRITTEN: dict[str, tuple[str, ...]] = {
    "c10d::allreduce_": ("tensors",),
    "c10d::allreduce_coalesced_": ("tensors",),
    "c10d::broadcast_": ("tensors",),
    "c10d::reduce_": ("tensors",),
    "c10d::allgather_": ("output_tensors",),
    "c10d::allgather_coalesced_": ("output_lists",),
    "c10d::allgather_into_tensor_coalesced_": ("outputs",),
    "c10d::_allgather_base_": ("output_tensor",),
    "c10d::gather_": ("output_tensors",),
    "c10d::reduce_scatter_": ("output_tensors",),
    "c10d::reduce_scatter_tensor_coalesced_": ("outputs",),
    "c10d::_reduce_scatter_base_": ("output_tensor",),
    "c10d::scatter_": ("output_tensors",),
    "c10d::alltoall_": ("output_tensors",),
    "c10d::alltoall_base_": ("output",),
    "_c10d_functional::all_reduce": (),
    "_c10d_functional::all_reduce_": ("input",),
    "_c10d_functional::all_reduce_coalesced": (),
    "_c10d_functional::all_reduce_coalesced_": ("inputs",),
    "_c10d_functional::all_gather_into_tensor": (),
    "_c10d_functional::all_gather_into_tensor_coalesced": (),
    "_c10d_functional::all_gather_into_tensor_out": ("out",),
    "_c10d_functional::all_to_all_single": (),
    "_c10d_functional::broadcast": (),
    "_c10d_functional::broadcast_": ("input",),
    "_c10d_functional::reduce_scatter_tensor": (),
    "_c10d_functional::reduce_scatter_tensor_coalesced": (),
    "_c10d_functional::reduce_scatter_tensor_out": ("out",),
}
"""The collectives that a tape repeats, and the names of the arguments that each one writes.

Source: the schemas of torch 2.11 to 2.13, and the methods of `ProcessGroup` where the schemas say nothing.
"""

WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})
"""The waits for functional collectives. A replay does not repeat them, because it has waited already."""


def is_collective(func: Any) -> bool:
    """Return whether the overload ``func`` communicates through ``torch.distributed``."""
    return str(operator_of(func).name()).startswith(NAMESPACES)


def is_repeated(func: Any) -> bool:
    """Return whether a tape can repeat the collective ``func``, or does not have to."""
    return func.name() in WRITTEN or func.name() in WAITS


def run_and_wait(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Issue the collective ``func``, wait for it, and return its result.

    The object to wait for is replaced by one that is done already, because some backends copy results in each
    call of its ``wait``, by operations that would be recorded as the caller's.
    """
    result = func(*args, **kwargs)
    if func.namespace != "c10d":
        for each in tensors_of(result):
            torch.ops._c10d_functional.wait_tensor(each)  # noqa: SLF001  no public name
        return result
    c10d = torch._C._distributed_c10d  # noqa: SLF001  no public name
    parts = list(result) if isinstance(result, tuple) else [result]
    for at, part in enumerate(parts):
        if isinstance(part, torch.ScriptObject):
            c10d.Work.unbox(part).wait()
            parts[at] = c10d.FakeWork().boxed()
    return tuple(parts) if isinstance(result, tuple) else parts[0]


def repeat_collective(func: Any, number: int | None, *args: Any, **kwargs: Any) -> Any:
    """Run and wait for the collective ``func``, the one of a ``number`` in its region, in a replay.

    Raises:
        CollectiveError: The transport failed, for instance because a peer has ended.
    """
    try:
        return run_and_wait(func, *args, **kwargs)
    except RuntimeError as error:
        leaves = (described(leaf) for leaf in tree_leaves((args, kwargs)))
        texts = (shape_and_dtype(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        about = ", ".join(dict.fromkeys(text for text in texts if isinstance(text, str)))
        raise CollectiveError(
            f"collective {number}, {func} ({about}), failed at a replay: {error}",
            hint="every rank of the group has to replay a graph with the same collectives in the same order;"
            " look for the rank that ended, ran eagerly, or replayed another shape",
        ) from error


def described(leaf: Any) -> Any:
    """Return what a trace stores for an argument: itself, or the name of a group or reduction."""
    if not isinstance(leaf, torch.ScriptObject):
        return leaf
    kind = leaf._type().name()  # type: ignore[attr-defined]  # noqa: SLF001  no public way
    if kind == "ProcessGroup":
        group = torch._C._distributed_c10d.ProcessGroup.unbox(leaf)  # noqa: SLF001
        return f"group {group.group_name} ({group.group_desc}), {group.size()} ranks"
    if kind == "ReduceOp":
        return str(torch._C._distributed_c10d.ReduceOp.RedOpType(leaf.op()).name)  # type: ignore[attr-defined]  # noqa: SLF001
    return leaf
