"""`Builders`: an author's factory of vLLM builders, and the lanes that check it.

    from graphpact_adapters.vllm import Builders

    checked = Builders(make_builder)            # or a builder class with the constructor of vLLM's

Does not: run anything; ``graphpact check --adapter vllm package.module:make_builder`` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphpact.attention import Capabilities, GraphSupport, HeadLayout, LayerSpec, Limits
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, named_options
from graphpact.plugin_calls import describe_error, place_of
from graphpact.shapes import GraphShape
from graphpact_adapters import stand_ins
from graphpact_adapters.backend import DEVICE, Make
from graphpact_adapters.builder_lanes import TaskTape, builder_lane
from graphpact_adapters.calls import uncalled
from graphpact_adapters.experiments import BUILDER_EXPERIMENTS, TASK_EXPERIMENTS
from graphpact_adapters.kernel_reads import Reader
from graphpact_adapters.needs import needs_of
from graphpact_adapters.recurrent_states import LinearOracle, StateMemory
from graphpact_adapters.tasks import Tasks
from graphpact_adapters.vllm.backend import UPDATE, ModelRunner, VllmBackend, updates_block_tables, vllm_sizes
from graphpact_adapters.vllm.plain_values import Kind, NotGivenError, plain_layers
from graphpact_adapters.vllm.readers import read_vllm_metadata
from graphpact_adapters.vllm.values import STAND_INS, Values, installed_values
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.experiments import Experiment
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.oracle import OracleBackend
from graphpact_conformance.records.kv_memory import KvMemory
from graphpact_conformance.suite import Needs, PlannedLane, Uncalled, is_asked, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_tape import HostMemory, two_memories

SUPPORT = {
    "ALWAYS": GraphSupport.ALWAYS,
    "UNIFORM_BATCH": GraphSupport.UNIFORM,
    "UNIFORM_SINGLE_TOKEN_DECODE": GraphSupport.UNIFORM_DECODE,
    "PURE_DECODE_ONLY": GraphSupport.UNIFORM_DECODE,
    "NEVER": GraphSupport.NEVER,
}
"""Graph support by the names of vLLM's ``AttentionCGSupport``; the values have changed between releases."""
_NAMES = {
    GraphSupport.ALWAYS: "ALWAYS",
    GraphSupport.UNIFORM: "UNIFORM_BATCH",
    GraphSupport.UNIFORM_DECODE: "UNIFORM_SINGLE_TOKEN_DECODE",
    GraphSupport.NEVER: "NEVER",
}
"""vLLM's names of graph support."""
_EARLIER = ("cudagraph_support", "attn_cudagraph_support")
"""The attributes in which builders of earlier releases declare graph support; later ones have a method."""
_PROBED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED)
_SUFFIXES = ("", _V1 := "-v1", _DIFFERENT_LENGTHS := "-varlen")
"""Suffixes of a plain lane and of the lanes that are derived from it."""
_OF_V1 = tuple(
    map(Case, (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND, ForwardMode.MIXED))
)
"""The kinds of step that are also checked with the calls of model runner V1, in graphs or eagerly."""
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


@named_options
@dataclass(frozen=True)
class Builders:
    """Builders of one class, as their author makes them.

    Args:
        make: ``(kv_cache_spec, layer_names, vllm_config, device) -> builder``: a builder class, or a
            function. For what it gets see ``values``.
        read: ``(metadata, slot_mapping) -> reads``: returns the data that the kernel reads. The default
            recognizes metadata by the names of its fields.
        kind: The kind of data in the KV cache.
        block_sizes: The sizes of a KV-cache block that the builder supports.
        head_sizes: The head sizes that it supports; None for any.
        modes: The kinds of step; None for all that the kernel model of ``kind`` supports.
        pads_replays: Whether the build of a replay gets the graph's padding rows and tokens, as in model
            runner V2. False for runners of earlier releases: there the builder gets only the live requests,
            and the graph reads the old contents of the rows after them.
        tasks: The kernel arguments that the engine updates for each replay, as on an NPU. An update gets the
            metadata of the step by layer name. Recurrent states and drafts of several steps have no tasks.
        values: What ``make`` and the builders get; None for the classes of the installed engine, or
            stand-ins without it.
    """

    make: Make
    read: Reader = read_vllm_metadata
    kind: Kind = "full"
    block_sizes: Sequence[int] = (16,)
    head_sizes: Sequence[int] | None = None
    modes: frozenset[ForwardMode] | None = None
    pads_replays: bool = True
    tasks: Tasks | None = None
    values: Values | None = None

    def __post_init__(self) -> None:
        """Refuse tasks of recurrent states."""
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
        """The code that no lane checks: the kernels themselves, and the code that stand-ins replace."""
        values = self.given
        given = (
            "vLLM's specs, configuration and batches: builders get stand-ins"
            if values is STAND_INS
            else f"vLLM's layers: builders get stand-ins, beside what they get of {values.name}"
        )
        return (
            given,
            "the builder's own kernels, all rules: a model of them reads the metadata",
            *stand_ins.notes(),
        )

    @property
    def given(self) -> Values:
        """What builders get.

        Raises:
            ConfigError: The installed release of the engine is not supported.
        """
        return installed_values() if self.values is None else self.values

    @staticmethod
    def prepare() -> None:
        """Let builders of the installed engine be imported, before the author's module is."""
        installed_values()

    # -- lanes -----------------------------------------------------------------------------------

    @property
    def _all_modes(self) -> frozenset[ForwardMode]:
        """The kinds of step. No replay builds the steps of a draft in one graph, so these have no tasks."""
        modes = _MODES[self.kind] if self.modes is None else self.modes
        return modes if self.tasks is None else modes - {ForwardMode.DRAFT_DECODE}

    @cached_property
    def _capabilities(self) -> Capabilities:
        """The capabilities of the kernel model and the lanes of this kind; the builder declares graphs."""
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
        runner: ModelRunner = "V2",
    ) -> type[VllmBackend]:
        """Return the backend class of a lane.

        Args:
            config: The lane; None for all lanes.
            support: The graph support that its builder declares there.
            varlen: See `VllmBackend`.
            runner: The model runner whose calls are made.
        """
        adapter, most, sizes = (
            self,
            varlen,
            [] if config is None else [shape.num_tokens for shape in config.shapes],
        )

        class OfFactory(VllmBackend):
            """Builders of a given factory."""

            make = staticmethod(adapter.make)
            values = adapter.given
            read = staticmethod(adapter.read)
            kind = adapter.kind
            tasks = adapter.tasks
            capture_sizes = tuple(sizes)
            varlen = most
            pads_replays = adapter.pads_replays
            model_runner = runner
            # Recurrent states of prompts are computed by other kernels, so its graphs cannot serve them.
            takes_prompts = runner == "V1" and adapter.kind != "mamba"
            capabilities = replace(adapter._capabilities, graph_support=support)

        return OfFactory

    def _new_builder(self, config: Config, varlen: int | None = None) -> tuple[Any, Any, Any]:
        """Return a builder for a lane, and the configuration and spec that its class methods get.

        Raises:
            ConfigError: The factory makes no builder, or the builder declares no graph support.
        """
        group = 1 if self.kind == "sliding_window" else 0  # the layers of the other group have no window
        sizes = vllm_sizes(
            _ContextOfLane(config), [s.num_tokens for s in config.shapes], self.kind, group, varlen
        )
        spec = self.given.kv_cache_spec(sizes)
        engine = self.given.vllm_config(sizes, plain_layers(sizes))
        try:
            with two_memories(HostMemory(), DEVICE):
                builder: Any = self.make(spec, sizes.layer_names, engine, DEVICE)
            stand_ins.called()  # calls in imports do not count
            declared_support(builder, engine, getattr(builder, "kv_cache_spec", spec))
        except NotGivenError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name} makes no builder with graph support: {describe_error(error)},"
                f" at {place_of(error)}",
                hint="it is called with (kv_cache_spec, layer_names, vllm_config, device), on the CPU; the"
                " builder's get_cudagraph_support(vllm_config, kv_cache_spec) returns an AttentionCGSupport;"
                " in earlier releases its attribute cudagraph_support is one",
            ) from error
        return builder, engine, getattr(builder, "kv_cache_spec", spec)

    def declared(self, config: Config) -> GraphSupport:
        """Return the graph support that a builder declares in the configuration of a lane.

        Drafts of several steps are captured only with builders that update captured metadata in the graph.
        """
        builder, engine, spec = self._new_builder(config)
        drafts = config.case.mode is ForwardMode.DRAFT_DECODE
        if drafts and not getattr(builder, "supports_draft_decode_metadata_update", False):
            return GraphSupport.NEVER
        return declared_support(builder, engine, spec)

    def _without_graphs(self, config: Config) -> str:
        """Return why a lane has no graphs if its builder does not declare them."""
        builder, engine, spec = self._new_builder(config)
        name = type(builder).__name__
        drafts = config.case.mode is ForwardMode.DRAFT_DECODE
        if drafts and not hasattr(builder, "update_draft_decode_metadata"):
            return f"{name} has no method update_draft_decode_metadata, which a graph of draft steps records"
        if drafts and not getattr(builder, "supports_draft_decode_metadata_update", False):
            return f"{name}.supports_draft_decode_metadata_update is not set"
        says, needed = (_NAMES[each] for each in (declared_support(builder, engine, spec), config.case.needs))
        return f"{name} declares the graph support {says}, and these batches need {needed}"

    def needs(self, options: Options) -> Iterator[Needs]:
        """Yield the values of configurations and batches that builders read and the adapter does not have."""
        return needs_of(lambda asked: [*self._plain(asked)], options, self._declared)

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the lanes of a run, each with the graph support that its builder declares.

        If a builder cannot declare it, because it reads a value that the adapter does not have, the lane gets
        all graphs: the builder reads the value again there.
        """
        for plan in self._plain(options):
            try:
                found = self._declared(plan)
            except NotGivenError:
                found = [plan]
            yield from (each for each in found if is_asked(each, options))

    def _plain(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the plain lanes, with all graphs, if a run asks for them or for lanes derived from them."""
        for plan in planned_lanes(self.backend(), ReferenceRunner, replace(options, lanes=())):
            config = plan.lane.config
            if config.case.segments or config.case.frozen or config.mixed_dim is not None:
                continue
            if any(is_asked(replace(plan, suffix=suffix), options) for suffix in _SUFFIXES):
                yield replace(plan, lane=self._lane(config, self.backend(config)))

    def _declared(self, plan: PlannedLane) -> list[PlannedLane]:
        """Return a lane with the graph support that its builder declares, and the lanes derived from it."""
        config = plan.lane.config
        support = self.declared(config)
        why = None if support.covers(config.case.needs) else self._without_graphs(config)
        found = [replace(plan, lane=self._lane(config, self.backend(config, support), without_graphs=why))]
        if self._is_of_v1(plan):
            of_v1 = self._lane(config, self.backend(config, support, runner="V1"))
            found.append(replace(plan, lane=of_v1, suffix=_V1))
        if config.case == Case(ForwardMode.MIXED) and not support.covers(config.case.needs):
            found += self._of_different_lengths(plan)
        return found

    def _lane(
        self,
        config: Config,
        backend: type[VllmBackend],
        most_tokens: int | None = None,
        without_graphs: str | None = None,
    ) -> LaneUnderTest:
        """Return a lane for the kind of KV cache."""
        is_recurrent = self.kind == "mamba"
        return builder_lane(
            config,
            backend,
            runner=ReferenceRunner if most_tokens is None else ReferenceRunner.of(config),
            driver=None if self.tasks is None else TaskTape,
            most_tokens=most_tokens,
            kv_memory=StateMemory if is_recurrent else KvMemory,
            oracle=LinearOracle if is_recurrent else OracleBackend,
            without_graphs=without_graphs,
        )

    def _is_of_v1(self, plan: PlannedLane) -> bool:
        """Return whether model runner V1 makes other calls in a plain lane, in its replays or eager steps.

        V1 makes the metadata of a group from that of another group only if their specifications are equal.
        """
        config = plan.lane.config
        if config.unusual or config.case not in _OF_V1 or self.kind == "sliding_window":
            return False
        return updates_block_tables(self._new_builder(config)[0])

    def _of_different_lengths(self, plan: PlannedLane) -> Iterator[PlannedLane]:
        """Yield a lane of decodes of different lengths, if a builder declares graphs for them."""
        builder, engine, spec = self._new_builder(plan.lane.config, VARLEN)
        ask = getattr(builder, "get_varlen_cudagraph_max_query_len", None)
        most = None if ask is None else ask(engine, spec)
        if most is None or most < VARLEN:
            return
        sizes = ((2, 2 * VARLEN), (4, 4 * VARLEN - 2))
        shapes = tuple(GraphShape(ForwardMode.MIXED, requests, tokens) for requests, tokens in sizes)
        config = replace(plan.lane.config, capture_shapes=shapes)
        lane = self._lane(config, self.backend(config, varlen=VARLEN), most_tokens=VARLEN)
        yield replace(plan, lane=lane, suffix=_DIFFERENT_LENGTHS)

    def uncalled(self, plans: Sequence[PlannedLane]) -> Iterator[Uncalled]:
        """Yield the methods of builders that vLLM calls, but no lane of a run."""
        lanes = [plan.lane for plan in plans]
        called = {name for lane in lanes for name in _called_in(lane)}
        builders = {type(made): made for made in (self._new_builder(lane.config)[0] for lane in lanes)}
        yield from uncalled(list(builders.values()), METHODS, called, base="AttentionMetadataBuilder")

    def probes(self, options: Options) -> Iterator[tuple[str, PlannedLane]]:
        """Yield plain lanes with graphs that the builder does not declare, each with the declaration."""
        for plan in planned_lanes(self.backend(), ReferenceRunner, replace(options, size="quick")):
            config = plan.lane.config
            needs = config.case.needs
            is_plain = not config.unusual and config.case.mode in _PROBED and not config.case.segments
            if is_plain and not self.declared(config).covers(needs):
                lane = self._lane(config, self.backend(config))
                yield f"graphs {_NAMES[needs]}", replace(plan, lane=lane)


METHODS = {
    "build_for_cudagraph_capture": "before it captures a graph",
    "build_for_drafting": "in drafts of several steps that no graph holds",
    "update_draft_decode_metadata": "between the steps of a draft in one graph",
    UPDATE: "in replays, for KV-cache groups after the first; model runner V2 only for recurrent layers",
    "set_workspace_buffer": "once, so that the builders of all groups share a workspace",
    "use_cascade_attention": "in eager steps whose requests have a common prefix, in earlier releases",
    "reorder_batch": "before each build, in earlier releases",
    "can_run_in_cudagraph": "before each replay, in earlier releases",
}
"""Methods of builders that vLLM calls besides ``build``, and when it calls them."""


def _called_in(lane: LaneUnderTest) -> set[str]:
    """Return the methods of builders that are called in a lane, if they have them."""
    backend, case = lane.backend, lane.config.case
    assert issubclass(backend, VllmBackend)  # noqa: S101  lanes of this adapter have no other
    has_graphs = backend.capabilities.graph_support.covers(case.needs)
    drafts = case.mode is ForwardMode.DRAFT_DECODE
    found = {
        "build_for_cudagraph_capture": has_graphs,
        "build_for_drafting": drafts,
        "update_draft_decode_metadata": drafts and has_graphs,
        UPDATE: backend.model_runner == "V1" or backend.kind == "mamba",
    }
    return {name for name, is_called in found.items() if is_called}


def declared_support(builder: Any, vllm_config: Any, kv_cache_spec: Any) -> GraphSupport:
    """Return the graph support that a builder declares, in the form of any release.

    Raises:
        ConfigError: It declares none, or one that no release knows.
    """
    ask = getattr(builder, "get_cudagraph_support", None)
    if ask is not None:
        declared = ask(vllm_config, kv_cache_spec)
    elif (name := next((name for name in _EARLIER if hasattr(builder, name)), None)) is not None:
        declared = getattr(builder, name)
    else:
        raise ConfigError(f"{type(builder).__name__} has no get_cudagraph_support, and no {_EARLIER[0]}")
    found = SUPPORT.get(str(getattr(declared, "name", declared)))
    if found is None:
        raise ConfigError(
            f"{type(builder).__name__} declares graph support {declared!r}; there are {', '.join(SUPPORT)}"
        )
    return found


@dataclass(frozen=True)
class _ContextOfLane:
    """The part of a `BackendContext` that `vllm_sizes` reads."""

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
