"""Exhibits of memory: size, lifetime, owner and remaining contents: GP13, GP14, GP15, GP18, GP19.

Each is one edit of a correct attention backend. Factors that an edit adds are ones, so that outputs stay
right until their memory is lost.

Does not: run exhibits.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.hookspecs import hookimpl
from graphpact_museum.edits import Attended, Then, after_attention, there, workspace
from graphpact_museum.exhibit import Exhibit, Make

# -- GP13: too small ---------------------------------------------------------------------------------


def _sizes(resize: Callable[[Any, str, tuple[int, ...]], tuple[int, ...]]) -> Make:
    """Return a factory of backends with slots of other shapes: ``resize(limits, name, shape)``."""

    def make(base: type[Any]) -> type[Any]:
        class Sizes(base):  # type: ignore[misc]
            """A backend that sizes slots by another formula."""

            def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
                """Return the same slots, of other sizes."""

                def sized(slot: GraphSlot) -> GraphSlot:
                    shape_fn = slot.shape_fn
                    return replace(
                        slot,
                        shape_fn=lambda bs, tokens: resize(limits, slot.name, shape_fn(bs, tokens)),
                    )

                return [sized(slot) for slot in super().declare_slots(limits)]

        return Sizes

    return make


def _pages_without_drafts(limits: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name != "fa3.page_table":
        return shape
    return shape[0], (limits.max_context_len - limits.draft.num_draft_tokens) // limits.page_size


def _pages_of_64_keys(limits: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], 64 // limits.page_size) if name == "fa3.page_table" else shape


def _pages_of_real_requests(limits: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name != "flashinfer.kv_indices":
        return shape
    return (limits.max_bs * limits.max_pages_per_request,)


def _indices_of_one_branch(limits: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name != "flashinfer.kv_indices":
        return shape
    return (shape[0] // limits.draft.topk,)


def _clamps_keys(base: type[Any]) -> type[Any]:
    class ClampsKeys(base):  # type: ignore[misc]
        """Lengths end where a sequence without drafts does."""

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill, and cut lengths to what the table was made for."""
            super().fill_metadata(view, metadata)
            limits = self.context.limits
            metadata.seq_lens_k.clamp_(max=limits.max_context_len - limits.draft.num_draft_tokens)

    return ClampsKeys


def _clamps_tokens(backend: Any, call: Attended) -> torch.Tensor:
    """Copy rows through a workspace with one draft less per request, clamped to its last row."""
    limits = backend.context.limits
    rows = limits.max_bs * (limits.draft.num_draft_tokens - 1)
    at = torch.arange(len(call.out), device=call.out.device).clamp_(max=rows - 1)
    return call.out[at]


def _table_without_the_last_column(base: type[Any]) -> type[Any]:
    class WithoutTheLastColumn(base):  # type: ignore[misc]
        """The table ends before the last position, and what is past its end is taken from there."""

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill, and let no token see the last position."""
            super().fill_metadata(view, metadata)
            metadata.last.clamp_(max=self.context.limits.max_context_len - 2)

    return WithoutTheLastColumn


_SIZES = [
    Exhibit(
        name="fa3-page-table-without-draft-tokens",
        rule="GP13",
        thread="sgl-project/sglang#19016",
        planted="The page table has columns for whole pages of a sequence without its drafts.",
        base="fa3",
        lanes=("target_verify",),
        make=_sizes(_pages_without_drafts),
    ),
    Exhibit(
        name="fa3-page-table-of-a-fixed-length",
        rule="GP13",
        thread="predibase/lorax#363",
        planted="The page table is made for a fixed length, 64, instead of the longest context.",
        base="fa3",
        lanes=("extend",),
        make=_sizes(_pages_of_64_keys),
    ),
    Exhibit(
        name="flashinfer-kv-indices-without-the-fake-request",
        rule="GP13",
        thread="sgl-project/sglang#31012",
        planted="kv_indices has room for the pages of all requests, but not for those of the fake request.",
        base="flashinfer",
        lanes=("mixed",),
        make=_sizes(_pages_of_real_requests),
    ),
    Exhibit(
        name="flashinfer-kv-indices-without-topk",
        rule="GP13",
        thread="sgl-project/sglang#19016",
        planted="kv_indices lacks the factor topk, although every branch has its own indices.",
        base="flashinfer",
        lanes=("draft_decode_tree",),
        make=_sizes(_indices_of_one_branch),
    ),
    Exhibit(
        name="trtllm-key-lengths-are-clamped",
        rule="GP13",
        thread="ModelTC/LightLLM#1583",
        planted="Lengths are clamped to a table without room for drafts, so the last keys are not read.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_clamps_keys,
    ),
    Exhibit(
        name="fa3-workspace-lacks-a-draft-token",
        rule="GP13",
        thread="ModelTC/LightLLM#1583",
        planted="A workspace has one row less per request, and indices past its end are clamped to the last"
        " row.",
        base="fa3",
        lanes=("draft_extend",),
        make=after_attention(_clamps_tokens),
    ),
    Exhibit(
        name="reference-table-without-the-last-column",
        rule="GP13",
        thread="sgl-project/sglang#19016",
        planted="The table lacks its last column, and positions are clamped to the others.",
        base="reference",
        lanes=("decode",),
        make=_table_without_the_last_column,
    ),
]


# -- GP14: gone --------------------------------------------------------------------------------------


def _ones(backend: Any, rows: int) -> torch.Tensor:
    return torch.ones(rows, 1, 1, device=backend.context.device, dtype=backend.context.dtype)


def _grows(backend: Any, call: Attended) -> torch.Tensor:
    """Scale by a workspace, which is replaced where a step needs more than it has."""
    if len(getattr(backend, "workspace", ())) < backend.needed:
        backend.workspace = _ones(backend, backend.needed)
    workspace: torch.Tensor = backend.workspace
    return call.out * workspace[0]


def _for_all_keys(scale: Then) -> Make:
    """Return a factory of backends with a workspace of one element per key.

    Args:
        scale: Scales by ``backend.workspace``, of at least ``backend.needed`` ones.
    """

    def make(base: type[Any]) -> type[Any]:
        class ForAllKeys(after_attention(scale)(base)):  # type: ignore[misc]
            """Notes how much is needed."""

            needed = 1

            def allocate_metadata(self, view: Any, shape: Any, buffers: Any) -> Any:
                """Note it, and allocate."""
                self.needed = max(int(view.seq_lens_cpu.sum()), 1)
                return super().allocate_metadata(view, shape, buffers)

        return ForAllKeys

    return make


def _of_each_size(backend: Any, call: Attended) -> torch.Tensor:
    """Scale by a buffer that is made anew where the number of tokens is another."""
    known = vars(backend).setdefault("sized", {})
    if len(call.out) not in known and not getattr(backend.driver, "is_capturing", False):
        if len(known) >= 2:
            known.clear()
        known[len(call.out)] = _ones(backend, len(call.out))
    scale: torch.Tensor = known[len(call.out)]
    return call.out * scale


def _cached(base: type[Any]) -> type[Any]:
    @functools.lru_cache(maxsize=2)
    def scale_of(rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(rows, 1, 1, dtype=dtype)

    class Cached(base):  # type: ignore[misc]
        """Takes a tensor from a function with a small cache."""

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and scale."""
            return super().forward(q, k, v, layer, metadata) * scale_of(len(q), q.dtype)

    return Cached


def _remakes_weights(base: type[Any]) -> type[Any]:
    class RemakesWeights(base):  # type: ignore[misc]
        """Lays out a weight again whenever metadata of an eager step is made."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.loaded = torch.ones(4, 2, device=context.device, dtype=context.dtype)
            self.weight = self.loaded.t().contiguous()

        def init_metadata_eager(self, batch: Any, **more: Any) -> Any:
            """Lay out, and make metadata."""
            self.weight = self.loaded.t().contiguous()
            return super().init_metadata_eager(batch, **more)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and scale by the weight."""
            return super().forward(q, k, v, layer, metadata) * self.weight[0, 0]

    return RemakesWeights


def _resizes(backend: Any, call: Attended) -> torch.Tensor:
    """Scale by a workspace, which is resized in place where a step needs more than it has."""
    if not hasattr(backend, "workspace"):
        backend.workspace = _ones(backend, 1)
    if len(backend.workspace) < backend.needed:
        backend.workspace.resize_(backend.needed, 1, 1).fill_(1)
    workspace: torch.Tensor = backend.workspace
    return call.out * workspace[0]


def _copies_from_a_local(backend: Any, call: Attended) -> torch.Tensor:
    """Scale by a copy from host memory without a lasting reference."""
    target = _ones(backend, 4)
    if backend.driver is None:
        return call.out * target[0]
    backend.driver.copy_async(target, torch.ones(4, 1, 1, dtype=target.dtype))
    return call.out * target[0]


_LIVES = [
    Exhibit(
        name="flashinfer-workspace-grows-in-an-eager-step",
        rule="GP14",
        thread="flashinfer-ai/flashinfer#4399",
        planted="A workspace is replaced by a larger one when an eager step has more keys.",
        base="flashinfer",
        lanes=("decode",),
        make=_for_all_keys(_grows),
    ),
    Exhibit(
        name="fa3-buffers-by-size-are-flushed",
        rule="GP14",
        thread="intel/llm-scaler#505",
        planted="A cache has one buffer per number of tokens, and drops all when it has too many.",
        base="fa3",
        lanes=("target_verify",),
        make=after_attention(_of_each_size),
    ),
    Exhibit(
        name="trtllm-lru-cache-of-tensors",
        rule="GP14",
        thread="ROCm/aiter#5393",
        planted="A tensor comes from a function under lru_cache(maxsize=2), which evicts it.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_cached,
    ),
    Exhibit(
        name="flashinfer-weights-are-laid-out-again",
        rule="GP14",
        thread="vllm-project/vllm-ascend#13902",
        planted="An eager step makes self.weight = weight.contiguous() again, in new memory.",
        base="flashinfer",
        lanes=("target_verify_tree",),
        make=_remakes_weights,
    ),
    Exhibit(
        name="trtllm-workspace-is-resized",
        rule="GP14",
        thread="flashinfer-ai/flashinfer#4399",
        planted="An eager step with more keys resizes a workspace in place, which moves its memory.",
        base="trtllm_mla",
        lanes=("extend",),
        make=_for_all_keys(_resizes),
    ),
    Exhibit(
        name="fa3-host-memory-of-a-copy-is-a-local",
        rule="GP14",
        thread="PaddlePaddle/Paddle#78568",
        planted="A recorded copy reads host memory that was a local variable.",
        base="fa3",
        lanes=("draft_extend",),
        make=after_attention(_copies_from_a_local),
    ),
]


# -- GP15: another graph's ---------------------------------------------------------------------------


def _cached_by_stream(backend: Any, call: Attended) -> torch.Tensor:
    """Scale by a buffer that is cached for each stream: the first on the capturing one is a graph's own."""
    known = vars(backend).setdefault("by_stream", {})
    stream = getattr(backend.driver, "is_capturing", False)
    if stream not in known:
        known[stream] = _ones(backend, backend.context.limits.max_num_tokens)
    scale: torch.Tensor = known[stream]
    return call.out * scale[: len(call.out)]


def _shares_between_graphs(base: type[Any]) -> type[Any]:
    class SharesBetweenGraphs(base):  # type: ignore[misc]
        """A backend whose metadata work uses the scratch tensor of the first recording."""

        scratch: torch.Tensor | None = None

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill by way of the scratch tensor."""
            super().fill_metadata(view, metadata)
            lens = metadata.cache_seqlens
            if self.driver is None or not self.driver.is_capturing:
                return
            if self.scratch is None or len(self.scratch) < len(lens):
                self.scratch = torch.zeros_like(lens)
            self.scratch[: len(lens)].copy_(lens)
            lens.copy_(self.scratch[: len(lens)])

    return SharesBetweenGraphs


def _reads_the_last_graph(backend: Any, call: Attended) -> torch.Tensor:
    """Keep what a layer gave while it was recorded, for the next graph to begin with."""
    kept = vars(backend).setdefault("kept", {})
    if not getattr(backend.driver, "is_capturing", False):
        return call.out
    before = kept.get(call.layer.layer_id)
    kept[call.layer.layer_id] = call.out
    return call.out if before is None else call.out + 0 * before[:1]


def _output_buffer(base: type[Any]) -> type[Any]:
    class OutputBuffer(base):  # type: ignore[misc]
        """Returns rows of one buffer, the one that the first capture made."""

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend into the buffer of the layer."""
            out = super().forward(q, k, v, layer, metadata)
            if not getattr(self.driver, "is_capturing", False):
                return out
            buffers = self.outputs = getattr(self, "outputs", {})
            buffer = buffers.setdefault((layer.layer_id, id(metadata) if not len(out) else 0), out)
            return buffer[: len(out)].copy_(out) if len(buffer) >= len(out) else out

    return OutputBuffer


_OWNERS = [
    Exhibit(
        name="flashinfer-cache-by-stream",
        rule="GP15",
        thread="ROCm/aiter#5393",
        planted="A buffer is cached by stream, so that the first capture allocates it in its own pool.",
        base="flashinfer",
        lanes=("decode",),
        make=after_attention(_cached_by_stream),
    ),
    Exhibit(
        name="fa3-scratch-of-the-first-capture",
        rule="GP15",
        thread="sgl-project/sglang#22930",
        planted="Recorded metadata work uses a scratch tensor that an earlier capture allocated.",
        base="fa3",
        lanes=("target_verify",),
        make=_shares_between_graphs,
    ),
    Exhibit(
        name="trtllm-begins-with-the-last-graph-s-output",
        rule="GP15",
        thread="sgl-project/sglang#22218",
        planted="A graph reads an intermediate tensor of the graph that was captured before it.",
        base="trtllm_mla",
        lanes=("draft_extend",),
        make=after_attention(_reads_the_last_graph),
    ),
    Exhibit(
        name="flashinfer-output-buffer-of-the-first-capture",
        rule="GP15",
        thread="sgl-project/sglang#22930",
        planted="All graphs return rows of one output buffer, which the first capture allocated.",
        base="flashinfer",
        lanes=("draft_decode",),
        make=_output_buffer,
    ),
]


# -- GP18: not armed ---------------------------------------------------------------------------------


def _semaphore(backend: Any) -> Sequence[GraphSlot]:
    del backend
    return [workspace("semaphore", 1, dtype=torch.int32)]


def _waits_for_zero(backend: Any, call: Attended) -> torch.Tensor:
    """Attend where the counter is zero, and count; the host set it to zero when it was made."""
    counter = there(backend, "semaphore")
    if not getattr(backend.driver, "is_capturing", False):
        counter.zero_()
    out = call.out * (counter <= len(backend.context.layers)).to(call.out.dtype)
    counter.add_(1)
    return out


def _draws_by_itself(base: type[Any]) -> type[Any]:
    class DrawsByItself(base):  # type: ignore[misc]
        """Rounds at random, by a generator of its own."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.generator = torch.Generator(device=context.device).manual_seed(0)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and add less than rounding does."""
            out = super().forward(q, k, v, layer, metadata)
            noise = torch.rand(out.shape, generator=self.generator, device=out.device)
            return out + 1e-7 * noise.to(out.dtype)

    return DrawsByItself


def _accumulators(backend: Any) -> Sequence[GraphSlot]:
    layers, most = backend.context.layers, backend.context.limits.max_num_tokens
    row = (layers[0].num_q_heads, layers[0].v_head_dim)
    return [workspace("sums", len(layers), most, *row, dtype=backend.context.dtype)]


def _accumulates(backend: Any, call: Attended) -> torch.Tensor:
    sums = there(backend, "sums")[call.layer.layer_id, : len(call.out)]
    return sums.add_(call.out).clone() if len(call.out) == len(sums) else call.out


def _zeroes_on_the_host(base: type[Any]) -> type[Any]:
    class ZeroesOnTheHost(after_attention(_accumulates, _accumulators)(base)):  # type: ignore[misc]
        """Adds partial results to sums that hooks of capture and of eager steps set to zero."""

        def _make_metadata(self, *arguments: Any) -> Any:
            """Set them to zero."""
            there(self, "sums").zero_()
            return super()._make_metadata(*arguments)

    return ZeroesOnTheHost


def _flag(backend: Any) -> Sequence[GraphSlot]:
    del backend
    return [workspace("flag", 1, dtype=torch.int32), workspace("base", 1, value=0.0)]


def _sets_a_flag(backend: Any, call: Attended) -> torch.Tensor:
    """Set an offset if the flag is 0, and set the flag, which is never reset."""
    flag, base = there(backend, "flag"), there(backend, "base")
    if not getattr(backend.driver, "is_capturing", False):
        flag.zero_()
    base.copy_(torch.where(flag == 0, call.k.float().mean(), base))
    flag.fill_(1)
    shift = base.to(call.out.dtype)
    return (call.out - shift) + shift


def _seeds(backend: Any, call: Attended) -> torch.Tensor:
    """Round at random, by the device's generator, which the host seeds for each layer."""
    del backend
    torch.manual_seed(17 + call.layer.layer_id)
    return call.out + 1e-7 * torch.rand_like(call.out)


_STATES = [
    Exhibit(
        name="trtllm-semaphore-is-not-re-armed",
        rule="GP18",
        thread="ROCm/aiter#4916",
        planted="A counter that a kernel expects at zero is zeroed on the host, and by no graph.",
        base="trtllm_mla",
        lanes=("decode",),
        make=after_attention(_waits_for_zero, _semaphore),
    ),
    Exhibit(
        name="flashinfer-private-generator",
        rule="GP18",
        thread="NVIDIA/Megatron-LM#5697",
        planted="Random numbers come from a generator that is not registered with the graph, and never"
        " change.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_draws_by_itself,
    ),
    Exhibit(
        name="fa3-sums-are-zeroed-by-the-host",
        rule="GP18",
        thread="ROCm/aiter#4916",
        planted="Partial results are added to sums that the capture hook zeroes and the replay hook does"
        " not.",
        base="fa3",
        lanes=("draft_extend",),
        make=_zeroes_on_the_host,
    ),
    Exhibit(
        name="fa3-flag-stays-up",
        rule="GP18",
        thread="ROCm/aiter#4916",
        planted="A flag marks that an offset was set in this launch; flag and offset are never reset.",
        base="fa3",
        lanes=("mixed",),
        make=after_attention(_sets_a_flag, _flag),
    ),
    Exhibit(
        name="trtllm-host-seeds-in-the-region",
        rule="GP18",
        thread="pytorch/pytorch#172390",
        planted="The host seeds the generator while the graph is recorded, which a replay does not repeat.",
        base="trtllm_mla",
        lanes=("draft_extend",),
        make=after_attention(_seeds),
    ),
]


# -- GP19: traces of a capture -----------------------------------------------------------------------


def _state(backend: Any) -> Sequence[GraphSlot]:
    rows, dim = backend.context.req_to_token.shape[0] * 2, backend.context.layers[0].head_dim
    return [workspace("state", rows, dim)]


def _advances(backend: Any, call: Attended) -> torch.Tensor:
    """Advance a recurrent state in place, also in warm-up and capture."""
    state = there(backend, "state")
    state.mul_(0.5).add_(call.k.float().mean(dim=(0, 1)))
    return call.out


def _counts_undeclared(base: type[Any]) -> type[Any]:
    class Counts(base):  # type: ignore[misc]
        """A backend that counts steps in undeclared device memory."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.served = torch.zeros(1, device=context.device)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and count."""
            self.served.add_(1)
            return super().forward(q, k, v, layer, metadata)

    return Counts


def _writes_by_dirty_indices(base: type[Any]) -> type[Any]:
    class WritesByDirtyIndices(base):  # type: ignore[misc]
        """Has write indices of its own, which the hook of replays fills and that of captures does not."""

        fill_is_device_only = False

        def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
            """Return one more, of write indices."""
            slot = metadata_slot(
                "museum.write_indices",
                lambda _, tokens: (tokens,),
                torch.int64,
                role="table",
                axis="tokens",
            )
            return [*super().declare_slots(limits), slot]

        def allocate_metadata(self, view: Any, shape: Any, buffers: Any) -> Any:
            """Bind it."""
            metadata = super().allocate_metadata(view, shape, buffers)
            metadata.out_cache_loc = buffers("museum.write_indices")
            return metadata

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill it too."""
            super().fill_metadata(view, metadata)
            if not self.binds:
                metadata.out_cache_loc.copy_(view.out_cache_loc)

        binds = False

        @hookimpl
        def init_metadata_capture(self, view: Any, shape: Any) -> Any:
            """Bind, and leave the write indices as they are."""
            self.binds = True
            try:
                return super().init_metadata_capture(view, shape)
            finally:
                self.binds = False

    return WritesByDirtyIndices


def _tunes_on_live_pages(base: type[Any]) -> type[Any]:
    class TunesOnLivePages(base):  # type: ignore[misc]
        """Tries kernels before a capture, on pages that it clears for that."""

        @hookimpl
        def init_metadata_capture(self, view: Any, shape: Any) -> Any:
            """Clear, and bind."""
            for cache in self.context.kv_cache.k:
                cache[self.context.limits.page_size :].zero_()
            return super().init_metadata_capture(view, shape)

    return TunesOnLivePages


def _reserves_a_row(base: type[Any]) -> type[Any]:
    class ReservesARow(base):  # type: ignore[misc]
        """Takes the last row of req_to_token for what is captured."""

        @hookimpl
        def init_metadata_capture(self, view: Any, shape: Any) -> Any:
            """Take it, and bind."""
            self.context.req_to_token[-1].zero_()
            return super().init_metadata_capture(view, shape)

    return ReservesARow


_TRACES = [
    Exhibit(
        name="flashinfer-state-advances-in-captures",
        rule="GP19",
        thread="microsoft/onnxruntime#32243",
        planted="A recurrent state is advanced in place by warm-up and capture, and not put back.",
        base="flashinfer",
        lanes=("draft_extend",),
        make=after_attention(_advances, _state),
    ),
    Exhibit(
        name="fa3-counter-advances-in-captures",
        rule="GP19",
        thread="microsoft/onnxruntime#32243",
        planted="Every run of the region, also a capture, advances a counter of the backend.",
        base="fa3",
        lanes=("decode",),
        make=_counts_undeclared,
    ),
    Exhibit(
        name="fa3-captures-through-dirty-write-indices",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="A capture runs with the write indices of the last batch, and overwrites its KV slots.",
        base="fa3",
        lanes=("target_verify",),
        make=_writes_by_dirty_indices,
    ),
    Exhibit(
        name="trtllm-captures-through-dirty-write-indices",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="A capture runs with the write indices of the last batch, and overwrites its KV slots.",
        base="trtllm_mla",
        lanes=("extend",),
        make=_writes_by_dirty_indices,
    ),
    Exhibit(
        name="trtllm-tunes-on-live-pages",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="Kernel tuning before a capture clears pages that live requests own.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_tunes_on_live_pages,
    ),
    Exhibit(
        name="flashinfer-capture-takes-a-request-row",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="The capture hook zeroes a row of req_to_token that a live request may own.",
        base="flashinfer",
        lanes=("mixed",),
        make=_reserves_a_row,
    ),
]

EXHIBITS = [*_SIZES, *_LIVES, *_OWNERS, *_STATES, *_TRACES]
"""All exhibits of this room, in the order of their rules."""
