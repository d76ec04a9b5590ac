"""`log_at_exit`: what a guard has seen, in one line of the log when its process ends.

It runs at the end of a process and of a child of multiprocessing, which leaves out ``atexit``.

Does not: run where a process is killed by a signal that Python does not handle, such as SIGKILL.
"""

import logging
from collections import Counter
from collections.abc import Callable
from multiprocessing.util import Finalize

from graphpact_guard.guard import Guard

logger = logging.getLogger("graphpact.guard")


def log_at_exit(guard: Guard, before: Callable[[], object] | None = None) -> None:
    """Log what ``guard`` has seen when this process ends.

    Args:
        guard: The guard.
        before: Is called before, for example to write metrics.
    """

    def close() -> None:
        if before is not None:
            before()
        logger.warning("graphpact guard: %s", closing_line(guard))

    Finalize(None, close, exitpriority=1)


def closing_line(guard: Guard) -> str:
    """Return what ``guard`` has seen, in one line."""
    records = guard.records.values()
    name = f"{guard.rank}: " if guard.rank else ""
    parts = [
        f"{name}{sum(record.replays for record in records):,} replays of {len(records)} graphs",
        f"contents checked in {sum(record.contents for record in records):,}",
        f"{sum(record.verified for record in records):,} verified",
    ]
    if started := sum(record.started for record in records):
        parts.append(f"{started:,} synthetic steps verified before serving")
    rules: Counter[str] = Counter()
    for (rule, *_), count in guard.log.counts.items():
        rules[rule] += count
    found = ", ".join(f"{rule} {count:,} times" for rule, count in sorted(rules.items()))
    parts.append(f"{len(guard.log.faults)} faults" + (f" ({found})" if found else ""))
    if guard.log.num_ignored:
        parts.append(f"{guard.log.num_ignored:,} ignored")
    if guard.refused:
        parts.append(f"refused: {', '.join(sorted(map(str, guard.refused)))}")
    return "; ".join(parts)
