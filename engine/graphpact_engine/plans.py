"""What was chosen for each lane: plugins looked up by name, and held to each other and to the model.

Cheap refusals come first: every name is looked up, and every driver and kernel asked whether it can run here,
before a weight is read; a model that its backends cannot run is refused before anything is captured.

Does not: build anything; `graphpact_engine.build` does.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    HeadLayout,
    LayerSpec,
    Limits,
    ProviderName,
)
from graphpact.attention.providers import choose_provider, lacking, require_provider
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, GraphpactError, PluginError
from graphpact.graphs import GraphDriver
from graphpact.plugins import Loaded, PluginCatalog, observer_fault
from graphpact.runners import EagerRunner, GraphRunner
from graphpact.shapes import EagerReason
from graphpact_engine.capabilities import require_capabilities, say_others
from graphpact_engine.config import EngineConfig, LaneConfig, LaneMode
from graphpact_engine.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FORWARD_MODES: dict[LaneMode, ForwardMode] = {
    "decode": ForwardMode.DECODE,
    "prefill": ForwardMode.EXTEND,
}


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What was chosen for one lane, before anything heavy was done."""

    name: str
    mode: ForwardMode
    config: LaneConfig
    runner: type[GraphRunner]
    backend: type[AttentionBackend]
    backend_name: str
    driver: type[GraphDriver]
    provider: ProviderName
    eager_reason: EagerReason | None = None
    """Why it runs eagerly though its runner captures; None where it captures."""

    @property
    def whose_kernels(self) -> str:
        """Lane, key, value and backend: how an error about kernels begins."""
        inherited = self.config.kernel_provider is None
        key = ": engine.kernel_provider" if inherited else ".kernel_provider"
        return f'lanes.{self.name}{key} = "{self.provider}", but attention backend {self.backend_name!r}'


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the loaded model asks of everything around it."""

    layers: Sequence[LayerSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    expanded_for: "LanePlan | None" = None
    """The lane for whose backend the model's MLA layers are expanded; None where none are."""
    expanded_layers: Callable[[], Sequence[LayerSpec]] | None = None
    """Tells what ``layers`` would be if they were expanded; None where they keep no latents."""


def resolve_device(name: str) -> torch.device:
    """Return the device that ``engine.device`` names; ``auto`` is a GPU where there is one.

    Raises:
        ConfigError: No such device here.
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


def plan_lanes(
    config: EngineConfig, catalog: PluginCatalog, device: torch.device
) -> list[LanePlan]:
    """Look up the plugins of every lane, in the order of the lanes.

    Raises:
        PluginError: A name that is unknown, rejected or ambiguous.
        ConfigError: A runner in a lane of a mode that it does not serve, a driver that cannot record on
            ``device``, or kernels that cannot run there.
    """
    plans = []
    for name, lane in config.lanes.items():
        mode = _FORWARD_MODES[lane.mode]
        backend_name = lane.attention_backend or config.engine.attention_backend
        provider = lane.kernel_provider or config.engine.kernel_provider
        driver_name = lane.graph_driver
        runner = catalog.select("runner", lane.runner)
        if driver_name == "auto":
            driver_name = runner.driver or ("cuda" if device.type == "cuda" else "tape")
        backend = catalog.select("attention_backend", backend_name)
        driver = catalog.select("graph_driver", driver_name)
        if mode not in runner.modes:
            serves = ", ".join(sorted(m.value for m in runner.modes))
            raise ConfigError(
                f"lanes.{name}.runner: {lane.runner!r} serves {serves}, not {mode.value}",
                hint='"eager" serves every mode',
            )
        support = backend.capabilities.graph_support
        if not support.covers(runner.needs):
            would_do = functools.partial(_serves, mode, runner, provider, device)
            raise ConfigError(
                f"lanes.{name}: runner {lane.runner!r} captures {runner.needs.value} batches;"
                f" attention backend {backend_name!r} can be captured: {support.value};"
                f" {say_others(_backends_that(would_do, catalog))}",
                hint='select another attention backend for the lane, or the runner "eager"',
            )
        if lane.strict and (runner is EagerRunner or not driver.has_strict_mode):
            what = "captures nothing" if runner is EagerRunner else f"records with {driver_name!r}"
            raise ConfigError(
                f"lanes.{name}.strict = true, but runner {lane.runner!r} {what}, where nothing strict is"
                " known",
                hint='the driver "tape" has a strict mode, on any device',
            )
        if lane.metadata_in_graph and runner is EagerRunner:
            raise ConfigError(
                f"lanes.{name}.metadata_in_graph = true, but runner {lane.runner!r} captures nothing",
                hint="leave metadata_in_graph out, or select a runner that captures",
            )
        reason = call_plugin("graph_driver", driver_name, driver.unavailable, device)
        eager_reason = None
        if reason is not None:
            if lane.graph_driver == "auto" and runner.driver is not None:
                eager_reason = call_plugin("runner", lane.runner, runner.eager_reason, device)
            if eager_reason is None:
                raise ConfigError(f"lanes.{name}.graph_driver: {driver_name!r}: {reason}")
            _log.warning(
                "lanes.%s: runner %r captures nothing and runs eagerly: its graph driver %r: %s",
                *(name, lane.runner, driver_name, reason),
            )
        plan = LanePlan(
            name, mode, lane, runner, backend, backend_name, driver, provider, eager_reason
        )
        require = functools.partial(
            require_provider, plan.whose_kernels, backend.providers, provider
        )
        call_plugin("attention_backend", backend_name, require, device)
        plans.append(plan)
    return plans


def select_observers(config: EngineConfig, catalog: PluginCatalog) -> list[tuple[str, type[Any]]]:
    """Look up the observers that the configuration names, by name, the outermost first.

    Raises:
        PluginError: A name that is unknown, rejected or ambiguous.
    """
    return [(name, catalog.select("observer", name)) for name in config.engine.observers]


def require_observers(observers: Sequence[object]) -> None:
    """Refuse what cannot observe a lane, among the observers of a caller.

    Raises:
        ConfigError: Says which, and what is wrong with it.
    """
    for at, observer in enumerate(observers):
        reason = observer_fault(type(observer))
        if isinstance(observer, type):
            reason = f"it is the class {observer.__name__}, not an object of it"
        if reason is not None:
            raise ConfigError(
                f"observers[{at}] cannot observe: {reason}",
                hint="an observer is an object with hook wrappers: @graphpact.hookimpl(wrapper=True)",
            )


def lane_without_latents(plans: Sequence[LanePlan]) -> LanePlan | None:
    """Return the first lane whose backend has no MLA; None where a model with MLA may keep its latents.

    All lanes share one KV cache, so one of them is enough to have every head's keys and values kept.
    """
    return next(
        (p for p in plans if HeadLayout.MLA not in p.backend.capabilities.head_layouts), None
    )


def check_backends(
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    catalog: PluginCatalog,
    spec: ModelSpec,
) -> None:
    """Refuse a model that a lane's backend, or its kernels, cannot run; nothing is captured before.

    Warns in the log, once for all lanes, where kernels run because better ones cannot.

    Raises:
        UnsupportedModelError: The model asks for what a backend lacks; names those that have it.
        ConfigError: Whose kernels were named, and they cannot run it.
    """
    told: dict[str, None] = {}
    for plan, context in zip(plans, contexts, strict=True):
        would_do = functools.partial(_can_run, plan.runner, context, spec)
        others = functools.partial(_backends_that, would_do, catalog)
        _require_backend_fits(plan, spec, context.limits, others)
        choose = functools.partial(choose_provider, plan.whose_kernels, plan.backend.providers)
        chosen, passed_over = call_plugin("attention_backend", plan.backend_name, choose, context)
        if chosen is not None and passed_over:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            line = f"attention backend {plan.backend_name!r} runs {chosen.name} kernels; {why}"
            told[line] = None
    for line in told:
        _log.warning("%s", line)


def _backends_that(
    would_do: Callable[[type[AttentionBackend]], bool], catalog: PluginCatalog
) -> list[str]:
    """Return the names of the installed attention backends that would do.

    One that is broken would not, and neither would one that raises when it is asked.
    """

    def ask(backend: type[AttentionBackend]) -> bool:
        try:
            return would_do(backend)
        except Exception:  # noqa: BLE001  anybody's code; and a provider that is refused raises
            return False

    return [
        plugin.info.name
        for plugin in catalog.check("attention_backend")
        if isinstance(plugin, Loaded) and ask(plugin.cls)
    ]


def _serves(
    mode: ForwardMode,
    runner: type[GraphRunner],
    provider: ProviderName,
    device: torch.device,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` would do for a lane, as far as that is known without a model."""
    can = backend.capabilities
    require_provider(backend.__name__, backend.providers, provider, device)
    return (
        mode in can.modes and device.type in can.devices and can.graph_support.covers(runner.needs)
    )


def _can_run(
    runner: type[GraphRunner],
    context: BackendContext,
    spec: ModelSpec,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` would do for a lane of ``runner`` with this model."""
    can = backend.capabilities
    if spec.expanded_layers is not None and HeadLayout.MLA not in can.head_layouts:
        context = replace(context, layers=spec.expanded_layers())
    choose_provider(backend.__name__, backend.providers, context)
    return can.graph_support.covers(runner.needs) and not lacking(can, context)


def _require_backend_fits(
    plan: LanePlan, spec: ModelSpec, limits: Limits, others: Callable[[], list[str]]
) -> None:
    """Refuse a model that asks for what the lane's backend lacks, and say who expanded its latents."""
    try:
        require_capabilities(
            plan.backend_name,
            plan.backend.capabilities,
            spec.layers,
            mode=plan.mode,
            dtype=spec.dtype,
            device=spec.device,
            page_size=limits.page_size,
            topk=limits.draft.topk,
            others=others,
        )
    except UnsupportedModelError as error:
        other, layouts = spec.expanded_for, plan.backend.capabilities.head_layouts
        fits = all(layer.head_layout in layouts for layer in spec.layers)
        if other is None or fits or HeadLayout.MLA not in layouts:
            raise
        raise UnsupportedModelError(
            f"{error.message}; the model has MLA, which runs expanded here, because all lanes share one KV"
            f" cache and the attention backend of lanes.{other.name}, {other.backend_name!r}, has no MLA",
            hint=f'set lanes.{other.name}.attention_backend = "{plan.backend_name}", or leave'
            f" {plan.backend_name!r} out",
        ) from error


def call_plugin(kind: str, name: str, make: Callable[..., T], *args: Any) -> T:
    """Call into a plugin; whatever it raises, but an error of ours, is told as the plugin's."""
    try:
        return make(*args)
    except GraphpactError:
        raise
    except Exception as error:
        raise PluginError(
            f"{kind} {name!r} cannot be had: it raised {type(error).__name__}: {error}",
            hint="select another one, or set GRAPHPACT_TRACEBACK=1 to see where it fails",
        ) from error
