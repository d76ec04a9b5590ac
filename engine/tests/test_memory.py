"""Tests of graph-resident memory: declared tensors are listed, and undeclared ones are found."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from graphpact import AttentionBackend, ForwardMode, GraphShape, LayerSpec
from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact.runners import RunnerContext
from graphpact_cli import main
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine
from graphpact_engine.config import EngineConfig
from graphpact_engine.memory import EngineMemory, _extent, _outside, _Ranges
from graphpact_flashinfer import FlashInferBackend
from graphpact_flashinfer import FlashInferMetadata as Metadata
from graphpact_tape.nodes import RunAndCopy
from graphpact_tape.tape import Tape
from support import Catalog

DEMO = Path(__file__).parents[2] / "examples/demo.toml"


class DecodesAnywhere(CudaGraphRunner):
    """A runner that captures decode in a lane of any mode, so that two lanes have graphs."""

    modes = frozenset(ForwardMode)

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(replace(context, mode=ForwardMode.DECODE))


class Undeclared(FlashInferBackend):
    """A backend that reads its own table, which is neither a slot nor a weight."""

    table: torch.Tensor | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: Metadata,
    ) -> torch.Tensor:
        """Attend with queries that are scaled by the table, one row for each token."""
        if self.table is None:
            self.table = torch.ones(8, 1, 1, dtype=q.dtype)
        return super().forward(q * self.table[: len(q)], k, v, layer, metadata)


def build(*overrides: str, backend: type[AttentionBackend] = FlashInferBackend) -> Engine:
    """Return the engine of the demo."""
    config = EngineConfig.load(DEMO, env={}, overrides=['engine.device="cpu"', *overrides])
    return Engine(config, catalog=Catalog(flashinfer=backend, decodes_anywhere=DecodesAnywhere))


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """Yield the demo's engine, for tests that do not change it."""
    with build() as engine:
        yield engine


def tapes(lane: Lane) -> dict[GraphShape, Tape]:
    """Return a lane's tapes."""
    found = {shape: captured.graph for shape, captured in lane.captured.items()}
    return {shape: graph for shape, graph in found.items() if isinstance(graph, Tape)}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in containers, and those that a node copies its results to."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, RunAndCopy):
        yield from tensors_of(value.outputs)


def addresses(tensor: torch.Tensor) -> range:
    """Return the addresses from the first element of a tensor to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return range(start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


def inside(tensor: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether a tensor is inside one of the others."""
    mine = addresses(tensor)
    return any(t.start <= mine.start and mine.stop <= t.stop for t in map(addresses, others))


def declared(engine: Engine, lane: Lane) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that a graph may use besides its pool, by kind."""
    assert lane.registry is not None
    model, memory = engine.model.model, engine.memory
    return {
        "slot": [slot.buffer for slot in lane.registry if slot.buffer is not None],
        "weight": [*model.parameters(), *model.buffers()],
        "kv_cache": [*memory.kv_cache.k, *memory.kv_cache.v],
        "request_table": [memory.requests.req_to_token],
    }


# -- declared memory -------------------------------------------------------------------------------


def test_every_recorded_tensor_of_the_demo_is_declared_or_the_tapes_own() -> None:
    """Each tensor of a tape is slot, weight, KV cache or request table, or is freed with the tape."""
    engine = build()
    memory = EngineMemory.of(engine)
    pools = {row.name: row.nbytes for row in memory.rows if row.kind == "pool"}
    left: list[tuple[str, StorageWeakRef]] = []
    seen: set[str] = set()
    for lane in engine.lanes:
        for shape, tape in tapes(lane).items():
            kinds = declared(engine, lane)
            own: dict[int, int] = {}
            for tensor in tensors_of([tape._nodes, tape.outputs]):
                kind = next((k for k, others in kinds.items() if inside(tensor, *others)), None)
                seen.add(kind or "pool")
                if kind is None:
                    storage = tensor.untyped_storage()
                    own[storage._cdata] = storage.nbytes()
                    left.append((f"{shape}: {list(tensor.shape)}", StorageWeakRef(storage)))
                    del storage
                del tensor
            assert pools[str(shape)] == sum(own.values())
            del kinds, tape
    assert seen == {"slot", "weight", "kv_cache", "request_table", "pool"}
    assert len(left) > 100
    assert not any(ref.expired() for _, ref in left)
    engine.close()
    gc.collect()
    assert [what for what, ref in left if not ref.expired()] == []
    assert memory.unknown == []


def test_what_is_declared_is_listed_with_its_facts(demo: Engine) -> None:
    """Each slot, KV cache tensor and weight in a graph of the demo has one row with the tensor's facts."""
    memory = EngineMemory.of(demo)
    (lane,) = [lane for lane in demo.lanes if lane.registry is not None]
    assert lane.registry is not None
    rows = {(row.kind, row.name): row for row in memory.rows}
    assert len(rows) == len(memory.rows)
    for slot in lane.registry:
        row = rows["slot", slot.name]
        assert slot.buffer is not None
        assert (row.owner, row.shape, row.nbytes) == (
            slot.owner,
            tuple(slot.buffer.shape),
            slot.buffer.nbytes,
        )
        assert row.policy is not None
        assert row.policy.startswith(slot.padding_policy.value)
        assert row.reason == slot.reason
    cache = demo.memory.kv_cache
    of_cache = [row for row in memory.rows if row.kind == "kv_cache"]
    assert sum(row.nbytes or 0 for row in of_cache) == cache.nbytes
    assert len(of_cache) == 2 * len(demo.model.layers)
    assert rows["request_table", "req_to_token"].in_graph is True
    listed = {row.name for row in memory.rows if row.kind == "weight"}
    weights = dict(demo.model.named_weights())
    external = [
        t
        for tape in tapes(lane).values()
        for t in tensors_of(tape._nodes)
        if not inside(t, *declared(demo, lane)["slot"])
    ]
    touched = {n for n, w in weights.items() if any(inside(t, w) for t in external)}
    assert listed == touched
    assert "model.rotary_emb.inv_freq" in listed


def test_which_slots_graphs_read_is_shown(demo: Engine) -> None:
    """Slots that the decode graphs read have `in_graph`; ``seq_lens_cpu``, which no graph reads, has not."""
    rows = {row.name: row.in_graph for row in EngineMemory.of(demo).rows if row.kind == "slot"}
    assert rows["input_ids"]
    assert rows["flashinfer.kv_indices"]
    assert rows["seq_lens_cpu"] is False


def test_the_command_lists_every_slot_and_tensor(
    demo: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``doctor --memory --json`` prints the rows of `EngineMemory`, with every slot."""
    monkeypatch.delenv("GRAPHPACT_DISABLE_PLUGINS", raising=False)
    status = main(["doctor", "--memory", "--json", "-c", str(DEMO), "-s", 'engine.device="cpu"'])
    out, err = capsys.readouterr()
    assert status == 0, err
    report = json.loads(out)
    expected = json.loads(json.dumps(EngineMemory.of(demo).to_dict()))
    assert report["memory"] == expected
    slots = [slot.name for lane in demo.lanes for slot in lane.registry or ()]
    rows = [row for lane in report["memory"]["lanes"] for row in lane["rows"]]
    assert [row["name"] for row in rows if row["kind"] == "slot"] == slots
    assert len(slots) >= 10


# -- undeclared memory -----------------------------------------------------------------------------


def test_a_tensor_that_nobody_declared_is_unknown() -> None:
    """A backend's undeclared table is found, once for all shapes, with the size of its largest view."""
    with build(backend=Undeclared) as engine:
        (row,) = EngineMemory.of(engine).unknown
        assert (row.lane, row.shape, row.dtype) == ("decode", (8, 1, 1), "float32")
        assert (row.owner, row.nbytes, row.in_graph) == (None, 32, True)


def test_a_tensor_that_ends_behind_what_is_declared_is_unknown() -> None:
    """A tensor that begins in declared memory and ends outside it is undeclared."""
    base = torch.zeros(12)
    known = _Ranges([_extent(base[:4]), _extent(base[4:8])])
    inner = [base[:4], base[1:3], base[:8:2], base[:8].view(2, 4).t()]
    outer = [base[6:9], base[8:], base]
    assert list(_outside(known, inner)) == []
    for tensor in outer:
        assert [t.data_ptr() for t in _outside(known, [*inner, tensor])] == [tensor.data_ptr()]
    assert len(list(_outside(known, outer))) == 1


def test_the_command_warns_of_what_nobody_declared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An undeclared tensor is a warning with shape, dtype and a help; the status stays 0."""
    doctor: Any = PluginCatalog.scan(env={}).select("command", "doctor")
    catalog = Catalog(flashinfer=Undeclared, doctor=doctor)
    monkeypatch.setattr(PluginCatalog, "scan", lambda **_: catalog)
    command = ["doctor", "--memory", "-c", str(DEMO), "-s", 'engine.device="cpu"']
    assert main(command) == 0
    *_, warning, fix, verdict = capsys.readouterr().out.splitlines()
    assert warning == (
        "warning: lane 'decode': its graphs read or write an undeclared float32 tensor"
        " [8, 1, 1] on cpu, 32 bytes"
    )
    assert fix.startswith("  help: declare it as a GraphSlot")
    assert verdict == "Graphs read or write 1 undeclared tensor."
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (problem,) = report["problems"]
    assert (problem["severity"], report["usable"]) == ("warning", True)
    assert "[8, 1, 1]" in problem["what"]


# -- several lanes ---------------------------------------------------------------------------------


def union(engine: Engine) -> int:
    """Return the number of addresses that declared tensors of all lanes with graphs cover together."""
    ranges: list[range] = []
    for lane in engine.lanes:
        if lane.registry is not None:
            kinds = declared(engine, lane)
            touched = {
                name
                for name, weight in engine.model.named_weights()
                for tape in tapes(lane).values()
                if any(inside(t, weight) for t in tape.external_tensors())
            }
            weights = [w for n, w in engine.model.named_weights() if n in touched]
            parts = [kinds["slot"], weights, kinds["kv_cache"], kinds["request_table"]]
            ranges += [addresses(tensor) for part in parts for tensor in part]
    total, end = 0, 0
    for one in sorted(ranges, key=lambda r: r.start):
        total += max(0, one.stop - max(end, one.start))
        end = max(end, one.stop)
    return total


def test_totals_count_nothing_twice() -> None:
    """The bytes of two lanes are the addresses that they cover together, plus their pools."""
    with build("lanes.prefill.runner=decodes_anywhere") as engine:
        memory = EngineMemory.of(engine)
        pools = sum(row.nbytes or 0 for row in memory.rows if row.kind == "pool")
        assert len(memory.lanes) == 2
        assert memory.nbytes == union(engine) + pools
        assert memory.nbytes == sum(memory.own_nbytes.values()) + memory.shared_nbytes


def test_a_lane_without_graphs_says_so(demo: Engine) -> None:
    """An eager lane, and every lane of a closed engine, has no rows and a reason."""
    decode, prefill = EngineMemory.of(demo).lanes
    assert (prefill.rows, str(prefill.absent)) == ((), "this lane captures nothing")
    assert decode.absent is None
    with build("lanes.decode.batch_sizes=[1]") as engine:
        assert len(EngineMemory.of(engine).lanes[0].of_kind("pool")) == 1
    closed = EngineMemory.of(engine)
    assert closed.rows == []
    assert str(closed.lanes[0].absent) == "nothing is captured yet"
    assert closed.nbytes == 0


def test_a_driver_that_cannot_tell_gets_every_weight_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without external tensors all weights are listed, `in_graph` is None, and a pool's size may be None."""
    monkeypatch.setattr(Tape, "external_tensors", lambda _: None)
    with build("lanes.decode.batch_sizes=[1, 2]", backend=Undeclared) as engine:
        for graph in tapes(engine.lanes[0]).values():
            graph.pool_nbytes = -1
        lane = EngineMemory.of(engine).lanes[0]
        names = [row.name for row in lane.of_kind("weight")]
        assert names == [name for name, _ in engine.model.named_weights()]
        assert not lane.knows_externals
        assert lane.of_kind("unknown") == []
        assert {row.in_graph for row in lane.of_kind("slot", "weight", "kv_cache")} == {None}
        assert [row.nbytes for row in lane.of_kind("pool")] == [None, None]


# -- ranges ----------------------------------------------------------------------------------------

_EXTENTS = st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 6)).map(
    lambda e: (e[0], e[1], e[1] + e[2])
)


@settings(derandomize=True, max_examples=1000)
@given(extents=st.lists(_EXTENTS, max_size=6), one=_EXTENTS)
def test_ranges_agree_with_sets_of_addresses(
    extents: list[tuple[str, int, int]], one: tuple[str, int, int]
) -> None:
    """`contains` and `overlaps` of ranges agree with sets of single addresses."""

    def every(*extents: tuple[str, int, int]) -> set[tuple[str, int]]:
        return {(device, at) for device, first, end in extents for at in range(first, end)}

    ranges = _Ranges(extents)
    assert ranges.contains(one) == (every(one) <= every(*extents))
    assert ranges.overlaps(one) == bool(every(one) & every(*extents))
