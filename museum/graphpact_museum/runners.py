"""Exhibits of runners, of the registry, of the capture sizes, and of the batches that a scheduler makes.

Bugs of runners are planted in the decode runners and in the suite's own runner, which captures every mode.
Code outside plugins is edited in place while the exhibit runs.

Does not: plant bugs in attention backends, except where ranks record different work.
"""

import bisect
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, fills
from graphpact.errors import EngineError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.parallel import get_parallel, local_num_token_non_padded
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.lane.reference import ReferenceSizes
from graphpact_conformance.world.problems import Problem
from graphpact_museum.exhibit import Around, Exhibit, Make

_Fit: TypeAlias = GraphShape | EagerReason

# -- edits of a runner -------------------------------------------------------------------------------


def populating(
    edit: Callable[[Any, Callable[[], None], CudaGraphBufferRegistry, ForwardBatch, GraphShape], None],
) -> Make:
    """Return a factory of runners with another ``populate``.

    Args:
        edit: Called with the runner, what fills the slots as they should be, the registry, the batch and the
            shape.
    """

    def make(base: type[Any]) -> type[Any]:
        class Populates(base):  # type: ignore[misc]
            """A runner with an edited `populate`."""

            @hookimpl
            def populate(
                self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
            ) -> None:
                """Fill the slots, with the edit."""

                def fill(source: ForwardBatch = batch) -> None:
                    base.populate(self, registry=registry, batch=source, shape=shape)

                edit(self, fill, registry, batch, shape)

        return Populates

    return make


def after_fill(edit: Callable[[Any, CudaGraphBufferRegistry, ForwardBatch, GraphShape], None]) -> Make:
    """Return a factory of runners that edit filled slots: ``(runner, registry, batch, shape)``."""

    def fill_first(
        runner: Any,
        fill: Callable[[], None],
        registry: CudaGraphBufferRegistry,
        batch: ForwardBatch,
        shape: GraphShape,
    ) -> None:
        fill()
        edit(runner, registry, batch, shape)

    return populating(fill_first)


def _rows(
    registry: CudaGraphBufferRegistry, name: str, batch: ForwardBatch, shape: GraphShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the real and the padded rows of a slot."""
    slot = registry.get_slot(name)
    whole = slot.slice_for(shape.batch_size, shape.num_tokens)
    real = batch.batch_size if slot.axis == "bs" else batch.num_tokens
    return whole[:real], whole[real:]


def keeps_tails(*names: str) -> Make:
    """Return a factory of runners that do not reset the padding rows of some slots."""

    def edit(_: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
        tails = [_rows(registry, name, batch, shape)[1] for name in names]
        kept = [tail.clone() for tail in tails]
        fill()
        for tail, old in zip(tails, kept, strict=True):
            tail.copy_(old)

    return populating(edit)


def _is_new(runner: Any, shape: GraphShape) -> bool:
    """Return whether a runner fills for a shape for the first time: at its capture. Note the shape."""
    seen = vars(runner).setdefault("shapes_seen", set())
    is_new = shape not in seen
    seen.add(shape)
    return is_new


def keeps(name: str) -> Make:
    """Return a factory of runners that write a slot, where there is one, only at capture."""

    def edit(runner: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
        if not registry.has_slot(name):
            fill()
            return
        real, _ = _rows(registry, name, batch, shape)
        kept = real.clone()
        fill()
        if not _is_new(runner, shape):
            real.copy_(kept)

    return populating(edit)


def _pads(name: str, value: Callable[[Any, torch.Tensor], torch.Tensor | int]) -> Make:
    """Return a factory of runners that pad a slot with another value, from the runner and the live rows."""

    def edit(runner: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
        fill()
        real, tail = _rows(registry, name, batch, shape)
        pad = value(runner, real)
        if isinstance(pad, int):
            tail.fill_(pad)
        elif len(pad):
            tail.copy_(pad.expand_as(tail))

    return populating(edit)


def _at_capture(edit: Callable[[Any, ForwardBatch, GraphShape], None]) -> Make:
    """Return a factory of runners that call ``edit`` after the fill of a capture."""

    def at_capture(runner: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
        fill()
        if _is_new(runner, shape):
            edit(registry, batch, shape)

    return populating(at_capture)


def viewing(edit: Callable[[ForwardBatch, ForwardBatch], ForwardBatch]) -> Make:
    """Return a factory of runners with another view, made from the right one and the batch."""

    def make(base: type[Any]) -> type[Any]:
        class Views(base):  # type: ignore[misc]
            """A runner with an edited view."""

            @hookimpl
            def prepare_replay(
                self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
            ) -> ForwardBatch:
                """Prepare, and edit."""
                view = base.prepare_replay(self, registry=registry, batch=batch, shape=shape)
                return edit(view, batch)

        return Views

    return make


def fitting(edit: Callable[[Any, ForwardBatch, _Fit], _Fit]) -> Make:
    """Return a factory of runners with another answer, from runner, batch and the right answer."""

    def make(base: type[Any]) -> type[Any]:
        class Chooses(base):  # type: ignore[misc]
            """A runner with an edited `fit`."""

            def fit(self, batch: ForwardBatch) -> _Fit:
                """Return the edited answer."""
                return edit(self, batch, super().fit(batch))

        return Chooses

    return make


def sizing(edit: Callable[[list[int]], list[int]]) -> Make:
    """Return a factory of runners with other default capture sizes, made from the right ones."""

    def make(base: type[Any]) -> type[Any]:
        class Sizes(base):  # type: ignore[misc]
            """Captures other sizes."""

            def default_batch_sizes(self) -> list[int]:
                """Return other sizes."""
                return edit(super().default_batch_sizes())

        return Sizes

    return make


def dummies(edit: Callable[[Any, ForwardBatch], ForwardBatch]) -> Make:
    """Return a factory of runners with other dummy batches, made from the runner and the right one."""

    def make(base: type[Any]) -> type[Any]:
        class Captures(base):  # type: ignore[misc]
            """Captures another dummy batch."""

            def dummy(self, shape: GraphShape) -> ForwardBatch:
                """Return another batch."""
                return edit(self, super().dummy(shape))

        return Captures

    return make


def composing(edit: Callable[[Any, RegionContext, Region], Region]) -> Make:
    """Return a factory of runners with another region, from runner, step and the right region."""

    def make(base: type[Any]) -> type[Any]:
        class Composes(base):  # type: ignore[misc]
            """A runner with an edited `compose`."""

            def compose(self, forward: Forward, step: RegionContext) -> Region:
                """Return the edited region."""
                return edit(self, step, super().compose(forward, step))

        return Composes

    return make


def _giving(edit: Callable[[Any, RegionContext, torch.Tensor], torch.Tensor]) -> Make:
    """Return a factory of runners with other outputs, from runner, step and the right one."""

    def compose(runner: Any, step: RegionContext, region: Region) -> Region:
        def edited() -> StepOutputs:
            outputs = region()
            given = {n: (edit(runner, step, t), outputs.axes[n]) for n, t in outputs.items()}
            return StepOutputs(**given)

        return edited

    return composing(compose)


def slotting(edit: Callable[[Any, list[GraphSlot]], Sequence[GraphSlot]]) -> Make:
    """Return a factory of runners with other slots, made from the runner and the right ones."""

    def make(base: type[Any]) -> type[Any]:
        class Declares(base):  # type: ignore[misc]
            """Declares other slots."""

            def slots(self) -> Sequence[GraphSlot]:
                """Return other slots."""
                return edit(self, [*super().slots()])

        return Declares

    return make


# -- edits of what is no plugin ----------------------------------------------------------------------


def _method(owner: type[Any], name: str, edit: Callable[..., Any]) -> Around:
    """Return a context that replaces a method by ``edit``, called with the original and its arguments."""
    right = getattr(owner, name)

    def edited(*args: Any, **more: Any) -> Any:
        return edit(right, *args, **more)

    return lambda: patch.object(owner, name, edited)


def _batches(edit: Callable[[ForwardBatch, Problem], ForwardBatch]) -> Around:
    """Return a context in which the suite makes other batches."""
    return _method(Problem, "batch", lambda right, problem, **more: edit(right(problem, **more), problem))


# -- GP12: which graph -------------------------------------------------------------------------------


def _bisect_right(right: Any, sizes: CaptureSizes, batch: ForwardBatch, *variant: str) -> _Fit:
    fit: _Fit = right(sizes, batch, *variant)
    if isinstance(fit, EagerReason):
        return fit
    counts = [shape.batch_size for shape in sizes.shapes]
    at = bisect.bisect_right(counts, batch.batch_size)
    return sizes.shapes[at] if at < len(counts) else EagerReason.OVER_LARGEST


def _any_mode(right: Any, sizes: Any, batch: ForwardBatch, *variant: str) -> _Fit:
    mode = sizes.shapes[0].mode
    fit: _Fit = right(sizes, replace(batch, forward_mode=mode), *variant)
    return fit


def _any_width(right: Any, sizes: ReferenceSizes, batch: ForwardBatch) -> _Fit:
    fit: _Fit = right(sizes, batch)
    if fit != EagerReason.OTHER_WIDTH:
        return fit
    width = sizes.shapes[0].num_tokens // sizes.shapes[0].batch_size
    return next(
        (s for s in sizes.shapes if s.num_tokens >= batch.num_tokens // width * width),
        EagerReason.OVER_LARGEST,
    )


def _as_decode(runner: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    if right == EagerReason.WRONG_MODE and batch.num_tokens == batch.batch_size:
        sizes = CaptureSizes(tuple(runner.shapes()))
        return sizes.fit(replace(batch, forward_mode=ForwardMode.DECODE))
    return right


def _exact_only(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    is_exact = isinstance(right, GraphShape) and right.batch_size == batch.batch_size
    return right if is_exact or not batch.batch_size else EagerReason.OVER_LARGEST


def _largest(runner: Any, _: ForwardBatch, right: _Fit) -> _Fit:
    largest: GraphShape = runner.shapes()[-1]
    return largest if isinstance(right, GraphShape) else right


def _by_tokens(runner: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    if isinstance(right, EagerReason):
        return right
    fits = [s for s in runner.shapes() if s.batch_size >= batch.num_tokens]
    return fits[0] if fits else EagerReason.OVER_LARGEST


def _by_length(runner: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Compare lengths with a count of requests."""
    longest = max(batch.seq_lens_cpu.tolist(), default=0)
    is_long = longest > runner.shapes()[-1].batch_size
    return EagerReason.OVER_LARGEST if is_long else right


_LONG = EagerReason("museum_long_context", "a request is longer than the captured context")


def _leaves_long_requests(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Leave batches with a long request to eager steps, and those of ranks that gather."""
    is_long = max(batch.seq_lens_cpu.tolist(), default=0) > 40
    return _LONG if is_long or batch.global_num_tokens_cpu else right


def _leaves_its_long_requests(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Leave batches with a long request to eager steps, whatever the other ranks have."""
    return _LONG if max(batch.seq_lens_cpu.tolist(), default=0) > 40 else right


def _looks_at_the_last_request(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Leave batches whose last request is long to eager steps, and those of ranks that gather."""
    is_long = batch.batch_size and int(batch.seq_lens_cpu[-1]) > 40
    return _LONG if is_long or batch.global_num_tokens_cpu else right


def _limits_padding_by_its_own_tokens(runner: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Leave a batch to an eager step if the padding is too much for this rank's tokens."""
    if isinstance(right, EagerReason) or not batch.num_tokens:
        return right
    is_too_much = right.num_tokens > batch.num_tokens * runner.context.max_padding_ratio
    return runner.declines[0] if is_too_much else right


def _leaves_all_of_rank_1(_: Any, __: ForwardBatch, right: _Fit) -> _Fit:
    return _LONG if get_parallel().attn_tp_rank else right


def _declining(edit: Callable[[Any, ForwardBatch, _Fit], _Fit]) -> Make:
    """Return a factory of runners with another answer, which declare the reason `_LONG`."""

    def make(base: type[Any]) -> type[Any]:
        class Declines(fitting(edit)(base)):  # type: ignore[misc]
            """A runner that declines batches of long requests."""

            declines = (_LONG,)

        return Declines

    return make


def _unlisted(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    """Answer with a shape of exactly the batch's size, which shapes() does not have."""
    if isinstance(right, EagerReason) or not batch.batch_size:
        return right
    return replace(right, batch_size=batch.batch_size, num_tokens=batch.num_tokens)


def _skips_largest(base: type[Any]) -> type[Any]:
    class Skips(base):  # type: ignore[misc]
        """Plans with all sizes, and captures all but the largest."""

        def shapes(self) -> Sequence[GraphShape]:
            """Return the shapes below an upper bound, or the only one."""
            shapes: Sequence[GraphShape] = super().shapes()
            return shapes[:-1] or shapes

        def fit(self, batch: ForwardBatch) -> _Fit:
            """Choose among all sizes."""
            return CaptureSizes(tuple(super().shapes())).fit(batch)

    return Skips


_GP12 = [
    Exhibit(
        name="capture-sizes-bisect-right",
        rule="GP12",
        thread="vllm-project/vllm#54933",
        planted="A batch that fills a shape exactly takes the next larger shape, and the largest batch"
        " takes none.",
        base="cuda_graph",
        lanes=("decode",),
        around=_method(CaptureSizes, "fit", _bisect_right),
        site="capture sizes",
    ),
    Exhibit(
        name="capture-sizes-ignore-the-mode",
        rule="GP12",
        thread="paiml/aprender#2030",
        planted="Graphs are keyed only by the number of requests, so that a prefill of one token per"
        " request replays the decode graph.",
        base="cpu_graph",
        lanes=("decode",),
        around=_method(CaptureSizes, "fit", _any_mode),
        site="capture sizes",
    ),
    Exhibit(
        name="capture-sizes-ignore-the-width",
        rule="GP12",
        thread="vllm-project/vllm#53407",
        planted="A batch with another number of tokens per request than was captured takes a graph by its"
        " tokens.",
        base="reference_runner",
        lanes=("target_verify",),
        around=_method(ReferenceSizes, "fit", _any_width),
        site="capture sizes",
    ),
    Exhibit(
        name="capture-sizes-ignore-the-mode-of-prefill",
        rule="GP12",
        thread="lightseekorg/tokenspeed#936",
        planted="A ragged batch of any mode takes the graph that was captured for mixed batches.",
        base="reference_runner",
        lanes=("mixed",),
        around=_method(ReferenceSizes, "fit", _any_mode),
        site="capture sizes",
    ),
    Exhibit(
        name="cuda-graph-classifies-decode-by-its-size",
        rule="GP12",
        thread="vllm-project/vllm#36165",
        planted="A batch with one token per request counts as decode, whatever its mode is.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_as_decode),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-captures-multiples",
        rule="GP12",
        thread="GeeeekExplorer/nano-vllm#216",
        planted="The default capture sizes end at the largest multiple of their step that is not above the"
        " maximum.",
        base="cuda_graph",
        lanes=("decode",),
        make=sizing(lambda sizes: [s for s in sizes if s in (1, 2, 4) or s % 8 == 0]),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-captures-without-its-maximum",
        rule="GP12",
        thread="sgl-project/sglang#21005",
        planted="The end of the default capture sizes is exclusive: the largest step is never replayed.",
        base="cpu_graph",
        lanes=("decode",),
        make=sizing(lambda sizes: sizes[:-1] or sizes),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-captures-below-the-largest",
        rule="GP12",
        thread="sgl-project/sglang#21005",
        planted="fit() returns the largest shape, which shapes() does not contain and which is never"
        " captured.",
        base="cuda_graph",
        lanes=("decode",),
        make=_skips_largest,
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-compares-lengths-with-a-batch-size",
        rule="GP12",
        thread="vllm-project/vllm#9285",
        planted="Whether a batch may replay is decided by its longest sequence, compared with the largest"
        " number of"
        " requests.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_by_length),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-declines-by-the-last-request",
        rule="GP12",
        thread="vllm-project/vllm#9285",
        planted="Long requests are left to eager steps, but only the last request of a batch is looked at.",
        base="cuda_graph",
        lanes=("decode",),
        make=_declining(_looks_at_the_last_request),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-compares-tokens-with-requests",
        rule="GP12",
        thread="vllm-project/vllm#9285",
        planted="The shape of target verify is looked up by its draft tokens among request counts.",
        base="reference_runner",
        lanes=("target_verify",),
        make=fitting(_by_tokens),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-falls-back-for-padded-sizes",
        rule="GP12",
        thread="vllm-project/vllm#53407",
        planted="A batch that would have padding rows runs eagerly although a captured shape holds it.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_exact_only),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-fits-shapes-that-are-not-captured",
        rule="GP12",
        thread="vllm-project/vllm#53407",
        planted="fit() returns a shape of the batch's exact size, which is not in shapes(): the batch runs"
        " eagerly although a captured shape holds it.",
        base="reference_runner",
        lanes=("target_verify",),
        make=fitting(_unlisted),
        site="runner",
    ),
    Exhibit(
        name="draft-runner-takes-the-largest-bucket",
        rule="GP12",
        thread="vllm-project/vllm#36165",
        planted="Every batch is looked up under the largest key that was registered.",
        base="reference_runner",
        lanes=("draft_decode",),
        make=fitting(_largest),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-leaves-long-requests-undeclared",
        rule="GP12",
        thread="vllm-project/vllm#9285",
        planted="Batches with a long request run eagerly although a captured shape holds them, with a reason"
        " that the runner does not declare.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_leaves_long_requests),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-declines-every-batch",
        rule="GP12",
        thread="vllm-project/vllm#53407",
        planted="Every batch runs eagerly with a declared reason: the captured graphs are never replayed.",
        base="cpu_graph",
        lanes=("decode",),
        make=_declining(lambda *_: _LONG),
        site="runner",
    ),
]

# -- GP17: ranks -------------------------------------------------------------------------------------


def _local_tokens(right: Any, sizes: Any, batch: ForwardBatch, *variant: str) -> _Fit:
    fit: _Fit = right(sizes, replace(batch, global_num_tokens_cpu=None), *variant)
    return fit


def _idle_takes_the_smallest(runner: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    if batch.batch_size or isinstance(right, EagerReason):
        return right
    smallest: GraphShape = runner.shapes()[0]
    return smallest


def _idle_runs_eagerly(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    alone = batch.global_num_tokens_cpu is None
    return right if batch.batch_size or alone else EagerReason.WRONG_MODE


def _fewer_on_rank_1(base: type[Any]) -> type[Any]:
    class Fewer(base):  # type: ignore[misc]
        """Captures fewer shapes on one rank."""

        def shapes(self) -> Sequence[GraphShape]:
            """Return fewer shapes on rank 1."""
            shapes: Sequence[GraphShape] = super().shapes()
            return shapes[get_parallel().attn_tp_rank :]

    return Fewer


def _records_on_rank_0(base: type[Any]) -> type[Any]:
    class Records(base):  # type: ignore[misc]
        """Records one operation more on one rank."""

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend; a cache of registered buffers is hit on one rank alone."""
            out: torch.Tensor = super().forward(*args)
            return out if get_parallel().attn_tp_rank else out + 0

    return Records


def _gathers_more_on_the_last_rank(base: type[Any]) -> type[Any]:
    class Gathers(base):  # type: ignore[misc]
        """Gives the last rank a row more."""

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend, and gather this rank's rows."""
            out: torch.Tensor = super().forward(*args)
            parallel = get_parallel()
            rows = len(out) // parallel.attn_tp_size
            if parallel.attn_tp_rank == parallel.attn_tp_size - 1 and parallel.attn_tp_size > 1:
                rows += 1
            mine = out[len(out) - rows :].clone()
            return torch.cat([out[: len(out) - rows], mine])

    return Gathers


def _splits_the_batch(right: Any, registry: Any, batch: Any, **counts: int) -> None:
    right(registry, batch, **counts)
    if registry.has_slot("num_token_non_padded") and batch.num_token_non_padded_cpu is not None:
        raw = counts["raw_num_tokens"]
        local = local_num_token_non_padded(batch.num_token_non_padded_cpu, raw)
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(local)


_GP17 = [
    Exhibit(
        name="capture-sizes-look-at-this-rank-alone",
        rule="GP17",
        thread="vllm-project/vllm#25906",
        planted="The shape depends on the rank's own tokens: ranks with other loads take other graphs.",
        base="cuda_graph",
        lanes=("decode",),
        around=_method(CaptureSizes, "fit", _local_tokens),
        site="capture sizes",
    ),
    Exhibit(
        name="verify-capture-sizes-look-at-this-rank-alone",
        rule="GP17",
        thread="vllm-project/vllm#18724",
        planted="The shape of target verify depends on the rank's own drafts.",
        base="reference_runner",
        lanes=("target_verify",),
        around=_method(ReferenceSizes, "fit", _local_tokens),
        site="capture sizes",
    ),
    Exhibit(
        name="cpu-graph-idle-rank-takes-the-smallest-bucket",
        rule="GP17",
        thread="sgl-project/sglang#37933",
        planted="A rank without requests replays the smallest graph while the others replay larger ones.",
        base="cpu_graph",
        lanes=("decode",),
        make=fitting(_idle_takes_the_smallest),
        site="runner",
    ),
    Exhibit(
        name="draft-runner-idle-rank-runs-eagerly",
        rule="GP17",
        thread="sgl-project/sglang#37933",
        planted="A rank without requests runs eagerly while the others replay a graph that gathers.",
        base="reference_runner",
        lanes=("draft_extend",),
        make=fitting(_idle_runs_eagerly),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-declines-by-its-own-requests",
        rule="GP17",
        thread="vllm-project/vllm#25906",
        planted="A rank with a long request declines, with a declared reason, while the others replay a graph"
        " that gathers.",
        base="cuda_graph",
        lanes=("decode",),
        make=_declining(_leaves_its_long_requests),
        site="runner",
    ),
    Exhibit(
        name="breakable-limits-padding-by-its-own-tokens",
        rule="GP17",
        thread="sgl-project/sglang#37933",
        planted="A rank with few tokens finds that the shape of the largest rank has too much padding.",
        base="breakable_cuda_graph",
        lanes=("extend",),
        make=fitting(_limits_padding_by_its_own_tokens),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-declines-on-one-rank",
        rule="GP17",
        thread="sgl-project/sglang#25581",
        planted="One rank declines every batch, with a declared reason, while the others replay.",
        base="reference_runner",
        lanes=("target_verify",),
        make=_declining(_leaves_all_of_rank_1),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-captures-by-the-rank",
        rule="GP17",
        thread="sgl-project/sglang#25581",
        planted="One rank captures one shape less than the others, so the sequences of captures differ.",
        base="cuda_graph",
        lanes=("decode",),
        make=_fewer_on_rank_1,
        site="runner",
    ),
    Exhibit(
        name="fa3-records-a-call-on-rank-0-alone",
        rule="GP17",
        thread="ROCm/aiter#2638",
        planted="Only the rank with a cache miss records the creation of a buffer.",
        base="fa3",
        lanes=("decode",),
        make=_records_on_rank_0,
    ),
    Exhibit(
        name="trtllm-mla-gathers-other-rows-on-the-last-rank",
        rule="GP17",
        thread="vllm-project/vllm#18724",
        planted="The last rank records a gather of one row more than the others.",
        base="trtllm_mla",
        lanes=("target_verify",),
        make=_gathers_more_on_the_last_rank,
    ),
    Exhibit(
        name="registry-splits-the-raw-tokens",
        rule="GP17",
        thread="sgl-project/sglang#22404",
        planted="A rank's count of live tokens is computed from the batch's tokens, while its rows are"
        " those of the padded shape.",
        base="cuda_graph",
        lanes=("decode",),
        around=_method(CudaGraphBufferRegistry, "fill_from", _splits_the_batch),
        site="registry",
    ),
]

# -- GP11: what is captured --------------------------------------------------------------------------


def _counts_plainly(registry: Any, _: ForwardBatch, shape: GraphShape) -> None:
    if registry.has_slot("num_token_non_padded"):
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(shape.num_tokens)


def _too_long(runner: Any, dummy: ForwardBatch) -> ForwardBatch:
    lens = dummy.seq_lens + runner.context.limits.max_context_len
    return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())


def _no_room_for_drafts(runner: Any, dummy: ForwardBatch) -> ForwardBatch:
    lens = torch.full_like(dummy.seq_lens, runner.context.limits.max_context_len)
    return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())


_GP11 = [
    *(
        Exhibit(
            name=f"{base.replace('_', '-')}-counts-plainly-at-capture",
            rule="GP11",
            thread="sgl-project/sglang#22404",
            planted="The count of live tokens is that of the shape at capture, and the rank's share at"
            " replay.",
            base=base,
            lanes=(lane,),
            make=_at_capture(_counts_plainly),
            site="runner",
        )
        for base, lane in (
            ("cuda_graph", "decode"),
            ("cpu_graph", "decode"),
            ("reference_runner", "extend"),
        )
    ),
    Exhibit(
        name="cuda-graph-dummies-beyond-the-longest",
        rule="GP11",
        thread="vllm-project/vllm#53658",
        planted="The dummy's sequences are longer than a row of the page table.",
        base="cuda_graph",
        lanes=("decode",),
        make=dummies(_too_long),
        site="runner",
    ),
    Exhibit(
        name="verify-dummies-without-room-for-drafts",
        rule="GP11",
        thread="vllm-project/vllm#53658",
        planted="The dummy's sequences have the maximum length, and its drafts lie after it.",
        base="reference_runner",
        lanes=("target_verify",),
        make=dummies(_no_room_for_drafts),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-dummies-disagree-with-the-host",
        rule="GP11",
        thread="NVIDIA/TensorRT-LLM#14640",
        planted="The lengths on the host are 0 while those on the device are the dummy's.",
        base="cpu_graph",
        lanes=("decode",),
        make=dummies(lambda _, d: replace(d, seq_lens_cpu=torch.zeros_like(d.seq_lens_cpu))),
        site="runner",
    ),
    Exhibit(
        name="mixed-dummies-disagree-with-the-host",
        rule="GP11",
        thread="NVIDIA/TensorRT-LLM#14640",
        planted="The extend lengths are in another order on the host than on the device.",
        base="reference_runner",
        lanes=("mixed",),
        make=dummies(lambda _, d: replace(d, extend_seq_lens_cpu=d.required_extend_lens()[1].flip(0))),
        site="runner",
    ),
    Exhibit(
        name="draft-dummies-of-length-zero",
        rule="GP11",
        thread="lightseekorg/tokenspeed#258",
        planted="The dummy's sequences have length 0, while the drafts after them have positions and slots.",
        base="reference_runner",
        lanes=("draft_decode",),
        make=dummies(
            lambda _, d: replace(
                d,
                seq_lens=torch.zeros_like(d.seq_lens),
                seq_lens_cpu=torch.zeros_like(d.seq_lens_cpu),
            )
        ),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-blanks-lengths-at-capture",
        rule="GP11",
        thread="vllm-project/vllm#53821",
        planted="At capture lengths are zeroed after the fill, to protect a kernel that does not need them.",
        base="cuda_graph",
        lanes=("decode",),
        make=_at_capture(lambda r, _, s: r.get_slot("seq_lens").slice_for(s.batch_size, 0).zero_()),
        site="runner",
    ),
]

# -- GP03, GP04: padded rows -------------------------------------------------------------------------

_GP03 = [
    *(
        Exhibit(
            name=f"{name}-keeps-request-rows",
            rule="GP03",
            thread="sgl-project/sglang#26292",
            planted="Lengths and slots of padding rows are reset, but not their request rows.",
            base=base,
            lanes=(lane,),
            make=keeps_tails("req_pool_indices"),
            site="runner",
        )
        for name, base, lane in (
            ("cuda-graph", "cuda_graph", "decode"),
            ("cpu-graph", "cpu_graph", "decode"),
            ("draft-extend-runner", "reference_runner", "draft_extend"),
            ("verify-runner", "reference_runner", "target_verify_tree"),
        )
    ),
    *(
        Exhibit(
            name=f"{name}-keeps-positions",
            rule="GP03",
            thread="sgl-project/sglang#10892",
            planted="Padded tokens keep the positions of an earlier, larger batch.",
            base=base,
            lanes=(lane,),
            make=keeps_tails("positions"),
            site="runner",
        )
        for name, base, lane in (
            ("cpu-graph", "cpu_graph", "decode"),
            ("draft-runner", "reference_runner", "draft_decode_tree"),
        )
    ),
    Exhibit(
        name="draft-runner-keeps-several-fields",
        rule="GP03",
        thread="sgl-project/sglang#18647",
        planted="Token ids, positions and request rows of padded branches are those of an earlier batch.",
        base="reference_runner",
        lanes=("draft_decode",),
        make=keeps_tails("input_ids", "positions", "req_pool_indices"),
        site="runner",
    ),
    Exhibit(
        name="mixed-runner-keeps-slots-and-tokens",
        rule="GP03",
        thread="SJTU-DENG-Lab/Diffulex#44",
        planted="Only offsets are padded; slots and lengths of padding rows are those of an earlier batch.",
        base="reference_runner",
        lanes=("mixed",),
        make=keeps_tails("out_cache_loc", "seq_lens"),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-keeps-lengths-on-the-host",
        rule="GP03",
        thread="sgl-project/sglang#25512",
        planted="Lengths of padding rows are reset on the device, but not on the host, where plans are made.",
        base="cuda_graph",
        lanes=("decode",),
        make=keeps_tails("seq_lens_cpu"),
        site="runner",
    ),
    Exhibit(
        name="registry-resets-no-tail",
        rule="GP03",
        thread="vllm-project/vllm#21196",
        planted="A fill copies the heads of all slots, and resets none of their tails.",
        base="cuda_graph",
        lanes=("decode",),
        around=lambda: patch.object(fills, "_plan_tails", lambda *_: ([], [])),
        site="registry",
    ),
]


def _behind_scratch(runner: Any, _: torch.Tensor) -> int:
    slot: int = runner.context.limits.page_size
    return slot


def _last_row(runner: Any, _: torch.Tensor) -> int:
    row: int = runner.context.limits.max_bs
    return row


_GP04 = [
    Exhibit(
        name="cuda-graph-pads-slots-with-minus-one",
        rule="GP04",
        thread="vllm-project/vllm#43810",
        planted="Padding tokens have KV slot -1, which is the last slot in plain indexing.",
        base="cuda_graph",
        lanes=("decode",),
        make=_pads("out_cache_loc", lambda *_: -1),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-pads-slots-behind-scratch",
        rule="GP04",
        thread="sgl-project/sglang#38997",
        planted="Padding tokens write the first KV slot after the scratch page, which requests own.",
        base="cpu_graph",
        lanes=("decode",),
        make=_pads("out_cache_loc", _behind_scratch),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-pads-with-a-live-slot",
        rule="GP04",
        thread="m0at/rvllm#32",
        planted="Padded drafts write where the first real draft does.",
        base="reference_runner",
        lanes=("target_verify",),
        make=_pads("out_cache_loc", lambda _, real: real[:1]),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-pads-lengths-with-zero",
        rule="GP04",
        thread="sgl-project/sglang#1469",
        planted="Padding rows have length 0, but the backend declares another length for an empty row.",
        base="cuda_graph",
        lanes=("decode",),
        make=_pads("seq_lens", lambda *_: 0),
        site="runner",
    ),
    Exhibit(
        name="draft-extend-runner-pads-with-an-active-row",
        rule="GP04",
        thread="NVIDIA/TensorRT-LLM#9873",
        planted="Padding requests have the request row of the last live request.",
        base="reference_runner",
        lanes=("draft_extend",),
        make=_pads("req_pool_indices", lambda _, real: real[-1:]),
        site="runner",
    ),
    Exhibit(
        name="extend-runner-pads-with-the-last-row",
        rule="GP04",
        thread="sgl-project/sglang#38997",
        planted="Padding requests have request row max_bs, which is the last row of the pool: row 0 is"
        " reserved.",
        base="reference_runner",
        lanes=("extend",),
        make=_pads("req_pool_indices", _last_row),
        site="runner",
    ),
    Exhibit(
        name="registry-forgets-pad-values",
        rule="GP04",
        thread="vllm-project/vllm#35969",
        planted="Every tail is zeroed, whatever value its slot declares.",
        base="cpu_graph",
        lanes=("decode",),
        around=lambda: patch.object(GraphSlot, "initial_value", property(lambda _: 0)),
        site="registry",
    ),
]

# -- GP05, GP06: how many rows -----------------------------------------------------------------------


def _cut_by_tokens(right: Any, registry: CudaGraphBufferRegistry, **more: Any) -> ForwardBatch:
    """Cut rows of requests by the count of tokens."""
    view: ForwardBatch = right(registry, **more)
    whole = registry.get_slot("seq_lens").slice_for(*[more["padded_num_tokens"]] * 2)
    return replace(view, seq_lens=whole)


def _uncounted(runner: Any, slots: list[GraphSlot]) -> Sequence[GraphSlot]:
    """Leave the count of real tokens out wherever ranks gather."""
    if not runner.context.require_gathered_buffer:
        return slots
    return [slot for slot in slots if slot.name != "num_token_non_padded"]


def _counts_padding(_: Any, fill: Any, __: Any, batch: Any, shape: Any) -> None:
    if batch.num_token_non_padded_cpu is not None:
        batch = replace(batch, num_token_non_padded_cpu=shape.num_tokens)
    fill(batch)


_GP05 = [
    Exhibit(
        name="verify-runner-cuts-lengths-by-raw-counts",
        rule="GP05",
        thread="vllm-project/vllm#28202",
        planted="The view has the batch's number of lengths, and the shape's number of tokens.",
        base="reference_runner",
        lanes=("target_verify",),
        make=viewing(lambda view, batch: replace(view, seq_lens=view.seq_lens[: max(batch.batch_size, 1)])),
        site="runner",
    ),
    Exhibit(
        name="registry-cuts-requests-by-tokens",
        rule="GP05",
        thread="vllm-project/vllm#25265",
        planted="Lengths are sliced by the number of tokens, which is larger than that of requests.",
        base="reference_runner",
        lanes=("draft_extend",),
        around=_method(CudaGraphBufferRegistry, "extract_buffer", _cut_by_tokens),
        site="registry",
    ),
    Exhibit(
        name="cuda-graph-counts-padding-as-real",
        rule="GP05",
        thread="sgl-project/sglang#35588",
        planted="The count of live tokens is that of the padded shape.",
        base="cuda_graph",
        lanes=("decode",),
        make=populating(_counts_padding),
        site="runner",
    ),
    *(
        Exhibit(
            name=f"{name}-keeps-the-count-of-the-capture",
            rule="GP05",
            thread="sgl-project/sglang#39574",
            planted="The count of live tokens is written at capture only.",
            base=base,
            lanes=(lane,),
            make=keeps("num_token_non_padded"),
            site="runner",
        )
        for name, base, lane in (
            ("cuda-graph", "cuda_graph", "decode"),
            ("extend-runner", "reference_runner", "extend"),
        )
    ),
    Exhibit(
        name="verify-runner-has-no-count-of-real-tokens",
        rule="GP05",
        thread="sgl-project/sglang#35588",
        planted="The count of live tokens is registered only in some set-ups, although layers need it.",
        base="reference_runner",
        lanes=("target_verify",),
        make=slotting(_uncounted),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-shows-the-raw-batch-size",
        rule="GP05",
        thread="vllm-project/vllm-ascend#7460",
        planted="The view has the batch's number of requests, and tensors with padding rows.",
        base="cuda_graph",
        lanes=("decode",),
        make=viewing(lambda view, batch: replace(view, batch_size=batch.batch_size)),
        site="runner",
    ),
    Exhibit(
        name="scheduler-counts-one-token-for-each-request",
        rule="GP05",
        thread="ROCm/ATOM#1595",
        planted="The batch gives its number of requests as the count of live tokens, although each has"
        " several.",
        base="reference_runner",
        lanes=("target_verify",),
        around=_batches(
            lambda batch, problem: (
                replace(
                    batch,
                    num_token_non_padded=batch.num_token_non_padded // 4,
                    num_token_non_padded_cpu=len(problem.requests),
                )
                if batch.num_token_non_padded is not None
                else batch
            )
        ),
        site="batch",
    ),
]


def cuts_nothing(_: Any, __: RegionContext, region: Region) -> Region:
    """Return a region whose outputs have no axis."""

    def whole() -> StepOutputs:
        return StepOutputs(**{name: (tensor, "none") for name, tensor in region().items()})

    return whole


def _last_rows(_: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """Return first as many rows as are real, counted from the padded end, and then the rest."""
    if not len(rows):
        return rows
    real = (step.view.req_pool_indices > 0).sum() * step.view.tokens_per_request
    at = torch.arange(len(rows), device=rows.device) - real
    return rows[at % len(rows)]


def _uncounted_in_the_model(base: type[Any]) -> type[Any]:
    class Uncounted(base):  # type: ignore[misc]
        """Runs the model on a batch of fewer fields than the view has."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Leave the count out."""
            view = replace(step.view, num_token_non_padded=None)
            region: Region = super().compose(forward, replace(step, view=view))
            return region

    return Uncounted


_GP06 = [
    Exhibit(
        name="cuda-graph-hands-padded-rows-to-the-sampler",
        rule="GP06",
        thread="NVIDIA/TensorRT-LLM#5058",
        planted="compose() declares no axis for its outputs, so that they are returned with their padding"
        " rows.",
        base="cuda_graph",
        lanes=("decode",),
        make=composing(cuts_nothing),
        site="runner",
    ),
    Exhibit(
        name="draft-runner-returns-the-last-rows",
        rule="GP06",
        thread="NVIDIA/TensorRT-LLM#5058",
        planted="The live rows are counted from the padded end of the outputs.",
        base="reference_runner",
        lanes=("draft_decode",),
        make=_giving(_last_rows),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-masks-no-padded-token",
        rule="GP06",
        thread="sgl-project/sglang#31838",
        planted="compose() passes the model a batch without the count of live tokens, so that layers pool"
        " padding rows too.",
        base="cpu_graph",
        lanes=("decode",),
        make=_uncounted_in_the_model,
        site="runner",
    ),
]

# -- GP01, GP02, GP13, GP15, GP19, GP20 --------------------------------------------------------------


def _first_batch_alone(right: Any, names: Sequence[str]) -> Any:
    """Return a function that returns the fields of the first batch with the same shapes and dtypes."""
    getter = right(names)
    seen: dict[object, Any] = {}

    def fields(batch: Any) -> Any:
        if names and "." in names[0]:  # shapes and dtypes
            return getter(batch)
        values = getter(batch)
        return seen.setdefault(tuple(v.shape for v in values), values)

    return fields


def _outputs_of_the_graph_before(runner: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """Return the output of the previously recorded graph, if it has enough rows."""
    if not step.driver.is_capturing:
        return rows
    before: torch.Tensor = vars(runner).get("outputs", rows)
    runner.outputs = rows
    return before[: len(rows)] if len(before) >= len(rows) else rows


def _adds_memory_that_grows(runner: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """Add zeros of the runner's own, which a larger capture replaces by more."""
    if step.is_eager:
        return rows
    zeros: torch.Tensor | None = vars(runner).get("zeros")
    if zeros is None or len(zeros) < len(rows):
        zeros = runner.zeros = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    return rows + zeros[: len(rows)].view(-1, *[1] * (rows.dim() - 1))


def _one_output_buffer(runner: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of one buffer for each width: what the first capture gave."""
    if not step.driver.is_capturing:
        return rows
    buffer: torch.Tensor = vars(runner).setdefault("outputs", {}).setdefault(rows.shape[1:], rows)
    if buffer is rows or len(buffer) < len(rows):
        return rows
    return buffer[: len(rows)].copy_(rows)


def _prefetches(base: type[Any]) -> type[Any]:
    class Prefetches(base):  # type: ignore[misc]
        """Wraps every step, and begins the next one in it."""

        @hookimpl(wrapper=True)
        def run_step(self, lane: Lane) -> Generator[None, Any, Any]:
            """Run the step, and replay another graph before its outputs are handed on."""
            before = lane.stats.replays
            outputs = yield
            other = next(iter(lane.captured.values()), None)
            if other is not None and lane.stats.replays > before:
                lane.launch(lane.prepare(self.dummy(other.context.shape)))
            return outputs

    return Prefetches


def _without(field: str, _: Any, slots: list[GraphSlot]) -> Sequence[GraphSlot]:
    return [slot for slot in slots if slot.name != field]


def _clamps_the_batch(_: Any, fill: Any, __: Any, batch: Any, ___: Any) -> None:
    batch.positions.clamp_(max=8)
    fill()


def _leaves_slots_at_capture(_: Any, fill: Any, registry: Any, batch: Any, shape: Any) -> None:
    real, _ = _rows(registry, "out_cache_loc", batch, shape)
    kept = real.clone()
    fill()
    if batch.req_pool_indices.tolist() == [0] * batch.batch_size:
        real.copy_(kept)


def _reads_a_length(_: Any, fill: Any, __: Any, batch: Any, ___: Any) -> None:
    fill()
    if batch.batch_size and batch.seq_lens.max().item() < 0:
        raise EngineError("a length is negative")


def _asks_the_device(_: Any, batch: ForwardBatch, right: _Fit) -> _Fit:
    has_keys = not batch.batch_size or bool(batch.seq_lens.max() > 0)
    return right if has_keys else EagerReason.OVER_LARGEST


def _too_few_tokens(right: Any, registry: Any, *args: Any, **sizes: Any) -> None:
    """Leave out the token that a verify has beside its drafts."""
    sizes["max_num_tokens"] -= sizes["max_bs"]
    right(registry, *args, **sizes)


_OTHERS = [
    Exhibit(
        name="cuda-graph-shows-new-tensors",
        rule="GP01",
        thread="vllm-project/vllm#13353",
        planted="The view's positions are a new tensor in every step.",
        base="cuda_graph",
        lanes=("decode",),
        make=viewing(lambda view, _: replace(view, positions=view.positions.clone())),
        site="runner",
    ),
    Exhibit(
        name="extend-runner-pads-a-new-tensor",
        rule="GP01",
        thread="PaddlePaddle/FastDeploy#7864",
        planted="The extend lengths are padded into a new tensor, which becomes part of the view.",
        base="reference_runner",
        lanes=("extend",),
        make=viewing(
            lambda view, batch: (
                replace(
                    view,
                    extend_seq_lens=torch.nn.functional.pad(
                        batch.required_extend_lens()[0], (0, view.batch_size - batch.batch_size)
                    ),
                )
                if batch.batch_size
                else view
            )
        ),
        site="runner",
    ),
    *(
        Exhibit(
            name=f"{name}-misses-{field.replace('_', '-')}",
            rule="GP02",
            thread="sgl-project/sglang#39088",
            planted=f"{field} of the batch are copied for every mode but {lane}.",
            base=base,
            lanes=(lane,),
            make=keeps(field),
            site="runner",
        )
        for name, base, lane, field in (
            ("cuda-graph", "cuda_graph", "decode", "positions"),
            ("draft-extend-runner", "reference_runner", "draft_extend", "num_correct_drafts"),
            ("verify-runner", "reference_runner", "target_verify_tree", "tree_mask"),
            ("mixed-runner", "reference_runner", "mixed", "extend_seq_lens"),
        )
    ),
    *(
        Exhibit(
            name=f"{name}-has-no-slot-for-{field.replace('_', '-')}",
            rule="GP02",
            thread="sgl-project/sglang#39088",
            planted=f"slots() has no slot for {field}, which the batches of {lane} carry.",
            base="reference_runner",
            lanes=(lane,),
            make=slotting(partial(_without, field)),
            site="runner",
        )
        for name, lane, field in (
            ("draft-extend-runner", "draft_extend", "num_correct_drafts"),
            ("verify-runner", "target_verify_tree", "tree_mask"),
        )
    ),
    Exhibit(
        name="registry-copies-the-first-batch",
        rule="GP02",
        thread="sgl-project/sglang#22832",
        planted="A fill keeps the tensors of the first batch of its counts, and copies them in all later"
        " steps.",
        base="cuda_graph",
        lanes=("decode",),
        around=lambda: patch.object(
            fills,
            "_getter",
            partial(_first_batch_alone, getattr(fills, "_getter")),  # noqa: B009  private
        ),
        site="registry",
    ),
    Exhibit(
        name="registry-lacks-tokens-of-a-verify",
        rule="GP13",
        thread="sgl-project/sglang#19016",
        planted="Inputs by token are sized for drafts, without the additional token of each request.",
        base="reference_runner",
        lanes=("target_verify",),
        around=_method(CudaGraphBufferRegistry, "__init__", _too_few_tokens),
        site="registry",
    ),
    Exhibit(
        name="draft-runner-returns-the-previous-graphs-outputs",
        rule="GP15",
        thread="pytorch/pytorch#148439",
        planted="compose() returns the output buffer of the previously recorded graph.",
        base="reference_runner",
        lanes=("draft_extend",),
        make=_giving(_outputs_of_the_graph_before),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-replays-another-graph-before-outputs-are-read",
        rule="GP15",
        thread="sgl-project/sglang#35546",
        planted="A wrapper of run_step replays the graph of the next step before the outputs of this step"
        " are read.",
        base="cuda_graph",
        lanes=("decode",),
        make=_prefetches,
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-grows-memory-in-the-region",
        rule="GP14",
        thread="intel/llm-scaler#505",
        planted="A tensor that the region reads is replaced by a larger one when a larger shape is captured.",
        base="cuda_graph",
        lanes=("decode",),
        make=_giving(_adds_memory_that_grows),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-has-one-output-buffer",
        rule="GP15",
        thread="sgl-project/sglang#22930",
        planted="compose() returns rows of one buffer for all graphs, which the first capture allocated.",
        base="reference_runner",
        lanes=("target_verify",),
        make=_giving(_one_output_buffer),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-writes-the-batch",
        rule="GP19",
        thread="microsoft/onnxruntime#32243",
        planted="populate() clamps the positions of the engine's own batch to the length of a table.",
        base="cuda_graph",
        lanes=("decode",),
        make=populating(_clamps_the_batch),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-captures-over-the-last-batch",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="A capture does not reset out_cache_loc, so that a recapture writes the KV slots of the"
        " last batch.",
        base="cpu_graph",
        lanes=("decode",),
        make=populating(_leaves_slots_at_capture),
        site="runner",
    ),
    Exhibit(
        name="verify-dummies-on-live-slots",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="Dummy drafts have KV slots that live requests own.",
        base="reference_runner",
        lanes=("target_verify",),
        make=dummies(
            lambda runner, d: replace(
                d,
                out_cache_loc=torch.arange(d.num_tokens, device=d.device) + runner.context.limits.page_size,
            )
        ),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-waits-for-a-length",
        rule="GP20",
        thread="vllm-project/vllm#40807",
        planted="populate() reads a length from the device.",
        base="cuda_graph",
        lanes=("decode",),
        make=populating(_reads_a_length),
        site="runner",
    ),
    Exhibit(
        name="cpu-graph-asks-the-device-whether-it-can-run",
        rule="GP20",
        thread="vllm-project/vllm#22758",
        planted="fit() decides by a tensor on the device.",
        base="cpu_graph",
        lanes=("decode",),
        make=fitting(_asks_the_device),
        site="runner",
    ),
]

EXHIBITS: list[Exhibit] = [
    *_GP12,
    *_GP17,
    *_GP11,
    *_GP03,
    *_GP04,
    *_GP05,
    *_GP06,
    *_OTHERS,
]
"""All exhibits of this room."""
