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

    In ragged modes each request has one new token, as in a decode step, or as many as a verified draft. No
    batch has more requests or tokens than the lane's limits allow.
    """
    here = (config.case.mode, config.case.lane_mode, ForwardMode.IDLE)
    for case in CASES:
        if case.mode in here:
            continue
        other = replace(config, case=case, capture_shapes=(), extra_requests=0)
        for chunk in (1, DRAFT_WIDTH) if case.mode.is_ragged else (case.tokens_per_request or 1,):
            most = min(config.most_requests, other.most_requests, config.limits.max_num_tokens // chunk)
            for size in sorted({1, most} - {0}):
                problem = of_size(other, size, chunk)
                yield f"a {case} batch with {chunk} new tokens for each of {size} requests", problem


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

    In ragged modes there are also batches with as many new tokens per request as a verified draft has.
    """
    most = config.most_requests
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    idle = Problem(config.case, [], 0)
    if config.case.mode is ForwardMode.IDLE:
        return [idle]
    chunks = [of_size(config, size, DRAFT_WIDTH) for size in (1, most)] if config.case.mode.is_ragged else []
    return [*(of_size(config, size) for size in dict.fromkeys(sizes)), *chunks, idle]


def one_token_more(config: Config) -> Problem:
    """Return a batch of a ragged mode with one token more than the largest shape holds."""
    shape = config.shapes[-1]
    return corner(replace(config, capture_shapes=(replace(shape, num_tokens=shape.num_tokens + 1),)))
