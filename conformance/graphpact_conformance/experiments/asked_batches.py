"""The batches that are passed to `GraphRunner.fit`: every size, other kinds, default capture sizes.

Does not: call ``fit``; see `graphpact_conformance.experiments.graph_choice`.
"""

from collections.abc import Iterator
from dataclasses import replace

from graphpact.batch import ForwardMode
from graphpact.shapes import GraphShape
from graphpact_conformance.draws.cases import CASES, DRAFT_WIDTH
from graphpact_conformance.draws.chosen_batches import corner, of_size
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem

MOST = (*range(1, 258), 301)
"""Values of max_bs for which the default shapes of a runner are checked.

They include every multiple of the usual steps between capture sizes, and its neighbours.
"""


def of_other_kinds(config: Config) -> Iterator[tuple[str, Problem]]:
    """Yield batches of all modes except the lane's, each with a description.

    In ragged modes each request has as many new tokens as in a decode step, as a verified draft, or as in the
    lane's steps; these are chunks after a cached key, or prompts. No batch has more requests or tokens than
    the lane's limits allow.
    """
    here = (config.case.mode, config.case.lane_mode, ForwardMode.IDLE)
    for case in CASES:
        if case.mode in here:
            continue
        other = replace(config, case=case, capture_shapes=(), extra_requests=0)
        alike = {1, DRAFT_WIDTH, config.case.tokens_per_request or 1}
        for chunk in sorted(alike) if case.mode.is_ragged else (case.tokens_per_request or 1,):
            most = min(config.most_requests, other.most_requests, config.limits.max_num_tokens // chunk)
            for size in sorted({1, most} - {0}):
                what = f"batch with {chunk} new tokens for each of {size} requests"
                yield f"a {case} {what}", of_size(other, size, chunk)
                if case.mode.is_ragged:
                    yield f"a {case} {what}, all prompts", of_size(other, size, chunk, cached=0)


def lies_within(config: Config, problem: Problem) -> bool:
    """Return whether the request rows and KV slots of a batch of another lane are within this lane's."""
    slots = [slot for request in problem.requests for slot in request.table]
    rows = [request.row for request in problem.requests]
    return max(rows) < config.num_rows and max(slots) < config.num_pages * config.page_size


def of_default_sizes(config: Config, most: int) -> Iterator[Problem]:
    """Yield batches of 1 to 8 requests, of multiples of 8 and their neighbours, and of ``most`` requests.

    Args:
        config: The configuration of the lane. Its mode is not ragged.
        most: The largest number of requests, at least 9.
    """
    each, width = config.case.rows_per_request, config.case.tokens_per_request or 1
    shape = GraphShape(config.case.lane_mode, most * each, most * width)
    whole = of_size(replace(config, capture_shapes=(shape,)), most)
    beside = {at + by for at in range(8, most + 1, 8) for by in (-1, 0, 1)}
    for size in sorted({*range(1, 9), *beside, most}):
        if size <= most:
            yield Problem(whole.case, whole.requests[:size], whole.seed)


def batches_of_every_size(config: Config) -> list[Problem]:
    """Return batches of short requests: small sizes, the largest shape, one request more, and an idle batch.

    In ragged modes there are also batches with as many new tokens per request as a verified draft has, of as
    many requests as the lane's limits allow.
    """
    most = config.most_requests
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    idle = Problem(config.case, [], 0)
    if config.case.mode is ForwardMode.IDLE:
        return [idle]
    drafts = {1, min(most, config.limits.max_num_tokens // DRAFT_WIDTH)} if config.case.mode.is_ragged else ()
    chunks = [of_size(config, size, DRAFT_WIDTH) for size in sorted(drafts)]
    return [*(of_size(config, size) for size in dict.fromkeys(sizes)), *chunks, idle]


def one_token_more(config: Config) -> Problem:
    """Return a batch of a ragged mode with one token more than the largest shape holds."""
    shape = config.shapes[-1]
    return corner(replace(config, capture_shapes=(replace(shape, num_tokens=shape.num_tokens + 1),)))
