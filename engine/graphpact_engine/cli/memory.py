"""The output of ``graphpact doctor --memory``: the graph-resident memory of an engine.

Does not: find the memory; `graphpact_engine.memory` does.
"""

from collections.abc import Iterable, Iterator

from rich.console import Console

from graphpact_cli.console import clean, print_table
from graphpact_engine.memory import EngineMemory, LaneMemory, MemoryRow

_IN_GRAPH = {True: "graph", False: "preparation", None: "?"}
_SLOTS = ("slot", "owner", "shape", "dtype", "device", "policy", "used by", "bytes", "reason")
_SHARED = ("shared", "name", "shape", "dtype", "device", "lanes", "bytes")


def print_memory(console: Console, memory: EngineMemory) -> None:
    """Print slots and pools of each lane, then shared memory, each kind summed, then totals."""
    for lane in memory.lanes:
        _print_lane(console, lane)
    if memory.shared:
        print_table(console, _SHARED, list(_shared_rows(memory)), numbers=("bytes",))
        console.print()
    for line in _totals(memory):
        console.print(clean(line), soft_wrap=True)


def _shared_rows(memory: EngineMemory) -> Iterator[tuple[object, ...]]:
    """Yield a row for each kind of shared memory: for all tensors of one dtype that the same lanes use."""
    alike: dict[tuple[object, ...], list[MemoryRow]] = {}
    for row in memory.shared:
        lanes = ", ".join(memory.lanes_of(row)) or "preparation only"
        about = row.kind.replace("_", " "), row.dtype, row.device, lanes
        alike.setdefault(about, []).append(row)
    for (kind, *where), rows in alike.items():
        name = rows[0].name if len(rows) == 1 else f"{len(rows)} tensors"
        shapes = {_shape(row) for row in rows}
        shape = shapes.pop() if len(shapes) == 1 else "several"
        yield kind, name, shape, *where, f"{_sum(rows):,}"


def _print_lane(console: Console, lane: LaneMemory) -> None:
    if lane.absent is not None:
        console.print(
            f"lane {clean(lane.lane)}: no graph-resident memory; {lane.absent.text}\n",
            soft_wrap=True,
        )
        return
    place = "in the graph" if lane.metadata_in_graph else "by its replay hook"
    console.print(
        f"lane {clean(lane.lane)}: recorded by {clean(lane.driver)}, metadata made {place}",
        soft_wrap=True,
    )
    slots = [
        (
            row.name,
            row.owner or "",
            _shape(row),
            row.dtype,
            row.device,
            row.policy,
            _IN_GRAPH[row.in_graph],
            _bytes(row),
            row.reason or "",
        )
        for row in lane.of_kind("slot")
    ]
    print_table(console, _SLOTS, slots, numbers=("bytes",))
    console.print()
    pools = [(row.name, row.device, _bytes(row)) for row in lane.of_kind("pool")]
    print_table(console, ("pool", "device", "bytes"), pools, numbers=("bytes",))
    console.print()


def memory_verdict(memory: EngineMemory) -> str:
    """Return one sentence on whether graphs use declared memory only."""
    unknown = len(memory.unknown)
    if unknown:
        return f"Graphs read or write {unknown} undeclared tensor{'' if unknown == 1 else 's'}."
    unreported = sorted({str(lane.driver) for lane in memory.lanes if not lane.knows_externals})
    if unreported:
        return (
            f"Undeclared memory cannot be detected: driver {', '.join(unreported)} does not report what"
            " graphs read; the tape does."
        )
    if not any(lane.rows for lane in memory.lanes):
        return "No lane has graphs."
    partial = sorted({str(lane.driver) for lane in memory.lanes if lane.externals == "dispatched"})
    if partial:
        return (
            f"Everything that torch operations read and write is declared. Driver {', '.join(partial)} does"
            " not report what kernels launched below torch's dispatcher read; the tape reports the rest."
        )
    return "Everything that graphs read and write is declared."


def undeclared_problem(row: MemoryRow) -> tuple[str, str]:
    """Return the problem of an undeclared tensor, and its fix."""
    problem = (
        f"lane {row.lane!r}: its graphs read or write an undeclared {row.dtype} tensor {_shape(row)} on"
        f" {row.device}, {_bytes(row)} bytes"
    )
    return problem, (
        "declare it as a GraphSlot, in AttentionBackend.declare_slots() or"
        " GraphRunner.slots(), or register it as a buffer of the model's module; otherwise"
        " its replacement is not detected, and graphs keep reading the old memory"
    )


def _totals(memory: EngineMemory) -> Iterable[str]:
    for lane in memory.lanes:
        if lane.absent is None:
            slots, pools = lane.of_kind("slot"), lane.of_kind("pool")
            yield (
                f"lane {lane.lane}: {format_bytes(memory.own_nbytes[lane.lane])} for this lane only:"
                f" {len(slots)} slots, {format_bytes(_sum(slots))}"
                + (
                    f" ({format_bytes(lane.registry.allocated_nbytes)} allocated)"
                    if lane.registry is not None
                    else ""
                )
                + f"; {len(pools)} pools, {format_bytes(_sum(pools))}"
            )
    if memory.shared:
        parts = []
        for kind, word in (("weight", "weights"), ("kv_cache", "KV cache"), ("request_table", "")):
            rows = [row for row in memory.shared if row.kind == kind]
            parts.append(f"{word or 'request table'}, {format_bytes(_sum(rows))}")
        yield f"shared by all lanes: {'; '.join(parts)}"
    yield f"graph-resident in all: {format_bytes(memory.nbytes)}"


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes with its unit: ``512 B``, ``1.5 KiB``, ``2.0 GiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, ["GiB", "MiB", "KiB"]
    while len(units) > 1 and round(size, 1) >= 1024:
        size /= 1024
        units.pop()
    return f"{size:,.1f} {units[-1]}"


def _sum(rows: Iterable[MemoryRow]) -> int:
    return sum(row.nbytes or 0 for row in rows)


def _shape(row: MemoryRow) -> str:
    return str(list(row.shape or ()))


def _bytes(row: MemoryRow) -> str:
    return "?" if row.nbytes is None else f"{row.nbytes:,}"
