"""`coverage_of`: what a run went through, and how often; `Coverage` adds up runs.

    kind KIND              batches of a kind, such as ``kind mixed``
    graph GRAPH            replays of a graph
    eager KIND: REASON     steps without a graph
    event NAME             what happened to requests: a hit of the prefix cache, a preemption, an accepted
                           draft, a chunk beside a decode, a request that left in the middle of a batch

Does not: say what is enough.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphpact.engines import EngineStep
from graphpact_swarm.draws import pairs_of
from graphpact_swarm.outcome import RunOutcome


def coverage_of(outcome: RunOutcome) -> dict[str, int]:
    """Return what a run went through, and how often."""
    counts: Counter[str] = Counter()
    for step in outcome.steps:
        counts[f"kind {step.kind}"] += 1
        if step.graph is not None:
            counts[f"graph {step.graph}"] += 1
        else:
            counts[f"eager {step.kind}: {step.reason or 'no reason'}"] += 1
    counts.update(f"event {name}" for name in _events(outcome.steps))
    counts.update(f"event ended by {each.reason}" for each in outcome.answers.values())
    return dict(sorted(counts.items()))


def _events(steps: Iterable[EngineStep]) -> Iterator[str]:
    """Yield the names of what happened to requests."""
    known: dict[int, int] = {}  # the tokens that each request had in the cache after its last step
    before: EngineStep | None = None
    for step in steps:
        if step.kind in ("draft", "draft_extend", "idle"):
            continue
        for request, tokens, computed in zip(step.requests, step.tokens, step.computed, strict=True):
            if request not in known and computed:
                yield "prefix cache hit"
            elif request in known and computed < known[request] and step.kind != "verify" and tokens > 1:
                yield "request preempted, and computed again"
            elif request in known and step.kind == "verify" and computed > known[request]:
                yield "draft accepted"
            known[request] = computed + (1 if step.kind == "verify" else tokens)
        if step.kind == "mixed":
            yield "prompt beside a decode"
        if before is not None and before.kind == step.kind == "decode":
            left = [at for at, request in enumerate(before.requests) if request not in step.requests]
            if left and left[-1] < len(before.requests) - 1:
                yield "request left in the middle of a batch"
        before = step


class Coverage:
    """What many runs went through.

    Attributes:
        pairs: Runs with each pair of values of features.
        seen: How often each thing was seen; see `coverage_of`.
    """

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.seen: Counter[str] = Counter()

    def add(self, choice: Mapping[str, Any], seen: Mapping[str, int]) -> None:
        """Add a run."""
        self.pairs.update(pairs_of(choice))
        self.seen.update(seen)

    def is_new(self, choice: Mapping[str, Any]) -> bool:
        """Return whether a configuration and load has a pair of values that no run had."""
        return any(pair not in self.pairs for pair in pairs_of(choice))
