"""What a backend of SGLang is given in place of a model runner: plain values, and nothing else.

A backend reads a few dozen attributes of its model runner. :class:`Given` holds exactly those that somebody
wrote down. A new release that reads another one says so, by its path, instead of computing with a default.

Does not: import SGLang, or know which attributes a backend needs.
"""

from collections.abc import Collection
from typing import Any

from graphpact.errors import UsageError


class NotGivenError(UsageError):
    """A backend read an attribute that it was not given.

    It is no ``AttributeError``: ``getattr(runner, name, default)`` and ``hasattr`` raise it too, since a
    default would hide what the backend began to read.
    """


class Given:
    """A strict namespace over plain values. Values may be set later, as a backend does with its runner.

    Args:
        path: The name of the object in errors, for instance ``model_runner.model_config``.
        absent: Attributes that the engine's own object may lack. Reading one raises ``AttributeError``, so
            that ``getattr`` with a default and ``hasattr`` work as they do there.
        values: The attributes.

    Raises:
        NotGivenError: when an attribute is read that is neither a value nor in ``absent``.

    """

    def __init__(self, path: str, /, *, absent: Collection[str] = (), **values: Any) -> None:
        self.__dict__.update(values, _path=path, _absent=frozenset(absent))

    def __getattr__(self, name: str) -> Any:
        """Raise: Python asks here only for what is not among the values."""
        if name.startswith("__"):  # a protocol of Python's, such as copying; the values may not be there yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in self._absent:
            raise AttributeError(f"{self._path} has no attribute {name!r}")
        there = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_"))) or "nothing"
        raise NotGivenError(
            f"{self._path}.{name} was read, and is not given; given are {there}",
            hint=f"give {self._path} a value for {name!r}, or list it as absent if an engine may lack it",
        )

    def __repr__(self) -> str:
        return f"Given({self._path!r})"
