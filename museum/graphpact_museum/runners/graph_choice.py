"""Exhibits of the choice of a graph for a batch: GP12. Some are in runners, some in the capture sizes.

Does not: plant a choice that depends on the rank; see `graphpact_museum.runners.ranks`.
"""

import bisect
from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact_conformance.lane.reference_runner import ReferenceSizes
from graphpact_museum.edits.override import override, overrides, replaces
from graphpact_museum.edits.runners import LONG_CONTEXT, SHORT_TIER, Fit, with_length_tiers
from graphpact_museum.exhibit import exhibit


@exhibit("GP12", "vllm-project/vllm#54933", on="cuda_graph", lanes="decode", site="capture sizes")
@replaces(CaptureSizes, "fit")
def capture_sizes_bisect_right(right: Any, sizes: CaptureSizes, batch: ForwardBatch, *variant: str) -> Fit:
    """A batch that fills a shape exactly takes the next larger shape, and the largest batch takes none."""
    fit: Fit = right(sizes, batch, *variant)
    if isinstance(fit, EagerReason):
        return fit
    counts = [shape.batch_size for shape in sizes.shapes]
    at = bisect.bisect_right(counts, batch.batch_size)
    return sizes.shapes[at] if at < len(counts) else EagerReason.OVER_LARGEST


@exhibit(
    "GP12", "vllm-project/vllm#53407", on="reference_runner", lanes="target_verify", site="capture sizes"
)
@replaces(ReferenceSizes, "fit")
def capture_sizes_ignore_the_width(right: Any, sizes: ReferenceSizes, batch: ForwardBatch) -> Fit:
    """A batch with another number of tokens per request than was captured takes a graph by its tokens."""
    fit: Fit = right(sizes, batch)
    if fit != EagerReason.OTHER_WIDTH:
        return fit
    width = sizes.shapes[0].num_tokens // sizes.shapes[0].batch_size
    return next(
        (s for s in sizes.shapes if s.num_tokens >= batch.num_tokens // width * width),
        EagerReason.OVER_LARGEST,
    )


@exhibit("GP12", "vllm-project/vllm#36165", on="cuda_graph", lanes="decode")
@overrides("fit")
def cuda_graph_classifies_decode_by_its_size(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A batch with one token per request counts as decode, whatever its mode is."""
    fit: Fit = right(batch)
    if fit == EagerReason.WRONG_MODE and batch.num_tokens == batch.batch_size:
        sizes = CaptureSizes(tuple(runner.shapes()))
        return sizes.fit(replace(batch, forward_mode=ForwardMode.DECODE))
    return fit


@exhibit("GP12", "vllm-project/vllm#53407", on="cuda_graph", lanes="decode")
@overrides("fit")
def cuda_graph_falls_back_for_padded_sizes(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A batch that would have padding rows runs eagerly although a captured shape holds it."""
    fit: Fit = right(batch)
    is_exact = isinstance(fit, GraphShape) and fit.batch_size == batch.batch_size
    return fit if is_exact or not batch.batch_size else EagerReason.OVER_LARGEST


@exhibit("GP12", "vllm-project/vllm#36165", on="reference_runner", lanes="draft_decode")
@overrides("fit")
def draft_runner_takes_the_largest_bucket(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """Every batch is looked up under the largest registered key."""
    fit: Fit = right(batch)
    largest: GraphShape = runner.shapes()[-1]
    return largest if isinstance(fit, GraphShape) else fit


@exhibit("GP12", "vllm-project/vllm#9285", on="reference_runner", lanes="target_verify")
@overrides("fit")
def verify_runner_compares_tokens_with_requests(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """The shape of target verify is looked up by its draft tokens among request counts."""
    fit: Fit = right(batch)
    if isinstance(fit, EagerReason):
        return fit
    fits = [s for s in runner.shapes() if s.batch_size >= batch.num_tokens]
    return fits[0] if fits else EagerReason.OVER_LARGEST


@exhibit("GP12", "vllm-project/vllm#9285", on="cuda_graph", lanes="decode")
@overrides("fit")
def cuda_graph_compares_lengths_with_a_batch_size(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """fit() compares the longest sequence with the largest number of requests to decide whether a batch may
    replay.
    """
    fit: Fit = right(batch)
    longest = max(batch.seq_lens_cpu.tolist(), default=0)
    is_long = longest > runner.shapes()[-1].batch_size
    return EagerReason.OVER_LARGEST if is_long else fit


@exhibit("GP12", "vllm-project/vllm#9285", on="cuda_graph", lanes="decode")
@overrides("fit")
def cuda_graph_leaves_long_requests_undeclared(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """Batches with a long request run eagerly although a captured shape holds them, with a reason that the
    runner does not declare.
    """
    fit: Fit = right(batch)
    is_long = max(batch.seq_lens_cpu.tolist(), default=0) > 40
    return LONG_CONTEXT if is_long or batch.global_num_tokens_cpu else fit


@exhibit("GP12", "vllm-project/vllm#9285", on="cuda_graph", lanes="decode")
@overrides("fit", declines=(LONG_CONTEXT,))
def cuda_graph_declines_by_the_last_request(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """Batches with long requests run eagerly, but only the last request of a batch is checked."""
    fit: Fit = right(batch)
    is_long = batch.batch_size and int(batch.seq_lens_cpu[-1]) > 40
    return LONG_CONTEXT if is_long or batch.global_num_tokens_cpu else fit


@exhibit("GP12", "vllm-project/vllm#53407", on="reference_runner", lanes="target_verify")
@overrides("fit")
def verify_runner_fits_shapes_that_are_not_captured(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """fit() returns a shape of the batch's exact size, which is not in shapes(): the batch runs eagerly
    although a captured shape holds it.
    """
    fit: Fit = right(batch)
    if isinstance(fit, EagerReason) or not batch.batch_size:
        return fit
    return replace(fit, batch_size=batch.batch_size, num_tokens=batch.num_tokens)


@exhibit("GP12", "sgl-project/sglang#21005", on="cuda_graph", lanes="decode")
def cuda_graph_captures_below_the_largest(base: type[Any]) -> type[Any]:
    """fit() returns the largest shape, which shapes() does not contain and which is never captured."""

    def shapes(_: Any, right: Any) -> Any:
        return right()[:-1] or right()

    def fit(self: Any, _: Any, batch: ForwardBatch) -> Fit:
        return CaptureSizes(tuple(base.shapes(self))).fit(batch)

    return override(base, shapes, fit)


@exhibit("GP12", "paiml/aprender#2030", on="cpu_graph", lanes="decode", site="capture sizes")
@replaces(CaptureSizes, "fit")
def capture_sizes_ignore_the_mode(right: Any, sizes: Any, batch: ForwardBatch, *variant: str) -> Fit:
    """Graphs are keyed only by the number of requests, so that a prefill of one token per request replays the
    decode graph.
    """
    fit: Fit = right(sizes, replace(batch, forward_mode=sizes.shapes[0].mode), *variant)
    return fit


@exhibit("GP12", "lightseekorg/tokenspeed#936", on="reference_runner", lanes="mixed", site="capture sizes")
@replaces(ReferenceSizes, "fit")
def capture_sizes_ignore_the_mode_of_prefill(right: Any, sizes: Any, batch: ForwardBatch) -> Fit:
    """A ragged batch of any mode takes the graph that was captured for mixed batches."""
    fit: Fit = right(sizes, replace(batch, forward_mode=sizes.shapes[0].mode))
    return fit


@exhibit("GP12", "vllm-project/vllm#53407", on="cpu_graph", lanes="decode")
@overrides("fit", declines=(LONG_CONTEXT,))
def cpu_graph_declines_every_batch(*_: Any) -> Fit:
    """Every batch runs eagerly with a declared reason: the captured graphs are never replayed."""
    return LONG_CONTEXT


@exhibit("GP12", "GeeeekExplorer/nano-vllm#216", on="cuda_graph", lanes="decode")
@overrides("default_batch_sizes")
def cuda_graph_captures_multiples(_: Any, right: Any) -> list[int]:
    """The default capture sizes end at the largest multiple of their step that is not above the maximum."""
    sizes: list[int] = right()
    return [s for s in sizes if s in (1, 2, 4) or s % 8 == 0]


@exhibit("GP12", "sgl-project/sglang#21005", on="cpu_graph", lanes="decode")
@overrides("default_batch_sizes")
def cpu_graph_captures_without_its_maximum(_: Any, right: Any) -> list[int]:
    """The end of the default capture sizes is exclusive: the largest step is never replayed."""
    sizes: list[int] = right()
    return sizes[:-1] or sizes


@exhibit("GP12", "huggingface/transformers#45323", on="cuda_graph", lanes="decode")
def cuda_graph_takes_the_tier_of_the_shortest(base: type[Any]) -> type[Any]:
    """Of two graphs for short and for long requests a batch takes that of its shortest request."""

    def is_short(batch: ForwardBatch) -> bool:
        is_alone = batch.global_num_tokens_cpu is None
        return is_alone and min(batch.seq_lens_cpu.tolist(), default=0) <= SHORT_TIER

    return with_length_tiers(base, is_short)


@exhibit("GP12", "vllm-project/vllm#9285", on="cuda_graph", lanes="target_verify")
def verify_runner_takes_one_token_too_many(base: type[Any]) -> type[Any]:
    """The graph for short requests serves requests that are one token longer than it was captured for."""

    def is_short(batch: ForwardBatch) -> bool:
        is_alone = batch.global_num_tokens_cpu is None
        return is_alone and max(batch.seq_lens_cpu.tolist(), default=0) <= SHORT_TIER + 1

    return with_length_tiers(base, is_short)
