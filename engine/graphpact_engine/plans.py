"""The choice of plugins for each lane, checked against each other and against the model.

Cheap checks come first: before any weight is read, every name is looked up, and every driver and kernel
provider is asked whether it can run here. A model that a backend cannot run is refused before any capture.

Does not: build anything; `graphpact_engine.build` does.
"""

import functools
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    DraftLimits,
    GraphSupport,
    HeadLayout,
    LayerSpec,
    Limits,
    ProviderName,
)
from graphpact.attention.providers import choose_provider, lacking
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, GraphpactError, PluginError
from graphpact.graphs import GraphDriver
from graphpact.plugin_calls import describe_error, place_of
from graphpact.plugin_checks import observer_fault
from graphpact.plugins import Loaded, PluginCatalog
from graphpact.runners import EagerRunner, GraphRunner
from graphpact.shapes import EagerReason
from graphpact.speculation import LaneRole, SpeculationAlgorithm
from graphpact_engine.capabilities import list_alternatives, require_capabilities
from graphpact_engine.config import LANE_MODES, EngineConfig, LaneConfig, LaneMode, SpeculativeConfig
from graphpact_engine.errors import UnsupportedModelError

_log = logging.getLogger(__name__)

T = TypeVar("T")

ModelName = Literal["target", "draft"]

_ROLES: Mapping[str, LaneRole] = {
    "decode": LaneRole(ForwardMode.DECODE, "target", "cuda_graph"),
    "prefill": LaneRole(ForwardMode.EXTEND, "target", "eager"),
}
_MIXED_PREFILL = replace(_ROLES["prefill"], mode=ForwardMode.MIXED)
_NOT_CAPTURED = EagerReason("capture_off", "the lane's configuration says capture = false")


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The plugins and settings of one lane, before anything is built.

    Args:
        name: Name of the lane.
        role: The lane's mode in the configuration, which says what its batches are.
        mode: Forward mode of its batches.
        model: The model that it runs.
        draft: The largest draft; all 1 without speculation.
        config: Its table of the configuration.
        runner: The runner.
        runner_name: The name by which the runner was selected.
        backend: The attention backend.
        backend_name: The name by which the backend was selected.
        driver: The graph driver.
        provider: The requested kernels.
        max_num_tokens: The most tokens of its steps.
        eager_reason: Why the lane runs eagerly although its runner captures; None if it captures.
    """

    name: str
    role: LaneMode
    mode: ForwardMode
    model: ModelName
    draft: DraftLimits
    config: LaneConfig
    runner: type[GraphRunner]
    runner_name: str
    backend: type[AttentionBackend]
    backend_name: str
    driver: type[GraphDriver]
    provider: ProviderName
    max_num_tokens: int
    eager_reason: EagerReason | None = None

    @property
    def provider_setting(self) -> str:
        """The beginning of an error about kernels: lane, key, value and backend."""
        inherited = self.config.kernel_provider is None
        key = ": engine.kernel_provider" if inherited else ".kernel_provider"
        return f'lanes.{self.name}{key} = "{self.provider}", but attention backend {self.backend_name!r}'

    def limits(self, shared: Limits) -> Limits:
        """Return the limits of the lane's runner, from those that all lanes share."""
        rows = self.draft.topk if self.runner.frozen_kv else 1
        tokens = min(shared.max_num_tokens, self.max_num_tokens)
        return replace(shared, max_bs=shared.max_bs * rows, max_num_tokens=tokens, draft=self.draft)

    def backend_limits(self, shared: Limits) -> Limits:
        """Return the limits of the lane's backend, which serves one mode."""
        return replace(self.limits(shared), draft=self.draft.for_backend(self.mode))


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
        hidden_sizes: For a draft model, the widths of the hidden states that its batches carry, by forward
            mode.
        has_experts: Whether it routes tokens to experts, which must not compute padding.
    """

    layers: Sequence[LayerSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None
    expanded_for: "LanePlan | None" = None
    expanded_layers: Callable[[], Sequence[LayerSpec]] | None = None
    hidden_sizes: Mapping[ForwardMode, int] = field(default_factory=dict)
    has_experts: bool = False


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
        ConfigError: It is asked for with speculation.
    """
    asked = config.engine.async_scheduling
    drafts = config.speculative.algorithm is not None
    if asked == "auto":
        return device.type == "cuda" and not drafts
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
    known = LANE_MODES[len(_ROLES) :]
    if unknown := sorted(algorithm.lanes.keys() - set(known)):
        raise PluginError(
            f"speculation {asked.algorithm!r} has a lane {unknown[0]!r}; lanes are called {', '.join(known)}",
            hint="a defect of that plugin: name its lanes by what they do",
        )
    if [role.mode for role in algorithm.lanes.values()].count(ForwardMode.TARGET_VERIFY) != 1:
        raise PluginError(
            f"speculation {asked.algorithm!r} has the lanes {', '.join(algorithm.lanes)}; one has to be"
            " of mode target_verify",
            hint="a defect of that plugin: one lane lets the target verify",
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
    return algorithm


def draft_limits(config: EngineConfig) -> DraftLimits:
    """Return the largest draft of the configuration; all 1 without speculation."""
    asked = config.speculative
    if asked.algorithm is None:
        return DraftLimits()
    width = asked.num_draft_tokens or asked.num_steps * asked.topk + 1
    return DraftLimits(asked.num_steps, asked.topk, width)


def _planned(
    config: EngineConfig, algorithm: type[SpeculationAlgorithm] | None
) -> list[tuple[str, LaneConfig, LaneRole]]:
    """Return every lane with its role: those of the configuration, and default ones for other roles."""
    roles: Mapping[str, LaneRole] = _ROLES
    if algorithm is not None:
        roles = {**algorithm.lanes, "prefill": _ROLES["prefill"]}
    lanes = dict(config.lanes.items())
    for name, lane in config.lanes.items():
        if lane.mode in roles:
            continue
        if algorithm is not None and lane == LaneConfig(mode="decode"):
            del lanes[name]  # the default lane
        else:
            why = "speculation drafts and verifies instead" if algorithm else "it needs [speculative]"
            raise ConfigError(
                f"lanes.{name}, of mode {lane.mode}, never runs: {why}",
                hint=f"modes of lanes are here {', '.join(roles)}",
            )
    given = {lane.mode for lane in lanes.values()}
    for mode in LANE_MODES:
        if mode in roles and mode not in given:
            if mode in lanes:
                raise ConfigError(
                    f"lanes.{mode} has the mode {lanes[mode].mode}", hint="give the lane another name"
                )
            lanes[mode] = LaneConfig(mode=mode)
    return [(name, lane, roles[lane.mode]) for name, lane in lanes.items()]


def plan_lanes(
    config: EngineConfig,
    catalog: PluginCatalog,
    device: torch.device,
    algorithm: type[SpeculationAlgorithm] | None = None,
) -> list[LanePlan]:
    """Look up the plugins of every lane, in the order of the lanes.

    The mode of the prefill lanes is mixed if decoding requests take part in their steps; otherwise extend.

    Args:
        config: The configuration.
        catalog: The plugins.
        device: The device of the lanes.
        algorithm: The speculation algorithm, from `select_algorithm`.

    Raises:
        PluginError: A name is unknown, rejected or ambiguous.
        ConfigError: A runner does not serve the mode of its lane, a driver or kernels cannot run on
            ``device``, or ``engine.mixed`` is set and mixed steps are not possible.
    """
    draft = draft_limits(config)
    planned = _planned(config, algorithm)
    if _is_mixed(planned, config, catalog):
        planned = [
            (name, lane, _MIXED_PREFILL if lane.mode == "prefill" else role) for name, lane, role in planned
        ]
    return [_plan_lane(name, lane, role, draft, config, catalog, device) for name, lane, role in planned]


def _is_mixed(
    planned: Sequence[tuple[str, LaneConfig, LaneRole]], config: EngineConfig, catalog: PluginCatalog
) -> bool:
    """Return whether decoding requests take part in prefill steps; refuse ``true`` where they cannot."""
    asked = config.engine.mixed
    obstacle = None if asked is False else _obstacle_to_mixed(planned, config, catalog)
    if asked and obstacle is not None:
        fault, remedy = obstacle
        raise ConfigError(
            f"engine.mixed = true, but {fault}",
            hint=f"{remedy}, or set engine.mixed = false: prefill and decode steps then take turns",
        )
    return asked is not False and obstacle is None


def _obstacle_to_mixed(
    planned: Sequence[tuple[str, LaneConfig, LaneRole]], config: EngineConfig, catalog: PluginCatalog
) -> tuple[str, str] | None:
    """Return what keeps prefill steps from being mixed, and what to do about it; None if nothing does."""
    mixed, algorithm = ForwardMode.MIXED, config.speculative.algorithm
    if algorithm is not None:
        fault = f"speculative.algorithm is {algorithm!r}: drafts are verified in steps of their own"
        return fault, "remove [speculative]"
    for name, lane, role in planned:
        if lane.mode != "prefill":
            continue
        runner_name = lane.runner or role.runner
        modes = catalog.select("runner", runner_name).modes
        if mixed not in modes:
            serves = ", ".join(sorted(mode.value for mode in modes))
            fault = f"lanes.{name}.runner: {runner_name!r} serves {serves}, not mixed"
            return fault, 'select another runner ("eager" serves every mode)'
        backend_name = lane.attention_backend or config.engine.attention_backend
        if mixed not in catalog.select("attention_backend", backend_name).capabilities.modes:
            others = list_alternatives(_backends_that(lambda b: mixed in b.capabilities.modes, catalog))
            fault = f"the attention backend of lanes.{name}, {backend_name!r}, lacks the mode mixed; {others}"
            return fault, f"select another lanes.{name}.attention_backend"
    return None


def _plan_lane(
    name: str,
    lane: LaneConfig,
    role: LaneRole,
    draft: DraftLimits,
    config: EngineConfig,
    catalog: PluginCatalog,
    device: torch.device,
) -> LanePlan:
    """Look up the plugins of one lane; see `plan_lanes`."""
    mode = role.mode
    backend_name = lane.attention_backend or config.engine.attention_backend
    provider = lane.kernel_provider or config.engine.kernel_provider
    driver_name = lane.graph_driver
    runner_name = lane.runner or role.runner
    runner = catalog.select("runner", runner_name)
    if driver_name == "auto":
        driver_name = runner.driver or ("tape" if device.type == "cpu" else device.type)
    backend = catalog.select("attention_backend", backend_name)
    driver = catalog.select("graph_driver", driver_name)
    _require_serves(name, runner_name, runner, role)
    needs = _needed_support(runner, draft.tokens_per_request(mode))
    support = backend.capabilities.graph_support
    if lane.capture and not support.covers(needs):
        fits = functools.partial(_serves, mode, needs, provider, device)
        raise ConfigError(
            f"lanes.{name}: runner {runner_name!r} captures {needs.value} batches;"
            f" the graph support of attention backend {backend_name!r} is {support.value};"
            f" {list_alternatives(_backends_that(fits, catalog))}",
            hint=f"select another lanes.{name}.attention_backend, or set lanes.{name}.capture = false",
        )
    _require_captures(name, lane, runner_name, runner, driver_name, driver)
    if lane.max_padding_ratio is not None and not mode.is_ragged:
        raise ConfigError(
            f"lanes.{name}.max_padding_ratio has no effect: graphs of mode {mode.value} pad requests",
            hint="remove it; batch_sizes are dense where padding costs most",
        )
    reason = call_plugin("graph_driver", driver_name, _unavailable, driver, driver_name, device)
    eager_reason = None if lane.capture else _NOT_CAPTURED
    if reason is not None and lane.capture:
        if lane.graph_driver == "auto" and runner.driver is not None:
            eager_reason = call_plugin("runner", runner_name, runner.eager_reason, device)
        if eager_reason is None:
            raise ConfigError(f"lanes.{name}.graph_driver: {driver_name!r}: {reason}")
        _log.warning(
            "lanes.%s: runner %r captures nothing and runs eagerly: its graph driver %r: %s",
            *(name, runner_name, driver_name, reason),
        )
    plan = LanePlan(
        name=name,
        role=lane.mode,
        mode=mode,
        model=role.model,
        draft=draft,
        config=lane,
        runner=runner,
        runner_name=runner_name,
        backend=backend,
        backend_name=backend_name,
        driver=driver,
        provider=provider,
        max_num_tokens=_most_tokens(role, config),
        eager_reason=eager_reason,
    )
    choose = functools.partial(choose_provider, plan.provider_setting, backend.providers, provider)
    call_plugin("attention_backend", backend_name, choose, device)
    return plan


def _most_tokens(role: LaneRole, config: EngineConfig) -> int:
    """Return the most tokens of a step: a chunk, and in a mixed step one for each other request."""
    engine = config.engine
    most = engine.max_num_batched_tokens
    if not role.mode.is_ragged or engine.max_prefill_chunk is None:
        return most
    decodes = engine.max_num_seqs - 1 if role.mode is ForwardMode.MIXED else 0
    return min(most, engine.max_prefill_chunk + decodes)


def _require_serves(name: str, runner_name: str, runner: type[GraphRunner], role: LaneRole) -> None:
    """Refuse a runner that does not serve the mode of its lane, or not as the algorithm needs it."""
    if role.mode not in runner.modes:
        serves = ", ".join(sorted(m.value for m in runner.modes))
        raise ConfigError(
            f"lanes.{name}.runner: {runner_name!r} serves {serves}, not {role.mode.value}",
            hint='"eager" serves every mode',
        )
    if role.model == "draft" and runner is EagerRunner and role.runner != "eager":
        raise ConfigError(
            f"lanes.{name}.runner: {runner_name!r} runs the draft model once, without the work of"
            f" {role.runner!r} around it",
            hint=f"to run the lane without graphs set lanes.{name}.capture = false",
        )
    if role.model == "draft" and runner.eager_attention:
        raise ConfigError(
            f"lanes.{name}.runner: {runner_name!r} has no slot for the hidden states in the draft"
            " model's batches",
            hint=f"leave the key out: {role.runner!r} serves the lane",
        )


def _require_captures(
    name: str,
    lane: LaneConfig,
    runner_name: str,
    runner: type[GraphRunner],
    driver_name: str,
    driver: type[GraphDriver],
) -> None:
    """Refuse settings of graphs for a lane that captures none, and a strict lane without a strict driver."""
    eager = runner is EagerRunner or not lane.capture
    fault = f"runner {runner_name!r} captures nothing" if lane.capture else "capture = false"
    if lane.strict and (eager or not driver.has_strict_mode):
        no_strict = f"graph driver {driver_name!r} has no strict mode"
        raise ConfigError(
            f"lanes.{name}.strict = true, but {fault if eager else no_strict}",
            hint='the graph driver "tape" has a strict mode, on any device',
        )
    if lane.max_padding_ratio is not None and eager:
        raise ConfigError(
            f"lanes.{name}.max_padding_ratio = {lane.max_padding_ratio}, but {fault}",
            hint="remove max_padding_ratio, or select a runner that captures",
        )


def _needed_support(runner: type[GraphRunner], tokens_per_request: int | None) -> GraphSupport:
    """Return the graph support that a runner needs for batches of this width; None for ragged ones."""
    if runner.needs is GraphSupport.NEVER or tokens_per_request is None:
        return runner.needs
    needed = GraphSupport.for_width(tokens_per_request)
    return needed if needed.covers(runner.needs) else runner.needs


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
    target = [p for p in plans if p.model == "target"]
    return next((p for p in target if HeadLayout.MLA not in p.backend.capabilities.head_layouts), None)


def check_backends(
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    catalog: PluginCatalog,
    specs: Mapping[ModelName, ModelSpec],
) -> None:
    """Refuse a model that the backend of a lane or its kernels cannot run, before any capture.

    Logs one warning for each backend whose preferred kernels cannot run.

    Raises:
        UnsupportedModelError: The model needs what a backend lacks; names the backends that have it.
        ConfigError: The kernel provider of the configuration cannot run the model.
    """
    warnings: dict[str, None] = {}
    for plan, context in zip(plans, contexts, strict=True):
        spec = specs[plan.model]
        fits = functools.partial(_can_run, plan.runner, context, spec)
        others = functools.partial(_backends_that, fits, catalog)
        remedy = functools.partial(_another_backend, plan, plans, contexts, specs)
        _require_backend_fits(plan, spec, context.limits, remedy, others)
        choose = functools.partial(choose_provider, plan.provider_setting, plan.backend.providers)
        asked = context.provider, context.device, context
        chosen, passed_over = call_plugin("attention_backend", plan.backend_name, choose, *asked)
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
    needs: GraphSupport,
    provider: ProviderName,
    device: torch.device,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` fits a lane, checked without a model."""
    can = backend.capabilities
    choose_provider(backend.__name__, backend.providers, provider, device)
    return mode in can.modes and device.type in can.devices and can.graph_support.covers(needs)


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
    choose_provider(backend.__name__, backend.providers, context.provider, context.device, context)
    return can.graph_support.covers(runner.needs) and not lacking(can, context)


def _demands(plan: LanePlan, spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    """Return what a lane needs of its backend, as `Capabilities.missing` takes it."""
    return {
        "layers": spec.layers,
        "mode": plan.mode,
        "dtype": spec.dtype,
        "device": spec.device,
        "page_size": limits.page_size,
        "topk": limits.draft.topk,
    }


def _another_backend(
    plan: LanePlan,
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    specs: Mapping[ModelName, ModelSpec],
) -> str:
    """Return how another backend is selected for a lane, so that other lanes can keep the one it has."""
    if plan.config.attention_backend is not None:
        return f"select another lanes.{plan.name}.attention_backend"
    keep = [
        f'lanes.{each.name}.attention_backend = "{plan.backend_name}"'
        for each, context in zip(plans, contexts, strict=True)
        if each.config.attention_backend is None
        and not plan.backend.capabilities.missing(**_demands(each, specs[each.model], context.limits))
    ]
    another = "select another engine.attention_backend"
    return f"set {' and '.join(keep)}, and {another} for the other lanes" if keep else another


def _require_backend_fits(
    plan: LanePlan,
    spec: ModelSpec,
    limits: Limits,
    remedy: Callable[[], str],
    others: Callable[[], list[str]],
) -> None:
    """Refuse a model that needs what the lane's backend lacks; name the lane that made MLA run expanded."""
    try:
        require_capabilities(
            plan.backend_name,
            plan.backend.capabilities,
            **_demands(plan, spec, limits),
            remedy=remedy,
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
