"""Options that several commands share, and the configuration and engine that they make.

Does not: read the environment or files itself; `graphpact_engine.config` does.
"""

import contextlib
import json
import os
import sys
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from graphpact.files import read_file
from graphpact.plugins import PluginCatalog
from graphpact_engine.checkpoint_folder import require_checkpoint_folder
from graphpact_engine.cli.progress import capture_progress

if TYPE_CHECKING:
    from graphpact_engine.config import EngineConfig
    from graphpact_engine.engine import Engine


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of ``KEY=VALUE``: keys, including those of lanes in ``--config``, then values."""
    from graphpact_engine.config import LANE_MODES, config_keys  # noqa: PLC0415  slow: pydantic

    lanes: list[str] = [*LANE_MODES]
    odd = OSError, ValueError, RecursionError, AttributeError, TypeError
    with contextlib.suppress(*odd):  # a missing or invalid file
        document = tomllib.loads(read_file(Path(ctx.params["config"])).decode())
        lanes += [lane for lane in document["lanes"] if lane not in lanes]
    key, equals, _ = incomplete.partition("=")
    keys = {each.name: each for each in config_keys(lanes)}
    found = [f"{name}=" for name in keys]
    if equals and key in keys:
        kind = key.rpartition(".")[2]  # a key that selects a plugin ends with its kind
        plugins = [i.name for i in PluginCatalog.scan(env={}).infos() if i.kind == kind]
        found = [f"{key}={value}" for value in [*plugins, *keys[key].choices]]
    return [each for each in found if each.startswith(incomplete)]


ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="DIR", help="Checkpoint directory; sets model.path."),
]
ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file in TOML."),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set one key of the configuration; repeatable. Overrides all other sources.",
        autocompletion=complete_setting,
        show_default=False,
    ),
]


def load_settings(
    config: Path | None,
    model: str | None,
    sets: Sequence[str] | None,
    more: Mapping[str, str] | None = None,
) -> "EngineConfig":
    """Return the configuration that the options select.

    Args:
        config: The value of ``--config``.
        model: The value of ``--model``.
        sets: The values of ``--set``.
        more: ``key=value`` strings of other options that set configuration keys, by option.

    Raises:
        ConfigError: A key, a value or a file is not valid.
        CheckpointError: The path of the model is no checkpoint. This is found before slow imports.
    """
    from graphpact_engine.config import EngineConfig  # noqa: PLC0415  slow: pydantic

    options = {} if model is None else {"--model": f"model.path={_toml_string(model)}"}
    settings = EngineConfig.load(config, options={**options, **(more or {})}, overrides=sets or [])
    if settings.model.path is not None:
        require_checkpoint_folder(Path(settings.model.path))
    return settings


def build_engine(
    settings: "EngineConfig", *, quiet: bool = False, observers: Sequence[object] = ()
) -> "Engine":
    """Build the engine of ``settings`` and capture its shapes, with progress on a terminal.

    Args:
        settings: The configuration.
        quiet: Whether to show no progress.
        observers: See `Engine`.

    Raises:
        GraphpactError: The engine cannot be built.
    """
    _silence_transformers()
    from graphpact_engine.engine import Engine  # noqa: PLC0415  slow: pydantic and transformers

    with (
        capture_progress(str(settings.model.path), quiet=quiet) as on_capture,
        contextlib.redirect_stdout(sys.stderr),  # plugins may print when they are imported
    ):
        return Engine(settings, on_capture=on_capture, observers=observers)


def _toml_string(text: str) -> str:
    """Return ``text`` as a TOML string: with the escapes of JSON, and one for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _drop(*_: object, **__: object) -> None:
    """Show no warning."""


def _silence_transformers() -> None:
    """Turn off progress bars and log messages of transformers, which reads these when it is imported.

    Warnings of other packages are for programmers; ``python -W default`` shows them.
    """
    if not sys.warnoptions:
        warnings.showwarning = _drop
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
