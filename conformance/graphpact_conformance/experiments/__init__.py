"""All experiments of the suite, in the order in which they run.

    values    outputs and KV cache against attention in float64; effects of padding rows
    look_alikes  live requests with the numbers of padding rows; a part of ``answers_replayed``
    refresh   entries that a replay does not write, or writes from earlier batches
    parity    the inputs of a replay against those of a capture of the same batch
    capture   side effects of captures, and the recorded work
    dummies   the dummy batches of the runner
    recorded  the steps of a real engine, in their order
    order     other orders of batches, poisoned memory, eager activity between replays
    life      captured again, beside other lanes, on memory that the engine rewrites
    dispatch  the choice of the graph; ranks

A rule is checked by every experiment that lists it. It passes if none of them has a finding. An experiment
reports only rules that it lists: if kernels or the tape refuse a step by another rule, the finding has the
rule that the experiment gives, or none.

What an experiment finds is found in a new lane, without state of other experiments.

Does not: run experiments; see `graphpact_conformance.suite`.
"""

from graphpact_conformance.experiments import (
    capture,
    dispatch,
    dummies,
    life,
    order,
    parity,
    recorded,
    refresh,
    values,
)
from graphpact_conformance.experiments.base import Experiment
from graphpact_conformance.rules import RULES

_NOT_IN_CAPTURES = ("GP06", "GP17")
"""Rules that need outputs or several ranks."""

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "captures",
        tuple(rule for rule in RULES if rule not in _NOT_IN_CAPTURES),
        capture.captures,
        explains_captures=True,
    ),
    Experiment(
        "answers_eagerly",
        (),
        values.answers_eagerly,
        repeats=True,
        depth="lightest",
        needs_graphs=False,
        reuses=True,
    ),
    Experiment(
        "answers_replayed",
        ("GP02", "GP04", "GP05", "GP06", "GP07", "GP08", "GP09", "GP10", "GP12", "GP13", "GP15", "GP19"),
        values.answers_replayed,
        repeats=True,
        depth="lightest",
        in_pairs=True,
        of_fields=True,
    ),
    Experiment(
        "recorded_steps",
        ("GP02", "GP03", "GP09", "GP10"),
        recorded.recorded_steps,
        of_recordings=True,
    ),
    Experiment(
        "unwritten_and_stale",
        ("GP02", "GP03", "GP09", "GP10"),
        refresh.unwritten_and_stale,
        repeats=True,
        in_pairs=True,
        of_fields=True,
        names_rules=True,
        reuses=True,
    ),
    Experiment(
        "replay_against_capture",
        (
            *("GP01", "GP02", "GP03", "GP04", "GP05", "GP07", "GP08", "GP09", "GP10", "GP11", "GP13", "GP20"),
            "GP21",
        ),
        parity.replay_against_capture,
        repeats=True,
        in_pairs=True,
        names_rules=True,
        reuses=True,
    ),
    Experiment(
        "padding",
        ("GP03", "GP04", "GP05", "GP06"),
        values.padding,
        repeats=True,
        depth="light",
        in_pairs=True,
        of_fields=True,
        reuses=True,
    ),
    Experiment("largest_step", ("GP13",), values.largest_step, depth="light", of_long=True),
    # From here to rewritten_memory, all begin with the graphs that largest_step captured. The last two change
    # what they use: captured_again captures anew, rewritten_memory writes weights.
    Experiment(
        "guarded", order.GUARDED, order.guarded, repeats=True, in_pairs=True, of_kinds=True, reuses=True
    ),
    Experiment("interleaved", ("GP09", "GP15", "GP18"), order.interleaved, reuses=True),
    Experiment("smallest_first", ("GP14", "GP15"), order.smallest_first, reuses=True),
    Experiment("dummies", ("GP10", "GP11", "GP12"), dummies.dummies, reuses=True),
    Experiment("cold_and_warm", ("GP10",), capture.cold_and_warm, reuses=True),
    Experiment("graph_choice", ("GP08", "GP10", "GP12", "GP20"), dispatch.graph_choice, reuses=True),
    Experiment("captured_again", ("GP10",), life.captured_again, reuses=True),
    Experiment("rewritten_memory", ("GP02", "GP15", "GP16"), life.rewritten_memory, reuses=True),
    Experiment("repeated", ("GP18",), order.repeated),
    # It steps lanes of another mode: what they leave on a class would hide a finding from its repetition.
    Experiment("beside_other_lanes", ("GP02", "GP09", "GP10", "GP15", "GP19"), life.beside_other_lanes),
    Experiment("survives_eager_activity", ("GP14",), order.survives_eager_activity),
    Experiment("capture_side_effects", ("GP19",), capture.capture_side_effects),
    Experiment(
        "declared_graph_support",
        ("GP12",),
        dispatch.declared_graph_support,
        depth="lightest",
        in_pairs=True,
        needs_graphs=False,
    ),
    Experiment("ranks_agree", ("GP04", "GP05", "GP06", "GP11", "GP17"), dispatch.ranks_agree),
)
"""All experiments. Their names are unique and appear in reports."""

__all__ = ["EXPERIMENTS", "Experiment"]
