"""How a portable kernel becomes one operator of torch, and so one node of a graph.

``Library.define`` and ``impl`` are used, and not the ``custom_op`` decorator, whose Python layer costs
tens of microseconds a call.

Does not: hold any kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def define_kernel(
    schema: str, function: Callable[..., Any], *, namespace: str = "graphpact"
) -> Callable[..., Any]:
    """Define operator ``<namespace>::<schema>`` with one implementation for every device, and return it.

    The implementation runs below the dispatcher's modes: what it does inside is not recorded, as the
    inside of a kernel is not. A kernel returns nothing and writes its outputs, so to a compiler, which
    knows shapes and no contents, it does nothing but what its schema says.

    Args:
        schema: In torch's language, such as ``"double(Tensor x, Tensor(a!) out) -> ()"``.
        function: The implementation.
        namespace: A plugin's own; the name of its package will do.
    """
    name = schema.split("(", 1)[0]
    library = _library(namespace)
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", lambda *_: None, lib=library)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
    return overload


def may_read(tensor: torch.Tensor) -> bool:
    """Return whether a kernel may read ``tensor`` on the host: where the host is the device.

    There a kernel works on the lengths that its index tensors hold, and checks them. Elsewhere it works on
    the bounds that it was given, so that it never waits for the device.
    """
    return tensor.device.type == "cpu"
