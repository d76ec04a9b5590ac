"""The choice of plugins for each lane, checked against each other.

Before any weight is read, every name is looked up, and every driver and kernel provider is asked whether it
can run here.

Does not: build anything (`graphpact_engine.build_lanes` does), or look at a model
(`graphpact_engine.model_checks` does).
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from graphpact.attention import AttentionBackend, DraftLimits, GraphSupport, Limits, ProviderName
from graphpact.attention.providers import choose_provider
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, PluginError
from graphpact.graphs import GraphDriver
from graphpact.plugins import PluginCatalog
from graphpact.runners import EagerRunner, GraphRunner
from graphpact.shapes import EagerReason
from graphpact.speculation import LaneRole, SpeculationAlgorithm
from graphpact_engine.capabilities import backends_that, list_alternatives
from graphpact_engine.config import LANE_MODES, EngineConfig, LaneConfig, LaneMode
from graphpact_engine.faults import call_plugin
from graphpact_engine.selection import draft_limits

_log = logging.getLogger(__name__)

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
        role: The lane's mode in the configuration, which determines its batches.
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
        max_num_tokens: Maximum number of tokens in a step.
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


def _planned(
    config: EngineConfig, algorithm: type[SpeculationAlgorithm] | None
) -> list[tuple[str, LaneConfig, LaneRole]]:
    """Return every lane with its role, sorted by mode: a mode without a lane gets one with its name."""
    roles: Mapping[str, LaneRole] = _ROLES
    if algorithm is not None:
        roles = {**algorithm.lanes, "prefill": _ROLES["prefill"]}
    for name, lane in config.lanes.items():
        if lane.mode not in roles:
            why = "speculation drafts and verifies instead" if algorithm else "it needs [speculative]"
            raise ConfigError(
                f"lanes.{name}, of mode {lane.mode}, never runs: {why}",
                hint=f"the modes of this configuration are {', '.join(roles)}",
            )
    planned = []
    for mode in LANE_MODES:
        if mode in roles:
            given = [(name, lane) for name, lane in config.lanes.items() if lane.mode == mode]
            default = [(str(mode), LaneConfig(mode=mode))]
            planned += [(name, lane, roles[mode]) for name, lane in given or default]
    return planned


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
    """Return why prefill steps cannot be mixed, and a remedy; None if they can be."""
    mixed, algorithm = ForwardMode.MIXED, config.speculative.algorithm
    if algorithm is not None:
        fault = f"speculative.algorithm is {algorithm!r}: drafts are verified in separate steps"
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
            others = list_alternatives(backends_that(lambda b: mixed in b.capabilities.modes, catalog))
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
            f" {list_alternatives(backends_that(fits, catalog))}",
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
    """Return the maximum tokens of a step: a chunk, and in a mixed step one for each other request."""
    engine = config.engine
    most = engine.max_num_batched_tokens
    if not role.mode.is_ragged or engine.max_prefill_chunk is None:
        return most
    decodes = engine.max_num_seqs - 1 if role.mode is ForwardMode.MIXED else 0
    return min(most, engine.max_prefill_chunk + decodes)


def _require_serves(name: str, runner_name: str, runner: type[GraphRunner], role: LaneRole) -> None:
    """Refuse a runner that does not serve the mode of its lane or does not do the algorithm's work."""
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
    """Refuse graph settings for a lane that captures nothing, and a strict lane without a strict driver."""
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
    """Return the graph support that a runner needs; None for ``tokens_per_request`` means ragged batches."""
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
