"""`Backends`: an author's factory of SGLang backends, and the lanes in which it is checked.

    from graphpact_adapters.sglang import Backends

    checked = Backends(make_backend)            # or a class of SGLang's constructor, as it is

Does not: run anything; ``graphpact check --adapter sglang package.module:make_backend`` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphpact.attention import Capabilities, GraphSupport, HeadLayout
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, named_options
from graphpact.plugin_calls import describe_error, place_of
from graphpact_adapters import stand_ins
from graphpact_adapters.backend import DEVICE, Make
from graphpact_adapters.builder_lanes import TaskTape, builder_lane
from graphpact_adapters.calls import uncalled
from graphpact_adapters.experiments import BUILDER_EXPERIMENTS, TASK_EXPERIMENTS
from graphpact_adapters.needs import needs_of
from graphpact_adapters.sglang.backend import SglangBackend, SglangReader, calls_of
from graphpact_adapters.sglang.batch import OWN, EngineTypes
from graphpact_adapters.sglang.plain_values import Kind, ModelRunnerSizes, model_runner
from graphpact_adapters.sglang.readers import read_sglang_metadata
from graphpact_adapters.tasks import Tasks
from graphpact_conformance.experiments import Experiment
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.records.raised import NeedsValueError
from graphpact_conformance.suite import Needs, PlannedLane, Uncalled, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_tape import HostMemory, two_memories

METHODS = {
    "update_verify_buffers_to_fill_after_draft": "after a draft, for a verify that was planned before it",
    "init_mha_chunk_metadata": "in extends of latents with cached keys",
}
"""The methods of backends that SGLang calls and that lanes do not call, and when SGLang calls them."""
_LAYOUTS: dict[Kind, frozenset[HeadLayout]] = {
    "mha": frozenset({HeadLayout.MHA, HeadLayout.GQA}),
    "mla": frozenset({HeadLayout.MLA}),
}
_MADE = "the factory is called with a model runner, and returns an attention backend of SGLang"
_GRAPHS = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND})
_MODES: dict[Kind, frozenset[ForwardMode]] = {"mha": _GRAPHS | {ForwardMode.EXTEND}, "mla": _GRAPHS}


@named_options
@dataclass(frozen=True)
class Backends:
    """Backends of one class, as their author makes them.

    Args:
        make: ``model_runner -> backend``: a backend class, or a function. It gets plain values: see
            `graphpact_adapters.sglang.plain_values`. An object with ``attn_backends``, one for each draft
            step, is checked in lanes of draft decode. Any other object is checked in all other lanes.
        read: ``(metadata, batch) -> reads``: returns what the kernel reads from the metadata. The default
            recognises metadata by the names of its fields.
        kind: What the KV cache holds.
        page_sizes: The page sizes of the KV cache that the backend serves.
        head_dims: The ``head_dim`` values that it serves; None for any.
        trees: Whether it serves drafts with branches (top-k > 1). If so, a request of a draft extend has a
            number of tokens other than the number of draft steps plus one.
        modes: The kinds of step; None for all that the kind has. Extends run eagerly, as in an engine without
            prefill graphs.
        graph_modes: The kinds of step that SGLang captures in graphs with the backend; None for all but
            extends. Steps of other modes are checked only eagerly.
        engine: Makes the objects that only an installed engine can make; by default the types of
            `graphpact_adapters.sglang.batch`.
        window_pool: Whether the backend serves layers with a sliding window whose keys are in a pool with a
            numbering of its own, as in hybrid models. It gets ``token_to_kv_pool`` with SGLang's translation.
            Not for draft decodes, latents and tasks.
        tasks: The kernel arguments that the engine updates for each replay, as on an NPU. An update gets the
            batch of the replay. Not for draft decodes.
    """

    make: Make
    read: SglangReader = read_sglang_metadata
    kind: Kind = "mha"
    page_sizes: Sequence[int] = (1, 16)
    head_dims: Sequence[int] | None = None
    trees: bool = False
    modes: frozenset[ForwardMode] | None = None
    graph_modes: frozenset[ForwardMode] | None = None
    engine: EngineTypes = OWN
    tasks: Tasks | None = None
    window_pool: bool = False

    def __post_init__(self) -> None:
        """Refuse a window pool where no lane has one."""
        if self.window_pool and (self.kind == "mla" or self.tasks is not None):
            raise ConfigError(
                "Backends(window_pool=True, ...): latents and tasks have no lanes with a window pool",
                hint="leave window_pool out, or check kind='mha' without tasks",
            )

    @property
    def name(self) -> str:
        """The name of the factory."""
        return getattr(self.make, "__qualname__", type(self.make).__qualname__)

    @property
    def experiments(self) -> Sequence[Experiment]:
        """The experiments that run in its lanes."""
        return BUILDER_EXPERIMENTS if self.tasks is None else TASK_EXPERIMENTS

    @property
    def not_shown(self) -> Sequence[str]:
        """What no lane exercises."""
        return (
            "the backend's own kernels, all rules: a model of them reads the metadata",
            "draft trees, all rules: the drafts of all steps are chains",
            *stand_ins.notes(),
        )

    # -- lanes -----------------------------------------------------------------------------------

    @cached_property
    def _example(self) -> Any:
        """A backend of the factory, to find out its kind."""
        table = torch.zeros(2, 8, dtype=torch.int32)
        sizes = ModelRunnerSizes(
            kind=self.kind,
            num_heads=4,
            num_kv_heads=1 if self.kind == "mla" else 4,
            head_dim=24 if self.kind == "mla" else 8,
            v_head_dim=16 if self.kind == "mla" else 8,
            kv_lora_rank=16 if self.kind == "mla" else None,
            dtype=torch.float32,
            page_size=min(self.page_sizes),
            context_len=4,
            max_requests=1,
            num_draft_tokens=3,
            num_steps=3,
            is_draft_worker=True,
            drafts=True,
        )
        sizes = replace(sizes, sliding_window=2 if self.window_pool else None)
        slots = torch.arange(2 * sizes.page_size) if self.window_pool else None
        try:
            with two_memories(HostMemory(), DEVICE):
                made = self.make(model_runner(sizes, table, slots))
        except NeedsValueError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name} makes no backend: {describe_error(error)}, at {place_of(error)}",
                hint=_MADE,
            ) from error
        if not any(hasattr(made, name) for name in ("init_forward_metadata", "attn_backends")):
            raise ConfigError(
                f"{self.name} makes a {type(made).__name__}, which has no init_forward_metadata", hint=_MADE
            )
        stand_ins.called()  # calls made by imports do not count
        return made

    @property
    def _modes(self) -> frozenset[ForwardMode]:
        if self.modes is not None:
            return self.modes
        return (
            frozenset({ForwardMode.DRAFT_DECODE})
            if hasattr(self._example, "attn_backends")
            else _MODES[self.kind]
        )

    def backend(self, support: GraphSupport = GraphSupport.UNIFORM) -> type[SglangBackend]:
        """Return the backend class of lanes with this graph support."""
        adapter = self

        class OfFactory(SglangBackend):
            """A backend made by the given factory."""

            make = staticmethod(adapter.make)
            read = staticmethod(adapter.read)
            kind = adapter.kind
            trees = adapter.trees
            tasks = adapter.tasks
            window_pool = adapter.window_pool
            unit = "KV pool" if adapter.window_pool else SglangBackend.unit
            engine = adapter.engine
            calls = calls_of(adapter._example)
            capabilities = Capabilities(
                modes=adapter._modes,
                graph_support=support,
                dtypes=frozenset({torch.float32, torch.bfloat16}),
                devices=frozenset({"cpu"}),
                head_layouts=_LAYOUTS[adapter.kind],
                page_sizes=frozenset(adapter.page_sizes),
                head_dims=None if adapter.head_dims is None else frozenset(adapter.head_dims),
                seq_len_fill_value=1,
                needs_host_plan=True,
                sliding_window=adapter.window_pool,
            )

        return OfFactory

    def needs(self, options: Options) -> Iterator[Needs]:
        """Yield the names that backends read from the model runner and batch and that the adapter lacks."""
        return needs_of(lambda asked: [*replace(self).lanes(asked)], options)

    def uncalled(self, plans: Sequence[PlannedLane]) -> Iterator[Uncalled]:
        """Yield the methods of backends that SGLang calls and that no lane of a run calls."""
        del plans
        yield from uncalled([self._example], METHODS, (), base="AttentionBackend")

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the lanes of a run."""
        backend, without_graphs = self.backend(), self.backend(GraphSupport.NEVER)
        for plan in planned_lanes(backend, ReferenceRunner, options):
            config = plan.lane.config
            if config.case.segments or config.mixed_dim is not None or config.case.frozen:
                continue
            drafts = config.case.mode is ForwardMode.DRAFT_DECODE
            if drafts and (self.tasks is not None or self.window_pool):
                continue
            if self.window_pool and (config.high or not config.sliding_window):
                continue
            mode = config.case.mode
            in_graphs = self.graph_modes is None or mode in self.graph_modes
            driver = None if self.tasks is None else TaskTape
            why = f"SGLang captures no graph of {mode.value} by the backend's methods"
            if not in_graphs:
                why = f"graph_modes of Backends leaves out {mode.value}"
            used = backend if in_graphs else without_graphs
            yield replace(plan, lane=builder_lane(config, used, driver=driver, without_graphs=why))

    def probes(self, options: Options) -> Iterator[tuple[str, PlannedLane]]:
        """Yield plain lanes with graphs that `graph_modes` leaves out, each with the declaration."""
        if self.graph_modes is None:
            return
        for plan in replace(self, graph_modes=None).lanes(replace(options, size="quick")):
            config, mode = plan.lane.config, plan.lane.config.case.mode
            is_captured = GraphSupport.UNIFORM.covers(config.case.needs)
            if is_captured and not config.unusual and mode not in self.graph_modes:
                yield f"{mode.value} in graph_modes", plan
