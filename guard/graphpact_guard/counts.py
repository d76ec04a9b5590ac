"""`GraphCounts` and `summary_of_steps`: how often each graph of an engine was replayed, with which padding.

Does not: count; an integration does, where its engine captures, replays and runs eagerly.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graphpact_guard.faults import GraphKey


@dataclass(slots=True)
class GraphCounts:
    """The counts of one graph.

    Args:
        capture_seconds: How long its capture took.
        nodes: Recorded operations; -1 if unknown.
        replays: How often it was replayed.
        raw: What all replays had of the graph's size, requests or tokens.
        padded: The same with padding.
    """

    capture_seconds: float
    nodes: int = -1
    replays: int = 0
    raw: int = 0
    padded: int = 0


def summary_of_steps(
    graphs: Mapping[GraphKey, GraphCounts], eager: Counter[tuple[str, str]]
) -> dict[str, Any]:
    """Return the counts of a process, ready for JSON.

    Args:
        graphs: Those of each graph.
        eager: Eager steps by mode and reason.
    """
    return {
        "graphs": {str(key): asdict(counts) for key, counts in graphs.items()},
        "eager": [{"mode": mode, "reason": why, "steps": n} for (mode, why), n in eager.items()],
    }
