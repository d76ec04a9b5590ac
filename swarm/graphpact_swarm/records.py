"""`record_of`: a dataclass from what `dataclasses.asdict` and JSON made of it.

Does not: read a file.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from graphpact.errors import UsageError

_T = TypeVar("_T")

CLOSED = ConfigDict(extra="forbid")
"""For ``__pydantic_config__`` of a dataclass: it has no other fields."""


def record_of(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a dataclass.

    Raises:
        UsageError: A field is missing, unknown, or has a value of another type; the message names it.
    """
    try:
        record: _T = _adapter(cast("Hashable", kind)).validate_python(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise UsageError(f"this is no {kind.__name__}: {where}: {fault['msg']}") from error
    return record


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
