"""What the suite does with a lane: every experiment, in the order in which they are run.

    values    what steps give, against attention in float64; what padded rows do to it
    refresh   what a replay leaves unwritten, or writes from the past
    parity    what a replay prepared, against a capture of the very same batch
    capture   what captures change and record
    dummies   what captures are given
    order     batches in other orders, over poison, after what happens to an engine
    dispatch  which graph a batch takes; ranks

A rule is judged by every experiment that lists it, and passes where none of them finds anything. An
experiment finds breaches of the rules that it lists, and of no other: where kernels or the tape refuse a step
by another rule, the finding is of the rule that the experiment gives, or is no rule's.

Each experiment gets a lane of its own: none sees what another one left.

Does not: run them; see `graphpact_conformance.suite`.
"""

from graphpact_conformance.experiments import (
    capture,
    dispatch,
    dummies,
    order,
    parity,
    refresh,
    values,
)
from graphpact_conformance.experiments.base import Experiment
from graphpact_conformance.rules import RULES

_NOT_IN_CAPTURES = ("GP06", "GP17")
"""What answers alone can show, and what ranks."""

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "captures",
        tuple(rule for rule in RULES if rule not in _NOT_IN_CAPTURES),
        capture.captures,
    ),
    Experiment("answers_eagerly", (), values.answers_eagerly, repeats=True, depth="lightest"),
    Experiment(
        "answers_replayed",
        ("GP02", "GP04", "GP05", "GP06", "GP07", "GP08", "GP09", "GP10", "GP12", "GP13", "GP19"),
        values.answers_replayed,
        repeats=True,
        depth="lightest",
        in_pairs=True,
    ),
    Experiment(
        "unwritten_and_stale",
        ("GP02", "GP03", "GP09", "GP10"),
        refresh.unwritten_and_stale,
        repeats=True,
        in_pairs=True,
    ),
    Experiment(
        "captured_anew",
        ("GP01", "GP02", "GP04", "GP05", "GP07", "GP08", "GP09", "GP10", "GP11", "GP13", "GP20"),
        parity.captured_anew,
        repeats=True,
        in_pairs=True,
    ),
    Experiment(
        "padding",
        ("GP03", "GP04", "GP05", "GP06"),
        values.padding,
        repeats=True,
        depth="light",
        in_pairs=True,
    ),
    Experiment("largest_step", ("GP13",), values.largest_step, depth="light"),
    Experiment("guarded", order.GUARDED, order.guarded, repeats=True, in_pairs=True),
    Experiment("interleaved", ("GP09", "GP15", "GP18"), order.interleaved),
    Experiment("repeated", ("GP18",), order.repeated),
    Experiment("life_goes_on", ("GP14",), order.life_goes_on),
    Experiment("smallest_first", ("GP15",), order.smallest_first),
    Experiment("dummies", ("GP10", "GP11", "GP12"), dummies.dummies),
    Experiment("leaves_no_trace", ("GP19",), capture.leaves_no_trace),
    Experiment("cold_and_warm", ("GP10",), capture.cold_and_warm),
    Experiment(
        "takes_the_right_graph", ("GP08", "GP10", "GP12", "GP20"), dispatch.takes_the_right_graph
    ),
    Experiment("declares_what_it_can", ("GP12",), dispatch.declares_what_it_can),
    Experiment("ranks_agree", ("GP04", "GP05", "GP06", "GP11", "GP17"), dispatch.ranks_agree),
)
"""Each by a name of its own."""

__all__ = ["EXPERIMENTS", "Experiment"]
