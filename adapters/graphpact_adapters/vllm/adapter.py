"""`Builders`: an author's factory of vLLM builders, and the lanes in which it is checked.

    from graphpact_adapters.vllm import Builders

    checked = Builders(make_builder)            # or a class of vLLM's constructor, as it is

Does not: run anything; ``graphpact check --adapter vllm package.module:make_builder`` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphpact.attention import Capabilities, GraphSupport, HeadLayout, LayerSpec, Limits
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, describe_error, place_of
from graphpact.shapes import GraphShape
from graphpact_adapters.backend import Make
from graphpact_adapters.experiments import BUILDER_EXPERIMENTS, TASK_EXPERIMENTS
from graphpact_adapters.reads import Reader
from graphpact_adapters.states import RecurrentLane
from graphpact_adapters.tasks import Tasks
from graphpact_adapters.under_test import BuilderUnderTest, TaskTape
from graphpact_adapters.vllm.backend import VllmBackend, sizes_of
from graphpact_adapters.vllm.given import Kind, NotGivenError, kv_cache_spec, vllm_config
from graphpact_adapters.vllm.readers import read as read_by_fields
from graphpact_conformance.experiments import Experiment
from graphpact_conformance.lane.reference import ReferenceRunner
from graphpact_conformance.suite import PlannedLane, plan_lanes
from graphpact_conformance.targets import Options
from graphpact_conformance.world.lanes import Case, Config

SUPPORT = {
    3: GraphSupport.ALWAYS,
    2: GraphSupport.UNIFORM,
    1: GraphSupport.UNIFORM_DECODE,
    0: GraphSupport.NEVER,
}
"""Graph support by the value of vLLM's ``AttentionCGSupport``."""
_NAMES = {GraphSupport.ALWAYS: "ALWAYS", GraphSupport.UNIFORM: "UNIFORM_BATCH"} | {
    GraphSupport.UNIFORM_DECODE: "UNIFORM_SINGLE_TOKEN_DECODE"
}
"""vLLM's names of graph support."""
_PROBED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED)
VARLEN = 4
"""The most tokens of a request in lanes of decodes of different lengths."""
_LAYOUTS: dict[Kind, frozenset[HeadLayout]] = {
    "full": frozenset({HeadLayout.MHA, HeadLayout.GQA}),
    "sliding_window": frozenset({HeadLayout.MHA, HeadLayout.GQA}),
    "mla": frozenset({HeadLayout.MLA}),
    "mamba": frozenset({HeadLayout.MHA}),
}
_UNIFORM = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE})
_MODES: dict[Kind, frozenset[ForwardMode]] = {
    "full": _UNIFORM | {ForwardMode.EXTEND, ForwardMode.MIXED},
    "sliding_window": _UNIFORM | {ForwardMode.EXTEND, ForwardMode.MIXED},
    "mla": _UNIFORM,
    "mamba": _UNIFORM - {ForwardMode.DRAFT_DECODE},
}


@dataclass(frozen=True)
class Builders:
    """Builders of one class, as their author makes them.

    Args:
        make: ``(kv_cache_spec, layer_names, vllm_config, device) -> builder``: a builder class, or a
            function. It gets plain values: see `graphpact_adapters.vllm.given`.
        read: ``(metadata, slot_mapping) -> reads``: what the kernel reads of the metadata; by default by the
            names of its fields.
        kind: What the KV cache holds.
        block_sizes: The sizes of a KV-cache block that the builder serves.
        head_sizes: The head sizes that it serves; None for any.
        modes: The kinds of step; by default those that the kind's kernel model has.
        tasks: What of the kernels the engine updates for each replay, as on an NPU. An update gets the
            metadata of the step by layer name. Not for recurrent states, and for no draft of several steps.
    """

    make: Make
    read: Reader = read_by_fields
    kind: Kind = "full"
    block_sizes: Sequence[int] = (16,)
    head_sizes: Sequence[int] | None = None
    modes: frozenset[ForwardMode] | None = None
    tasks: Tasks | None = None

    def __post_init__(self) -> None:
        """Refuse tasks of a kind that has none."""
        if self.tasks is not None and self.kind == "mamba":
            raise ConfigError(
                "Builders(kind='mamba', tasks=...): recurrent states are not updated in a graph",
                hint="leave tasks out: the kernels of recurrent states take device tensors",
            )

    @property
    def name(self) -> str:
        """The name of the factory."""
        return getattr(self.make, "__qualname__", type(self.make).__qualname__)

    @property
    def experiments(self) -> Sequence[Experiment]:
        """The experiments of its lanes."""
        return BUILDER_EXPERIMENTS if self.tasks is None else TASK_EXPERIMENTS

    @property
    def not_shown(self) -> Sequence[str]:
        """What no lane exercises: the kernels themselves."""
        return ("the builder's own kernels, all rules: a model of them reads the metadata",)

    # -- lanes -----------------------------------------------------------------------------------

    @property
    def _all_modes(self) -> frozenset[ForwardMode]:
        """The kinds of step. The steps of a draft in one graph are built by no replay, so none is updated."""
        modes = _MODES[self.kind] if self.modes is None else self.modes
        return modes if self.tasks is None else modes - {ForwardMode.DRAFT_DECODE}

    @cached_property
    def _capabilities(self) -> Capabilities:
        """All that the kernel model and the lanes of this kind have; graphs are asked of the builder."""
        return Capabilities(
            modes=self._all_modes,
            graph_support=GraphSupport.ALWAYS,
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            devices=frozenset({"cpu"}),
            head_layouts=_LAYOUTS[self.kind],
            page_sizes=frozenset(self.block_sizes),
            head_dims=None if self.head_sizes is None else frozenset(self.head_sizes),
            seq_len_fill_value=0,
            sliding_window=self.kind == "sliding_window",
            needs_host_plan=True,
        )

    def backend(
        self,
        config: Config | None = None,
        support: GraphSupport = GraphSupport.ALWAYS,
        varlen: int | None = None,
    ) -> type[VllmBackend]:
        """Return the backend class of a lane.

        Args:
            config: The lane; None for all lanes.
            support: The graph support that its builder declares there.
            varlen: See `VllmBackend`.
        """
        adapter, most, sizes = (
            self,
            varlen,
            [] if config is None else [shape.num_tokens for shape in config.shapes],
        )

        class OfFactory(VllmBackend):
            """Builders of a given factory."""

            make = staticmethod(adapter.make)
            read = staticmethod(adapter.read)
            kind = adapter.kind
            tasks = adapter.tasks
            capture_sizes = tuple(sizes)
            varlen = most
            capabilities = replace(adapter._capabilities, graph_support=support)

        return OfFactory

    def _asked(self, config: Config, varlen: int | None = None) -> tuple[Any, Any, Any]:
        """Return a builder for a lane, and the configuration and spec that its class methods get.

        Raises:
            ConfigError: The factory makes no builder, or that has no ``get_cudagraph_support``.
        """
        group = 1 if self.kind == "sliding_window" else 0  # the layers of the other group have no window
        sizes = sizes_of(_OfLane(config), [s.num_tokens for s in config.shapes], self.kind, group, varlen)
        spec, engine = kv_cache_spec(sizes), vllm_config(sizes)
        try:
            builder: Any = self.make(spec, sizes.layer_names, engine, torch.device("cpu"))
            builder.get_cudagraph_support(engine, getattr(builder, "kv_cache_spec", spec))
        except NotGivenError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name} makes no builder with graph support: {describe_error(error)},"
                f" at {place_of(error)}",
                hint="it is called with (kv_cache_spec, layer_names, vllm_config, device), on the CPU; the"
                " builder's get_cudagraph_support(vllm_config, kv_cache_spec) returns an AttentionCGSupport",
            ) from error
        return builder, engine, getattr(builder, "kv_cache_spec", spec)

    def declared(self, config: Config) -> GraphSupport:
        """Return the graph support that a builder declares in the configuration of a lane.

        Drafts of several steps are captured only with builders that update captured metadata in the graph.
        """
        builder, engine, spec = self._asked(config)
        drafts = config.case.mode is ForwardMode.DRAFT_DECODE
        if drafts and not getattr(builder, "supports_draft_decode_metadata_update", False):
            return GraphSupport.NEVER
        return SUPPORT[int(builder.get_cudagraph_support(engine, spec).value)]

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the lanes of a run, each with the graph support that is declared in it."""
        for plan in plan_lanes(self.backend(), ReferenceRunner, options):
            config = plan.lane.config
            if config.case.segments or config.case.frozen or config.mixed_dim is not None:
                continue
            support = self.declared(config)
            yield replace(plan, lane=self._lane(config, self.backend(config, support)))
            if config.case == Case(ForwardMode.MIXED) and not support.covers(config.case.needs):
                yield from self._of_different_lengths(plan)

    def _lane(
        self, config: Config, backend: type[VllmBackend], most_tokens: int | None = None
    ) -> BuilderUnderTest:
        """Return a lane of the kind."""
        of_kind = RecurrentLane if self.kind == "mamba" else BuilderUnderTest
        runner = ReferenceRunner if most_tokens is None else ReferenceRunner.of(config)
        driver = None if self.tasks is None else TaskTape
        return of_kind(config, backend, runner, driver=driver, most_tokens=most_tokens)

    def _of_different_lengths(self, plan: PlannedLane) -> Iterator[PlannedLane]:
        """Yield a lane of decodes of different lengths, if a builder declares graphs for them."""
        builder, engine, spec = self._asked(plan.lane.config, VARLEN)
        ask = getattr(builder, "get_varlen_cudagraph_max_query_len", None)
        most = None if ask is None else ask(engine, spec)
        if most is None or most < VARLEN:
            return
        sizes = ((2, 2 * VARLEN), (4, 4 * VARLEN - 2))
        shapes = tuple(GraphShape(ForwardMode.MIXED, requests, tokens) for requests, tokens in sizes)
        config = replace(plan.lane.config, capture_shapes=shapes)
        lane = self._lane(config, self.backend(config, varlen=VARLEN), most_tokens=VARLEN)
        yield replace(plan, lane=lane, suffix="-varlen")

    def probes(self, options: Options) -> Iterator[tuple[str, PlannedLane]]:
        """Yield the plain lanes of graphs that the builder does not declare, each with the declaration."""
        for plan in plan_lanes(self.backend(), ReferenceRunner, replace(options, size="quick")):
            config = plan.lane.config
            needs = config.case.needs
            is_plain = not config.unusual and config.case.mode in _PROBED and not config.case.segments
            if is_plain and not self.declared(config).covers(needs):
                lane = self._lane(config, self.backend(config))
                yield f"graphs {_NAMES[needs]}", replace(plan, lane=lane)


@dataclass(frozen=True)
class _OfLane:
    """The part of a `BackendContext` that sizes are made of."""

    config: Config

    @property
    def layers(self) -> list[LayerSpec]:
        return self.config.layers

    @property
    def limits(self) -> Limits:
        return self.config.backend_limits

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype

    @property
    def mode(self) -> ForwardMode:
        return self.config.case.lane_mode
