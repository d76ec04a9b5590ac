"""The agreement of data-parallel ranks that step together with unequal batches: GP17.

Each rank has its own requests, and is one rank of a group that shares them. All replay the shape of the
largest batch, so the counts of tokens and the results of a small one are compared in this shape.

Does not: start processes or run collectives; know the right counts (see ``ranks``).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import cycle, islice

from graphpact.batch import ForwardMode
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.chosen_batches import corner, of_size, tier_ends, with_prefixes
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.asked_batches import batches_of_every_size
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.graph_choice import MOST_SIZES, ask_runner, smallest_holding
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding

Compare = Callable[[int, Rig, StepRecord, tuple[int, ...]], Findings]
"""``(rank, rig, step, tokens of the ranks) -> findings``: compares counts and results of a rank's step."""
_GATHER_HELP = (
    "without other ranks the batch runs: check the use of global_num_tokens_cpu, and ranks that have no"
    " requests and no rows"
)
_DECLINE_RANK_HELP = (
    "let a declared reason depend only on data that all ranks have. Where layers gather over ranks, each rank"
    " has other requests: decline every batch with global_num_tokens_cpu, or none"
)


def uneven_ranks(
    lane: LaneUnderTest,
    rigs: Mapping[int, Rig],
    as_rank: Callable[[int], AbstractContextManager[object]],
    compare: Compare | None,
) -> Findings:
    """Give ranks unequal batches, in steps and with default settings: all must take one shape, or none.

    Args:
        lane: The lane of a single rank.
        rigs: The rig of each rank.
        as_rank: Makes this process a rank inside a context.
        compare: Compares the step of a rank; None if steps with equal batches are wrong already.
    """
    yield from _in_steps(lane, rigs, as_rank, compare)
    yield from _by_default(lane, rigs[0])


def _groups(lane: LaneUnderTest, rig: Rig) -> list[list[Problem]]:
    """Return groups of unequal batches for data-parallel ranks.

    Batches that do not take the right graph even without other ranks are left out.
    """
    config = rig.config
    if config.case.tokens_per_request is None:
        most = min(config.shapes[-1].num_tokens, config.context - 1)
        chunks = _of_ranks(config, (most, 1), (most // 2, 1))
        groups = [[of_size(config, 1, chunk or 1) for chunk in each] for each in (*chunks, chunks[0][::-1])]
    else:
        most = config.most_requests
        requests = _of_ranks(config, (most, 1), (most, 0), (1, 0), (most + 1, 1))
        groups = [
            [of_size(config, size) if size else Problem(config.case, [], 0) for size in sizes]
            for sizes in (*requests, requests[0][::-1])
        ]
    declined = next(filter(lane.declined, (corner(config.unbounded), *batches_of_every_size(config))), None)
    if declined is not None:
        groups += [[declined, *[of_size(config, config.most_requests)] * (config.ranks - 1)]]
    groups += _in_each_tier(rig)
    # if a batch takes another graph even without other ranks, `graph_choice` reports it
    return [group for group in groups if not any(_takes_another_graph(rig, problem) for problem in group)]


def _in_each_tier(rig: Rig) -> list[list[Problem]]:
    """Return groups of batches of equal sizes, but on both sides of the lengths at which the graph changes.

    None where a runner has one graph of a size: then a length does not change the graph.
    """
    if len({shape.variant for shape in rig.captured}) == 1:
        return []
    try:
        ends = tier_ends(rig.config, lambda problem: rig.fit(rig.batch_of(problem)))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything: see `graph_choice`
        return []
    sides = [side for change in ends for side in (change, change[::-1])]
    ranks = rig.config.ranks
    return [[with_prefixes(rig.config, [n]) for n in islice(cycle(side), ranks)] for side in sides]


def _in_steps(
    lane: LaneUnderTest,
    rigs: Mapping[int, Rig],
    as_rank: Callable[[int], AbstractContextManager[object]],
    compare: Compare | None,
) -> Findings:
    """Step data-parallel ranks with unequal batches: all replay the shape of the largest, with its counts.

    After a wrong count or result the other batches are left out.
    """
    if lane.config.case.mode is ForwardMode.IDLE:
        return
    for group in _groups(lane, rigs[0]):
        together = tuple(len(problem.tokens) for problem in group)
        answers: list[GraphShape | EagerReason | None] = []
        wrong: list[Finding] = []
        for (rank, rig), problem in zip(rigs.items(), group, strict=True):
            with as_rank(rank):
                batch = replace(rig.batch_of(problem), global_num_tokens_cpu=together)
                asked, refused = ask_runner(lane, rig, batch, problem)
                if refused is not None:
                    return  # `graph_choice` reports it
                if isinstance(asked, GraphShape):
                    step = rig.step(problem, batch=batch, may_decline=True)
                    if step.error is not None:
                        if rig.step(problem, may_decline=True).error is None:
                            what = f"{len(problem.tokens)} tokens, with {together} on the ranks"
                            yield lane.of_error(
                                step.error,
                                expected=f"a replay of {what}",
                                rule="GP17",
                                step=step,
                                help=_GATHER_HELP,
                            )
                        return
                    asked = step.shape if step.replays == 1 else None
                    if asked is not None and compare is not None and not wrong:
                        wrong += compare(rank, rig, step, together)
                answers.append(asked)
        others = [*_of_answers(lane, rigs[0], together, answers)]
        yield from others or wrong  # ranks with other graphs have other counts too
        if wrong:
            return


def _by_default(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Fit unequal batches of ranks with the default settings of a runner, which may limit padding.

    Only ragged modes have such a limit.
    """
    if lane.kind != "runner" or lane.config.case.tokens_per_request is not None:
        return
    for group in _groups(lane, rig):
        together = tuple(len(problem.tokens) for problem in group)
        batches = [replace(rig.batch_of(problem), global_num_tokens_cpu=together) for problem in group]
        try:
            answers = [lane.fit_default(MOST_SIZES, batch) for batch in batches]
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return  # `graph_choice` reports it
        yield from _of_answers(lane, rig, together, answers)


VARIANT_HELP = (
    "the shapes differ only in their variant: choose it, like the size, from data that all ranks have;"
    " lengths of one rank's requests are not known to the others"
)


def differ_in_variant(answers: Sequence[GraphShape | EagerReason | None]) -> bool:
    """Return whether ranks took shapes of one size that differ in their variant."""
    shapes = [answer for answer in answers if isinstance(answer, GraphShape)]
    return len(shapes) == len(answers) and len({replace(shape, variant="") for shape in shapes}) == 1


def _of_answers(
    lane: LaneUnderTest,
    rig: Rig,
    together: tuple[int, ...],
    answers: Sequence[GraphShape | EagerReason | None],
) -> Findings:
    """Yield a finding if ranks with these token counts take different shapes, or only some take a graph."""
    if len({*answers}) == 1 or not any(isinstance(answer, GraphShape) for answer in answers):
        return
    shown = [
        f"rank {rank} with {tokens} tokens: {answer or 'no graph'}"
        for rank, (tokens, answer) in enumerate(zip(together, answers, strict=True))
    ]
    yield lane.finding(
        "GP17",
        field="the replayed shape",
        expected=f"the same on all ranks for global_num_tokens_cpu = {together}",
        actual="; ".join(shown),
        help=_help_of(rig, together, answers),
    )


def _help_of(rig: Rig, together: tuple[int, ...], answers: Sequence[GraphShape | EagerReason | None]) -> str:
    """Return the help for answers of ranks that differ."""
    if any(answer in rig.declines for answer in answers):
        return _DECLINE_RANK_HELP
    if differ_in_variant(answers):
        return VARIANT_HELP
    shapes = [isinstance(answer, GraphShape) for answer in answers]
    eager = [tokens for tokens, has_shape in zip(together, shapes, strict=True) if not has_shape]
    return _GATHER_HELP if any(eager) or not eager else _IDLE_RANK_HELP


_GATHER_HELP = (
    "where layers gather over ranks, all take the shape of the largest: CaptureSizes.fit() uses"
    " global_num_tokens_cpu"
)
_IDLE_RANK_HELP = (
    "a rank without requests replays the graph of the others, with padding rows only: let fit() serve a batch"
    " of mode IDLE where global_num_tokens_cpu has tokens of other ranks"
)


def _of_ranks(config: Config, *sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return one number for each rank: the given ones for the first two ranks, then 0 and 1 in turn."""
    return [(*two, *islice(cycle((0, 1)), config.ranks - len(two))) for two in sizes]


def _takes_another_graph(rig: Rig, problem: Problem) -> bool:
    """Return whether a batch, without other ranks, does not take the smallest shape that holds it."""
    batch = rig.batch_of(problem)
    try:
        asked = rig.fit(batch)
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return True
    held_by = smallest_holding(rig.captured, batch)
    is_shape = isinstance(asked, GraphShape) or bool(held_by)
    return asked not in held_by and is_shape and asked not in rig.declines
