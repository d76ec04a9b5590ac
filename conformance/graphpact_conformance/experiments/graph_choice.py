"""The choice of the graph for a batch: GP08, GP10, GP12, GP20.

Does not: compare the choices of ranks; see `graphpact_conformance.experiments.ranks`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import (
    corner,
    half_size_batch,
    of_mixed_tiers,
    of_size,
    short_and_long,
    tier_ends,
)
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.asked_batches import (
    MOST,
    batches_of_every_size,
    lies_within,
    of_default_sizes,
    of_other_kinds,
    one_token_more,
)
from graphpact_conformance.experiments.comparison import differences, wrong_results
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Finding
from graphpact_tape.tape import TapeDriver

_DECLINE_HELP = (
    "return the captured shape; or, if its graph must not serve the batch, define an EagerReason in the"
    " runner, return it, and list it in the class attribute `declines`"
)
MOST_SIZES = 256
"""The value of max_bs for which batches of every size are fitted."""


def graph_choice(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Fit and run batches of every size: each takes the smallest captured shape that holds it.

    A batch may also run eagerly, if the runner declares the reason or if no captured shape holds it.
    """
    lane = with_room(lane)
    rig = lane.rig()
    shapes = rig.captured
    yield from _planned(lane, rig, shapes)
    largest = [half_size_batch(lane.config), corner(lane.config)]
    if lane.config.case.tokens_per_request is None:
        largest.append(one_token_more(lane.config))
    if lane.config != lane.config.unbounded:
        largest.append(corner(lane.config.unbounded))
    tiers = longest_of_tiers(rig)
    for problem in (*batches_of_every_size(lane.config), *largest, *_at_tiers(rig, tiers)):
        batch = rig.batch_of(problem)
        asked, refused = ask_runner(lane, rig, batch, problem)
        if refused is not None:
            yield refused
            continue
        held_by = smallest_holding(shapes, batch)
        may_be_eager = not held_by or asked in rig.declines
        if asked not in held_by and not (isinstance(asked, EagerReason) and may_be_eager):
            yield lane.finding(
                "GP12",
                hook="prepare_replay",
                field="fit()",
                expected=" or ".join(map(str, held_by)) or "an EagerReason: no captured shape holds it",
                actual=str(asked),
                problem=problem,
                help=_DECLINE_HELP
                if isinstance(asked, EagerReason)
                else "let fit() depend only on the batch: return the smallest captured shape of its mode with"
                " room for its requests and tokens",
            )
            continue
        if (longer := _longer_than_its_tier(lane, tiers, batch, asked, problem)) is not None:
            yield longer
            continue
        yield from _run_as_fitted(lane, rig, problem, asked)
    yield from _in_any_order(lane, rig)
    yield from _other_kinds(lane, rig)


def with_room(lane: LaneUnderTest) -> LaneUnderTest:
    """Return a lane whose limits allow one request more than the largest shape.

    Plugins size their memory by the limits, so a batch that no graph holds must still be within them.
    """
    return lane.like(replace(lane.config, extra_requests=max(lane.config.extra_requests, 1)))


def longest_of_tiers(rig: Rig) -> dict[GraphShape, int]:
    """Return the longest request of the dummy of each shape, for shapes that are tiers of lengths.

    Shapes of one size are tiers if their dummies differ in this length. Variants whose dummies are equally
    long, such as sets of adapters, are left out.
    """
    shapes = rig.captured
    if len({shape.variant for shape in shapes}) == 1:
        return {}
    longest = {shape: max(rig.dummy(shape).seq_lens_cpu.tolist()) for shape in shapes}
    lengths: dict[tuple[int, int], set[int]] = {}
    for shape, length in longest.items():
        lengths.setdefault((shape.batch_size, shape.num_tokens), set()).add(length)
    return {s: n for s, n in longest.items() if len(lengths[s.batch_size, s.num_tokens]) > 1}


def _at_tiers(rig: Rig, tiers: Collection[GraphShape]) -> list[Problem]:
    """Return batches at the ends of tiers of lengths; an empty list without tiers, or if ``fit`` raises."""
    if not tiers:
        return []
    try:
        ends = tier_ends(rig.config, lambda problem: rig.fit(rig.batch_of(problem)))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything: see `ask_runner`
        return []
    return [problem for low, high in ends for problem in of_mixed_tiers(rig.config, low, high)]


def _longer_than_its_tier(
    lane: LaneUnderTest,
    tiers: Mapping[GraphShape, int],
    batch: ForwardBatch,
    asked: GraphShape | EagerReason | None,
    problem: Problem,
) -> Finding | None:
    """Return a finding about a batch with a longer request than the dummy of its shape, or None."""
    longest = max(batch.seq_lens_cpu.tolist(), default=0)
    if not isinstance(asked, GraphShape) or longest <= tiers.get(asked, longest):
        return None
    return lane.finding(
        "GP12",
        hook="prepare_replay",
        field="fit()",
        expected=f"a shape whose dummy has a request of {longest} tokens or more, as the batch has: dummies"
        " of this size differ in length, so the variants are tiers of lengths",
        actual=f"{asked}, whose dummy has at most {tiers[asked]} tokens in a request",
        problem=problem,
        help="choose the tier by the longest request, max(batch.seq_lens_cpu), and let the dummy of a tier"
        " have the longest request that fit() gives this tier",
    )


def _run_as_fitted(
    lane: LaneUnderTest, rig: Rig, problem: Problem, asked: GraphShape | EagerReason | None
) -> Findings:
    """Run a batch: the lane replays the shape from ``fit``, or runs eagerly and counts the reason."""
    best = asked if isinstance(asked, GraphShape) else None
    step = rig.step(problem, may_decline=True)
    if step.error is not None:
        if best is None:  # other experiments report a failing replay
            yield lane.of_error(
                step.error,
                expected=f"a batch for which fit() returns a reason runs eagerly: {asked}",
                rule="GP12",
                step=step,
                help="return an EagerReason from fit(); Lane.run() then runs the batch eagerly",
            )
        return
    replayed, counted = list(dict.fromkeys(step.replayed)), step.eager_runs
    reason = None if best else asked
    if (replayed, counted, step.reason) != ([best] if best else [], 0 if best else 1, reason):
        yield lane.finding(
            "GP12",
            field="Lane.stats",
            expected=f"one replay of {best}" if best else f"one eager run, counted as {asked}",
            actual=f"replays of {', '.join(map(str, replayed)) or 'none'}, {counted} eager runs"
            + (f", counted as {step.reason}" if step.reason else ""),
            step=step,
            help="return a captured shape from fit(), or an EagerReason",
        )
    if step.declined is not None:
        yield from wrong_results(
            lane, rig, step, what="an eager run", help="no graph is involved: check the region"
        )
        return
    wrong = differences(rig, step, lane.answer(rig, problem))
    if not wrong:
        return
    found = compare_with_capture(lane, rig, "graph", problem)
    otherwise = [each for each in found if each.rule in ("GP08", "GP10")]
    if lane.kind == "attention_backend":
        yield from otherwise  # the suite chooses the shapes of a backend's lane, so GP12 does not apply
    elif otherwise:
        yield lane.finding(
            "GP12",
            field=wrong[0].what,
            expected=wrong[0].expected,
            actual=wrong[0].actual,
            step=step,
            help="a capture of this batch records other work than the graph that replayed it: put"
            " everything that recorded kernels depend on into the shape",
        )


def ask_runner(
    lane: LaneUnderTest, rig: Rig, batch: ForwardBatch, problem: Problem
) -> tuple[GraphShape | EagerReason | None, Finding | None]:
    """Return the result of ``fit``, called without host syncs, or a finding about its error."""
    guard = TapeDriver(lane.device, strict=True)
    host = batch.host_tensors() if lane.device.type == "cpu" else [*batch.tensors().values()]
    try:
        with guard.preparation(host, read_only=[*batch.tensors().values()]):
            return rig.fit(batch), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        return None, lane.of_error(
            error,
            expected="fit() returns a shape or an EagerReason for any batch, from host data",
            rule="GP12",
            problem=problem,
            hook="prepare_replay",
            help="return an EagerReason if no shape holds the batch; do not raise an error",
        )


def smallest_holding(shapes: Sequence[GraphShape], batch: ForwardBatch) -> list[GraphShape]:
    """Return the smallest captured shapes that hold a batch.

    There can be several if shapes differ in two sizes, or in their variant.
    """
    fits = [
        shape
        for shape in shapes
        if shape.batch_size >= batch.batch_size
        and shape.num_tokens >= batch.num_tokens
        and batch.forward_mode in (shape.mode, ForwardMode.IDLE)
    ]
    sizes = [(shape.batch_size, shape.num_tokens) for shape in fits]
    return [
        shape
        for shape, (bs, tokens) in zip(fits, sizes, strict=True)
        if not any(other != (bs, tokens) and other[0] <= bs and other[1] <= tokens for other in sizes)
    ]


def _planned(lane: LaneUnderTest, rig: Rig, shapes: Sequence[GraphShape]) -> Findings:
    """Check that the runner's shapes are captured and cover the largest step."""
    planned = rig.planned
    if set(planned) != set(shapes) or len(set(shapes)) != len(shapes):
        yield lane.finding(
            "GP12",
            field="shapes()",
            expected=f"every shape captured once: {', '.join(map(str, planned))}",
            actual=", ".join(map(str, shapes)),
            help="return the same shapes from every call of shapes(), each once",
        )
    if lane.kind == "runner" and not lane.config.case.mode.is_ragged:
        yield from _default_shapes(lane, rig)


def _default_shapes(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Check that the runner's default shapes cover the largest step, or end at one fixed cap."""
    capture_sizes: dict[int, list[int]] = {}
    each = lane.config.case.rows_per_request
    for most in (each * number for number in MOST):
        try:
            own = lane.default_shapes(most)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            yield lane.of_error(
                error,
                expected=f"shapes for steps of {most} requests",
                rule="GP12",
                help="support every value of limits.max_bs, from 1 up, in shapes()",
            )
            return
        if own:
            capture_sizes[most] = [shape.batch_size for shape in own]
    cap = max((size for sizes in capture_sizes.values() for size in sizes), default=0)
    for most, sizes in capture_sizes.items():
        reach = min(most, cap)
        if max(sizes, default=0) != reach or min(sizes, default=0) < each:
            yield lane.finding(
                "GP12",
                field=f"the default capture sizes for max_bs = {most}",
                expected=f"sizes from 1 up, the largest {reach}: every step can be replayed",
                actual=str(sizes),
                help="append max_bs to the capture sizes",
            )
            return
    yield from _fit_defaults(lane, rig)


def _fit_defaults(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Fit batches of every size to the default capture sizes: each takes the smallest that holds it."""
    most = MOST_SIZES * lane.config.case.rows_per_request
    shapes = lane.default_shapes(most)
    for problem in of_default_sizes(lane.config, MOST_SIZES) if shapes else ():
        batch = rig.batch_of(problem)
        asked, held_by = lane.fit_default(most, batch), smallest_holding(shapes, batch)
        if asked in rig.declines or asked in held_by or (not held_by and isinstance(asked, EagerReason)):
            continue
        yield lane.finding(
            "GP12",
            hook="prepare_replay",
            field=f"fit() with the default capture sizes for max_bs = {most}",
            expected=f"{' or '.join(map(str, held_by))} for {batch.batch_size} requests",
            actual=str(asked),
            help="return the smallest captured shape that holds the batch: CaptureSizes.fit()",
        )
        return


def _in_any_order(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Fit requests of different lengths in two orders: the answers must be equal.

    Mixed batches are left out, because their order says which requests decode.
    """
    problem = short_and_long(lane.config.unbounded)
    if lane.config.case.mode is ForwardMode.MIXED:
        return
    orders = problem, replace(problem, requests=problem.requests[::-1])
    answers = [ask_runner(lane, rig, rig.batch_of(each), each) for each in orders]
    if any(refused is not None for _, refused in answers) or answers[0] == answers[1]:
        return  # `graph_choice` reports errors of ``fit`` for other batches
    yield lane.finding(
        "GP12",
        hook="prepare_replay",
        field="fit()",
        expected=f"one answer for requests in any order: {answers[0][0]}",
        actual=f"{answers[1][0]} with the requests in reverse",
        problem=problem,
        help="look at all requests, such as at the largest of seq_lens_cpu, not at the first or the last",
    )


def _other_kinds(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Fit batches of other modes and widths, and run some: none of them may take a graph of this lane."""
    problem = of_size(lane.config, 1)
    batch = rig.batch_of(problem)
    others = [
        (f"a batch of this size and of mode {mode.value}", replace(batch, forward_mode=mode))
        for mode in ForwardMode
        if mode not in (ForwardMode.IDLE, batch.forward_mode, lane.config.case.lane_mode)
    ]
    others += [(what, rig.batch_of(other)) for what, other in of_other_kinds(lane.config)]
    if batch.batch_size and not batch.forward_mode.is_ragged:
        twice = {
            name: getattr(batch, name).repeat_interleave(2, dim=0)
            for name in ("input_ids", "positions", "out_cache_loc")
        }
        mode = lane.config.case.lane_mode  # not IDLE, because an idle batch has no tokens
        doubled = replace(batch, forward_mode=mode, **twice)
        others.append(("a batch with twice as many tokens per request", doubled))
    for what, other in others:
        asked, refused = ask_runner(lane, rig, other, problem)
        if refused is not None:
            yield refused
        elif isinstance(asked, GraphShape):
            width = asked.num_tokens // asked.batch_size
            is_uniform = not asked.mode.is_ragged
            if asked.mode is other.forward_mode and (not is_uniform or width == other.tokens_per_request):
                continue
            yield lane.finding(
                "GP12",
                field="fit()",
                expected=f"an EagerReason for {what}: {asked} was recorded for another kind of batch",
                actual=str(asked),
                problem=problem,
                help="compare the mode, the tokens per request, and everything else that recorded kernels"
                " depend on, before the size",
            )

    if lane.kind == "runner":
        yield from _run_other_kinds(lane, rig)


def _run_other_kinds(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Run chunks and prompts with the shape of this lane's batches: an eager run, or an error.

    A wrapper of ``run_step`` can replay a batch for which ``fit`` returns a reason. Only runners have such.
    """
    for what, problem in of_other_kinds(lane.config):
        if not (problem.mode.is_ragged and lies_within(lane.config, problem)):
            continue
        step = rig.step(problem, may_decline=True)
        if not step.replayed and (step.error is not None or step.eager_runs == 1):
            continue
        replayed = ", ".join(map(str, dict.fromkeys(step.replayed)))
        yield lane.finding(
            "GP12",
            field="Lane.stats",
            expected=f"one eager run with a counted reason, or an error, for {what}",
            actual=f"replays of {replayed or 'none'}, {step.eager_runs} eager runs",
            problem=problem,
            help="let wrappers of run_step pass each batch on as it is: a graph serves only its own kind",
        )
        return


def declared_graph_support(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Check that a lane captures shapes, unless its backend or runner declares no graphs for the mode."""
    if lane.captures_nothing and lane.no_graphs_declared is None:
        support = lane.graph_support
        yield lane.finding(
            "GP12",
            field="shapes()" if lane.kind == "runner" else "capabilities.graph_support",
            expected=f"graphs of {lane.config.case}: the declared graph support is {support.value!r}",
            actual="the runner has no shape to capture",
            help="return the shapes to capture from shapes(), or declare needs = GraphSupport.NEVER"
            if lane.kind == "runner"
            else "declare only the graph support that the kernels have",
        )
