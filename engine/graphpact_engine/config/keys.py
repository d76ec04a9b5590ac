"""`config_keys`: every key of the configuration in words, for error messages and for the reference.

The set of keys depends on the lanes that a configuration names: every table ``[lanes.NAME]`` is a lane. The
reference lists the keys of a lane once, as ``lanes.NAME.*``.

Does not: validate a value; `graphpact_engine.config.schema` does.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from graphpact_engine.config.schema import LANE_NAME, ConfigTables, LaneConfig, LanesConfig, Section

KeyPath = tuple[str, ...]
ENV_PREFIX = "GRAPHPACT_"
RESERVED_VARIABLES = frozenset(
    {
        "GRAPHPACT_CACHE_DIR",
        "GRAPHPACT_CHECK_TIMEOUT",
        "GRAPHPACT_DISABLE_PLUGINS",
        "GRAPHPACT_TRACE",
        "GRAPHPACT_TRACEBACK",
    }
)
"""Variables with the prefix that are not configuration keys."""
ANY_LANE = "NAME"
"""A placeholder for the name of a lane in the reference; it is not a valid name."""
TEXT = "a string that is not empty"
"""The allowed values of a key that takes any string."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key, for error messages and for the reference.

    Args:
        name: The dotted name, as in ``--set``.
        variable: The environment variable.
        default: The default value.
        allowed: A description of the allowed values.
        description: The meaning of the key.
        choices: The allowed values of an enumerated key; empty for any other.
    """

    name: str
    variable: str
    default: Any
    allowed: str
    description: str
    choices: tuple[str, ...]


def config_keys(lanes: Sequence[str] = (ANY_LANE,)) -> list[ConfigKey]:
    """Return every key of the configuration, in the order of its tables.

    Args:
        lanes: Names of lanes whose keys to return; by default the keys of a lane are returned once, as
            ``lanes.NAME.*``.
    """
    return [key for path, model in tables_of(lanes).items() for key in _keys_of(path, model)]


def tables_of(lanes: Sequence[str]) -> dict[KeyPath, type[Section]]:
    """Return the tables that have keys, by path."""
    tables: dict[KeyPath, type[Section]] = {}
    for name, field in ConfigTables.model_fields.items():
        model = field.annotation
        if model is LanesConfig:
            tables |= {(name, lane): LaneConfig for lane in lanes}
        elif isinstance(model, type) and issubclass(model, Section):
            tables[name,] = model
    return tables


def _keys_of(table: KeyPath, model: type[Section]) -> Iterator[ConfigKey]:
    schemas = _schemas(model)
    for name, field in model.model_fields.items():
        path = (*table, name)
        yield ConfigKey(
            ".".join(path),
            ENV_PREFIX + "__".join(path).upper(),
            None if field.is_required() else field.default,
            _allowed(schemas[name]),
            field.description or "",
            _choices(field.annotation),
        )


@functools.cache
def _schemas(model: type[Section]) -> dict[str, Any]:
    schemas: dict[str, Any] = model.model_json_schema()["properties"]
    return schemas


def is_table(path: KeyPath) -> bool:
    """Return whether ``path`` is a table of the configuration, for ``[lanes.NAME]`` with any valid name."""
    if len(path) == 2 and path[0] == "lanes":
        return re.fullmatch(LANE_NAME, path[1]) is not None
    return len(path) < 2 and (not path or path[0] in ConfigTables.model_fields)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal``, also of ``Literal | None``."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((get_args(a) for a in get_args(annotation) if get_origin(a) is Literal), ())


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return a description of the values that a JSON schema allows."""
    if "allowed" in schema:
        return str(schema["allowed"])
    if "anyOf" in schema:
        return _allowed(schema["anyOf"][0])  # the other branch is null, the default
    if "enum" in schema:
        return one_of(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema["type"] == "array":
        kind = "a list of one or more" if schema.get("minItems") else "a list"
        return f"{kind}, each {_allowed(schema['items'])}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    text = words.get(schema["type"], TEXT)
    if "minimum" in schema:
        text += f" from {_number(schema['minimum'])}"
        text += f" to {_number(schema['maximum'])}" if "maximum" in schema else " up"
    if "exclusiveMinimum" in schema:
        text += f" above {schema['exclusiveMinimum']:g}"
    if "exclusiveMaximum" in schema:
        text += f", below {schema['exclusiveMaximum']}"
    return text


def one_of(values: Sequence[str]) -> str:
    """Return values in words: ``a, b or c``."""
    return ", ".join(values[:-1]) + f" or {values[-1]}"


def _number(bound: float) -> str:
    """Return a bound as a string; some versions of pydantic give 0 and others 0.0."""
    return str(int(bound)) if bound == int(bound) else str(bound)
