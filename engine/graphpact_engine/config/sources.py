"""The settings of each source: a TOML file, variables ``GRAPHPACT_<TABLE>__<KEY>``, ``--set key=value``.

Every setting has a description of its source. Types are not guessed: in a file the string
``"8"`` is not a number. A value from the environment or from ``--set`` is parsed as TOML (``8``, ``[1]``); a
value that is not valid TOML is a string (``fa3``).

Does not: know which keys exist.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpact.errors import ConfigError
from graphpact.files import read_file
from graphpact_engine.config.keys import ENV_PREFIX, RESERVED_VARIABLES, KeyPath, is_table

_PATHS = {("model", "path"), ("speculative", "draft_model")}


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One setting of a source.

    Args:
        path: The key.
        value: The value.
        source: A description of its source.
        variable: The environment variable, if it comes from one.
    """

    path: KeyPath
    value: Any
    source: str
    variable: str | None = None

    @property
    def lane(self) -> str | None:
        """The lane that the setting belongs to, by a key or as an empty table; None if there is none."""
        if len(self.path) < 2 or self.path[0] != "lanes" or not is_table(self.path[:2]):
            return None
        return self.path[1] if len(self.path) > 2 or self.is_empty else None

    @property
    def is_empty(self) -> bool:
        """Whether it is the empty table of a lane, which still declares the lane."""
        return len(self.path) == 2 and is_table(self.path) and self.value == {}


def _flatten(path: KeyPath, value: Any, source: str, variable: str | None = None) -> Iterator[ConfigSetting]:
    """Yield a setting for every key in ``value``; an unknown table counts as one key."""
    if isinstance(value, dict) and is_table(path) and (value or len(path) < 2):
        for key, inner in value.items():
            yield from _flatten((*path, key), inner, source, variable)
    else:
        yield ConfigSetting(path, value, source, variable)


def from_file(path: Path | None) -> Iterator[ConfigSetting]:
    """Yield the settings of a TOML file; nothing if ``path`` is None.

    A relative path of a model is resolved against the file's folder if it exists there.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    if path is None:
        return
    try:
        data = read_file(path)
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} is not UTF-8 text (at line {line})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from None
    for setting in _flatten((), document, str(path)):
        value = setting.value
        if setting.path in _PATHS and isinstance(value, str):
            here = path.parent / value
            if value and os.path.exists(here):  # noqa: PTH110  Path.exists raises without permission
                yield ConfigSetting(setting.path, str(here), setting.source)
                continue
        yield setting


def from_env(env: Mapping[str, str], faults: list[str]) -> Iterator[ConfigSetting]:
    """Yield the settings of environment variables; add a variable that is set twice to ``faults``."""
    seen: dict[str, str] = {}
    for variable, text in sorted(env.items()):
        name = variable.upper()
        if not name.startswith(ENV_PREFIX) or name in RESERVED_VARIABLES:
            continue
        if name in seen:
            faults.append(f"{variable} and {seen[name]} are both set (environment): keep one of them")
        seen[name] = variable
        # A lane name may contain "__": the part between the first and the last "__" is the name.
        table, _, key = name.removeprefix(ENV_PREFIX).lower().rpartition("__")
        path = (*table.split("__", 1), key) if table else (key,)
        yield from _flatten(path, _parse(text), f"environment variable {variable}", variable)


def from_overrides(overrides: Sequence[str], source: str, faults: list[str]) -> Iterator[ConfigSetting]:
    """Yield the settings of ``key=value`` strings; add malformed ones to ``faults``."""
    for override in overrides:
        key, _, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if "=" in override and all(path):
            yield from _flatten(path, _parse(text), source)
        else:
            faults.append(f"{override!r} ({source}): not of the form key=value")


def merge(settings: Mapping[KeyPath, ConfigSetting]) -> dict[str, Any]:
    """Return the settings as nested tables, with lanes in the order of their first mention."""
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        table = tree
        for key in path if setting.is_empty else path[:-1]:
            table = table.setdefault(key, {})
        if not setting.is_empty:
            table[path[-1]] = setting.value
    return tree


def _parse(text: str) -> Any:
    """Return ``text`` parsed as a TOML value, or the stripped text if it is not valid TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return document["value"] if document.keys() == {"value"} else text.strip()
