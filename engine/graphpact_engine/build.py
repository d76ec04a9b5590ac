"""`EngineParts`: everything that an engine consists of, built from its configuration.

Cheap checks come first: the plugins that the configuration names are looked up before weights are read, and a
model that a backend cannot run is refused before anything is captured.

Does not: run a step; `graphpact_engine.loop` does.
"""

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphpact.attention import LayerSpec, kv_tensors
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, PluginError
from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact.speculation import SpeculationAlgorithm, SpeculationContext
from graphpact_engine.allocator import keep_freed_memory
from graphpact_engine.build_lanes import OnCapture, backend_context, build_lane, build_observers
from graphpact_engine.config import EngineConfig
from graphpact_engine.faults import call_plugin
from graphpact_engine.lanes import LaneSet
from graphpact_engine.layout import Memory, lay_out_memory
from graphpact_engine.loop import AsyncLoop, PlainLoop, SpeculativeLoop
from graphpact_engine.model_checks import ModelSpec, check_backends, lane_without_latents
from graphpact_engine.phases import EnginePhases
from graphpact_engine.plans import LanePlan, ModelName, plan_lanes
from graphpact_engine.ranks import EngineRanks, PipelineStage, RankSteps
from graphpact_engine.request_texts import RequestTexts
from graphpact_engine.sampler import Sampler
from graphpact_engine.scheduler import Scheduler
from graphpact_engine.selection import (
    choose_async,
    draft_limits,
    require_observers,
    select_algorithm,
    select_observers,
)
from graphpact_engine.speculation import SampleAfter, Speculator
from graphpact_engine.threads import choose_num_threads, running_on
from graphpact_engine.verify import Verifier

if TYPE_CHECKING:  # its package is an extra that takes seconds to import
    from graphpact_engine.models.generation_config import GenerationDefaults


@dataclass(frozen=True, slots=True)
class Models:
    """The loaded models.

    Args:
        target: The target model.
        draft: The draft model, if there is one.
        specs: Their properties.
        vocab_size: Tokens of the vocabulary.
        generation: What the checkpoint says about generation.
        texts: Its tokenizer.
    """

    target: Any
    draft: Any
    specs: Mapping[ModelName, ModelSpec]
    vocab_size: int
    generation: "GenerationDefaults"
    texts: RequestTexts

    @property
    def by_name(self) -> dict[ModelName, Any]:
        """The models by name."""
        return {"target": self.target} if self.draft is None else {"target": self.target, "draft": self.draft}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine, with every shape captured.

    Args:
        device: The device of the models.
        is_async: Whether decodes are launched before the tokens of the decode before are read.
        models: The models.
        memory: The memory that all lanes share.
        lanes: All lanes, sorted by mode.
        lane_set: Chooses the lane of each batch.
        verifiers: One for each lane whose replays are verified.
        speculation: Runs the steps of the speculation algorithm; None without speculation.
        num_threads: CPU threads of a step.
        scheduler: The scheduler.
        loop: Runs the steps.
        phases: The phases of a step, as observers wrap them.
        rank_steps: Decides with the other ranks what runs next; None for one process.
    """

    device: torch.device
    is_async: bool
    models: Models
    memory: Memory
    lanes: list[Lane]
    lane_set: LaneSet
    verifiers: list[Verifier]
    speculation: Speculator | None
    num_threads: int
    scheduler: Scheduler
    loop: PlainLoop
    phases: EnginePhases
    rank_steps: RankSteps | None


def build_parts(
    config: EngineConfig,
    catalog: PluginCatalog,
    on_capture: OnCapture | None,
    observers: Sequence[object],
    *,
    device: torch.device,
    ranks: EngineRanks | None,
) -> EngineParts:
    """Load the models, build everything, and capture every shape of every lane.

    Args:
        config: The configuration.
        catalog: The plugins to select from.
        on_capture: Called after each captured shape.
        observers: Hook wrappers for every lane, the outermost first.
        device: The device of the models.
        ranks: The ranks that run the engine together; None for one process.

    Raises:
        UsageError: A name, value, checkpoint or model cannot be used; nothing was captured.
        CaptureError: Capturing a shape failed.
    """
    algorithm = select_algorithm(config, catalog)
    is_async = choose_async(config, device)
    plans = plan_lanes(config, catalog, device, algorithm)
    configured = select_observers(config, catalog)
    require_observers(observers)

    models = _load_models(config, device, lane_without_latents(plans), ranks)
    memory = lay_out_memory(config, models.specs, ranks)
    contexts = [backend_context(plan, models.specs[plan.model], memory, memory.kv_cache) for plan in plans]
    check_backends(plans, contexts, catalog, models.specs)

    # Each lane has the given observers, and its own configured ones. Those of the first lane observe the
    # engine too.
    observing = [[*observers, *build_observers(configured)] for _ in plans]
    drafting = None if algorithm is None else _build_algorithm(algorithm, config, models, memory)
    lanes, verifiers = _build_lanes(plans, config, models, memory, observing, drafting, on_capture, ranks)
    by_mode = _by_mode(plans, lanes)
    rank_steps = None if ranks is None else RankSteps(ranks, by_mode, device)
    stage = None
    if ranks is not None and ranks.layout.pipeline > 1:
        stage = PipelineStage(ranks, width=models.target.width, dtype=models.target.dtype, device=device)
    lane_set = LaneSet(by_mode, rank_steps, stage)
    weights = sum(weight.nbytes for model in models.by_name.values() for _, weight in model.named_weights())
    num_threads = choose_num_threads(config.engine.num_threads, device, weights)
    if device.type == "cpu":
        keep_freed_memory()
    with running_on(num_threads):
        lane_set.capture()
    if ranks is not None:  # stages compile for different times, and steps have less time than the start
        ranks.wait_for_all()

    sampler = Sampler(models.generation.eos_token_ids)
    scheduler = Scheduler(
        memory.requests,
        memory.pages,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        eos_token_ids=models.generation.eos_token_ids,
        device=device,
        num_reserved=memory.num_reserved,
        max_prefill_chunk=config.engine.max_prefill_chunk,
        mixed=any(plan.mode is ForwardMode.MIXED for plan in plans),
    )
    phases = EnginePhases(observing[0])
    loop: Callable[..., PlainLoop] = AsyncLoop if is_async else PlainLoop
    speculation = None
    if drafting is not None:
        sample = phases.observed("sample", sampler.sample_after)
        speculation = _build_speculator(drafting, config, models, memory, sample, lane_set)
        loop = functools.partial(SpeculativeLoop, speculation)
    return EngineParts(
        device=device,
        is_async=is_async,
        models=models,
        memory=memory,
        lanes=lanes,
        lane_set=lane_set,
        verifiers=verifiers,
        speculation=speculation,
        num_threads=num_threads,
        scheduler=scheduler,
        loop=loop(
            scheduler,
            lane_set,
            sampler,
            models.texts,
            num_threads=num_threads,
            phases=phases,
            ranks=rank_steps,
            stage=stage,
        ),
        phases=phases,
        rank_steps=rank_steps,
    )


def _build_lanes(
    plans: Sequence[LanePlan],
    config: EngineConfig,
    models: Models,
    memory: Memory,
    observing: Sequence[Sequence[object]],
    drafting: "_Drafting | None",
    on_capture: OnCapture | None,
    ranks: EngineRanks | None,
) -> tuple[list[Lane], list[Verifier]]:
    """Build a lane for each plan, with its observers, without capturing; return them and their verifiers."""
    states = () if drafting is None else tuple(drafting.state.values())
    lanes, verifiers = [], []
    for plan, observers in zip(plans, observing, strict=True):
        lane, verifier = build_lane(
            plan,
            config,
            model=models.by_name[plan.model],
            spec=models.specs[plan.model],
            memory=memory,
            states=states,
            observers=observers,
            on_capture=on_capture,
            ranks=ranks,
        )
        lanes.append(lane)
        if verifier is not None:
            verifiers.append(verifier)
    return lanes, verifiers


def _by_mode(plans: Sequence[LanePlan], lanes: Sequence[Lane]) -> dict[str, list[Lane]]:
    by_mode: dict[str, list[Lane]] = {}
    for plan, lane in zip(plans, lanes, strict=True):
        by_mode.setdefault(plan.role, []).append(lane)
    return by_mode


def _load_models(
    config: EngineConfig, device: torch.device, expanding: LanePlan | None, ranks: EngineRanks | None
) -> Models:
    """Load the checkpoint and the draft model.

    Args:
        config: The configuration.
        device: The device of the models.
        expanding: The lane whose backend makes MLA layers run expanded; None if no lane does.
        ranks: The ranks that split the target model.
    """
    if config.model.path is None:
        raise ConfigError(
            "no model: model.path is not set",
            hint="give --model DIR, or path = ... under [model] in the configuration file",
        )
    from graphpact_engine import models  # noqa: PLC0415  an extra that takes seconds to import

    path, dtype = Path(config.model.path), config.model.dtype
    checkpoint = models.load_checkpoint(
        path,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        device=device,
        attention=models.ATTENTION_NAME,
        trust_remote_code=config.model.trust_remote_code,
        sharding=None if ranks is None or not ranks.split_model else models.Sharding(ranks, device),
    )
    gathering = None
    if ranks is not None:
        ranks.wait_for_all()
        if ranks.is_sharded:
            gathering = models.GatheredTokens(ranks)
            gathering.install(checkpoint.model)
    target = models.TransformersModel(checkpoint.model, absorb=expanding is None, gathering=gathering)
    expanded: Callable[[], Sequence[LayerSpec]] | None = None
    if target.has_latents and expanding is None:
        expanded = lambda: models.TransformersModel(checkpoint.model, gathering=gathering).layers  # noqa: E731
    specs: dict[ModelName, ModelSpec] = {
        "target": ModelSpec(
            target.layers,
            target.dtype,
            device,
            checkpoint.max_model_len,
            has_experts=target.has_experts,
            expanded_for=expanding if target.has_latents else None,
            expanded_layers=expanded,
            proxies=target.received,
        )
    }
    draft = None
    if config.speculative.draft_model is not None:
        draft = models.load_draft_model(Path(config.speculative.draft_model), target=target)
        if ranks is not None and ranks.layout.attention_tensor > 1 and not draft.has_own_kv:
            raise ConfigError(
                f"the draft model {config.speculative.draft_model} reads the target's KV cache, of which each"
                f" of {ranks.layout.attention_tensor} ranks has a part of the heads",
                hint="set parallel.attention_data to parallel.tensor, or take a draft with its own KV cache",
            )
        target.hidden_states = draft.target_layers  # it returns the hidden states that the draft model reads
        sizes = {
            **dict.fromkeys(ForwardMode, draft.target_hidden_size),
            ForwardMode.DRAFT_DECODE: draft.hidden_size,
        }
        specs["draft"] = ModelSpec(
            draft.layers, target.dtype, device, draft.max_model_len, hidden_sizes=sizes
        )
    load_tokenizer = functools.partial(
        models.load_tokenizer, path, trust_remote_code=config.model.trust_remote_code
    )
    return Models(
        target, draft, specs, checkpoint.vocab_size, checkpoint.generation, RequestTexts(load_tokenizer)
    )


class _Drafting(NamedTuple):
    """A speculation algorithm and its request state, which its lanes may write."""

    algorithm: SpeculationAlgorithm
    state: dict[str, torch.Tensor]


def _build_algorithm(
    algorithm: type[SpeculationAlgorithm], config: EngineConfig, models: Models, memory: Memory
) -> _Drafting:
    """Build the speculation algorithm and its request state.

    Raises:
        PluginError: The algorithm or its state cannot be built.
    """
    name, draft = str(config.speculative.algorithm), models.draft
    context = SpeculationContext(
        draft_limits(config),
        memory.max_model_len,
        target_hidden_size=0 if draft is None else draft.target_hidden_size,
        draft_hidden_size=0 if draft is None else draft.hidden_size,
        dtype=models.target.dtype,
    )
    built = call_plugin("speculation", name, algorithm, context)

    def make_state() -> dict[str, torch.Tensor]:
        rows, device = memory.requests.max_requests + 1, memory.requests.req_to_token.device
        declared = dict(built.state())
        for key, row in declared.items():
            if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], torch.dtype)):
                raise PluginError(
                    f"speculation {name!r}: state() has {key!r}: {reprlib.repr(row)}, not (shape, dtype)",
                    hint='a defect of that plugin: {"tokens": ((width,), torch.int64)}',
                )
        return {
            key: torch.zeros((rows, *shape), dtype=dtype, device=device)
            for key, (shape, dtype) in declared.items()
        }

    return _Drafting(built, call_plugin("speculation", name, make_state))


def _build_speculator(
    drafting: _Drafting,
    config: EngineConfig,
    models: Models,
    memory: Memory,
    sample: SampleAfter,
    lanes: LaneSet,
) -> Speculator:
    """Build the `Speculator` of the algorithm, on the target's part of the KV cache."""
    cache, num_layers = memory.kv_cache, len(models.target.layers)
    of_target = SimpleNamespace(k=cache.k[:num_layers], v=cache.v[:num_layers])
    return Speculator(
        drafting.algorithm,
        run=lanes.run,
        sample=sample,
        draft=draft_limits(config),
        state=drafting.state,
        target_cache=list(kv_tensors(of_target).values()),
        max_position=memory.max_model_len - 1,
    )
