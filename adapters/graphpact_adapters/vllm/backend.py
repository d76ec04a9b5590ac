"""`VllmBackend`: builders of vLLM as a backend, with the calls that model runner V2 makes.

    capture   ``build_for_cudagraph_capture`` for every group, twice: V2 warms up with separate metadata
    replay    ``build(0, common)`` for every group; the result is dropped. Runners of earlier releases pass no
              padding rows; the author chooses (`VllmBackend.pads_replays`)
    draft     the metadata of a capture serves all steps: in the graph, each step advances the buffers and
              calls ``update_draft_decode_metadata``; an eager draft calls ``build_for_drafting`` for each
              step
    idle      as a capture: V2 gives a rank without requests the metadata of a dummy, and replays
    groups    each group has other blocks for a request, so the metadata of one group is wrong for another
    order     groups are built one after another, in reverse order in every second step, because a release
              may change the order
    states    a group of recurrent layers after the first takes the metadata of the first, with another block
              table, if the builder has ``supports_update_block_table``: at captures too, and always in order

Model runner V1 differs for builders with ``supports_update_block_table``: each group is captured with
separate metadata, and in all other steps a group after the first takes the metadata of the first.

Does not: choose lanes; see `graphpact_adapters.vllm.adapter`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from graphpact.attention import BackendContext, DraftLimits, KVBuffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import GraphShape
from graphpact_adapters.backend import (
    NUM_GROUPS,
    BuilderBackend,
    Built,
    DraftStep,
    Make,
    Phase,
    Words,
    renumbered,
)
from graphpact_adapters.kernel_reads import Reader
from graphpact_adapters.vllm.plain_values import Kind, Sizes, plain_layers
from graphpact_adapters.vllm.runner import Lent, RunnerBuffers, is_all_padding
from graphpact_adapters.vllm.values import STAND_INS, Values


class OfLane(Protocol):
    """The part of a `BackendContext` from which sizes are made."""

    @property
    def layers(self) -> Sequence[LayerSpec]:
        """The layers."""

    @property
    def limits(self) -> Limits:
        """The largest counts."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""

    @property
    def mode(self) -> ForwardMode:
        """The forward mode of the lane."""


_ON_HOST = (
    "query_start_loc_cpu",
    "seq_lens_cpu_upper_bound",
    "is_prefilling",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
)
"""Host fields that the builders of a step share."""
ModelRunner = Literal["V1", "V2"]
UPDATE = "update_block_table"
ROPE = 8
"""Width of the rotary part of an MLA key in the suite's lanes."""


def num_drafts_of(mode: ForwardMode, draft: DraftLimits) -> int:
    """Return ``num_speculative_tokens`` of a lane's engine; 0 without drafts."""
    if mode is ForwardMode.TARGET_VERIFY:
        return draft.num_draft_tokens - 1
    return draft.num_steps if mode is ForwardMode.DRAFT_DECODE else 0


def vllm_sizes(
    context: "OfLane", capture_sizes: Sequence[int], kind: Kind, group: int = 0, varlen: int | None = None
) -> Sizes:
    """Return the sizes of a lane as vLLM's configuration counts them.

    Args:
        context: The context of the lane's backend.
        capture_sizes: Token counts that are captured.
        kind: What the KV cache holds; with windows, the groups of layers without one are ``full``.
        group: The KV-cache group.
        varlen: The most tokens of a request in a graph of decodes of different lengths; None in other lanes.
    """
    layer, limits = context.layers[group], context.limits
    window = layer.sliding_window if kind == "sliding_window" else None
    latent = layer.kv_lora_rank
    return Sizes(
        num_layers=len(context.layers),
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        head_size_v=0 if latent is not None else layer.v_head_dim,
        dtype=context.dtype,
        block_size=limits.page_size,
        max_model_len=limits.max_context_len,
        max_num_seqs=limits.max_bs,
        max_num_tokens=limits.max_num_tokens,
        capture_sizes=tuple(sorted({*capture_sizes})),
        num_speculative_tokens=varlen - 1 if varlen else num_drafts_of(context.mode, limits.draft),
        kind="full" if kind == "sliding_window" and window is None else kind,
        sliding_window=window,
        rope_size=ROPE if latent is None else layer.head_dim - latent,
    )


WORDS = Words(
    subject="builder",
    allocates="the constructor",
    largest="max_num_seqs requests, each with num_speculative_tokens + 1 tokens, and padding up to the"
    " largest capture size",
    next_reader="the builders of other KV-cache groups read",
    no_graphs="if vLLM captures no graphs of such batches with this builder, let get_cudagraph_support return"
    " a smaller AttentionCGSupport",
)
"""vLLM's words."""


class VllmBackend(BuilderBackend):
    """A backend that calls builders of one class; a subclass sets the factory.

    Attributes:
        make: The factory: ``(kv_cache_spec, layer_names, vllm_config, device) -> builder``.
        values: What it gets.
        read: Returns what the kernel reads from metadata.
        kind: What the KV cache holds.
        capture_sizes: Token counts that the lane captures.
        varlen: The most tokens of a request in a graph of decodes of different lengths; None in other lanes.
        pads_replays: Whether a replay's build gets the padding rows and tokens of the graph.
        model_runner: The model runner whose calls are made.
    """

    make: ClassVar[Make]
    values: ClassVar[Values] = STAND_INS
    read: ClassVar[Reader]
    kind: ClassVar[Kind] = "full"
    capture_sizes: ClassVar[Sequence[int]] = ()
    varlen: ClassVar[int | None] = None
    pads_replays: ClassVar[bool] = True
    model_runner: ClassVar[ModelRunner] = "V2"
    warmups = 1
    words = WORDS
    bounds = "seq_lens_cpu_upper_bound"
    calls: ClassVar[Mapping[Phase, str]] = {
        "capture": "build_for_cudagraph_capture",
        "replay": "build",
        "eager": "build",
        "draft": "build_for_drafting",
    }

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        cls = type(self)
        num_slots = len(context.kv_cache.k[0])
        of_groups = [
            replace(
                vllm_sizes(context, cls.capture_sizes, cls.kind, group, cls.varlen),
                num_blocks=num_slots // context.limits.page_size,
            )
            for group in range(NUM_GROUPS)
        ]
        self.sizes = of_groups[0]
        states: Any = context.kv_cache if cls.kind == "mamba" else None
        self.buffers = RunnerBuffers(
            self.sizes,
            NUM_GROUPS,
            context.req_to_token,
            num_slots,
            context.device,
            num_steps=context.limits.draft.num_steps if context.mode is ForwardMode.DRAFT_DECODE else 1,
            varlen=cls.varlen,
            states=states,
            by_shape=cls.takes_prompts,
            windows=[sizes.sliding_window for sizes in of_groups],
            common=cls.values.common,
        )
        given = [
            (
                cls.values.kv_cache_spec(sized),
                sized.layer_names[group::NUM_GROUPS],
                cls.values.vllm_config(sized, plain_layers(sized)),
            )
            for group, sized in enumerate(sizes.times(self.room) for sizes in of_groups)
        ]
        with self.two_memories():
            self._builders: list[Any] = [cls.make(*each, self.device) for each in given]
        self._builds = 0
        self._found: dict[int, Any] = {}  # the metadata of the last build by group, which the engine keeps
        self._objects: dict[int, tuple[Built, dict[int, Any]]] = {}
        """Captured metadata by group, by the identity of its reads. Drafts update it in the graph."""

    @property
    def builders(self) -> Sequence[object]:
        """The builders, one for each KV-cache group."""
        return self._builders

    def lent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the runner's persistent buffers."""
        return self.buffers.tensors()

    def shared_in_step(self, lent: Lent) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, and the tensors on the host, which the groups of a step share."""
        return {**self.buffers.tensors(), **self.host_tensors(lent)}

    def host_tensors(self, lent: Lent) -> Mapping[str, torch.Tensor]:
        """Return the tensors on the host, which the groups of a step share."""
        found = {name: getattr(lent.common[0], name, None) for name in _ON_HOST}
        found["num_decode_draft_tokens_cpu"] = lent.num_decode_draft_tokens_cpu
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def lend(self, view: ForwardBatch, shape: GraphShape | None) -> Lent:
        """Write the persistent buffers as model runner V2 does."""
        return self.buffers.lend(view, shape, has_exact_bounds=self.has_exact_bounds)

    @contextmanager
    def cache_of(self, group: int, layer: LayerSpec) -> Iterator[KVBuffers]:
        """Yield a copy of the layer's cache with the group's block order, and write it back at the end."""
        slots = self.buffers.slots[group]
        if slots is None:
            yield self.context.kv_cache
            return
        with renumbered(self.context.kv_cache, layer, slots) as cache:
            yield cache

    def build(self, lent: Lent, phase: Phase, step: int = 0) -> Built:
        """Build for each group, in the reverse order of the step before. ``step`` is the step of a draft."""
        if phase == "replay" and not self.pads_replays:
            lent = lent.unpadded()
        updates = self._updates(phase)
        found: dict[int, Any] = {}
        in_order = updates or self.model_runner == "V1"
        for group in range(NUM_GROUPS) if in_order else self._in_turn():
            builder, common = self._builders[group], lent.common[group]
            if updates and found:
                found[group] = builder.update_block_table(
                    found[0], common.block_table_tensor, common.slot_mapping
                )
            else:
                found[group] = self._build_group(builder, lent, group, phase, step)
        self._found = found
        read = type(self).read
        slots = [common.slot_mapping for common in lent.common]
        try:
            built = Built(tuple(read(found[group], slots[group]) for group in range(NUM_GROUPS)))
        except ConfigError:
            if phase != "replay":
                raise
            return Built(())  # V2 drops the metadata of a replay unread
        if phase == "capture":
            self._objects[id(built)] = built, found
        return built

    def built_metadata(self) -> dict[str, Any]:
        """Return the metadata of the last build by layer name, in the order in which groups were built."""
        names = self.sizes.layer_names
        return {name: made for group, made in self._found.items() for name in names[group::NUM_GROUPS]}

    def _updates(self, phase: Phase) -> bool:
        """Return whether groups after the first take the metadata of the first group."""
        if not updates_block_tables(self._builders[0]):
            return False
        return phase in ("replay", "eager") if self.model_runner == "V1" else self.kind == "mamba"

    def call_of(self, group: int) -> str:
        """Return the name of the builder's method that makes the metadata of a group for replays."""
        return UPDATE if group and self._updates("replay") else super().call_of(group)

    def _in_turn(self) -> list[int]:
        self._builds += 1
        order = list(range(NUM_GROUPS))
        return order if self._builds % 2 else order[::-1]

    def begin_step(self, part: DraftStep) -> Built:
        """Advance the buffers, and update the captured metadata; in an eager draft, build for the step."""
        if part.built is None and not part.num_reqs:
            return Built(())  # no builder is called for a step without requests
        if part.built is None:
            lent = self.buffers.lend_step(part.step, part.num_reqs)
            with self.two_memories(lent):
                return self.build(lent, "draft", part.step)
        self.buffers.advance(part.step, part.num_reqs)
        objects = self._objects[id(part.built)][1]
        for group in self._in_turn():
            self._builders[group].update_draft_decode_metadata(objects[group])
        return part.built

    def _build_group(self, builder: Any, lent: Lent, group: int, phase: Phase, step: int) -> object:
        common = lent.common[group]
        if phase == "capture":
            return builder.build_for_cudagraph_capture(common)
        if phase == "draft":
            drafts = getattr(builder, "build_for_drafting", None)  # vLLM's base class has this default
            return builder.build(0, common, fast_build=True) if drafts is None else drafts(common, step)
        more: dict[str, Any] = {}
        if self.kind == "mamba" and _takes(builder.build, "num_accepted_tokens"):
            more = {
                "num_accepted_tokens": lent.num_accepted_tokens,
                "num_decode_draft_tokens_cpu": lent.num_decode_draft_tokens_cpu,
            }
        return builder.build(0, common, **more)

    def _build(self, view: ForwardBatch, shape: GraphShape | None, phase: Phase) -> Built:
        is_dummy = shape is not None and is_all_padding(view)
        return super()._build(view, shape, "capture" if is_dummy else phase)


def updates_block_tables(builder: object) -> bool:
    """Return whether a builder declares that it makes metadata from that of another group."""
    return bool(getattr(builder, "supports_update_block_table", False))


def _takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function accepts a keyword argument.

    V2 decides by the builder's class: Mamba2, GDN and the short convolutions take the counts of accepted
    tokens, Linear does not.
    """
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)
