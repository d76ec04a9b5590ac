"""What commands share: options, the configuration and the engine of them, the extras that they need.

Does not: read the environment or files itself; `graphpact_engine.config` does.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from graphpact_engine.cli.progress import capture_progress

if TYPE_CHECKING:
    from graphpact_engine.config import EngineConfig
    from graphpact_engine.engine import Engine

ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="DIR", help="Checkpoint directory: model.path."),
]
ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration in TOML."),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set one key of the configuration; repeatable. It has the last word.",
        show_default=False,
    ),
]


def load_settings(
    config: Path | None,
    model: str | None,
    sets: Sequence[str] | None,
    more: Mapping[str, str] | None = None,
) -> "EngineConfig":
    """Return the configuration that the options ask for.

    Args:
        config: ``--config``.
        model: ``--model``.
        sets: ``--set``.
        more: ``key=value`` texts of other options that are keys of the configuration, by option.

    Raises:
        ConfigError: A key, a value or a file that is not valid.
    """
    from graphpact_engine.config import EngineConfig  # noqa: PLC0415  pydantic

    options = {} if model is None else {"--model": f"model.path={_toml_string(model)}"}
    return EngineConfig.load(config, options={**options, **(more or {})}, overrides=sets or [])


def build_engine(settings: "EngineConfig", *, quiet: bool = False) -> "Engine":
    """Build the engine of ``settings``, capture included, and show on a terminal how far it is.

    Raises:
        GraphpactError: It cannot be built.
    """
    _silence_transformers()
    from graphpact_engine.engine import Engine  # noqa: PLC0415  pydantic and all behind it

    with (
        capture_progress(str(settings.model.path), quiet=quiet) as on_capture,
        contextlib.redirect_stdout(sys.stderr),  # what plugins print when they are imported
    ):
        return Engine(settings, on_capture=on_capture)


def _toml_string(text: str) -> str:
    """Return ``text`` as a TOML string: JSON's escapes are TOML's, and DEL needs one too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _silence_transformers() -> None:
    """Keep the bars and the log of transformers out of ours; it reads these when it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
