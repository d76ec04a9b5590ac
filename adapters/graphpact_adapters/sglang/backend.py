"""`SglangBackend`: a backend of SGLang as one of the suite, called as SGLang's runners call it.

    once      ``init_cuda_graph_state(max_bs, max_num_tokens)``, before the first capture
    capture   ``init_forward_metadata_out_graph(batch, in_capture=True)``; then in the graph, before any
              attention, ``init_forward_metadata_in_graph(batch)``, which is recorded. After each warm-up
              ``on_after_cuda_graph_warmup()``
    replay    ``init_forward_metadata_out_graph(batch)``; the graph repeats what it recorded
    eager     ``init_forward_metadata(batch)``

If a backend lacks these methods, the pair of earlier releases is called instead:
``init_forward_metadata_capture_cuda_graph`` and ``init_forward_metadata_replay_cuda_graph``. A backend is
refused if it has this pair, but its methods of the first list do nothing, such as those inherited from
SGLang's
base class: SGLang would call those.

Does not: choose lanes; see `graphpact_adapters.sglang.adapter`.
"""

import copy
import dis
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from graphpact.attention import BackendContext, DraftMetadata, KVBuffers, LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.batch import ForwardMode as Mode
from graphpact.errors import ConfigError
from graphpact.shapes import GraphShape
from graphpact_adapters.backend import BuilderBackend, Built, Make, Metadata, Phase, Words, renumbered
from graphpact_adapters.kernel_reads import Reads
from graphpact_adapters.sglang.batch import EngineTypes
from graphpact_adapters.sglang.plain_values import Given, Kind, ModelRunnerSizes, model_runner
from graphpact_adapters.sglang.runner import GraphRunnerBuffers, LentBatch

_NAME = "init_forward_metadata"
_PAIR = (f"{_NAME}_capture_cuda_graph", f"{_NAME}_replay_cuda_graph")
_OF_A_NOOP = frozenset({"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"})

WORDS = Words(
    subject="backend",
    allocates="init_cuda_graph_state()",
    largest="the max_bs requests and max_num_tokens tokens that are passed to init_cuda_graph_state()",
    next_reader="the runner, and the backends of other draft steps, read",
    no_graphs="if SGLang captures no graphs of such steps with this backend, declare it: Backends(make,"
    " graph_modes={ForwardMode.DECODE}); steps of other modes are then checked without graphs",
)
"""SGLang's words."""


class SglangReader(Protocol):
    """A function that returns what the kernel of a layer reads from a backend's metadata.

    With a pool for layers with a window it returns two: the reads of layers without a window come first.
    """

    def __call__(self, metadata: Any, batch: Any) -> Reads | tuple[Reads, ...]:
        """Return the reads of metadata; see `graphpact_adapters.sglang.readers.read_sglang_metadata`."""


def sglang_sizes(context: BackendContext, kind: Kind, *, trees: bool = False) -> ModelRunnerSizes:
    """Return the sizes of a lane as SGLang counts them.

    A sequence that drafts is shorter than the context, so that the drafts have room after it in
    ``req_to_token``. With a chain, a request verifies one token more than there are draft steps; with a tree,
    any number.
    """
    layer, limits, mode = context.layers[0], context.limits, context.mode
    drafts = mode is Mode.DRAFT_DECODE
    is_speculative = drafts or mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND)
    width = limits.draft.num_draft_tokens
    extra = limits.draft.num_steps if drafts else width
    branches = trees and mode is Mode.DRAFT_EXTEND
    steps = limits.draft.num_steps + 1 if drafts else max(1, width - 2) if branches else width - 1
    return ModelRunnerSizes(
        kind=kind,
        num_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        dtype=context.dtype,
        page_size=limits.page_size,
        context_len=limits.max_context_len + 1 - extra,
        max_requests=limits.max_bs,
        width=limits.draft.tokens_per_request(mode) or 1,
        num_draft_tokens=width if is_speculative else None,
        num_steps=steps if is_speculative else 0,
        topk=2 if branches else 1,
        is_draft_worker=drafts or mode is Mode.DRAFT_EXTEND,
        drafts=drafts,
        sliding_window=context.layers[1].sliding_window if len(context.layers) > 1 else None,
    )


def calls_of(backend: Any) -> Mapping[Phase, str]:
    """Return the names of the methods that prepare a step, by phase."""
    capture, replay = _PAIR
    if _is_triple(backend):
        capture = replay = f"{_NAME}_out_graph"
    return {"capture": capture, "replay": replay, "eager": _NAME, "draft": _NAME}


def _is_triple(backend: Any) -> bool:
    return hasattr(backend, f"{_NAME}_out_graph")


def uncalled_pair(backend: Any) -> str | None:
    """Return how a backend prepares graphs if only in methods that SGLang no longer calls, or None."""
    cls, pair = type(backend), [name for name in _PAIR if hasattr(backend, name)]
    if not pair or not _is_triple(backend):
        return None
    called = f"{_NAME}_out_graph"
    if not (_does_nothing(backend, called) and _does_nothing(backend, f"{_NAME}_in_graph")):
        return None
    owner = next(each for each in cls.__mro__ if called in vars(each))
    return (
        f"{cls.__name__} prepares graphs in {' and '.join(pair)}, which SGLang no longer calls; it calls"
        f" {called}, and {owner.__name__}.{called} does nothing"
    )


def _does_nothing(backend: Any, name: str) -> bool:
    """Return whether a backend lacks a method, or has one with an empty body."""
    code = getattr(getattr(backend, name, None), "__code__", None)
    return code is None or {each.opname for each in dis.get_instructions(code)} <= _OF_A_NOOP


@dataclass
class _OfStep:
    """The reads of one draft step."""

    built: Built
    step: int

    @property
    def reads(self) -> tuple[Reads, ...]:
        return self.built.reads[self.step : self.step + 1]


class SglangBackend(BuilderBackend):
    """A backend that calls one with SGLang's interface; a subclass sets the factory.

    Attributes:
        make: The factory: ``model_runner -> backend``.
        read: Returns what the kernel reads from metadata.
        kind: What the KV cache holds.
        trees: Whether drafts have branches (top-k > 1).
        engine: Makes the objects that only an installed engine can make.
        window_pool: Whether layers with a window have a pool of their own, with other numbers of KV slots.
    """

    make: ClassVar[Make]
    read: ClassVar[SglangReader]
    kind: ClassVar[Kind]
    trees: ClassVar[bool]
    engine: ClassVar[EngineTypes]
    window_pool: ClassVar[bool] = False
    unit = "draft step"
    words = WORDS
    calls: ClassVar[Mapping[Phase, str]]

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        cls = type(self)
        self.sizes = sglang_sizes(context, cls.kind, trees=cls.trees)
        self._sizes_of_calls = self.sizes.times(self.room)
        with self.two_memories():
            self._in_window_pool = self._window_slots() if cls.window_pool else None
            self.model_runner = model_runner(self._sizes_of_calls, context.req_to_token, self._in_window_pool)
            self._backend: Any = cls.make(self.model_runner)
        self._has_graphs = False
        self._buffers: GraphRunnerBuffers | None = None
        self._batches: dict[GraphShape, Given] = {}
        self._replayed: Given | None = None
        self._shape: GraphShape | None = None
        self._runs = 0
        self._finished_in_graph: set[GraphShape] = set()

    # -- the window pool -------------------------------------------------------------------------

    def _window_slots(self) -> torch.Tensor:
        """Return ``[slots]`` int64: the slots of the window pool. Page 0 stays; the others are reversed.

        Unused entries of the suite's table are out of range. They are out of range here, too.
        """
        most, page = len(self.context.kv_cache.k[0]), self.context.limits.page_size
        slots = torch.arange(most + 2 * (page + 1), device=self.context.req_to_token.device)
        pages = slots[:most].view(-1, page)
        return torch.cat([torch.cat([pages[:1], pages[1:].flip(0)]).flatten(), slots[most:]])

    @contextmanager
    def cache_of(self, group: int, layer: LayerSpec) -> Iterator[KVBuffers]:
        """Yield the KV cache; to a layer of the window pool with the numbers of that pool."""
        cache, slots = self.context.kv_cache, self._in_window_pool
        if slots is None or not group:
            yield cache
            return
        with renumbered(cache, layer, slots[: len(cache.k[layer.cache_layer])]) as in_window_pool:
            yield in_window_pool

    # -- the object ------------------------------------------------------------------------------

    @property
    def builders(self) -> Sequence[object]:
        """The backend, and its draft steps."""
        return [self._backend, *getattr(self._backend, "attn_backends", ())]

    @property
    def _steps(self) -> Sequence[Any]:
        """The backends of the draft steps that attend; empty for a backend of single steps.

        The last of ``speculative_num_steps`` steps does not attend, so a backend for it is optional.
        """
        if not self.sizes.drafts:
            return ()
        steps, most = self._backend.attn_backends, self.sizes.num_steps - 1
        if len(steps) < most:
            raise ConfigError(
                f"{type(self._backend).__name__}.attn_backends has {len(steps)} of {most} backends, but a"
                f" draft of speculative_num_steps = {most + 1} reads attn_backends[{most - 1}]",
                hint="make speculative_num_steps - 1 backends or more: every step but the last attends",
            )
        return list(steps[:most])

    @property
    def _is_triple(self) -> bool:
        return _is_triple(self._backend)

    @property
    def buffers(self) -> GraphRunnerBuffers:
        """The runner's buffers, made when the backend's fill value for padding rows is known."""
        if self._buffers is None:
            with self.engine.running():
                fill = int((*self._steps, self._backend)[0].get_cuda_graph_seq_len_fill_value())
            self._buffers = GraphRunnerBuffers(self.sizes, fill, self.engine, self.device)
        return self._buffers

    # -- an engine's part ------------------------------------------------------------------------

    def lent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the runner's persistent buffers, and the table of requests."""
        return {**self.buffers.tensors(), "req_to_token": self.context.req_to_token}

    def host_tensors(self, lent: LentBatch) -> Mapping[str, torch.Tensor]:
        """Return the host tensors of lengths: the persistent buffer, and that of the step."""
        return {
            "seq_lens_cpu": self.buffers.tensors()["seq_lens_cpu"],
            "of the step": lent.rows["seq_lens_cpu"],
        }

    def lend(self, view: ForwardBatch, shape: GraphShape | None) -> LentBatch:
        """Write the persistent buffers as SGLang's runners do."""
        return self.buffers.lend(view, shape)

    def build(self, lent: LentBatch, phase: Phase) -> Built:
        """Prepare a step, and return what the kernels read; for a capture, `in_graph` returns it later."""
        if phase == "capture" and (why := uncalled_pair(self._backend)) is not None:
            raise ConfigError(
                why,
                hint="move their work to init_forward_metadata_out_graph(forward_batch, in_capture):"
                " in_capture is True at a capture",
            )
        if phase == "capture" and not self._has_graphs:
            with self.engine.running():
                sizes = self._sizes_of_calls
                self._backend.init_cuda_graph_state(sizes.max_requests, sizes.max_requests * sizes.width)
            self._has_graphs = True
        batch = self.buffers.batch(lent, phase)
        before = self._metadata()
        self.engine.bind(batch, self.model_runner, in_capture=phase == "capture")
        with self.engine.running():
            self._call(batch, lent, phase)
        if phase == "eager":
            return Built(self._read(batch))
        shape = lent.shape
        assert shape is not None  # noqa: S101  captures and replays have one
        if phase == "capture":
            self._batches[shape] = batch
            self._shape, self._runs = shape, 0
            return Built(())
        self._replayed = batch
        after = self._metadata()
        if self.tasks is None and (
            shape in self._finished_in_graph
            or any(a is None or a is b for a, b in zip(after, before, strict=True))
        ):
            return Built(())  # there is no metadata, or kernels cannot read it yet
        return Built(self._read(self._batches[shape]))

    def built_metadata(self) -> Any:
        """Return the batch of the replay, which SGLang's runner uses to update the tasks of the graph."""
        return self._replayed

    def _call(self, batch: Given, lent: LentBatch, phase: Phase) -> None:
        backend = self._backend
        if phase == "eager":
            backend.init_forward_metadata(batch)
        elif self._is_triple:
            capture = {"in_capture": True} if phase == "capture" else {}
            backend.init_forward_metadata_out_graph(batch, **capture)
        elif self._steps:
            if phase == "capture":
                backend.init_forward_metadata_capture_cuda_graph(batch)
            else:
                backend.init_forward_metadata_replay_cuda_graph(batch, lent.batch_size)
        elif phase == "capture":
            backend.init_forward_metadata_capture_cuda_graph(
                batch.batch_size,
                len(batch.input_ids),
                batch.req_pool_indices,
                batch.seq_lens,
                batch.encoder_lens,
                batch.forward_mode,
                batch.spec_info,
            )
        else:
            backend.init_forward_metadata_replay_cuda_graph(
                batch.batch_size,
                batch.req_pool_indices,
                batch.seq_lens,
                batch.seq_lens_sum,
                batch.encoder_lens,
                batch.forward_mode,
                batch.spec_info,
                batch.seq_lens_cpu,
            )

    def in_graph(self, captured: Built) -> None:
        """Record the metadata work that belongs in the graph, and keep what its kernels read."""
        shape, backend = self._shape, self._backend
        assert shape is not None  # noqa: S101  a capture is under way
        batch = self._batches[shape]
        before = self._metadata()
        with self.engine.running():
            if self._runs and hasattr(backend, "on_after_cuda_graph_warmup"):
                backend.on_after_cuda_graph_warmup()
            if self._is_triple:
                backend.init_forward_metadata_in_graph(batch)
            self._runs += 1
            if any(a is not b for a, b in zip(before, self._metadata(), strict=True)):
                self._finished_in_graph.add(shape)
            captured.reads = self._read(batch)

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Metadata:
        """Prepare an eager step, or all steps of a draft. No backend is called without requests."""
        del fill  # the engine owns the buffers, and keeps them
        return self.steps_of(batch, self._build(batch, None, "eager") if batch.batch_size else Built(()))

    def steps_of(self, view: ForwardBatch, built: Built | None) -> Metadata:
        """Return the reads of a step, or of each step of a draft, which were prepared together."""
        assert built is not None  # noqa: S101  drafts are prepared before their first step
        if not self.sizes.drafts:
            return built
        return DraftMetadata(tuple(_OfStep(built, step) for step in range(view.num_draft_steps)))

    # -- what kernels read -----------------------------------------------------------------------

    def _metadata(self) -> list[Any]:
        return [current_metadata(each) for each in self._steps or [self._backend]]

    def _read(self, batch: Any) -> tuple[Reads, ...]:
        """Return the reads of each draft step, or of the only step: one for each pool."""
        read = type(self).read
        found: list[Reads] = []
        for part, at in zip(self._metadata(), self._each(batch), strict=True):
            reads = read(part, at)
            found += reads if isinstance(reads, tuple) else [reads]
        return tuple(found)

    def _each(self, batch: Any) -> Iterator[Any]:
        """Yield a batch for each draft step, with the slots that it writes, or the batch of the only step."""
        if not self.sizes.drafts:
            yield batch
            return
        slots = batch.out_cache_loc.view(-1, self.sizes.num_steps)
        for step in range(self.sizes.num_steps - 1):
            at = copy.copy(batch)
            at.out_cache_loc = slots[:, step]
            yield at


def current_metadata(backend: Any) -> Any:
    """Return the metadata that a backend's layers currently read."""
    decode = getattr(backend, "forward_decode_metadata", None)
    return getattr(backend, "forward_metadata", None) if decode is None else decode
