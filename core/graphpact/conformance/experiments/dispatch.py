"""Which graph a batch replays, and that all ranks agree: GP05, GP11, GP12, GP17.

Ranks are simulated: one after another in this process, each as the rank that `graphpact.parallel` says it is.
What they would wait for each other in is the sequence of what they record and of the rows that they gather.

Does not: communicate.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.conformance.experiments.base import Findings, differences
from graphpact.conformance.experiments.parity import compare_traces, trace_of
from graphpact.conformance.problems import Config, Problem, of_size
from graphpact.conformance.rig import Rig
from graphpact.conformance.subject import LaneUnderTest
from graphpact.errors import GraphpactError
from graphpact.parallel import get_parallel
from graphpact.runners import RunnerContext
from graphpact.shapes import EagerReason, GraphShape

_RANKS = 2


# -- which graph -------------------------------------------------------------------------------------


def takes_the_right_graph(lane: LaneUnderTest, _: Sequence[Problem]) -> Findings:
    """Ask for, and replay, batches of every size: each takes the smallest captured shape that holds it."""
    rig = lane.rig()
    shapes = [shape for shape, _graph in rig.lane.graphs()]
    yield from _ladder(lane, rig, shapes)
    for problem in _sizes(lane.config):
        batch = rig.batch_of(problem)
        asked = rig.runner.can_run(batch)
        best = _smallest(shapes, batch)
        if asked != best and not (isinstance(asked, EagerReason) and best is None):
            yield lane.finding(
                "GP12",
                hook="prepare_replay",
                field="can_run()",
                expected=str(best or "a reason to run eagerly: no captured shape holds it"),
                actual=str(asked),
                problem=problem,
                help="let bucket and eligibility follow from the batch alone: the smallest captured shape"
                " with room for its requests and tokens, of its mode",
            )
            continue
        before = {shape: stats.replays for shape, stats in rig.lane.stats.shapes.items()}
        eager = rig.lane.stats.eager.total()
        step = rig.step(problem)
        if step.error is not None:
            yield lane.of_error(
                step.error, expected="a batch of any size is served", rule="GP12", step=step
            )
            continue
        replayed = [
            shape
            for shape, stats in rig.lane.stats.shapes.items()
            if stats.replays > before.get(shape, 0)
        ]
        counted = rig.lane.stats.eager.total() - eager
        if replayed != ([best] if best else []) or counted != (0 if best else 1):
            yield lane.finding(
                "GP12",
                field="Lane.stats",
                expected=f"one replay of {best}"
                if best
                else "one eager run, counted with its reason",
                actual=f"replays of {', '.join(map(str, replayed)) or 'none'}, {counted} eager runs",
                step=step,
                help="replay what can_run() answers; a batch that no graph holds is Lane.run()'s to serve",
            )
        for found in differences(rig, step, lane.answer(rig, problem)):
            yield lane.finding(
                "GP12",
                field=found.what,
                expected=found.expected,
                actual=found.actual,
                step=step,
                help="a graph serves what it was recorded for: put all that its kernels depend on into the"
                " shape",
            )
    yield from _other_kinds(lane, rig)


def _sizes(config: Config) -> list[Problem]:
    """Return a small batch of each number of requests, one more than the largest shape has, and none."""
    most = config.shapes[-1].batch_size
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    if config.case.mode is ForwardMode.IDLE:
        return [Problem(config.case, [], 0)]
    return [of_size(config, size) for size in dict.fromkeys(sizes)] + [Problem(config.case, [], 0)]


def _smallest(shapes: Sequence[GraphShape], batch: ForwardBatch) -> GraphShape | None:
    fits = [
        shape
        for shape in shapes
        if shape.batch_size >= batch.batch_size
        and shape.num_tokens >= batch.num_tokens
        and batch.forward_mode in (shape.mode, ForwardMode.IDLE)
    ]
    return min(fits, key=lambda s: (s.num_tokens, s.batch_size), default=None)


def _ladder(lane: LaneUnderTest, rig: Rig, shapes: Sequence[GraphShape]) -> Findings:
    """See that what the ladder has is captured, and reaches the largest step."""
    ladder = rig.runner.ladder
    planned = ladder.shapes if ladder is not None else []
    if set(planned) != set(shapes) or len(set(shapes)) != len(shapes):
        yield lane.finding(
            "GP12",
            field="the ladder",
            expected=f"every shape captured once: {', '.join(map(str, planned))}",
            actual=", ".join(map(str, shapes)),
            help="GraphRunner.capture() captures each shape of make_ladder()",
        )
    if lane.kind != "runner" or lane.config.case.mode.is_ragged:
        return
    for most in (1, 3, 5, 7, 13):
        limits = replace(lane.config.limits, max_bs=most, max_num_tokens=most * 8)
        context = RunnerContext(
            lane.device,
            rig.backend.capabilities,
            most,
            mode=lane.config.case.lane_mode,
            limits=limits,
        )
        try:
            own = lane.runner(context).ladder
        except GraphpactError as error:
            yield lane.of_error(
                error, expected=f"a ladder for steps of {most} requests", rule="GP12"
            )
            continue
        if own is None or lane.runner.__module__.startswith("graphpact.conformance"):
            continue
        sizes = [shape.batch_size for shape in own.shapes]
        if max(sizes) != most or min(sizes) < 1:
            yield lane.finding(
                "GP12",
                field=f"the default ladder for max_bs = {most}",
                expected=f"buckets from 1 up, the largest {most}: every step can be replayed",
                actual=str(sizes),
                help="append max_bs to the ladder, whatever its steps are",
            )


def _other_kinds(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Ask for batches of other modes, of other widths, with other fields: none may take this graph."""
    problem = of_size(lane.config, 1)
    batch = rig.batch_of(problem)
    others: list[tuple[str, ForwardBatch]] = []
    for mode in ForwardMode:
        if mode not in (ForwardMode.IDLE, batch.forward_mode, lane.config.case.lane_mode):
            others.append((f"a {mode.value} batch", replace(batch, forward_mode=mode)))
    if batch.batch_size and not batch.forward_mode.is_ragged:
        twice = {
            name: getattr(batch, name).repeat_interleave(2, dim=0)
            for name in ("input_ids", "positions", "out_cache_loc")
        }
        others.append(
            ("a batch with twice as many tokens of each request", replace(batch, **twice))
        )
    for what, other in others:
        asked = rig.runner.can_run(other)
        if isinstance(asked, GraphShape):
            width = asked.num_tokens // asked.batch_size
            if asked.mode is other.forward_mode and width == other.tokens_per_request:
                continue
            yield lane.finding(
                "GP12",
                field="can_run()",
                expected=f"a reason, for {what}: {asked} was recorded for another kind",
                actual=str(asked),
                problem=problem,
                help="compare the mode, the tokens of each request, and all else that recorded kernels"
                " depend on, before the size",
            )


def declares_what_it_can(lane: LaneUnderTest, _: Sequence[Problem]) -> Findings:
    """A backend that declares that a graph holds this mode is captured in it."""
    support = lane.backend.capabilities.graph_support
    if not isinstance(support, GraphSupport) or not support.covers(lane.config.case.needs):
        return
    rig = lane.rig()
    if rig.runner.ladder is None:
        yield lane.finding(
            "GP12",
            field="capabilities.graph_support",
            expected=f"graphs of {lane.config.case}: it declares {support.value!r}",
            actual="the lane captures nothing",
            help="declare what graphs can hold, and no more",
        )


# -- ranks -------------------------------------------------------------------------------------------


def ranks_agree(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Capture and step as each of two ranks: the same shapes, the same work, the same rows gathered."""
    counted = lane.like(replace(lane.config, counts=True))
    rigs: list[Rig] = []
    for rank in range(_RANKS):
        with get_parallel().override(attn_tp_rank=rank, attn_tp_size=_RANKS):
            try:
                with torch.inference_mode():
                    rigs.append(counted.build())
            except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
                yield lane.of_error(
                    error, expected=f"rank {rank} of {_RANKS} captures as any other", rule="GP17"
                )
                return
    yield from _same_captures(lane, rigs)
    for problem in (steps[-1], steps[1], steps[2 % len(steps)]):
        yield from _same_steps(counted, rigs, problem)
    yield from _uneven(lane, rigs)


def _same_captures(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
    orders = [[shape for shape, _ in rig.lane.graphs()] for rig in rigs]
    if orders[0] != orders[1]:
        yield lane.finding(
            "GP17",
            field="captured shapes",
            expected=f"the same on all ranks, in one order: {', '.join(map(str, orders[0]))}",
            actual=f"on rank 1: {', '.join(map(str, orders[1]))}",
            help="let nothing about shapes depend on the rank",
        )
        return
    for shape in orders[0]:
        found = compare_traces(trace_of(rigs[1], shape), trace_of(rigs[0], shape))
        if found is not None and found["rule"] == "GP10":
            yield lane.finding(
                "GP17",
                hook="init_metadata_capture",
                field=f"{shape}: {found['field']}",
                expected=f"on rank 1 what rank 0 records: {found['there']}",
                actual=found["here"],
                help="record the same operations on all ranks; what differs by rank is a tensor's contents",
            )
            return


def _same_steps(lane: LaneUnderTest, rigs: Sequence[Rig], problem: Problem) -> Findings:
    """All ranks of a tensor-parallel group have one batch, and each its share of the padded rows."""
    shapes = []
    for rank, rig in enumerate(rigs):
        with get_parallel().override(attn_tp_rank=rank, attn_tp_size=_RANKS):
            step = rig.step(problem)
            shapes.append(step.shape)
            if step.error is not None:
                yield lane.of_error(
                    step.error, expected=f"rank {rank} replays as any other", rule="GP17", step=step
                )
                return
            count = step.leaves.get("view.num_token_non_padded")
            if step.shape is not None and count is not None:
                yield from _share(lane, rank, step.shape, problem, int(count.value))
            for found in differences(rig, step, rig.answer(problem)):
                yield lane.finding(
                    "GP17" if found.what.endswith("what rows share") else None,
                    field=f"rank {rank}: {found.what}",
                    expected=found.expected,
                    actual=found.actual,
                    step=step,
                    help="each rank pools the real tokens among its own rows of the padded shape",
                )
    if len(set(shapes)) > 1:
        yield lane.finding(
            "GP17",
            field="the shape that is replayed",
            expected=f"one for all ranks: {shapes[0]}",
            actual=", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes)),
            problem=problem,
            help="let can_run() answer by what all ranks know: the batch, and global_num_tokens_cpu",
        )


def _share(
    lane: LaneUnderTest, rank: int, shape: GraphShape, problem: Problem, count: int
) -> Findings:
    rows = shape.num_tokens // _RANKS
    real = min(max(len(problem.tokens) - rank * rows, 0), rows)
    if count != real:
        yield lane.finding(
            "GP05",
            hook="populate",
            field=f"view.num_token_non_padded on rank {rank} of {_RANKS}",
            expected=f"{real}: the real tokens among its {rows} rows of {shape}",
            actual=str(count),
            problem=problem,
            help="graphpact.parallel.local_num_token_non_padded(count, padded tokens): the boundary between"
            " ranks is drawn in the padded count",
        )


def _uneven(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
    """Data-parallel ranks with more, fewer and no requests replay the bucket of the largest."""
    config = lane.config
    width = config.case.width
    if width is None or config.case.mode is ForwardMode.IDLE:
        return
    most = config.shapes[-1].batch_size
    for sizes in ((most, 1), (most, 0), (1, 0), (most + 1, 1)):
        together = tuple(size * width for size in sizes)
        answers = []
        for rig, size in zip(rigs, sizes, strict=True):
            problem = of_size(config, size) if size else Problem(config.case, [], 0)
            batch = replace(rig.batch_of(problem), global_num_tokens_cpu=together)
            answers.append(rig.runner.can_run(batch))
        if answers[0] != answers[1] and any(isinstance(a, GraphShape) for a in answers):
            told = [
                f"rank {rank} with {size} requests: {answer}"
                for rank, (size, answer) in enumerate(zip(sizes, answers, strict=True))
            ]
            yield lane.finding(
                "GP17",
                field="can_run()",
                expected=f"one answer on all ranks for global_num_tokens_cpu = {together}",
                actual="; ".join(told),
                help="where layers gather over ranks, all take the bucket of the largest: BucketLadder.fit()"
                " looks at global_num_tokens_cpu",
            )
