"""graphpact inside SGLang: its real engine on a tape, and a guard of its replays.

    hooks        what is registered in SGLang in this process
    arguments    arguments of its engine on a laptop
    stand_ins    stand-ins for packages that SGLang imports and a CPU cannot load

    seams        its graph runners, steps and ranks, which graphpact watches
    guard        what is checked at a replay, and before it serves
    tape         its platform, graph runners and graphs on a CPU
    attention    attention backends that run on a CPU and can be recorded
    runs         runs of its engine, for commands
    load         its engine under generated load

SGLang calls `platform_class` and `register` by its entry points, in each of its processes. Both do nothing
unless ``GRAPHPACT`` asks for something.

Does not: import SGLang when it is imported; modules that need it do.
"""

import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from graphpact.entry_errors import ended_by_errors
from graphpact.errors import ConfigError

if TYPE_CHECKING:
    from graphpact_guard import Settings

ATTENTION_BACKEND = "graphpact"
"""The name of our attention backend in SGLang: ``--attention-backend graphpact``."""

_DISTRIBUTION = "graphpact-sglang"

SUPPORTED = ("0.5.19", "0.5.21", "0.5.23")
"""The releases of SGLang whose seams were compared."""

RUN = ("0.5.23",)
"""Those that were run. The tape and the word ``start`` need one: others lack seams or make other batches."""


def platform_class() -> str | None:
    """Return the class of the tape's platform, or None without a tape: SGLang's ``sglang.srt.platforms``."""
    if _settings().tape is None:
        return None
    with ended_by_errors(_DISTRIBUTION):
        if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
            raise ConfigError(
                "GRAPHPACT asks for a tape, and SGLANG_USE_CPU_ENGINE=1 for SGLang's engine for CPUs",
                hint="unset SGLANG_USE_CPU_ENGINE: on the tape SGLang goes the ways of a GPU",
            )
        from graphpact_sglang import stand_ins  # noqa: PLC0415  SGLang asks before it imports the packages

        if names := stand_ins.install():
            sys.stderr.write(f"graphpact: not installed, and stood in for: {', '.join(names)}\n")
    return "graphpact_sglang.tape.platform:TapePlatform"


def register() -> None:
    """Register what ``GRAPHPACT`` asks for: SGLang's ``sglang.srt.plugins``."""
    settings = _settings()
    if not settings.is_active:
        return
    with ended_by_errors(_DISTRIBUTION):
        from graphpact_sglang import hooks  # noqa: PLC0415  it imports SGLang

        hooks.register(settings)


def _settings() -> "Settings":
    """Return the settings."""
    with ended_by_errors(_DISTRIBUTION):
        from graphpact_guard import Settings  # noqa: PLC0415  it imports torch

        settings = Settings.from_environment()
        if settings.is_active:
            _require_supported(settings)
    return settings


def _require_supported(settings: "Settings") -> None:
    installed = version("sglang")
    if installed not in SUPPORTED:
        raise ConfigError(
            f"GRAPHPACT is set, and SGLang {installed} is installed, whose seams were not compared",
            hint=f"install one of {', '.join(SUPPORTED)}, or a newer graphpact-sglang, or unset GRAPHPACT",
        )
    if settings.ranks:
        raise ConfigError(
            "GRAPHPACT asks for ranks, which the guard in SGLang does not do",
            hint="leave it out; verify:N compares the steps of each rank with eager runs",
        )
    if settings.start and installed not in RUN:
        raise ConfigError(
            f"GRAPHPACT asks for start, which SGLang {installed} does not serve",
            hint=f"install {', '.join(RUN)}, or write verify:N: it compares steps of the real load",
        )
    if settings.tape is not None and installed not in RUN:
        raise ConfigError(
            f"GRAPHPACT asks for a tape, on which SGLang {installed} does not run",
            hint=f"install {', '.join(RUN)}; the guard works with {', '.join(SUPPORTED)}",
        )
