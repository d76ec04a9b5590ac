"""`override`: makes an edited class from a correct one. `overrides` and `replaces` are decorators for it.

Does not: know what a backend, a runner or a driver is.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any
from unittest.mock import patch

from graphpact_museum.exhibit import Around, Make

__tracebackhide__ = True  # errors name the line of the edit


def override(base: type[Any], *methods: Callable[..., Any], **members: Any) -> type[Any]:
    """Return a subclass of ``base`` with other methods and attributes.

    A method is called with the object, the method of ``base`` bound to it, and its arguments. The second is
    None for an optional method that ``base`` lacks, such as ``plan_metadata``. The method is a hook
    implementation if that of ``base`` is one.

    Args:
        base: The correct class.
        methods: Functions, each in place of the method of its name.
        members: Other attributes by name. Functions among them replace methods too.
    """
    named = {method.__name__: method for method in methods} | members
    changed = {n: _method(base, n, m) if isinstance(m, FunctionType) else m for n, m in named.items()}
    home = next((m.__module__ for m in named.values() if isinstance(m, FunctionType)), __name__)
    name = f"Edited{base.__name__.removeprefix('Edited')}"
    return type(name, (base,), {"__module__": home} | changed)


def _method(base: type[Any], name: str, edit: Callable[..., Any]) -> Callable[..., Any]:
    right = getattr(base, name)

    def edited(self: Any, *args: Any, **more: Any) -> Any:
        bound = None if right is None else functools.partial(right, self)
        return edit(self, bound, *args, **more)

    # wraps() keeps the method's signature and its mark as a hook, which pluggy reads.
    return edited if right is None else functools.wraps(right)(edited)


def overrides(
    method: str, *, of: type[Any] | None = None, **members: Any
) -> Callable[[Callable[..., Any]], Make]:
    """Return a decorator that makes an edit from a function, which replaces one method of the class.

    Args:
        method: The name of the method.
        of: The class to edit; None for the correct class.
        members: See `override`.
    """

    def decorate(edit: Callable[..., Any]) -> Make:
        return named_after(edit, lambda base: override(of or base, **{method: edit}, **members))

    return decorate


def named_after(edit: Callable[..., Any], make: Make) -> Make:
    """Return ``make`` with the name, the docstring and the module of ``edit``."""
    return functools.wraps(edit)(make)


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Around]:
    """Return a decorator that makes a context from a function, which replaces code outside plugins there.

    The function gets the function that it replaces, and the arguments of the call.

    Args:
        owner: A class or a module.
        name: The name of a function, a method or a property of ``owner``.
    """

    def decorate(edit: Callable[..., Any]) -> Around:
        right = getattr(owner, name)

        def edited(*args: Any, **more: Any) -> Any:
            return edit(right, *args, **more)

        new = property(edited) if isinstance(right, property) else edited
        return functools.wraps(edit)(lambda: patch.object(owner, name, new))

    return decorate
