"""`register_hook` and `require_applied`: hooks in SGLang that are applied, or end the start.

SGLang applies the hooks of all plugins after the last plugin has registered, and only logs a hook that fails.
A check that is silently absent is worse than none. So a target is looked up when its hook is registered, and
the first model runner of a process finds every hook in its place before it loads a model.

Does not: see a plugin that wraps one of our hooks and never calls it.
"""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from graphpact.errors import EngineError

_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.__init__"


@dataclass(frozen=True, slots=True)
class _Hook:
    target: str
    function: Callable[..., Any]
    kind: HookType

    @property
    def is_applied(self) -> bool:
        """Whether a call of the target reaches the function."""
        found: Any = _found(self.target)
        while found is not None:
            found = getattr(found, "__func__", found)
            held = inspect.getclosurevars(found).nonlocals.values() if inspect.isfunction(found) else ()
            if any(each is self.function for each in (found, *held)):
                return self.kind is not HookType.REPLACE or self._is_last_replacement
            found = getattr(found, "__wrapped__", None)
        return False

    @property
    def _is_last_replacement(self) -> bool:
        registered = HookRegistry._hooks[self.target]  # noqa: SLF001  the wrappers do not tell their kinds
        return [each for kind, each, *_ in registered if kind is HookType.REPLACE][-1] is self.function


_registered: list[_Hook] = []
"""The hooks of this process."""


def register_hook(target: str, function: Callable[..., Any], kind: HookType) -> None:
    """Register a hook by SGLang's own registry.

    Args:
        target: The dotted path of a function, a method or a class of SGLang.
        function: What is called there; see SGLang's ``HookRegistry.register``.
        kind: When it is called.

    Raises:
        EngineError: SGLang has no such target.
    """
    if not _registered:
        _register(_MODEL_RUNNER, require_applied, HookType.BEFORE)
    _register(target, function, kind)


def _register(target: str, function: Callable[..., Any], kind: HookType) -> None:
    if _found(target) is None:
        raise EngineError(
            f"GRAPHPACT needs {target}, which the installed SGLang {version('sglang')} does not have",
            hint="install SGLang's release as it was published, or unset GRAPHPACT",
        )
    HookRegistry.register(target, function, kind)
    _registered.append(_Hook(target, function, kind))


def require_applied(*args: Any, **kwargs: Any) -> None:
    """Require that every hook is applied.

    Raises:
        EngineError: One is not; the message names its target.
    """
    del args, kwargs
    missing = sorted({hook.target for hook in _registered if not hook.is_applied})
    if missing:
        raise EngineError(
            f"GRAPHPACT needs its hooks in SGLang, and these are not applied: {', '.join(missing)}",
            hint="another plugin replaced them, or SGLang logged `Failed to apply hooks`: "
            "choose plugins by SGLANG_PLUGINS, or unset GRAPHPACT",
        )


def _found(target: str) -> Any:
    """Return what is at a dotted path now, without binding it; None for nothing."""
    parent, _, name = target.rpartition(".")
    try:
        return inspect.getattr_static(pkgutil.resolve_name(parent), name, None)
    except (ImportError, AttributeError):
        return None
