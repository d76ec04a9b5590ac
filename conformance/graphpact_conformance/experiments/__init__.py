"""All experiments of the suite, in the order in which they run.

    outputs        outputs and KV cache against attention in float64
    padding        effects of padding rows on outputs and KV cache
    indices        negative indices and offsets in padding rows and dummies
    host_rows      host tensors of the view; a part of ``padding``
    unlike_eager   replays that are wrong like a capture; a part of ``answers_replayed``
    look_alikes    live requests that look like padding rows; a part of ``answers_replayed``
    independent_requests   requests alone, and in another order
    refresh        entries that a replay does not write, or that depend on earlier batches
    plan_invariants   what a backend declares about its plans
    parity         a replay against a capture of the same batch: `compared_inputs`, `compared_work`
    capture        side effects of captures, and the recorded work
    dummies        the dummy batches of the runner
    recorded       the recorded steps of a real engine, in the recorded order
    replay_order   other orders of batches and captures, poisoned memory
    eager_activity eager steps between replays
    python_state   Python of the region, which a replay skips
    whole_requests requests from their prompt on, in a cache that only steps write
    recapture      repeated captures, several lanes in one process, memory that the engine rewrites
    shared_cache   layers without new keys, which read the cache of another layer
    graph_choice   the choice of the graph
    ranks          agreement of ranks that step together with one batch
    uneven_ranks   agreement of ranks whose batches differ

    experiment     `Experiment`, and `PlannedLane`, in which it may run
    when           where experiments run
    comparison     the comparison of two steps, and of a step with the oracle
    breaches       breaches of the pact as findings
    attended_slots the KV slots that a draft attends, as a part of findings
    asked_batches  the batches that are passed to `fit`

A rule is checked by every experiment that lists it. It passes if none of them has a finding. An experiment
reports only the rules that it lists. If a kernel or the tape raises an error that names another rule, the
finding has the rule that the experiment gives, or none.

A finding always comes from a run in a new lane, without state of other experiments.

Does not: run experiments; see `graphpact_conformance.suite`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphpact_conformance.experiments import (
    capture,
    dummies,
    eager_activity,
    graph_choice,
    independent_requests,
    indices,
    outputs,
    padding,
    parity,
    plan_invariants,
    python_state,
    ranks,
    recapture,
    recorded,
    refresh,
    replay_order,
    shared_cache,
    whole_requests,
)
from graphpact_conformance.experiments.experiment import Experiment, Findings, PlannedLane
from graphpact_conformance.experiments.when import (
    all_of,
    any_of,
    everywhere,
    in_full_lanes,
    in_full_lanes_of_one_plugin,
    in_long_contexts,
    in_plain_lanes,
    in_recorded_lanes,
    of_one_plugin,
    of_plain_backends,
    unless_quick,
    with_optional_fields,
    with_own_region,
    without_embeddings,
)
from graphpact_conformance.rules import RULES

_NOT_IN_CAPTURES = ("GP06", "GP17")
"""Rules that need outputs or several ranks."""


def _sharing_captures(
    first: Experiment, others: Sequence[Experiment], last: Sequence[Experiment]
) -> tuple[Experiment, ...]:
    """Return experiments in order. The later ones reuse the graphs that the ones before captured.

    Args:
        first: Captures every graph that the others replay. Where it does not run, these capture.
        others: Experiments that do not change captures.
        last: Experiments that change captures, for example by another capture. They run after the others.
    """
    return (first, *(replace(each, shares_captures=True) for each in (*others, *last)))


def _in_full_lanes(run: Callable[..., Findings], *examines: str, num_captures: int = 2) -> Experiment:
    """Return the experiment of a procedure that runs once in each full lane of one plugin."""
    return Experiment(run.__name__, examines, run, in_full_lanes_of_one_plugin, num_captures=num_captures)


EXPERIMENTS: tuple[Experiment, ...] = (
    *_sharing_captures(
        first=Experiment(
            "captures",
            tuple(rule for rule in RULES if rule not in _NOT_IN_CAPTURES),
            capture.captures,
            in_full_lanes_of_one_plugin,
            after_failed_captures=everywhere,
        ),
        others=[
            Experiment(
                "answers_replayed",
                (
                    *("GP02", "GP04", "GP05", "GP06", "GP07", "GP08", "GP09", "GP10", "GP12", "GP13"),
                    *("GP15", "GP19"),
                ),
                outputs.answers_replayed,
                everywhere,
                repeats=True,
                num_captures=1,
            ),
            Experiment(
                "recorded_steps",
                ("GP02", "GP03", "GP09", "GP10"),
                recorded.recorded_steps,
                all_of(in_full_lanes_of_one_plugin, in_recorded_lanes),
                takes_recordings=True,
            ),
            Experiment(
                "independent_requests",
                ("GP05",),
                independent_requests.independent_requests,
                all_of(in_plain_lanes, with_own_region),
                num_captures=0,
            ),
            Experiment(
                "unwritten_and_stale",
                ("GP02", "GP03", "GP09", "GP10"),
                refresh.unwritten_and_stale,
                any_of(in_full_lanes, with_optional_fields),
                after_findings=everywhere,
                repeats=True,
                num_captures=0,
            ),
            Experiment(
                "replay_against_capture",
                (
                    *("GP01", "GP02", "GP03", "GP04", "GP05", "GP07", "GP08", "GP09", "GP10", "GP11"),
                    *("GP13", "GP20", "GP21"),
                ),
                parity.replay_against_capture,
                all_of(in_full_lanes, without_embeddings),
                after_findings=without_embeddings,
                repeats=True,
            ),
            Experiment(
                "padding",
                ("GP02", "GP03", "GP04", "GP05", "GP06"),
                padding.padding,
                any_of(unless_quick, with_optional_fields),
                repeats=True,
                num_captures=0,
            ),
            Experiment(
                "answers_eagerly",
                (),
                outputs.answers_eagerly,
                of_one_plugin,
                repeats=True,
                needs_graphs=False,
                num_captures=0,
            ),
            Experiment(
                "largest_step",
                ("GP13",),
                outputs.largest_step,
                all_of(any_of(unless_quick, in_long_contexts), of_one_plugin),
                num_captures=0,
            ),
            Experiment(
                "strict_replays",
                replay_order.RULES_OF_STRICT_LANES,
                replay_order.strict_replays,
                all_of(any_of(in_full_lanes, in_plain_lanes), without_embeddings),
                repeats=True,
                num_captures=0,
            ),
            _in_full_lanes(replay_order.interleaved, "GP09", "GP15", "GP18"),
            _in_full_lanes(replay_order.smallest_first, "GP14", "GP15"),
            _in_full_lanes(dummies.dummies, "GP10", "GP11", "GP12"),
            Experiment(
                "indices",
                ("GP04", "GP11"),
                indices.indices,
                any_of(in_full_lanes_of_one_plugin, with_optional_fields),
                num_captures=0,
            ),
            _in_full_lanes(capture.cold_and_warm, "GP09", "GP10"),  # it captures again, so plans may differ
            _in_full_lanes(python_state.python_state, "GP10", num_captures=0),
            _in_full_lanes(whole_requests.whole_requests, "GP02", "GP09", "GP10", num_captures=0),
            _in_full_lanes(graph_choice.graph_choice, "GP08", "GP10", "GP12", "GP20", num_captures=0),
            _in_full_lanes(replay_order.repeated, "GP18", num_captures=0),
        ],
        last=[  # they capture the lane again, or write weights
            _in_full_lanes(plan_invariants.plan_invariants, "GP09", num_captures=1),
            _in_full_lanes(capture.capture_side_effects, "GP19"),
            _in_full_lanes(recapture.captured_again, "GP10"),
            _in_full_lanes(recapture.rewritten_memory, "GP02", "GP15", "GP16", num_captures=1),
        ],
    ),
    # This experiment needs new captures, because it steps lanes of another mode. These may leave state on a
    # class, and then a repeated run could miss the finding.
    _in_full_lanes(recapture.beside_other_lanes, "GP02", "GP03", "GP09", "GP10", "GP15", "GP19"),
    _in_full_lanes(eager_activity.survives_eager_activity, "GP14"),
    Experiment(
        "without_new_keys",
        shared_cache.RULES,
        shared_cache.without_new_keys,
        of_plain_backends,
        needs_graphs=False,
        num_captures=1,
    ),
    Experiment(
        "declared_graph_support",
        ("GP12",),
        graph_choice.declared_graph_support,
        without_embeddings,
        needs_graphs=False,
        num_captures=1,
    ),
    _in_full_lanes(ranks.ranks_agree, "GP04", "GP05", "GP06", "GP11", "GP17"),
)
"""All experiments. Their names are unique and appear in reports."""

OF_OUTPUTS = tuple(
    each
    for each in EXPERIMENTS
    if each.name in ("answers_eagerly", "answers_replayed", "declared_graph_support")
)
"""The experiments that run in every lane. They check only outputs and declarations."""

__all__ = ["EXPERIMENTS", "OF_OUTPUTS", "Experiment", "PlannedLane"]
