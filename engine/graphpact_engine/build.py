"""Builds the parts of an engine from its plans: memory, observers, lanes, and the speculator.

Does not: choose plugins (`graphpact_engine.plans` does), capture (the lanes do), or run anything.
"""

import functools
import itertools
import logging
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.attention import AttentionBackend, BackendContext, KVBuffers, Limits, kv_tensors
from graphpact.errors import ConfigError, PluginError
from graphpact.hookspecs import hookimpl
from graphpact.lane import CapturedShape, Lane
from graphpact.plugin_calls import all_returned
from graphpact.runners import EagerRunner, GraphRunner, RunnerContext
from graphpact.shapes import GraphShape
from graphpact.speculation import RunLane, SpeculationAlgorithm, SpeculationContext
from graphpact.step import Forward
from graphpact_engine.config import EngineConfig
from graphpact_engine.logs import log_event
from graphpact_engine.ownership import EngineOwnership
from graphpact_engine.phases import Around
from graphpact_engine.plans import LanePlan, ModelName, ModelSpec, call_plugin, draft_limits
from graphpact_engine.pools import KVCache, KVLayerShape, PagePool, RequestPool
from graphpact_engine.speculation import SampleAfter, Speculator
from graphpact_engine.trace import HookTrace
from graphpact_engine.verify import Verifier
from graphpact_tape.tape import TapeDriver

OnCapture = Callable[[str, GraphShape, int, int], None]
"""Called after each capture with lane name, shape, number of captured shapes, and total number of shapes."""

_log = logging.getLogger(__name__)
_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # default share of free memory for the KV cache


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that all lanes share.

    Args:
        limits: The largest counts of all lanes. Its context has room for drafts after the longest sequence.
        max_model_len: Tokens of the longest sequence, prompt and output.
        num_reserved: KV slots that a decode step reserves for each request.
        requests: The request rows.
        pages: The pages of KV slots.
        kv_cache: The KV cache.
        shadow: The cache on which verification runs steps again; None without verification.
    """

    limits: Limits
    max_model_len: int
    num_reserved: int
    requests: RequestPool
    pages: PagePool
    kv_cache: KVCache
    shadow: KVCache | None


def model_path(config: EngineConfig) -> Path:
    """Return the directory of the checkpoint.

    Raises:
        ConfigError: ``model.path`` is not set.
    """
    if config.model.path is None:
        raise ConfigError(
            "no model: model.path is not set",
            hint="give --model DIR, or path = ... under [model] in the configuration file",
        )
    return Path(config.model.path)


def lay_out_memory(config: EngineConfig, specs: Mapping[ModelName, ModelSpec]) -> Memory:
    """Allocate request rows, KV pages and the KV cache: the draft model's layers after the target's.

    Raises:
        ConfigError: A limit exceeds that of a model, or the KV cache does not fit in memory.
    """
    engine, spec = config.engine, specs["target"]
    device, draft = spec.device, draft_limits(config)
    needed = engine.max_num_seqs * draft.num_draft_tokens
    if engine.max_num_batched_tokens < needed:
        each = "one token per request"
        if draft.num_draft_tokens > 1:
            each = f"{draft.num_draft_tokens} tokens per request (speculative.num_draft_tokens)"
        raise ConfigError(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens}, engine.max_num_seqs is"
            f" {engine.max_num_seqs}; a decode step has {each}",
            hint=f"set engine.max_num_batched_tokens to {needed} or more",
        )
    if engine.max_prefill_chunk is not None and engine.max_prefill_chunk > engine.max_num_batched_tokens:
        raise ConfigError(
            f"engine.max_prefill_chunk is {engine.max_prefill_chunk}; a step has at most"
            f" {engine.max_num_batched_tokens} tokens (engine.max_num_batched_tokens)",
            hint="lower engine.max_prefill_chunk, or raise engine.max_num_batched_tokens",
        )
    cached = {s.cache_layer: s for each in specs.values() for s in each.layers}  # frozen KV adds none
    shapes = [
        KVLayerShape(s.num_kv_heads, s.head_dim, s.v_head_dim, s.kv_lora_rank is not None)
        for _, s in sorted(cached.items())
    ]
    per_slot = spec.dtype.itemsize * sum(s.width for s in shapes)
    budget = _kv_budget(engine.kv_cache_memory_gib, device)
    affordable = budget // (per_slot * engine.page_size) - 1  # page 0 is scratch
    num_reserved = max(draft.num_draft_tokens, draft.num_steps * draft.topk)
    max_model_len = _context_len(
        engine.max_model_len,
        {name: each.max_model_len for name, each in specs.items() if each.max_model_len is not None},
        max(affordable, 1) * engine.page_size - num_reserved + 1,
    )
    if max_model_len <= num_reserved > 1:
        raise ConfigError(
            f"a draft takes {num_reserved} tokens of a context of {max_model_len}",
            hint="lower speculative.num_steps, topk or num_draft_tokens, or raise engine.max_model_len",
        )
    limits = Limits(
        max_bs=engine.max_num_seqs,
        max_num_tokens=engine.max_num_batched_tokens,
        max_context_len=max_model_len + num_reserved - 1,
        page_size=engine.page_size,
    )
    num_pages = engine.num_pages or min(engine.max_num_seqs * limits.max_pages_per_request, affordable)
    if not 1 <= num_pages <= affordable:
        raise ConfigError(
            f"a KV cache of {num_pages} pages of {engine.page_size} tokens needs"
            f" {(num_pages + 1) * per_slot * engine.page_size / 2**30:.2f} GiB;"
            f" {budget / 2**30:.2f} GiB are available for it on {device}",
            hint="lower engine.num_pages, or raise engine.kv_cache_memory_gib",
        )
    pages = PagePool(num_pages, engine.page_size)
    kv_cache = KVCache(pages.num_slots, shapes, spec.dtype, device)
    return Memory(
        limits,
        max_model_len,
        num_reserved,
        RequestPool(engine.max_num_seqs, limits.max_context_len, device),
        pages,
        kv_cache,
        kv_cache.clone() if config.verify.replay_against_eager else None,
    )


def _context_len(asked: int | None, positions: Mapping[ModelName, int], affordable: int) -> int:
    """Return the maximum sequence length: ``asked``, or as many of the models' positions as are affordable.

    Args:
        asked: ``engine.max_model_len``.
        positions: The number of positions of each model for which it is known.
        affordable: The number of tokens that a KV cache has room for in memory.
    """
    if asked is None:
        if "target" not in positions:
            raise ConfigError(
                "the checkpoint's config.json does not say how many positions the model has",
                hint="set engine.max_model_len to the longest sequence that it is made for",
            )
        return min(*positions.values(), affordable)
    for name, most in positions.items():
        if asked > most:
            model = "the model" if name == "target" else "the draft model"
            raise ConfigError(
                f"engine.max_model_len is {asked}; {model} has {most} positions",
                hint=f"set it to {most} or less, or leave it out",
            )
    if asked > affordable:
        raise ConfigError(
            f"engine.max_model_len is {asked}; there is memory for a KV cache of {affordable} tokens",
            hint=f"set it to {affordable} or less, or raise engine.kv_cache_memory_gib",
        )
    return asked


def build_observers(selected: Sequence[tuple[str, type[Any]]]) -> list[object]:
    """Build the observers of one lane.

    Args:
        selected: Names and classes, the outermost first.

    Returns:
        Observers, the outermost first. With ``GRAPHPACT_TRACE=1`` a trace comes first unless one is selected.

    Raises:
        PluginError: An observer cannot be built.
    """
    observers = [call_plugin("observer", name, observer) for name, observer in selected]
    is_traced = os.environ.get("GRAPHPACT_TRACE", "0") not in {"", "0"}
    if is_traced and HookTrace not in map(type, observers):
        observers.insert(0, HookTrace())
    return observers


def build_lane(
    plan: LanePlan,
    config: EngineConfig,
    *,
    model: Forward,
    spec: ModelSpec,
    memory: Memory,
    states: Sequence[torch.Tensor] = (),
    observers: Sequence[object] = (),
    on_capture: OnCapture | None = None,
) -> tuple[Lane, Verifier | None]:
    """Build one lane, without capturing.

    The order of its observers, the outermost first: a log of captures, the strict observer of a strict lane,
    the verifier, ``observers``.

    Args:
        plan: Its plugins and settings.
        config: The configuration.
        model: The model that it runs.
        spec: The properties of that model.
        memory: The memory that all lanes share.
        states: The request state of a speculation algorithm.
        observers: Hook wrappers.
        on_capture: Called after each captured shape.

    Returns:
        The lane, and the verifier of its replays or None.

    Raises:
        ConfigError: The runner or the backend does not support a setting of the lane.
        PluginError: A plugin of the lane cannot be built.
    """

    def make_backend(kv_cache: KVBuffers) -> AttentionBackend:
        context = backend_context(plan, spec, memory, kv_cache)
        return call_plugin("attention_backend", plan.backend_name, plan.backend, context)

    context = RunnerContext(
        spec.device,
        plan.backend.capabilities,
        plan.limits(memory.limits),
        mode=plan.mode,
        batch_sizes=plan.config.batch_sizes,
        token_counts=plan.config.token_counts,
        max_padding_ratio=plan.config.max_padding_ratio or 2.0,
        lane=plan.name,
        num_token_non_padded=spec.has_experts,
        hidden_size=spec.hidden_sizes.get(plan.mode, 1),
        dtype=spec.dtype,
        layers=spec.layers,
    )
    runner = call_plugin("runner", plan.runner_name, plan.runner, context)
    _require_configured_sizes(plan, runner)
    driver = call_plugin(
        "graph_driver",
        plan.driver.name,
        functools.partial(plan.driver, strict=True) if plan.config.strict else plan.driver,
        spec.device,
    )
    outer: list[object] = [_CaptureLog(on_capture)]
    verifier = None
    if plan.config.strict:
        ownership = EngineOwnership(memory.requests, memory.pages, memory.kv_cache, states)
        outer.append(driver.strict_observer(ownership))
    if memory.shadow is not None and plan.runner is not EagerRunner:
        verifier = Verifier(
            make_backend=make_backend,
            kv_cache=memory.kv_cache,
            shadow=memory.shadow,
            share=config.verify.replay_against_eager,
            page_size=memory.limits.page_size,
            seed=config.engine.seed,
        )
        outer.append(verifier)
        if isinstance(driver, TapeDriver):
            driver.traced = True  # tells the verifier where replays must be equal to the bit
    lane = Lane(
        plan.name,
        model=model,
        runner=runner,
        backend=make_backend(memory.kv_cache),
        driver=driver,
        pact=config.verify.pact,
        eager_reason=plan.eager_reason,
        observers=[*outer, *observers],
    )
    return lane, verifier


def build_speculator(
    algorithm: type[SpeculationAlgorithm],
    config: EngineConfig,
    target: Any,
    draft_model: Any,
    memory: Memory,
    sample: SampleAfter,
    run: RunLane,
) -> Speculator:
    """Build the speculation algorithm and its request state.

    Args:
        algorithm: The algorithm.
        config: The configuration.
        target: The target model.
        draft_model: The draft model; None for an algorithm without one.
        memory: The memory that all lanes share.
        sample: Chooses tokens: `Sampler.sample_after`.
        run: ``(mode of a lane, batch) -> outputs``.

    Raises:
        PluginError: The algorithm or its state cannot be built.
    """
    draft, name = draft_limits(config), str(config.speculative.algorithm)
    context = SpeculationContext(
        draft,
        memory.max_model_len,
        target_hidden_size=0 if draft_model is None else draft_model.target_hidden_size,
        draft_hidden_size=0 if draft_model is None else draft_model.hidden_size,
        dtype=target.dtype,
    )
    built = call_plugin("speculation", name, algorithm, context)

    def make_state() -> dict[str, torch.Tensor]:
        rows, device = memory.requests.max_requests + 1, memory.requests.req_to_token.device
        declared = dict(built.state())
        for key, row in declared.items():
            if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], torch.dtype)):
                raise PluginError(
                    f"speculation {name!r}: state() has {key!r}: {reprlib.repr(row)}, no (shape, dtype)",
                    hint='a defect of that plugin: {"tokens": ((width,), torch.int64)}',
                )
        return {
            key: torch.zeros((rows, *shape), dtype=dtype, device=device)
            for key, (shape, dtype) in declared.items()
        }

    caches, num_layers = memory.kv_cache, len(target.layers)
    its_cache = SimpleNamespace(k=caches.k[:num_layers], v=caches.v[:num_layers])
    return Speculator(
        built,
        run=run,
        sample=sample,
        draft=draft,
        state=call_plugin("speculation", name, make_state),
        target_cache=list(kv_tensors(its_cache).values()),
        max_position=memory.max_model_len - 1,
    )


def _require_configured_sizes(plan: LanePlan, runner: GraphRunner) -> None:
    """Refuse capture sizes that the runner does not use: its shapes have exactly the configured ones."""
    shapes = all_returned(runner.shapes(), GraphShape, runner, "shapes")
    for key, configured, captured, what in (
        ("batch_sizes", plan.config.batch_sizes, {s.batch_size for s in shapes}, "requests"),
        ("token_counts", plan.config.token_counts, {s.num_tokens for s in shapes}, "tokens"),
    ):
        if configured is not None and captured != set(configured):
            sizes = ", ".join(map(str, sorted(captured)))
            raise ConfigError(
                f"lanes.{plan.name}.{key} = {list(configured)}, but runner {plan.runner_name!r}"
                + (f" captures shapes of {sizes} {what}" if captured else " captures nothing"),
                hint=f"leave {key} out, or select a runner that captures the configured numbers of {what}",
            )


def require_each_can_run(lanes: Sequence[Lane]) -> None:
    """Refuse a lane that never runs because an earlier lane of its mode takes all its batches.

    Args:
        lanes: All lanes of one mode, in their order.

    Raises:
        ConfigError: Names both lanes.
    """
    for earlier, lane in itertools.combinations(lanes, 2):
        shapes, taken = set(lane.runner.shapes()), set(earlier.runner.shapes())
        first = f"lanes.{earlier.name} comes first and captures"
        if not shapes:
            why = "it captures nothing, and of several lanes of one mode only the first runs eagerly"
            hint = "put it first, or remove it"
        elif earlier.runner.declines:  # it leaves batches to the later lane
            continue
        elif shapes == taken:
            why, hint = f"{first} the same shapes", "give it other batch_sizes, or remove it"
        elif shapes < taken:
            why, hint = f"{first} all its shapes", "put it first, or give it other batch_sizes"
        else:
            continue
        raise ConfigError(
            f"lanes.{lane.name}, after lanes.{earlier.name} of the same mode, never runs: {why}",
            hint=hint,
        )


def backend_context(plan: LanePlan, spec: ModelSpec, memory: Memory, kv_cache: KVBuffers) -> BackendContext:
    """Return the context for building the backend of a lane on ``kv_cache``."""
    return BackendContext(
        spec.device,
        spec.dtype,
        spec.layers,
        plan.backend_limits(memory.limits),
        memory.requests.req_to_token,
        kv_cache,
        mode=plan.mode,
        provider=plan.provider,
    )


class _CaptureLog:
    """An observer that logs each captured shape, and calls ``on_capture``."""

    def __init__(self, on_capture: OnCapture | None) -> None:
        self._on_capture = on_capture

    @hookimpl(wrapper=True)
    def capture(self, lane: Lane, shape: GraphShape) -> Around:
        """Log a shape once it is captured."""
        captured: CapturedShape = yield
        log_event(
            _log,
            logging.INFO,
            "shape captured",
            lane=lane.name,
            shape=str(shape),
            seconds=round(captured.stats.capture_seconds, 6),
            nodes=captured.graph.num_nodes,
            bytes=captured.graph.pool_nbytes,
        )
        if self._on_capture is not None:
            self._on_capture(lane.name, shape, len(lane.captured), len(lane.shapes))
        return captured


def _kv_budget(gib: float | None, device: torch.device) -> int:
    if gib is not None:
        return int(gib * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_host_memory()
    return int(free * _MEMORY_SHARE[device.type])


def _free_host_memory() -> int:
    """Return the bytes of free host memory; all host memory, or 8 GiB, if the system does not report it."""
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS has only the second
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return 8 * 2**30  # Windows has neither
