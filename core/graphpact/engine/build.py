"""From a configuration to the parts of an engine: plugins chosen, model loaded, memory laid out, lanes.

Cheap refusals come first: every name is looked up and every driver asked whether it can run here before
a weight is read, and nothing is captured before the model is known to fit its backends.

Does not: run anything; `graphpact.engine.engine` does.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    HeadLayout,
    KVBuffers,
    LayerSpec,
    Limits,
    ProviderName,
    require_capabilities,
)
from graphpact.attention.capabilities import say_others
from graphpact.attention.providers import choose_provider, lacking, require_provider
from graphpact.batch import ForwardMode
from graphpact.buffers import SharedBuffers
from graphpact.config import EngineConfig, LaneConfig
from graphpact.engine.ownership import EngineOwnership
from graphpact.engine.pools import KVCache, KVLayerShape, PagePool, RequestPool
from graphpact.errors import ConfigError, GraphpactError, PluginError, UnsupportedModelError
from graphpact.graphs import GraphDriver
from graphpact.lane import Lane, ModelFn, RunFn
from graphpact.plugins import Loaded, PluginCatalog
from graphpact.runners import EagerRunner, GraphRunner, RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact.strict import StrictGuard
from graphpact.trace import HookTrace
from graphpact.verify import Verifier

OnCapture = Callable[[str, GraphShape, int, int], None]
"""Called after each capture with lane name, shape, how many are done, how many there are."""

_log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the free memory, for the KV cache, by default


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


@dataclass(frozen=True, slots=True)
class Memory:
    """What all lanes share; of the buffers, those lanes whose configuration says so."""

    limits: Limits
    requests: RequestPool
    pages: PagePool
    kv_cache: KVCache
    buffers: SharedBuffers


@dataclass(frozen=True, slots=True)
class BuiltLane:
    """A lane, and how a step gets through it."""

    lane: Lane
    run: RunFn
    """`Lane.run`, with what stands around it."""
    verifier: Verifier | None


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
    """Look up every plugin that the configuration names.

    Raises:
        PluginError: A name that is unknown, rejected or ambiguous.
        ConfigError: A runner in a lane of a mode that it does not serve, a driver that cannot record on
            ``device``, or kernels that cannot run there.
    """
    plans = []
    for name, mode, lane in (
        ("decode", ForwardMode.DECODE, config.lanes.decode),
        ("prefill", ForwardMode.EXTEND, config.lanes.prefill),
    ):
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
        reason = _call_plugin("graph_driver", driver_name, driver.unavailable, device)
        eager_reason = None
        if reason is not None:
            if lane.graph_driver == "auto" and runner.driver is not None:
                eager_reason = _call_plugin("runner", lane.runner, runner.eager_reason, device)
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
        _call_plugin("attention_backend", backend_name, require, device)
        plans.append(plan)
    return plans


def lane_without_latents(plans: Sequence[LanePlan]) -> LanePlan | None:
    """Return the first lane whose backend has no MLA; None where a model with MLA may keep its latents.

    All lanes share one KV cache, so one of them is enough to have every head's keys and values kept.
    """
    return next(
        (p for p in plans if HeadLayout.MLA not in p.backend.capabilities.head_layouts), None
    )


def model_path(config: EngineConfig) -> Path:
    """Return the directory of the checkpoint.

    Raises:
        ConfigError: None is configured.
    """
    if config.model.path is None:
        raise ConfigError(
            "no model: model.path is not set",
            hint="give --model DIR, or path = ... under [model] in the configuration file",
        )
    return Path(config.model.path)


def lay_out_memory(config: EngineConfig, spec: ModelSpec) -> Memory:
    """Allocate request rows, KV pages and the KV cache.

    Raises:
        ConfigError: A limit above the model's, or a KV cache that does not fit in memory.
    """
    engine, device = config.engine, spec.device
    context = engine.max_model_len or spec.max_model_len
    if context > spec.max_model_len:
        raise ConfigError(
            f"engine.max_model_len is {context}; the model knows {spec.max_model_len} positions",
            hint=f"set it to {spec.max_model_len} or less, or leave it out",
        )
    limits = Limits(
        max_bs=engine.max_num_seqs,
        max_num_tokens=max(engine.max_num_batched_tokens, engine.max_num_seqs),
        max_context_len=context,
        page_size=engine.page_size,
    )
    shapes = [
        KVLayerShape(s.num_kv_heads, s.head_dim, s.v_head_dim, s.kv_lora_rank is not None)
        for s in spec.layers
    ]
    per_slot = spec.dtype.itemsize * sum(s.width for s in shapes)
    budget = _kv_budget(engine.kv_cache_memory_gib, device)
    affordable = budget // (per_slot * engine.page_size) - 1  # page 0 is scratch
    num_pages = engine.num_pages or min(
        engine.max_num_seqs * limits.max_pages_per_request, affordable
    )
    if not 1 <= num_pages <= affordable:
        raise ConfigError(
            f"a KV cache of {num_pages} pages of {engine.page_size} tokens needs"
            f" {(num_pages + 1) * per_slot * engine.page_size / 2**30:.2f} GiB;"
            f" {budget / 2**30:.2f} GiB may be used on {device}",
            hint="lower engine.num_pages, or raise engine.kv_cache_memory_gib",
        )
    pages = PagePool(num_pages, engine.page_size)
    sharing = [name for name, lane in config.lanes if lane.share_buffers]
    return Memory(
        limits,
        RequestPool(engine.max_num_seqs, context, device),
        pages,
        KVCache(pages.num_slots, shapes, spec.dtype, device),
        SharedBuffers(sharing),
    )


def check_backends(
    plans: Sequence[LanePlan], catalog: PluginCatalog, spec: ModelSpec, memory: Memory
) -> None:
    """Refuse a model that a lane's backend, or its kernels, cannot run; nothing is captured before.

    Warns in the log, once for all lanes, where kernels run because better ones cannot.

    Raises:
        UnsupportedModelError: The model asks for what a backend lacks; names those that have it.
        ConfigError: Whose kernels were named, and they cannot run it.
    """
    told: dict[str, None] = {}
    for plan in plans:
        context = _context(plan, spec, memory, memory.kv_cache)
        would_do = functools.partial(_can_run, plan.runner, context)
        others = functools.partial(_backends_that, would_do, catalog)
        _require_backend_fits(plan, spec, memory.limits, others)
        choose = functools.partial(choose_provider, plan.whose_kernels, plan.backend.providers)
        chosen, passed_over = _call_plugin("attention_backend", plan.backend_name, choose, context)
        if chosen is not None and passed_over:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            line = f"attention backend {plan.backend_name!r} runs {chosen.name} kernels; {why}"
            told[line] = None
    for line in told:
        _log.warning("%s", line)


def build_lane(
    plan: LanePlan,
    config: EngineConfig,
    *,
    model: ModelFn,
    spec: ModelSpec,
    memory: Memory,
    on_capture: OnCapture | None = None,
) -> BuiltLane:
    """Build one lane, capture its shapes, and put around it what is configured.

    Raises:
        CaptureError: A shape could not be recorded.
    """

    def make_backend(kv_cache: KVBuffers) -> AttentionBackend:
        context = _context(plan, spec, memory, kv_cache)
        return _call_plugin("attention_backend", plan.backend_name, plan.backend, context)

    context = RunnerContext(
        spec.device,
        plan.backend.capabilities,
        memory.limits.max_bs,
        plan.config.batch_sizes,
        lane=plan.name,
        share_pool=memory.buffers if plan.config.share_buffers else None,
        eager_reason=plan.eager_reason,
    )
    runner = _call_plugin("runner", plan.config.runner, plan.runner, context)
    driver = _call_plugin(
        "graph_driver",
        plan.driver.name,
        functools.partial(plan.driver, strict=True) if plan.config.strict else plan.driver,
        spec.device,
    )
    observers: list[object] = [HookTrace()] if os.environ.get("GRAPHPACT_TRACE") else []
    guard = verifier = None
    if plan.config.strict:
        ownership = EngineOwnership(memory.requests, memory.pages, memory.kv_cache)
        guard = StrictGuard(driver, ownership)
        observers.append(guard)
    if config.verify.replay_against_eager and runner.ladder is not None:
        verifier = Verifier(
            make_backend=make_backend,
            kv_cache=memory.kv_cache,
            shadow=memory.kv_cache.clone(),
            share=config.verify.replay_against_eager,
            page_size=memory.limits.page_size,
            seed=config.engine.seed,
        )
        observers.append(verifier)
    lane = Lane(
        plan.name,
        model=model,
        runner=runner,
        backend=make_backend(memory.kv_cache),
        driver=driver,
        pact=config.verify.pact,
        pact_sample_every=config.verify.pact_sample_every,
        metadata_in_graph=plan.config.metadata_in_graph,
        observers=observers,
    )
    if (plan.config.share_buffers and plan.eager_reason is None) and (
        lane.registry is None or lane.registry.share_pool is not memory.buffers
    ):
        raise ConfigError(
            f"lanes.{plan.name}.share_buffers = true, but the registry of runner {plan.config.runner!r}"
            " shares nothing",
            hint="the runner has to give its registry share_pool=self.context.share_pool; or leave"
            " share_buffers out",
        )
    if on_capture is not None:
        lane.on_capture = _count_captures(lane, on_capture)
    runner.capture(lane)
    run: RunFn = lane.run
    if verifier is not None:
        verifier.join(lane)
        run = verifier.run
    if guard is not None:
        run = guard.around(lane, run)
    return BuiltLane(lane, run, verifier)


def _context(
    plan: LanePlan, spec: ModelSpec, memory: Memory, kv_cache: KVBuffers
) -> BackendContext:
    return BackendContext(
        spec.device,
        spec.dtype,
        spec.layers,
        memory.limits,
        memory.requests.req_to_token,
        kv_cache,
        mode=plan.mode,
        provider=plan.provider,
    )


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
    runner: type[GraphRunner], context: BackendContext, backend: type[AttentionBackend]
) -> bool:
    """Return whether ``backend`` would do for a lane of ``runner`` with this model."""
    can = backend.capabilities
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


def _call_plugin(kind: str, name: str, make: Callable[[C], T], context: C) -> T:
    """Call into a plugin; whatever it raises, but an error of ours, is told as the plugin's."""
    try:
        return make(context)
    except GraphpactError:
        raise
    except Exception as error:
        raise PluginError(
            f"{kind} {name!r} cannot be had: it raised {type(error).__name__}: {error}",
            hint="select another one, or set GRAPHPACT_TRACEBACK=1 to see where it fails",
        ) from error


def _count_captures(lane: Lane, on_capture: OnCapture) -> Callable[[GraphShape], None]:
    total = len(lane.runner.ladder.shapes) if lane.runner.ladder else 0

    def report(shape: GraphShape) -> None:
        on_capture(lane.name, shape, len(lane.stats.shapes), total)

    return report


def _kv_budget(gib: float | None, device: torch.device) -> int:
    if gib is not None:
        return int(gib * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_host_memory()
    return int(free * _MEMORY_SHARE[device.type])


def _free_host_memory() -> int:
    """Return the bytes of memory that are free; all there are, or 8 GiB, where that is not told."""
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # the second for macOS
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return 8 * 2**30  # Windows has neither
