"""The boundary to plugins: calls of their code, and checks of what comes back.

    call(what, function, *args)             turn an exception into an error that names the plugin and the line
    returned(value, kind, by, method)       refuse a result of another type
    all_returned(values, kind, by, method) refuse several results if one has another type
    why_unavailable(function, device)       return an exception as the reason

Errors of graphpact pass through unchanged, because they already say what to do.

Does not: import torch, or find the plugin that caused an error elsewhere; `graphpact_engine.faults` does,
from the traceback.
"""

import inspect
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from graphpact.errors import EngineError, GraphpactError, PluginError

D = TypeVar("D")
T = TypeVar("T")

_DEFECT = "a defect of the plugin; GRAPHPACT_TRACEBACK=1 prints the traceback"


def call(
    what: str,
    function: Callable[..., T],
    *args: Any,
    error: type[GraphpactError] = PluginError,
    hint: str = _DEFECT,
) -> T:
    """Return the result of ``function(*args)``, which is code of a plugin.

    Args:
        what: Description of the function, for the message.
        function: The function.
        args: The arguments of the function.
        error: The type of the error.
        hint: What to do.

    Raises:
        GraphpactError: The function raised it. Any other exception becomes an ``error`` that names the
            innermost line of the plugin.
    """
    try:
        return function(*args)
    except (GraphpactError, KeyboardInterrupt):
        raise
    except BaseException as raised:  # SystemExit; the panics of Rust extensions
        inside = (
            raised.__traceback__ and raised.__traceback__.tb_next
        )  # there is none if the arguments did not fit
        place = f" (at {place_of(raised)})" if inside else ""
        raise error(f"{what} raised {describe_error(raised)}{place}", hint=hint) from raised


def returned(value: Any, kind: Any, by: object, method: str) -> Any:
    """Return ``value``, which ``by.method()`` returned; raise `EngineError` unless it is a ``kind``."""
    if isinstance(value, kind):
        return value
    cls, expected = type(by), getattr(kind, "__name__", kind)
    code = getattr(inspect.unwrap(getattr(cls, method, None) or (lambda: None)), "__code__", None)
    place = f" (at {short_path(code.co_filename)}:{code.co_firstlineno})" if code else ""
    raise EngineError(
        f"{cls.__module__}.{cls.__name__}.{method}() returned {reprlib.repr(value)}, not {expected}{place}",
        hint=(
            f"a defect of the plugin, or an observer of {method}() that does not return the value it "
            f"received from `yield`; see the docstring of {method}()"
        ),
    )


def all_returned(values: Any, kind: type[T], by: object, method: str) -> tuple[T, ...]:
    """Return the values that ``by.method()`` returned; raise `EngineError` unless each is a ``kind``."""
    values = returned(values, Iterable, by, method)
    return tuple(returned(each, kind, by, method) for each in values)


def why_unavailable(unavailable: Callable[[D], str | None], device: D) -> str | None:
    """Return the reason that ``unavailable(device)`` gives, in one line, or None if it is available.

    An exception counts as a reason too: if a plugin cannot tell whether it can run, it must not run.
    """
    try:
        reason: Any = unavailable(device)
    except Exception as error:  # noqa: BLE001  plugin code
        return describe_error(error)
    if reason is not None and not isinstance(reason, str):
        return f"unavailable() returned {reprlib.repr(reason)}, not a line of text or None"
    return None if reason is None else " ".join(reason.split())


# -- words -----------------------------------------------------------------------------------------


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one line, even if its ``__str__`` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  a third party's __str__
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def short_path(file: str) -> str:
    """Return the last two parts of a path, which are the same on every machine."""
    return "/".join(Path(file).parts[-2:])


def place_of(error: BaseException) -> str:
    """Return the file and line of an exception's innermost frame in code of a plugin or a user.

    Frames of torch, of the standard library, and of modules that set ``__tracebackhide__ = True`` are
    skipped. If there is no other frame, the innermost one is returned.
    """
    foreign = {"torch", *sys.stdlib_module_names}
    frames = [*traceback.walk_tb(error.__traceback__)]
    known = [f for f in frames if f[0].f_globals.get("__name__", "").partition(".")[0] not in foreign]
    own = [f for f in known if f[0].f_globals.get("__tracebackhide__") is not True]
    places = [f"{short_path(frame.f_code.co_filename)}:{line}" for frame, line in own or known or frames]
    return places[-1] if places else "an unknown line"
