"""graphpact inside SGLang: its real engine on a tape, and a guard of its replays.

    platform       the platform of the tape: graph runners and backends on a CPU
    attention      an attention backend that runs on a CPU and can be recorded
    drafts         the same for the steps of a draft, and the kernels of its tree
    segments       SGLang's breakable graphs on a tape
    stand_ins      stand-ins for packages that a CPU cannot load

SGLang calls `platform_class` and `register` by its entry points, in each of its processes. Both do nothing
unless ``GRAPHPACT`` asks for something.

Does not: import SGLang when it is imported; modules that need it do.
"""

import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from graphpact.errors import ConfigError, GraphpactError

if TYPE_CHECKING:
    from graphpact_guard import Settings

ATTENTION_BACKEND = "graphpact"
"""The name of our attention backend in SGLang: ``--attention-backend graphpact``."""

SUPPORTED = ("0.5.19", "0.5.21", "0.5.23")
"""The releases of SGLang whose seams were compared."""


def platform_class() -> str | None:
    """Return the class of the tape's platform, or None without a tape: SGLang's ``sglang.srt.platforms``."""
    if _settings().tape is None:
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        _end(
            ConfigError(
                "GRAPHPACT asks for a tape, and SGLANG_USE_CPU_ENGINE=1 for SGLang's engine for CPUs",
                hint="unset SGLANG_USE_CPU_ENGINE: on the tape SGLang goes the ways of a GPU",
            )
        )
    return "graphpact_sglang.platform:TapePlatform"


def register() -> None:
    """Register what ``GRAPHPACT`` asks for: SGLang's ``sglang.srt.plugins``."""
    settings = _settings()
    if not settings.is_active:
        return
    from graphpact_sglang import hooks  # noqa: PLC0415  it imports SGLang

    hooks.register(settings)


def _settings() -> "Settings":
    """Return the settings; end the process if they are invalid, because SGLang only logs such errors."""
    from graphpact_guard import Settings  # noqa: PLC0415  it imports torch

    try:
        settings = Settings.from_environment()
        if settings.is_active:
            _require_supported()
    except GraphpactError as error:
        _end(error)
    return settings


def _end(error: GraphpactError) -> NoReturn:
    sys.stderr.write(f"graphpact: {error}\n")
    raise SystemExit(error.code) from error


def _require_supported() -> None:
    installed = version("sglang")
    if installed not in SUPPORTED:
        raise ConfigError(
            f"GRAPHPACT is set, and SGLang {installed} is installed, whose seams were not compared",
            hint=f"install one of {', '.join(SUPPORTED)}, or a newer graphpact-sglang, or unset GRAPHPACT",
        )
