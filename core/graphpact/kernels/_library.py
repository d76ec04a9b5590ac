"""The operator library ``graphpact``: how a portable kernel becomes one node of a graph.

``Library.define`` and ``impl`` are used, and not the ``custom_op`` decorator, whose Python layer costs
tens of microseconds a call.

Does not: hold any kernel.
"""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("graphpact", "DEF")


def define_kernel(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Define operator ``graphpact::<schema>`` with one implementation for every device, and return it.

    The implementation runs below the dispatcher's modes: what it does inside is not recorded, as the
    inside of a kernel is not. A kernel returns nothing and writes its outputs, so to a compiler, which
    knows shapes and no contents, it does nothing but what its schema says.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphpact::{name}", lambda *_: None, lib=_library)
    overload: Callable[..., Any] = getattr(torch.ops.graphpact, name).default
    return overload
