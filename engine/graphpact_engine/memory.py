"""`EngineMemory`: the memory that the graphs of every lane are bound to, and whose it is.

A captured graph goes on reading the addresses that it was captured with. What lies there is one of

    slot            a buffer that the lane's registry declares
    pool            what the recorded region allocated: intermediates and outputs
    weight          a parameter or a buffer of the model
    kv_cache        keys or values of one layer
    request_table   ``req_to_token``

or it is ``unknown``: memory of which nobody promised that it stays, is refreshed, or is padded.

A tensor is known by its range of addresses, so a view of a slot is that slot; gaps between the rows of
a strided tensor count as its own. Where a driver cannot tell what its graphs touch, every weight is listed
and nothing is found unknown. Where it tells a part (CUDA graphs: the tensors of dispatched operations), what
is unknown is among that part, and every weight is listed. Slots and the request table are listed whether
a graph touches them or only what prepares a replay does.

Does not: free, move or read any of it, or list the weights that no graph touches.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from graphpact.attention import kv_tensors
from graphpact.buffers.description import RegistryDescription, SlotRow
from graphpact.graphs import Externals, Graph
from graphpact.lane import Lane
from graphpact.shapes import EagerReason, GraphShape
from graphpact.tensors import address_range
from graphpact_engine.engine import Engine

Kind = Literal["slot", "pool", "weight", "kv_cache", "request_table", "unknown"]
"""What a row is; the module says what each means."""

Extent: TypeAlias = tuple[str, int, int]
"""Device, first address, the address behind the last element."""

_SHARED: tuple[Kind, ...] = ("weight", "kv_cache", "request_table")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One piece of graph-resident memory.

    Args:
        lane: Whose graphs are bound to it.
        kind: What it is.
        name: Of a slot, a weight or a layer's cache; the captured shape of a pool; a number for what
            is unknown.
        owner: Who declared or allocated it; None for what is unknown.
        policy: Padding policy and pad value of a slot.
        reason: Of a slot: why earlier rows in its tail mislead nobody.
        shape: Of the whole tensor; None for a pool.
        dtype: Element type without ``torch.``; None for a pool.
        device: Where it lies.
        nbytes: How large it is; None where the driver cannot tell. Of CUDA graphs, which share one
            pool, what capture of this shape added.
        in_graph: Whether recorded work of the lane touches it; False where only what prepares a replay
            does. None where the driver cannot tell.
        extent: Where it lies; None for a pool.
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
        """Return it, ready for JSON, without addresses, which differ from run to run."""
        return {name: value for name, value in asdict(self).items() if name != "extent"}


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """What the graphs of one lane are bound to.

    Args:
        lane: Its name.
        driver: What recorded its graphs; None for a lane without.
        metadata_in_graph: Whether the graphs compute the attention backend's metadata; None for a lane
            without.
        absent: Why there is no graph-resident memory; None where there is.
        externals: How much the driver can tell of what its graphs touch.
        registry: The slots, those that are not enabled too; None for a lane without a registry.
        rows: Slots, pools, weights, KV cache, request table, and what is unknown, in this order.
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
        """Whether the driver can tell anything of what its graphs touch."""
        return self.externals != "unknown"

    def of_kind(self, *kinds: Kind) -> list[MemoryRow]:
        """Return the rows of these kinds."""
        return [row for row in self.rows if row.kind in kinds]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What the graphs of all lanes are bound to, and how much that is.

    Args:
        lanes: Every lane of the engine, those without graphs too.
    """

    lanes: tuple[LaneMemory, ...]

    @classmethod
    def of(cls, engine: Engine) -> "EngineMemory":
        """Look at the lanes of ``engine``."""
        return cls(tuple(_lane_memory(lane, engine) for lane in engine.lanes))

    @property
    def rows(self) -> list[MemoryRow]:
        """The rows of all lanes; what lanes share comes once for each."""
        return [row for lane in self.lanes for row in lane.rows]

    @property
    def unknown(self) -> list[MemoryRow]:
        """What graphs touch and nobody declared."""
        return [row for row in self.rows if row.kind == "unknown"]

    @property
    def shared(self) -> list[MemoryRow]:
        """What the graphs of all lanes may be bound to, each once: weights, KV cache, request table."""
        rows = _once(row for lane in self.lanes for row in lane.of_kind(*_SHARED))
        return sorted(rows, key=lambda row: _SHARED.index(row.kind))

    def lanes_of(self, row: MemoryRow) -> list[str]:
        """Return the lanes whose graphs touch the memory of ``row``, or might where nobody can tell."""
        return [
            lane.lane
            for lane in self.lanes
            if any(r.extent == row.extent and r.in_graph is not False for r in lane.rows)
        ]

    @property
    def own_nbytes(self) -> dict[str, int]:
        """Bytes of slots and pools by lane; slots that share memory with another lane's are in neither."""
        common = {row.extent for row in self.common_slots}
        return {
            lane.lane: _nbytes(lane.of_kind("pool"))
            + _nbytes(row for row in _once(lane.of_kind("slot")) if row.extent not in common)
            for lane in self.lanes
        }

    @property
    def common_slots(self) -> list[MemoryRow]:
        """Slots that share memory with another lane's, each once."""
        slots = [row for lane in self.lanes for row in _once(lane.of_kind("slot"))]
        extents = [row.extent for row in slots]
        return _once(row for row in slots if extents.count(row.extent) > 1)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of `shared` and of `common_slots`."""
        return _nbytes(self.shared) + _nbytes(self.common_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is declared, each counted once."""
        return sum(self.own_nbytes.values()) + self.shared_nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON; what lanes share comes once for each of them."""
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
    """Ranges of addresses, put together where they touch."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._ranges: list[Extent] = []
        for device, first, end in sorted(extents):
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last[0] == device and first <= last[2]:
                self._ranges[-1] = (device, last[1], max(end, last[2]))
            else:
                self._ranges.append((device, first, end))

    def holds(self, extent: Extent) -> bool:
        """Return whether all of ``extent`` lies in them."""
        device, first, end = extent
        at = bisect.bisect_right(self._ranges, (device, first, math.inf)) - 1
        return at >= 0 and self._ranges[at][0] == device and end <= self._ranges[at][2]

    def meets(self, extent: Extent) -> bool:
        """Return whether some of ``extent`` lies in them."""
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
        return LaneMemory(
            lane.name, None, None, reason, externals="all", registry=registry, rows=()
        )
    external = _external_tensors(graphs.values())
    told = max((graph.externals for graph in graphs.values()), key=get_args(Externals).index)
    touched = _Ranges(_extent(t) for t in external or ())

    def in_graph(where: Extent) -> bool | None:
        if touched.meets(where):
            return True
        return False if told == "all" else None

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
    shared = [row("weight", name, "model", t) for name, t in engine.model.named_weights()]
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
        lane.records_metadata,
        None,
        externals=told,
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
    """Return what the graphs touch and did not allocate; None where one cannot tell."""
    found: list[torch.Tensor] = []
    for graph in graphs:
        tensors = graph.external_tensors()
        if tensors is None:
            return None
        found += tensors
    return found


def _outside(known: _Ranges, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that are not all in ``known``, and of views of one memory only the largest."""
    kept: list[Extent] = []
    for tensor in sorted(tensors, key=lambda t: -t.nbytes):
        where = _extent(tensor)
        if not known.holds(where) and not _Ranges(kept).holds(where):
            kept.append(where)
            yield tensor


def _extent(tensor: torch.Tensor) -> Extent:
    return str(tensor.device), *address_range(tensor)


def _once(rows: Iterable[MemoryRow]) -> list[MemoryRow]:
    """Return ``rows`` without those whose memory an earlier one has."""
    first: dict[Extent | None, MemoryRow] = {}
    for row in rows:
        first.setdefault(row.extent, row)
    return list(first.values())


def _nbytes(rows: Iterable[MemoryRow]) -> int:
    return sum(row.nbytes or 0 for row in rows)
