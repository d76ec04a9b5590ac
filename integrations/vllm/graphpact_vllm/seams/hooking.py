"""`wrap`: calls of a function or a method of vLLM go through a function of ours.

vLLM has no registry of hooks, and only logs a plugin that fails. So a method is looked up when it is wrapped,
and a missing one ends the start.

Does not: wrap a method of an instance.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from graphpact.errors import EngineError
from graphpact_vllm import installed_release


def wrap(target: str, hook: Callable[..., Any]) -> None:
    """Let each call of a function or a method go through ``hook(original, *args, **kwargs)``.

    Args:
        target: Its dotted path, such as ``vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__``.
        hook: Is called instead; it calls ``original`` or not.

    Raises:
        EngineError: vLLM has nothing there.
    """
    parent, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(parent)
        original = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"GRAPHPACT needs {target}, which the installed vLLM {installed_release()} does not have",
            hint="install vLLM's release as it was published, or unset GRAPHPACT",
        ) from error

    called = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(called)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(called, *args, **kwargs)

    setattr(owner, name, staticmethod(hooked) if isinstance(original, staticmethod) else hooked)
