"""Split a segment at the blocks of calls that repeat, such as the layers of a model.

A compiler takes minutes for the code of many layers, and most of them are alike. So each block becomes a
piece. Pieces with equal keys (see `graphpact_cpu_graph.keys`) are compiled once and called with other inputs.
A result that a later piece reads is written to its recorded memory; the blocks begin where the fewest bytes
have to be written.

A segment is split if a block of at least `LEAST_NODES` operations repeats at least `LEAST_REPEATS` times.
Each call of a piece costs a few microseconds. So a model with fewer layers stays one piece, and small layers
become pieces of several: a piece reads at least `LEAST_BYTES` that it does not write, such as weights.

Does not: prove that blocks are alike. It compares operators, numbers and layouts, not the data flow. Blocks
that differ only in that have different keys, and are compiled separately.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from graphpact.tensors import storage_id
from graphpact_cpu_graph.keys import layout_of
from graphpact_tape.operators import written_by
from graphpact_tape.recorder import RecordedCall, Segment
from graphpact_tape.trees import tensors_of

LEAST_REPEATS = 8
"""The smallest number of equal blocks at which a segment is split."""

LEAST_NODES = 16
"""The smallest number of operations of a block that a replay has to repeat.

Shorter blocks count together: 24 blocks of 6 operations are 8 blocks of 18.
"""


LEAST_BYTES = 1 << 22
"""The smallest memory that the blocks of a piece read, which takes about 100 times as long as its call."""


class Run(NamedTuple):
    """Equal blocks of ``period`` calls, one after the other, among the calls ``begin`` to ``end``."""

    begin: int
    end: int
    period: int


def split_at_blocks(segment: Segment) -> list[Segment]:
    """Return the calls of ``segment`` as one segment, or as several, equal ones for the repeated blocks."""
    calls = segment.calls
    run = _longest_run(calls)
    if run is None:
        return [segment]
    begin = _best_begin(calls, run)
    nbytes = max(_bytes_read(calls[begin : begin + run.period]), 1)
    length = run.period * -(-LEAST_BYTES // nbytes)
    num_parts = (run.end - begin) // length
    if num_parts < 2:
        return [segment]
    cuts = [0, *(begin + length * at for at in range(num_parts + 1)), len(calls)]
    parts = (calls[first:last] for first, last in pairwise(cuts))
    return [Segment(part) for part in parts if part]


def _longest_run(calls: Sequence[RecordedCall]) -> Run | None:
    """Return the run of equal blocks with the most calls, with the shortest period, or None."""
    numbers: dict[Any, int] = {}
    forms = torch.tensor([numbers.setdefault(_form(call), len(numbers)) for call in calls])
    longest = Run(0, 0, 1)
    for period in range(1, len(calls) // LEAST_REPEATS + 1):
        # The positions that differ from the one a period later, with one before the first and after the last.
        differs = torch.nonzero(forms[:-period] != forms[period:]).flatten()
        edges = torch.cat([torch.tensor([-1]), differs, torch.tensor([len(calls) - period])])
        gaps = edges.diff()
        at = int(gaps.argmax())
        begin, num_equal = int(edges[at]) + 1, int(gaps[at]) - 1
        num_repeats = num_equal // period + 1
        num_nodes = sum(call.is_work for call in calls[begin : begin + period])
        is_longer = num_equal >= longest.end - longest.begin  # by at least one of its blocks
        if is_longer and num_repeats >= LEAST_REPEATS and num_nodes >= LEAST_NODES:
            longest = Run(begin, begin + num_equal + period, period)
    return longest if longest.end else None


def _best_begin(calls: Sequence[RecordedCall], run: Run) -> int:
    """Return where the first block begins, so that the fewest bytes cross from a block to the next."""
    crossing = _bytes_across(calls)
    num_blocks = (run.end - run.begin) // run.period
    spare = run.end - run.begin - num_blocks * run.period  # more shifts than this leave a block less
    middle = run.begin + run.period * (num_blocks // 2)
    shifts = sorted(range(run.period), key=lambda shift: (crossing[middle + shift], shift > spare))
    return run.begin + shifts[0]


def _bytes_across(calls: Sequence[RecordedCall]) -> list[int]:
    """Return for each call how many bytes, made by an earlier call, it or later calls use."""
    made: dict[int, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for at, call in enumerate(calls):
        for tensor in tensors_of(call.made):
            made.setdefault(storage_id(tensor), (at, tensor.untyped_storage().nbytes()))
        for tensor in call.tensors():
            last[storage_id(tensor)] = at
    changes = [0] * (len(calls) + 1)
    for storage, (at, nbytes) in made.items():
        changes[at + 1] += nbytes
        changes[last[storage] + 1] -= nbytes
    total, across = 0, []
    for change in changes:
        total += change
        across.append(total)
    return across


def _bytes_read(calls: Sequence[RecordedCall]) -> int:
    """Return the bytes of the tensors that ``calls`` read, and neither make nor write."""
    read = {id(t): t for call in calls for t in tensors_of((call.args, call.kwargs))}
    changed = {storage_id(t) for call in calls for t in tensors_of(call.made)}
    changed |= {storage_id(t) for call in calls for t in written_by(call.op, call.args, call.kwargs)}
    return sum(t.numel() * t.itemsize for t in read.values() if storage_id(t) not in changed)


def _form(call: RecordedCall) -> tuple[Any, ...]:
    """Return what equal blocks have in common in a call: operator, numbers, and layouts of tensors."""
    return call.op, *(_form_of(each) for each in (call.args, call.kwargs, call.result))


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return layout_of(value)
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form_of, value))
    return f"{type(value).__name__} {value!r}"
