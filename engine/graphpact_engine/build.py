"""From what was chosen to the parts of an engine: memory laid out, lanes built and captured.

Does not: choose (`graphpact_engine.plans` does), or run anything.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphpact.attention import AttentionBackend, BackendContext, KVBuffers, Limits
from graphpact.buffers import SharedBuffers
from graphpact.errors import ConfigError
from graphpact.lane import Lane
from graphpact.runners import EagerRunner, RunnerContext
from graphpact.shapes import GraphShape
from graphpact.step import Forward
from graphpact.trace import HookTrace
from graphpact_engine.config import EngineConfig
from graphpact_engine.ownership import EngineOwnership
from graphpact_engine.plans import LanePlan, ModelSpec, call_plugin
from graphpact_engine.pools import KVCache, KVLayerShape, PagePool, RequestPool
from graphpact_engine.verify import Verifier
from graphpact_tape.guard import StrictGuard

OnCapture = Callable[[str, GraphShape, int, int], None]
"""Called after each capture with lane name, shape, how many are done, how many there are."""

_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the free memory, for the KV cache, by default


@dataclass(frozen=True, slots=True)
class Memory:
    """What all lanes share; of the buffers, those lanes whose configuration says so."""

    limits: Limits
    requests: RequestPool
    pages: PagePool
    kv_cache: KVCache
    buffers: SharedBuffers


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
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens}, engine.max_num_seqs is"
            f" {engine.max_num_seqs}; a decode brings one token a request",
            hint=f"set engine.max_num_batched_tokens to {engine.max_num_seqs} or more",
        )
    limits = Limits(
        max_bs=engine.max_num_seqs,
        max_num_tokens=engine.max_num_batched_tokens,
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


def build_lane(
    plan: LanePlan,
    config: EngineConfig,
    *,
    model: Forward,
    spec: ModelSpec,
    memory: Memory,
    on_capture: OnCapture | None = None,
) -> tuple[Lane, Verifier | None]:
    """Build one lane with the observers that are configured, and capture its shapes.

    Returns:
        The lane, and the observer that verifies its replays, if any.

    Raises:
        CaptureError: A shape could not be recorded.
    """

    def make_backend(kv_cache: KVBuffers) -> AttentionBackend:
        context = backend_context(plan, spec, memory, kv_cache)
        return call_plugin("attention_backend", plan.backend_name, plan.backend, context)

    context = RunnerContext(
        spec.device,
        plan.backend.capabilities,
        memory.limits,
        mode=plan.mode,
        batch_sizes=plan.config.batch_sizes,
        lane=plan.name,
    )
    runner = call_plugin("runner", plan.config.runner, plan.runner, context)
    driver = call_plugin(
        "graph_driver",
        plan.driver.name,
        functools.partial(plan.driver, strict=True) if plan.config.strict else plan.driver,
        spec.device,
    )
    observers: list[object] = (
        [HookTrace()] if os.environ.get("GRAPHPACT_TRACE", "0") not in {"", "0"} else []
    )
    verifier = None
    if plan.config.strict:
        ownership = EngineOwnership(memory.requests, memory.pages, memory.kv_cache)
        observers.append(StrictGuard(driver, ownership))
    if config.verify.replay_against_eager and plan.runner is not EagerRunner:
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
        share_pool=memory.buffers if plan.config.share_buffers else None,
        eager_reason=plan.eager_reason,
        observers=observers,
    )
    if plan.config.share_buffers and plan.eager_reason is None and lane.registry is None:
        raise ConfigError(
            f"lanes.{plan.name}.share_buffers = true for the runner {plan.config.runner!r}, which has no"
            " buffers",
            hint="leave share_buffers out, or select a runner that captures",
        )
    if on_capture is not None:
        lane.on_capture = _count_captures(lane, on_capture)
    lane.capture_all()
    return lane, verifier


def backend_context(
    plan: LanePlan, spec: ModelSpec, memory: Memory, kv_cache: KVBuffers
) -> BackendContext:
    """Return what the backend of a lane is built with, on ``kv_cache``."""
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


def _count_captures(lane: Lane, on_capture: OnCapture) -> Callable[[GraphShape], None]:
    total = len(lane.shapes)

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
