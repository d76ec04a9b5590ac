"""`build_lane`: one lane from its plan, with its observers.

Does not: choose plugins (`graphpact_engine.plans` does), or capture (the lane does).
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpact.attention import AttentionBackend, BackendContext, KVBuffers
from graphpact.errors import ConfigError
from graphpact.hookspecs import hookimpl
from graphpact.lane import CapturedShape, Lane
from graphpact.plugin_calls import all_returned
from graphpact.ranks import RankObserver
from graphpact.runners import EagerRunner, GraphRunner, RunnerContext
from graphpact.shapes import GraphShape
from graphpact.step import Forward
from graphpact_engine.config import EngineConfig
from graphpact_engine.faults import call_plugin
from graphpact_engine.layout import Memory
from graphpact_engine.logs import log_event
from graphpact_engine.model_checks import ModelSpec
from graphpact_engine.models.products import EagerProducts
from graphpact_engine.ownership import EngineOwnership
from graphpact_engine.phases import Around
from graphpact_engine.plans import LanePlan
from graphpact_engine.ranks import EngineRanks
from graphpact_engine.trace import HookTrace
from graphpact_engine.verify import Verifier

OnCapture = Callable[[str, GraphShape, int, int], None]
"""Called after each capture with lane name, shape, number of captured shapes, and total number of shapes."""

_log = logging.getLogger(__name__)


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
    ranks: EngineRanks | None = None,
) -> tuple[Lane, Verifier | None]:
    """Build one lane, without capturing.

    The order of its observers, the outermost first: the comparison with other ranks, a log of captures, the
    strict observer of a strict lane, the verifier, ``observers``.

    Args:
        plan: Its plugins and settings.
        config: The configuration.
        model: The model that it runs.
        spec: The properties of that model.
        memory: The memory that all lanes share.
        states: The request state of a speculation algorithm.
        observers: Hook wrappers.
        on_capture: Called after each captured shape.
        ranks: The ranks that run the lane together.

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
        require_gathered_buffer=ranks is not None and ranks.is_sharded and plan.model == "target",
        hidden_size=spec.hidden_sizes.get(plan.mode, 1),
        dtype=spec.dtype,
        layers=spec.layers,
        pp_proxy_tensors=spec.proxies,
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
    if ranks is not None:
        outer.insert(
            0, RankObserver(ranks.stage, ranks.watch, strict=plan.config.strict, captures=ranks.captures)
        )
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
        if hasattr(driver, "traced"):
            driver.traced = True  # the verifier finds in a trace which replays must be bit-identical
    lane = Lane(
        plan.name,
        model=EagerProducts(model) if plan.runner is EagerRunner else model,
        runner=runner,
        backend=make_backend(memory.kv_cache),
        driver=driver,
        pact=config.verify.pact,
        eager_reason=plan.eager_reason,
        observers=[*outer, *observers],
    )
    return lane, verifier


def _require_configured_sizes(plan: LanePlan, runner: GraphRunner) -> None:
    """Refuse configured capture sizes that differ from the sizes of the runner's shapes."""
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
