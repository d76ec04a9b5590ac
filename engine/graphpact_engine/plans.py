"""The choice of plugins for each lane, checked against each other and against the model.

Cheap checks come first: before any weight is read, every name is looked up, and every driver and kernel
provider is asked whether it can run here. A model that a backend cannot run is refused before any capture.

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
from graphpact.errors import (
    ConfigError,
    GraphpactError,
    PluginError,
    describe_error,
    place_of,
)
from graphpact.graphs import GraphDriver
from graphpact.plugins import Loaded, PluginCatalog, observer_fault
from graphpact.runners import EagerRunner, GraphRunner
from graphpact.shapes import EagerReason
from graphpact_engine.capabilities import list_alternatives, require_capabilities
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
    """The plugins and settings of one lane, before anything is built.

    Args:
        name: Name of the lane.
        mode: Forward mode of its batches.
        config: Its table of the configuration.
        runner: The runner.
        backend: The attention backend.
        backend_name: The name by which the backend was selected.
        driver: The graph driver.
        provider: The requested kernels.
        eager_reason: Why the lane runs eagerly although its runner captures; None if it captures.
    """

    name: str
    mode: ForwardMode
    config: LaneConfig
    runner: type[GraphRunner]
    backend: type[AttentionBackend]
    backend_name: str
    driver: type[GraphDriver]
    provider: ProviderName
    eager_reason: EagerReason | None = None

    @property
    def provider_setting(self) -> str:
        """The beginning of an error about kernels: lane, key, value and backend."""
        inherited = self.config.kernel_provider is None
        key = ": engine.kernel_provider" if inherited else ".kernel_provider"
        return f'lanes.{self.name}{key} = "{self.provider}", but attention backend {self.backend_name!r}'


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of the loaded model that lanes and memory depend on.

    Args:
        layers: Its attention layers.
        dtype: Dtype of weights and KV cache.
        device: Device of the weights.
        max_model_len: Number of its positions; None if its config does not say.
        expanded_for: The lane whose backend makes the model's MLA layers run expanded; None if none are
            expanded.
        expanded_layers: Returns ``layers`` in expanded form; None if the model caches no latents.
    """

    layers: Sequence[LayerSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None
    expanded_for: "LanePlan | None" = None
    expanded_layers: Callable[[], Sequence[LayerSpec]] | None = None


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


def plan_lanes(config: EngineConfig, catalog: PluginCatalog, device: torch.device) -> list[LanePlan]:
    """Look up the plugins of every lane, in the order of the lanes.

    Raises:
        PluginError: A name is unknown, rejected or ambiguous.
        ConfigError: A runner does not serve the mode of its lane, or a driver or kernels cannot run on
            ``device``.
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
            fits = functools.partial(_serves, mode, runner, provider, device)
            raise ConfigError(
                f"lanes.{name}: runner {lane.runner!r} captures {runner.needs.value} batches;"
                f" the graph support of attention backend {backend_name!r} is {support.value};"
                f" {list_alternatives(_backends_that(fits, catalog))}",
                hint='select another attention backend for the lane, or the runner "eager"',
            )
        if lane.strict and (runner is EagerRunner or not driver.has_strict_mode):
            eager = runner is EagerRunner
            no_strict = f"graph driver {driver_name!r} has no strict mode"
            fault = f"runner {lane.runner!r} captures nothing" if eager else no_strict
            raise ConfigError(
                f"lanes.{name}.strict = true, but {fault}",
                hint='the graph driver "tape" has a strict mode, on any device',
            )
        if lane.metadata_in_graph and runner is EagerRunner:
            raise ConfigError(
                f"lanes.{name}.metadata_in_graph = true, but runner {lane.runner!r} captures nothing",
                hint="remove metadata_in_graph, or select a runner that captures",
            )
        reason = call_plugin("graph_driver", driver_name, _unavailable, driver, driver_name, device)
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
        plan = LanePlan(name, mode, lane, runner, backend, backend_name, driver, provider, eager_reason)
        require = functools.partial(require_provider, plan.provider_setting, backend.providers, provider)
        call_plugin("attention_backend", backend_name, require, device)
        plans.append(plan)
    return plans


def _unavailable(driver: type[GraphDriver], name: str, device: torch.device) -> str | None:
    """Return why a driver cannot record on ``device``, or None."""
    reason: Any = driver.unavailable(device)
    if isinstance(reason, str | None):
        return reason
    raise PluginError(
        f"graph driver {name!r}: unavailable() returned {reason!r}, not a line of text or None",
        hint="a defect of that plugin: return why it cannot record on the device, or None",
    )


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


def lane_without_latents(plans: Sequence[LanePlan]) -> LanePlan | None:
    """Return the first lane whose backend has no MLA; None if every backend has MLA.

    All lanes share one KV cache: one backend without MLA makes the cache hold keys and values of every head
    instead of latents.
    """
    return next((p for p in plans if HeadLayout.MLA not in p.backend.capabilities.head_layouts), None)


def check_backends(
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    catalog: PluginCatalog,
    spec: ModelSpec,
) -> None:
    """Refuse a model that the backend of a lane or its kernels cannot run, before any capture.

    Logs one warning for each backend whose preferred kernels cannot run.

    Raises:
        UnsupportedModelError: The model needs what a backend lacks; names the backends that have it.
        ConfigError: The kernel provider of the configuration cannot run the model.
    """
    warnings: dict[str, None] = {}
    for plan, context in zip(plans, contexts, strict=True):
        fits = functools.partial(_can_run, plan.runner, context, spec)
        others = functools.partial(_backends_that, fits, catalog)
        _require_backend_fits(plan, spec, context.limits, others)
        choose = functools.partial(choose_provider, plan.provider_setting, plan.backend.providers)
        chosen, passed_over = call_plugin("attention_backend", plan.backend_name, choose, context)
        if chosen is not None and passed_over:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            line = f"attention backend {plan.backend_name!r} runs {chosen.name} kernels; {why}"
            warnings[line] = None
    for line in warnings:
        _log.warning("%s", line)


def _backends_that(fits: Callable[[type[AttentionBackend]], bool], catalog: PluginCatalog) -> list[str]:
    """Return the names of the installed attention backends that ``fits`` accepts.

    Broken backends, and those for which ``fits`` raises, are left out.
    """

    def ask(backend: type[AttentionBackend]) -> bool:
        try:
            return fits(backend)
        except Exception:  # noqa: BLE001  third-party code; a refused provider raises too
            return False

    return [
        plugin.info.name
        for plugin in map(catalog.load, catalog.infos("attention_backend"))
        if isinstance(plugin, Loaded) and ask(plugin.cls)
    ]


def _serves(
    mode: ForwardMode,
    runner: type[GraphRunner],
    provider: ProviderName,
    device: torch.device,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` fits a lane, checked without a model."""
    can = backend.capabilities
    require_provider(backend.__name__, backend.providers, provider, device)
    return mode in can.modes and device.type in can.devices and can.graph_support.covers(runner.needs)


def _can_run(
    runner: type[GraphRunner],
    context: BackendContext,
    spec: ModelSpec,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` fits a lane of ``runner`` with this model."""
    can = backend.capabilities
    if spec.expanded_layers is not None and HeadLayout.MLA not in can.head_layouts:
        context = replace(context, layers=spec.expanded_layers())
    choose_provider(backend.__name__, backend.providers, context)
    return can.graph_support.covers(runner.needs) and not lacking(can, context)


def _require_backend_fits(
    plan: LanePlan, spec: ModelSpec, limits: Limits, others: Callable[[], list[str]]
) -> None:
    """Refuse a model that needs what the lane's backend lacks; name the lane that made MLA run expanded."""
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
            f"{error.message}; the model has MLA, which runs in expanded form, because all lanes share one KV"
            f" cache and the attention backend of lanes.{other.name}, {other.backend_name!r}, has no MLA",
            hint=f'set lanes.{other.name}.attention_backend = "{plan.backend_name}", or do not select'
            f" {plan.backend_name!r}",
        ) from error


def call_plugin(kind: str, name: str, make: Callable[..., T], *args: Any) -> T:
    """Call into a plugin; raise `PluginError` with its name for any exception that is no `GraphpactError`."""
    try:
        return make(*args)
    except (GraphpactError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit; the panics of Rust extensions
        raise PluginError(
            f"{kind} {name!r} cannot be used: it raised {describe_error(error)} (at {place_of(error)})",
            hint="select another one, or set GRAPHPACT_TRACEBACK=1 to see the traceback",
        ) from error
