"""`record_launches`: Triton's interpreter runs kernels on a CPU, and a graph records each launch as one node.

Triton kernels of any engine run unedited. A launch in a captured region becomes an operator that holds the
kernel, its grid and its numbers by value, and its tensors by identity, as a launch in a CUDA graph does.

Triton reads ``TRITON_INTERPRET=1`` when it is imported, so it is set before Python starts. Without it, a tape
refuses launches: a compiled kernel needs a GPU, and no tape sees it.

Does not: run fast; the interpreter takes milliseconds for each program of a grid.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_kernels._library import define_kernel

_captured: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
"""The launches in captured regions: executor and arguments. Graphs refer to them by index."""


def record_launches(is_capturing: Callable[[], bool]) -> None:
    """Make each launch while ``is_capturing`` one operator; others run as before.

    From then on, a launch of a compiled kernel raises `ConfigError`.
    """
    from triton.runtime import interpreter  # noqa: PLC0415  Triton may be missing
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    JITFunction.run = _refuse_launch
    run = GridExecutor.__call__
    if getattr(run, "is_recorded", False):
        return
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, _with_bool_mask(getattr(InterpreterBuilder, name), at))
    builder: Any = interpreter.interpreter_builder
    # A compiled kernel checks no overflow either, and the checks take half of a launch.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_for_each(interpreter._patch_lang)  # noqa: SLF001

    @functools.wraps(run)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_capturing():
            run(self, *args, **kwargs)
            return
        known = inspect.getfullargspec(self.fn)
        kwargs = {k: v for k, v in kwargs.items() if k in known.args or k in known.kwonlyargs}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        _captured.append((functools.partial(run, self), args, kwargs))
        _launch(tensors, len(_captured) - 1)

    launch.is_recorded = True  # type: ignore[attr-defined]
    GridExecutor.__call__ = launch


def _once_for_each(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the interpreter put its functions into Triton's language once for each kernel, and leave them.

    It does so for each launch, and for each call of a function in a kernel. Nothing else uses the language in
    a process whose kernels are interpreted.
    """
    patched: set[Any] = set()

    @functools.wraps(patch)
    def once(kernel: Any) -> Any:
        if kernel not in patched:
            patch(kernel)
            patched.add(kernel)
        return SimpleNamespace(restore=lambda: None)

    return once


def _with_bool_mask(method: Any, at: int) -> Any:
    """Let a method of the interpreter take integers as its mask, argument ``at``, as compiled kernels do."""

    @functools.wraps(method)
    def masked(self: Any, *args: Any) -> Any:
        args[at].data = args[at].data.astype(bool)
        return method(self, *args)

    return masked


def require_interpreter(what: str) -> None:
    """Require that Triton's interpreter runs kernels.

    Args:
        what: What launches them, for the message.

    Raises:
        ConfigError: It does not.
    """
    from triton import knobs  # noqa: PLC0415

    if not knobs.runtime.interpret:
        raise _not_interpreted(what)


def _refuse_launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    raise _not_interpreted(f"the kernel {kernel.__name__}")


def _not_interpreted(what: str) -> ConfigError:
    return ConfigError(
        f"a tape runs on a CPU, and {what} needs Triton, which was started without its interpreter",
        hint="set TRITON_INTERPRET=1 before Python starts, or choose another attention backend",
    )


def _run(tensors: list[torch.Tensor], number: int) -> None:
    launch, args, kwargs = _captured[number]
    given = iter(tensors)

    def now(value: Any) -> Any:
        return next(given) if isinstance(value, torch.Tensor) else value

    # Before the keyword arguments: a call reads ``*map(...)`` after them.
    positional = [now(value) for value in args]
    launch(*positional, **{name: now(value) for name, value in kwargs.items()})


_launch = define_kernel("interpreted_launch(Tensor(a!)[] tensors, int number) -> ()", _run)
