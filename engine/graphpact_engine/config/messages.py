"""The lines of a `ConfigError`: each names key, value and source, and the allowed or the nearest values.

Does not: find faults; the loader and pydantic do.
"""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from graphpact.errors import did_you_mean
from graphpact_engine.config.keys import (
    ANY_LANE,
    RESERVED_VARIABLES,
    TEXT,
    ConfigKey,
    KeyPath,
    config_keys,
    is_table,
    one_of,
    tables_of,
)
from graphpact_engine.config.schema import LANE_MODES
from graphpact_engine.config.sources import ConfigSetting


def unknown_key(setting: ConfigSetting, keys: Mapping[KeyPath, ConfigKey]) -> str:
    """Return the error line for a setting that is not in ``keys``."""
    path, name = setting.path, ".".join(part or '""' for part in setting.path)
    known = [key.name for key in keys.values()]
    tables = sorted({key.rpartition(".")[0] for key in known})
    same_tail = [key for key in known if key.rpartition(".")[2] == path[-1]]
    if path[0] == "lanes" and len(path) > 1 and not is_table(path[:2]):
        return (
            f"lanes.{path[1]} ({setting.source}): not a valid lane name; a name begins with a letter and"
            " contains only the letters a to z, digits and underscores"
        )
    is_lane = len(path) == 2 and not same_tail  # lanes.runner has no lane name
    if is_table(path) and (is_lane or len(path) < 2):
        lanes = path[1:] or (ANY_LANE,)
        own = ", ".join(k.name for k in config_keys(lanes) if k.name.startswith(f"{name}."))
        return f"{name} ({setting.source}): a table, not a key; its keys are {own}"
    if setting.variable is not None:
        variables = {key.variable for key in keys.values()} | RESERVED_VARIABLES
        near = did_you_mean(setting.variable.upper(), sorted(variables))
    else:
        names = tables if isinstance(setting.value, dict) else known
        near = did_you_mean(name, same_tail or names) or next(iter(same_tail), None)
    all_tables = ", ".join(".".join(table) for table in sorted(tables_of([ANY_LANE])))
    hint = f"did you mean {near}?" if near else f"the tables are {all_tables}"
    return f"{name} ({setting.source}): unknown key; {hint}"


def invalid_values(
    error: ValidationError,
    settings: Mapping[KeyPath, ConfigSetting],
    keys: Mapping[KeyPath, ConfigKey],
) -> Iterator[str]:
    """Yield one line for each error of pydantic: key, value, source, allowed values."""
    for fault in error.errors(include_url=False):
        if fault["type"] == "too_short" and fault["input"]:
            continue  # pydantic does not count invalid items; they have separate lines
        if fault["type"] == "missing":
            yield _missing_mode(fault["loc"][1], settings)
            continue
        context = fault.get("ctx", {})
        loc = context.get("path", fault["loc"])
        path = next(path for path in keys if path == loc[: len(path)])
        key = keys[path]
        inner = "".join(f"[{index}]" for index in loc[len(path) :])
        value = context.get("value", fault["input"])
        near = did_you_mean(value, key.choices) if isinstance(value, str) else None
        takes = f"expected {key.allowed}" + (f"; did you mean {near}?" if near else "")
        if key.allowed == TEXT and not isinstance(value, str):
            takes += "; put it in quotes"
        if fault["type"] == "lane_mode":
            takes = fault["msg"]
        yield f"{key.name}{inner} = {_show(value)} ({settings[path].source}): {takes}"


def _missing_mode(lane: Any, settings: Mapping[KeyPath, ConfigSetting]) -> str:
    """Return the error line for a lane without a mode, the only required key."""
    source = next(s.source for path, s in settings.items() if path[:2] == ("lanes", lane))
    near = did_you_mean(lane, LANE_MODES)
    hint = f"; or did you mean lanes.{near}?" if near else ""
    return f"lanes.{lane}.mode ({source}): not set; set it to {one_of(LANE_MODES)}{hint}"


def _show(value: Any) -> str:
    """Return a value as one short string, with booleans as TOML spells them."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value) if isinstance(value, str) else reprlib.repr(value)
    except ValueError:  # an int with more digits than Python converts
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
