"""`judge_runs`: what an engine's run on a tape did, and whether it answers as its eager run.

Does not: run an engine; `graphpact_cli.engine_runs` does.
"""

from collections.abc import Iterator
from typing import Any

from graphpact.engines import EngineResult
from graphpact.errors import ContractError
from graphpact_cli.console import note, print_table, talk

_COLUMNS = ("graph", "replays", "rows", "padding", "capture", "nodes", "")
_NUMBERS = ("replays", "rows", "padding", "capture", "nodes")


def judge_runs(eager: EngineResult, taped: EngineResult) -> None:
    """Print what the run on the tape did.

    Raises:
        ContractError: Tokens differ, a replay is at fault, or nothing was replayed.
    """
    states = [state for state in taped.states if state is not None]
    print_table(talk(), _COLUMNS, [row for state in states for row in _rows(state)], numbers=_NUMBERS)
    replays = sum(c["replays"] for state in states for c in state["steps"]["graphs"].values())
    steps = sum(each["steps"] for state in states for each in state["steps"]["eager"])
    guarded = [state["guard"] for state in states if state["guard"] is not None]
    faults = [fault for guard in guarded for fault in guard["faults"]]
    differing = [
        at
        for at, (one, other) in enumerate(zip(eager.answers, taped.answers, strict=True))
        if one.token_ids != other.token_ids
    ]
    count = len(taped.answers)
    note(
        f"{replays:,} replays; {steps:,} eager steps; {len(faults)} faults;"
        f" {count - len(differing)} of {count} answers have the eager tokens,"
        f" largest difference of a logarithm of probability {_largest_difference(eager, taped):.2g}"
    )
    if differing:
        at = differing[0]
        raise ContractError(
            f"the answer to prompt {at} differs: eager {eager.answers[at].text!r},"
            f" tape {taped.answers[at].text!r}",
            hint="--strict names what the graph reads wrongly; --words guard,verify:1 compares every replay",
        )
    if faults:
        first = faults[0]
        where = f"{first['owner']}.{first['field']} in {first['graph']}"
        raise ContractError(
            f"{where}: {first['text']}", hint="the faults are listed above", rule=first["rule"]
        )
    if not replays:
        raise ContractError("nothing was replayed", hint="the table says why each step ran eagerly")


def _largest_difference(eager: EngineResult, taped: EngineResult) -> float:
    pairs = [
        (a, b)
        for one, other in zip(eager.answers, taped.answers, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=False)
    ]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _rows(state: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each graph, smallest first, and for each reason of eager steps."""
    for graph, counts in reversed(state["steps"]["graphs"].items()):
        waste = 1 - counts["raw"] / counts["padded"] if counts["padded"] else 0.0
        yield (
            graph,
            counts["replays"],
            counts["raw"],
            f"{waste:.1%}" if counts["replays"] else "",
            f"{counts['capture_seconds'] * 1000:,.0f} ms",
            counts["nodes"] if counts["nodes"] >= 0 else "",
            "",
        )
    for each in state["steps"]["eager"]:
        yield f"{each['mode']}, eager", each["steps"], "", "", "", "", each["reason"]
