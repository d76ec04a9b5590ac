"""What a configuration selects for the whole engine: device, asynchronous steps, speculation, observers.

Does not: choose the plugins of a lane; `graphpact_engine.plans` does.
"""

import reprlib
from collections.abc import Sequence
from typing import Any

import torch

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, PluginError
from graphpact.plugin_checks import observer_fault
from graphpact.plugins import PluginCatalog
from graphpact.speculation import SpeculationAlgorithm
from graphpact_engine.config import LANE_MODES, EngineConfig, SpeculativeConfig


def resolve_device(name: str) -> torch.device:
    """Return the device that ``engine.device`` names; ``auto`` is a GPU if there is one.

    Raises:
        ConfigError: The device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device is {name!r}; torch sees {torch.cuda.device_count()} CUDA devices here",
            hint='set engine.device = "cpu", or run `graphpact doctor`',
        )
    return device


def choose_async(config: EngineConfig, device: torch.device) -> bool:
    """Return whether decode steps are scheduled asynchronously.

    Raises:
        ConfigError: The configuration asks for it together with speculation or with several ranks.
    """
    asked = config.engine.async_scheduling
    drafts = config.speculative.algorithm is not None
    has_ranks = config.parallel.num_ranks > 1
    if asked == "auto":
        return device.type == "cuda" and not drafts and not has_ranks
    if asked and has_ranks:
        raise ConfigError(
            "engine.async_scheduling = true, but parallel has several ranks, which decide each step together",
            hint="leave engine.async_scheduling out",
        )
    if asked and drafts:
        raise ConfigError(
            "engine.async_scheduling = true, but speculative.algorithm is set: how many tokens a verification"
            " accepts decides the slots and lengths of the next step",
            hint="leave engine.async_scheduling out, or remove [speculative]",
        )
    return asked


def select_algorithm(config: EngineConfig, catalog: PluginCatalog) -> type[SpeculationAlgorithm] | None:
    """Look up the speculation algorithm of the configuration; None without speculation.

    Raises:
        PluginError: The name is unknown, rejected or ambiguous, or the algorithm has lanes of unknown names.
        ConfigError: A key of the table has no effect without an algorithm, or needs another one.
    """
    asked = config.speculative
    if asked.algorithm is None:
        if asked != SpeculativeConfig():
            keys = ", ".join(f"speculative.{name}" for name in sorted(asked.model_fields_set))
            raise ConfigError(
                f"{keys} has no effect: speculative.algorithm is not set",
                hint='set speculative.algorithm, such as "eagle", or remove the table',
            )
        return None
    algorithm = catalog.select("speculation", asked.algorithm)
    known = [mode for mode in LANE_MODES if mode not in ("decode", "prefill")]
    if unknown := sorted(algorithm.lanes.keys() - set(known)):
        raise PluginError(
            f"speculation {asked.algorithm!r} has a lane {unknown[0]!r}; lanes are called {', '.join(known)}",
            hint="a defect of that plugin: name its lanes by what they do",
        )
    if [role.mode for role in algorithm.lanes.values()].count(ForwardMode.TARGET_VERIFY) != 1:
        raise PluginError(
            f"speculation {asked.algorithm!r} has the lanes {', '.join(algorithm.lanes)}; one has to be"
            " of mode target_verify",
            hint="a defect of that plugin: one of its lanes must be the verification of the target",
        )
    drafts = any(role.model == "draft" for role in algorithm.lanes.values())
    if drafts is (asked.draft_model is None):
        needs = "needs a draft model" if drafts else "drafts without a model"
        raise ConfigError(
            f"speculative.algorithm {asked.algorithm!r} {needs}; speculative.draft_model is"
            f" {reprlib.repr(asked.draft_model) if asked.draft_model else 'not set'}",
            hint="set it to the directory of a draft model that was trained for this target"
            if drafts
            else "remove speculative.draft_model",
        )
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"speculative.algorithm is {asked.algorithm!r} and parallel.pipeline is"
            f" {config.parallel.pipeline}: only the last stage has the logits that accept drafts",
            hint="split the model by parallel.tensor instead, or remove [speculative]",
        )
    return algorithm


def draft_limits(config: EngineConfig) -> DraftLimits:
    """Return the largest draft of the configuration; all 1 without speculation."""
    asked = config.speculative
    if asked.algorithm is None:
        return DraftLimits()
    width = asked.num_draft_tokens or asked.num_steps * asked.topk + 1
    return DraftLimits(asked.num_steps, asked.topk, width)


def select_observers(config: EngineConfig, catalog: PluginCatalog) -> list[tuple[str, type[Any]]]:
    """Look up the observers of the configuration; return names and classes, the outermost first.

    Raises:
        PluginError: A name is unknown, rejected or ambiguous.
    """
    return [(name, catalog.select("observer", name)) for name in config.engine.observers]


def require_observers(observers: Sequence[object]) -> None:
    """Refuse an object that cannot observe a lane, among observers that a caller passes.

    Raises:
        ConfigError: Names the object and its fault.
    """
    for at, observer in enumerate(observers):
        reason = observer_fault(type(observer))
        if isinstance(observer, type):
            reason = f"it is the class {observer.__name__}, not an instance of it"
        if reason is not None:
            raise ConfigError(
                f"observers[{at}] is not an observer: {reason}",
                hint="an observer is an object with hook wrappers: @graphpact.hookimpl(wrapper=True)",
            )
