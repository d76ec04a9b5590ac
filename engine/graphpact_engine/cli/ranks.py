"""The commands of an engine on several ranks: which rank talks, and the answers of all ranks.

Rank 0 writes the answers, and shows progress, events and tables. Files of other ranks have the rank in their
names. Errors are printed by every rank that has one.

Does not: start processes; ``torchrun`` does.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpact_engine.deltas import Delta
    from graphpact_engine.engine import Engine
    from graphpact_engine.request import SamplingParams


def rank_of_process() -> int:
    """Return the rank that ``torchrun`` gave this process; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def file_of_rank(path: Path | None) -> Path | None:
    """Return the file of this process: ``steps.rank1.jsonl`` on rank 1 for ``steps.jsonl``."""
    rank = rank_of_process()
    return path if path is None or not rank else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def deltas_of_all(engine: "Engine", prompts: Sequence[Any], sampling: "SamplingParams") -> "Iterator[Delta]":
    """Yield the tokens of all prompts on every rank.

    They are yielded as they are generated if every rank has all prompts; otherwise after the last step.
    """
    stream = engine.stream(prompts, sampling)
    if engine.ranks is None or engine.ranks.layout.request_groups == 1:
        yield from stream
        return
    from graphpact_engine.ranks.outputs import gathered  # noqa: PLC0415  slow: torch

    yield from gathered(engine.ranks, [*stream])
