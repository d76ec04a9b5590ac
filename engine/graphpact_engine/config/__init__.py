"""The configuration of an engine: `EngineConfig`, read from TOML, the environment and ``--set``.

Later sources win: defaults, the file, the environment, ``--set``.

Does not: look up plugins or check devices; the engine does both when it is built.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from graphpact.errors import ConfigError
from graphpact_engine.config.keys import ENV_PREFIX, RESERVED_VARIABLES, ConfigKey, KeyPath, config_keys
from graphpact_engine.config.messages import invalid_values, unknown_key
from graphpact_engine.config.schema import (
    LANE_MODES,
    ConfigTables,
    EngineSection,
    LaneConfig,
    LaneMode,
    LanesConfig,
    ModelConfig,
    ParallelConfig,
    ProviderName,
    SpeculativeConfig,
    VerifyConfig,
)
from graphpact_engine.config.sources import ConfigSetting, from_env, from_file, from_overrides, merge

__all__ = [
    "ENV_PREFIX",
    "LANE_MODES",
    "RESERVED_VARIABLES",
    "ConfigKey",
    "EngineConfig",
    "EngineSection",
    "LaneConfig",
    "LaneMode",
    "LanesConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProviderName",
    "SpeculativeConfig",
    "VerifyConfig",
    "config_keys",
]


class EngineConfig(ConfigTables):
    """The configuration: ``model``, ``engine``, ``parallel``, ``lanes``, ``speculative`` and ``verify``."""

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> "EngineConfig":
        """Read a configuration; later sources win: file, environment, options, overrides.

        A relative ``model.path`` in the file is resolved against the file's folder if it exists there,
        otherwise against the working directory.

        Args:
            path: A TOML file.
            env: Environment variables; by default those of the process.
            overrides: ``key=value`` strings, such as ``engine.max_num_seqs=8``.
            options: More such strings, by the command-line option that they come from.

        Raises:
            ConfigError: Lists every fault with its source and the allowed values.
        """
        faults: list[str] = []
        found = [
            *from_file(path),
            *from_env(os.environ if env is None else env, faults),
            *(
                setting
                for option, override in (options or {}).items()
                for setting in from_overrides([override], option, faults)
            ),
            *from_overrides(overrides, "--set", faults),
        ]
        keys = _keys_for(found)
        settings: dict[KeyPath, ConfigSetting] = {}
        for setting in found:
            if setting.path in keys or setting.is_empty:
                settings[setting.path] = setting
            else:
                faults.append(unknown_key(setting, keys))
        try:
            config = cls.model_validate(merge(settings))
        except ValidationError as error:
            faults += invalid_values(error, settings, keys)
        if faults:
            raise ConfigError("the configuration is not valid:" + "".join(f"\n  {fault}" for fault in faults))
        return config


def _keys_for(settings: Sequence[ConfigSetting]) -> dict[KeyPath, ConfigKey]:
    """Return the keys of a configuration with these settings, including the lanes that they name."""
    lanes = dict.fromkeys((*LANE_MODES, *(s.lane for s in settings if s.lane is not None)))
    return {tuple(key.name.split(".")): key for key in config_keys([*lanes])}
