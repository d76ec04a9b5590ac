"""`EngineMemory`: the memory that the graphs of every lane read and write, and its owners.

A captured graph always reads and writes the addresses of its capture. The memory at an address is one of

    slot            a buffer that the lane's registry declares
    pool            memory that the recorded region allocated: intermediates and outputs
    weight          a parameter or a buffer of the model
    kv_cache        keys or values of one layer
    request_table   ``req_to_token``

or ``unknown``: not declared, so that nothing guarantees that it stays allocated, is refreshed, or is padded.

A tensor is identified by its range of addresses, so a view of a slot is that slot. Gaps between the rows of
a strided tensor belong to the tensor. If a driver cannot report the memory of its graphs, every weight is
listed and no memory is ``unknown``. If it reports a part (CUDA graphs: tensors of dispatched operations),
``unknown`` memory is found in that part, and every weight is listed. Slots and the request table are listed
also if only the preparation of a replay uses them.

Does not: free, move or read the memory, or list weights that no graph uses.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from graphpact.attention import kv_tensors
from graphpact.buffers.description import RegistryDescription, SlotRow
from graphpact.graphs import Graph
from graphpact.graphs.driver import Externals
from graphpact.lane import Lane
from graphpact.shapes import EagerReason, GraphShape
from graphpact.tensors import address_range
from graphpact_engine.engine import Engine
from graphpact_engine.faults import names_plugins

Kind = Literal["slot", "pool", "weight", "kv_cache", "request_table", "unknown"]
"""The kind of a row; see the module docstring."""

Extent: TypeAlias = tuple[str, int, int]
"""Device, first address, and the address after the last element."""

_SHARED: tuple[Kind, ...] = ("weight", "kv_cache", "request_table")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One piece of graph-resident memory.

    Args:
        lane: Name of the lane.
        kind: The kind of memory.
        name: Name of a slot, a weight or a layer's cache; the captured shape of a pool; a number for
            unknown memory.
        owner: The part that declared or allocated it; None for unknown memory.
        policy: Padding policy and pad value of a slot.
        reason: For a slot, why stale padding is safe.
        shape: Shape of the whole tensor; None for a pool.
        dtype: Dtype without ``torch.``; None for a pool.
        device: The device.
        nbytes: Size in bytes; None if the driver cannot report it. For CUDA graphs, which share one pool,
            the memory that the capture of this shape added.
        in_graph: Whether recorded work of the lane uses it; False if only the preparation of a replay
            does. None if the driver cannot report it.
        extent: Device and addresses; None for a pool.
    """

    lane: str
    kind: Kind
    name: str
    owner: str | None
    policy: str | None
    reason: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    device: str
    nbytes: int | None
    in_graph: bool | None
    extent: Extent | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON, without addresses, which differ between runs."""
        return {name: value for name, value in asdict(self).items() if name != "extent"}


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """The memory that the graphs of one lane read and write.

    Args:
        lane: Name of the lane.
        driver: Name of the driver of its graphs; None without graphs.
        metadata_in_graph: Whether the graphs compute the attention backend's metadata; None without graphs.
        absent: Why there is no graph-resident memory; None if there is.
        externals: How much the driver reports of the memory that its graphs use.
        registry: All slots, including disabled ones; None for a lane without a registry.
        rows: Slots, pools, weights, KV cache, request table and unknown memory, in this order.
    """

    lane: str
    driver: str | None
    metadata_in_graph: bool | None
    absent: EagerReason | None
    externals: Externals
    registry: RegistryDescription | None
    rows: tuple[MemoryRow, ...]

    @property
    def knows_externals(self) -> bool:
        """Whether the driver reports any of the memory that its graphs use."""
        return self.externals != "unknown"

    def of_kind(self, *kinds: Kind) -> list[MemoryRow]:
        """Return the rows of these kinds."""
        return [row for row in self.rows if row.kind in kinds]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory that the graphs of all lanes read and write, with totals.

    Args:
        lanes: Every lane of the engine, including lanes without graphs.
    """

    lanes: tuple[LaneMemory, ...]

    @classmethod
    @names_plugins
    def of(cls, engine: Engine) -> "EngineMemory":
        """Return the memory of the lanes of ``engine``.

        Raises:
            EngineError: A driver's plugin failed to describe a graph.
        """
        return cls(tuple(_lane_memory(lane, engine) for lane in engine.lanes))

    @property
    def rows(self) -> list[MemoryRow]:
        """The rows of all lanes; shared memory is listed once per lane."""
        return [row for lane in self.lanes for row in lane.rows]

    @property
    def unknown(self) -> list[MemoryRow]:
        """Undeclared memory that graphs use."""
        return [row for row in self.rows if row.kind == "unknown"]

    @property
    def shared(self) -> list[MemoryRow]:
        """The memory that all lanes share, each row once: weights, KV cache, request table."""
        rows = _once(row for lane in self.lanes for row in lane.of_kind(*_SHARED))
        return sorted(rows, key=lambda row: _SHARED.index(row.kind))

    def lanes_of(self, row: MemoryRow) -> list[str]:
        """Return the lanes whose graphs use the memory of ``row``, or may use it as far as is known."""
        return [
            lane.lane
            for lane in self.lanes
            if any(r.extent == row.extent and r.in_graph is not False for r in lane.rows)
        ]

    @property
    def own_nbytes(self) -> dict[str, int]:
        """Bytes of slots and pools by lane."""
        return {
            lane.lane: _nbytes(lane.of_kind("pool")) + _nbytes(_once(lane.of_kind("slot")))
            for lane in self.lanes
        }

    @property
    def shared_nbytes(self) -> int:
        """Bytes of `shared`."""
        return _nbytes(self.shared)

    @property
    def nbytes(self) -> int:
        """Bytes of all declared memory, each counted once."""
        return sum(self.own_nbytes.values()) + self.shared_nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON; shared memory is listed once per lane."""
        own = self.own_nbytes
        return {
            "lanes": [
                {
                    "name": lane.lane,
                    "driver": lane.driver,
                    "metadata_in_graph": lane.metadata_in_graph,
                    "absent": None if lane.absent is None else lane.absent.name,
                    "knows_externals": lane.knows_externals,
                    "externals": lane.externals,
                    "own_nbytes": own[lane.lane],
                    "rows": [row.to_dict() for row in lane.rows],
                }
                for lane in self.lanes
            ],
            "shared_nbytes": self.shared_nbytes,
            "nbytes": self.nbytes,
        }


class _Ranges:
    """A set of address ranges; adjacent ranges are merged."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._ranges: list[Extent] = []
        for device, first, end in sorted(extents):
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last[0] == device and first <= last[2]:
                self._ranges[-1] = (device, last[1], max(end, last[2]))
            else:
                self._ranges.append((device, first, end))

    def contains(self, extent: Extent) -> bool:
        """Return whether the ranges contain all of ``extent``."""
        device, first, end = extent
        at = bisect.bisect_right(self._ranges, (device, first, math.inf)) - 1
        return at >= 0 and self._ranges[at][0] == device and end <= self._ranges[at][2]

    def overlaps(self, extent: Extent) -> bool:
        """Return whether the ranges overlap ``extent``."""
        device, first, end = extent
        at = bisect.bisect_left(self._ranges, (device, end, -1)) - 1
        return at >= 0 and self._ranges[at][0] == device and first < self._ranges[at][2]


def _lane_memory(lane: Lane, engine: Engine) -> LaneMemory:
    graphs = {shape: captured.graph for shape, captured in lane.captured.items()}
    registry = None if lane.registry is None else lane.registry.describe()
    if lane.registry is None or not graphs:
        reason = EagerReason.NOT_CAPTURED
        if lane.registry is None:
            reason = lane.eager_reason or EagerReason.NO_GRAPHS
        return LaneMemory(lane.name, None, None, reason, externals="all", registry=registry, rows=())
    external = _external_tensors(graphs.values())
    externals = lane.stats.externals
    used = _Ranges(_extent(t) for t in external or ())

    def in_graph(where: Extent) -> bool | None:
        if used.overlaps(where):
            return True
        return False if externals == "all" else None

    def row(
        kind: Kind, name: str, owner: str | None, tensor: torch.Tensor, slot: SlotRow | None = None
    ) -> MemoryRow:
        where = _extent(tensor)
        return MemoryRow(
            lane=lane.name,
            kind=kind,
            name=name,
            owner=owner,
            policy=None if slot is None else slot.padding,
            reason=None if slot is None else slot.reason,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            nbytes=tensor.nbytes,
            in_graph=in_graph(where),
            extent=where,
        )

    slots = [
        row("slot", slot.name, slot.owner, slot.buffer, SlotRow.of(slot))
        for slot in lane.registry
        if slot.buffer is not None
    ]
    owners = {"model": engine.model, "draft model": engine.draft_model}
    shared = [
        row("weight", name, owner, tensor)
        for owner, model in owners.items()
        if model is not None
        for name, tensor in model.named_weights()
    ]
    shared = [weight for weight in shared if weight.in_graph is not False]
    for name, tensor in kv_tensors(engine.memory.kv_cache).items():
        shared.append(row("kv_cache", name.removeprefix("the "), "engine", tensor))
    table = engine.memory.requests.req_to_token
    shared.append(row("request_table", "req_to_token", "engine", table))
    known = _Ranges(one.extent for one in (*slots, *shared) if one.extent is not None)
    unknown = [
        row("unknown", f"unknown {number}", None, tensor)
        for number, tensor in enumerate(_outside(known, external or ()), 1)
    ]
    pools = [_pool(lane, lane.driver.name, str(lane.driver.device), *one) for one in graphs.items()]
    return LaneMemory(
        lane.name,
        lane.driver.name,
        lane.backend.records_metadata,
        None,
        externals=externals,
        registry=registry,
        rows=(*slots, *pools, *shared, *unknown),
    )


def _pool(lane: Lane, driver: str, device: str, shape: GraphShape, graph: Graph) -> MemoryRow:
    return MemoryRow(
        lane=lane.name,
        kind="pool",
        name=str(shape),
        owner=driver,
        policy=None,
        reason=None,
        shape=None,
        dtype=None,
        device=device,
        nbytes=None if graph.pool_nbytes < 0 else graph.pool_nbytes,
        in_graph=True,
    )


def _external_tensors(graphs: Iterable[Graph]) -> list[torch.Tensor] | None:
    """Return the tensors that the graphs use but did not allocate; None if the driver cannot report them."""
    found: list[torch.Tensor] = []
    for graph in graphs:
        tensors = graph.external_tensors()
        if tensors is None:
            return None
        found += tensors
    return found


def _outside(known: _Ranges, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that are not entirely in ``known``; of views of one memory only the largest."""
    kept: list[Extent] = []
    for tensor in sorted(tensors, key=lambda t: -t.nbytes):
        where = _extent(tensor)
        if not known.contains(where) and not _Ranges(kept).contains(where):
            kept.append(where)
            yield tensor


def _extent(tensor: torch.Tensor) -> Extent:
    return str(tensor.device), *address_range(tensor)


def _once(rows: Iterable[MemoryRow]) -> list[MemoryRow]:
    """Return ``rows`` without those that have the memory of an earlier row."""
    first: dict[Extent | None, MemoryRow] = {}
    for row in rows:
        first.setdefault(row.extent, row)
    return list(first.values())


def _nbytes(rows: Iterable[MemoryRow]) -> int:
    return sum(row.nbytes or 0 for row in rows)
