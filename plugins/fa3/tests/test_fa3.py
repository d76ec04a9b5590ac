"""FA3's metadata against plain loops over the requests, in every mode and after any history."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    LayerSpec,
    Limits,
    PaddingPolicy,
)
from graphpact.attention import DraftLimits, DraftMetadata, GraphSupport, HeadLayout
from graphpact.buffers import build_decode_registry
from graphpact.errors import EngineError
from graphpact_conformance.draws.batches import sequences
from graphpact_conformance.draws.cases import CASES, DRAFT_WIDTH, NUM_STEPS, Case
from graphpact_conformance.draws.choice import CPU, PAGE_SIZES
from graphpact_conformance.draws.lanes import CONTEXT, WINDOWS, Config, Heads
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token
from graphpact_conformance.lane.rig import Rig
from graphpact_fa3 import FA3Backend, FA3Metadata, KeyRows
from graphpact_tape.recorder import Recorder
from oracle_kit import hold_to_oracle

MAX_BS = 4
EXAMPLES = settings(derandomize=True, max_examples=5)
BLOCK = 16
VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE
EXTEND_DRAFT = Case(ForwardMode.DRAFT_EXTEND)
TREE, BRANCHES = Case(VERIFY, tree=True), Case(DRAFT, topk=2)
DECODE = Case(ForwardMode.DECODE)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def make_config(case: Case, page_size: int = 1, **features: bool) -> Config:
    """Return a lane of two layers, the second with a window unless ``features`` disable it."""
    chosen = {"sliding_window": True, "softcap": False, "sinks": False} | features
    return Config(case, page_size, Heads("gqa", 4, 2, 8), torch.float32, **chosen)


@cache
def rig_of(config: Config) -> Rig:
    """Return a lane whose replay hook fills the metadata; equal configurations share one."""
    with torch.inference_mode():
        return Rig(config, backend=FA3Backend, in_graph=False)


# -- expected metadata, by loops ---------------------------------------------------------------------


def padded_to(problem: Problem, bs: int) -> list[ProblemRequest]:
    """Return the requests, followed by padding requests, which use scratch only."""
    case = problem.case
    count = 0 if case.mode.is_ragged else case.tokens_per_request or 0
    tokens = [Token(0, [0] * case.num_steps, None, 0) for _ in range(count)]
    cached = 0 if case.mode is ForwardMode.DRAFT_EXTEND else 1
    if case.mode is ForwardMode.DECODE:
        cached = 0
    scratch = ProblemRequest(0, [0] * cached, tokens, [0] * CONTEXT)
    return [*problem.requests, *[scratch] * (bs - len(problem.requests))]


def seen_drafts(problem: Problem, request: ProblemRequest, token: int, step: int) -> list[int]:
    """Return the slots of the drafts that a token sees; a padding token sees all drafts of its request."""
    if problem.case.mode is DRAFT:
        return request.tokens[token].slots[: step + 1]
    path = range(len(request.tokens)) if request.row == 0 else request.path(token)
    return [request.tokens[j].slots[0] for j in path]


def seen_in_window(problem: Problem, request: ProblemRequest, token: int, step: int) -> list[int]:
    """Return the slots of the keys of sequence and drafts that a token sees in a window."""
    drafts = seen_drafts(problem, request, token, step)
    if request.row == 0:  # drafts at one position are all inside the window
        return request.cached + drafts
    return (request.cached + drafts)[-WINDOWS[0] :]


def check_rows(rows: KeyRows, seen: Sequence[Sequence[int]]) -> None:
    """Compare a tree's rows with one list of slots per token; the rest of the table is zeros."""
    width = rows.page_table.shape[1]
    assert rows.cu_seqlens_q.tolist() == list(range(len(seen) + 1))
    assert rows.cache_seqlens.tolist() == [len(slots) for slots in seen]
    assert rows.page_table.tolist() == [[*slots, *[0] * (width - len(slots))] for slots in seen]
    assert (rows.page_size, rows.max_seqlen_q, rows.max_seqlen_k) == (1, 1, width)


def check(metadata: FA3Metadata, problem: Problem, bs: int, page_size: int, step: int) -> None:
    """Compare every index tensor of a step with loops over the requests."""
    case = problem.case
    requests = padded_to(problem, bs)
    is_tree = case.tree or case.topk > 1
    offsets, key_offsets, lens, table = [0], [0], [], []
    pages = metadata.page_table.shape[1]
    for r in requests:
        count = len(r.tokens)
        new = 0 if is_tree else step + 1 if case.mode is DRAFT else count
        length = len(r.cached) + new
        if case.mode.is_ragged and not count:
            length = 1  # padding
        lens.append(length)
        offsets.append(offsets[-1] + count)
        key_offsets.append(key_offsets[-1] + length)
        own = [slot // page_size for slot in r.table[:length:page_size]]
        table.append([*own, *[0] * (pages - len(own))])
    assert metadata.cu_seqlens_q.tolist() == offsets
    assert metadata.cache_seqlens.tolist() == lens
    assert metadata.cu_seqlens_k.tolist() == key_offsets
    assert metadata.page_table.tolist() == table
    schedule, width = metadata.scheduler_metadata.tolist(), -(-bs // 4) * 4
    expected = [0] * len(schedule)
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        expected[1 + i] = -(-(b - a) // BLOCK)
        expected[1 + width + i] = -(-lens[i] // BLOCK)
    assert schedule == expected
    assert (metadata.tree is not None) == is_tree
    if metadata.tree is not None:
        at = [(r, j) for r in requests for j in range(len(r.tokens))]
        check_rows(metadata.tree.drafts, [seen_drafts(problem, *who, step) for who in at])
        assert list(metadata.tree.windows) == [WINDOWS[0]]
        windows = [seen_in_window(problem, *who, step) for who in at]
        check_rows(metadata.tree.windows[WINDOWS[0]], windows)


def steps_of(metadata: Any) -> list[FA3Metadata]:
    """Return the metadata of each step of a batch."""
    return [*metadata.steps] if isinstance(metadata, DraftMetadata) else [metadata]


def replay_metadata(rig: Rig, problem: Problem) -> tuple[Any, GraphShape]:
    """Return the metadata that a replay of ``problem`` reads, from slots that held -9 before."""
    rig.load(problem)
    lane = rig.lane
    for slot in lane.registry or ():
        if slot.owner == "fa3" and slot.buffer is not None:
            slot.buffer.fill_(-9)
    shape = lane.prepare(problem.batch()).fit
    assert isinstance(shape, GraphShape)
    return lane.captured[shape].context.metadata, shape


@pytest.mark.few(8)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", [c for c in CASES if c.mode is not ForwardMode.IDLE], ids=str)
def test_metadata_equals_a_loop_whatever_came_before(case: Case, page_size: int) -> None:
    """At replay after any history, and in an eager step, every tensor equals a loop over the requests."""
    config = make_config(case, page_size)
    rig = rig_of(config)

    @EXAMPLES
    @given(history=sequences(config))
    def compare(history: Sequence[Problem]) -> None:
        for problem in history:
            replayed, shape = replay_metadata(rig, problem)
            for step, metadata in enumerate(steps_of(replayed)):
                check(metadata, problem, shape.batch_size, page_size, step)
                most = shape.num_tokens if case.mode.is_ragged else case.tokens_per_request
                assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (most, CONTEXT)
            if not problem.requests:
                continue
            eager = rig.backend.init_metadata_eager(problem.batch())
            for step, metadata in enumerate(steps_of(eager)):
                check(metadata, problem, len(problem.requests), page_size, step)
                assert metadata.max_seqlen_q == max(len(r.tokens) for r in problem.requests)
                assert metadata.max_seqlen_k == int(metadata.cache_seqlens.max())

    compare()


def test_a_large_batch_leaves_nothing_to_a_small_one() -> None:
    """After the largest step, a small step has the same metadata in used buffers as in new ones."""
    table = torch.arange(17, dtype=torch.int32)[:, None] * 16 + torch.arange(16, dtype=torch.int32)
    layers = [LayerSpec(0, 1, 1, 8, 8, scaling=1.0)]
    context = BackendContext(
        CPU, torch.float32, layers, Limits(16, 16, 16, 4), table, SimpleNamespace(k=[], v=[])
    )

    def lane() -> Callable[[list[int]], dict[str, list[Any]]]:
        """Return a function that prepares a replay of these lengths and returns the metadata as lists."""
        backend, views, captured = FA3Backend(context), {}, {}
        registry = build_decode_registry(
            max_bs=16,
            max_num_token=16,
            device=CPU,
            seq_len_fill_value=1,
            register_global_num_tokens=False,
            enable_mrope=False,
        )
        backend.attach(registry)
        for bs in (16, 2):
            views[bs] = registry.extract_buffer(
                padded_bs=bs, padded_num_tokens=bs, forward_batch_template=_decode([1] * bs)
            )
            shape = GraphShape(ForwardMode.DECODE, bs, bs)
            captured[bs] = backend.init_metadata_capture(views[bs], shape)

        def replay(lengths: list[int]) -> dict[str, list[Any]]:
            bs, raw = (2 if len(lengths) <= 2 else 16), len(lengths)
            registry.fill_from(
                _decode(lengths), raw_bs=raw, padded_bs=bs, raw_num_tokens=raw, padded_num_tokens=bs
            )
            shape = GraphShape(ForwardMode.DECODE, bs, bs)
            backend.init_metadata_replay(views[bs], shape, captured[bs])
            names = ("cu_seqlens_q", "cache_seqlens", "cu_seqlens_k", "page_table")
            found = {name: getattr(captured[bs], name).tolist() for name in names}
            return found | {"schedule": captured[bs].scheduler_metadata.tolist()}

        return replay

    used, new = lane(), lane()
    used([16] * 16)
    small = used([5])
    assert small == new([5])
    assert small["schedule"] == [0, 1, 1, 0, 0, 1, 1, *[0] * 58]
    assert small["page_table"] == [[4, 5, 0, 0], [0, 0, 0, 0]]


def _decode(lengths: list[int]) -> ForwardBatch:
    """Return a decode batch on the first request rows."""
    lens = torch.tensor(lengths)
    zeros = torch.zeros_like(lens)
    rows = torch.arange(1, len(lengths) + 1)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lengths),
        input_ids=zeros,
        positions=lens - 1,
        out_cache_loc=zeros,
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
    )


@settings(derandomize=True, max_examples=30)
@given(accepted=st.lists(st.integers(0, DRAFT_WIDTH), min_size=1, max_size=MAX_BS))
def test_draft_extend_has_one_stride_whatever_was_accepted(accepted: list[int]) -> None:
    """For any accepted lengths, query offsets are multiples of the draft's width, which is max_seqlen_q."""
    rig = rig_of(make_config(EXTEND_DRAFT))
    requests = [
        ProblemRequest(
            row=i + 1,
            cached=list(range(1, 2 + n)),
            tokens=[Token(0, [60 + j], None, 0) for j in range(DRAFT_WIDTH)],
            table=[*range(1, 2 + n), *range(60, 60 + DRAFT_WIDTH)],
        )
        for i, n in enumerate(accepted)
    ]
    problem = Problem(EXTEND_DRAFT, requests, 0)
    metadata, shape = replay_metadata(rig, problem)
    batch = problem.batch()
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = torch.tensor(accepted)
    eager = rig.backend.init_metadata_eager(batch)
    for found, bs in ((metadata, shape.batch_size), (eager, len(accepted))):
        assert found.cu_seqlens_q.tolist() == [DRAFT_WIDTH * i for i in range(bs + 1)]
        assert found.max_seqlen_q == DRAFT_WIDTH


def test_padded_rows_keep_the_stride() -> None:
    """A padding request of draft extend has a full stride of queries and as many keys, all in scratch."""
    config = make_config(EXTEND_DRAFT)
    tokens = [Token(0, [50 + j], None, 0) for j in range(DRAFT_WIDTH)]
    requests = [ProblemRequest(i, [i], tokens, [i, *range(50, 54)]) for i in (1, 2, 3)]
    metadata, _ = replay_metadata(rig_of(config), Problem(EXTEND_DRAFT, requests, 0))
    assert metadata.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16]
    assert metadata.cache_seqlens.tolist() == [5, 5, 5, 4]
    assert not metadata.page_table[3].any()


def test_a_stale_row_is_caught_when_planted() -> None:
    """A stale page in a padding row is detected, so the tests above can fail."""
    rig = rig_of(make_config(DECODE))
    problem = Problem(DECODE, [ProblemRequest(3, [4, 5], [Token(0, [6], None, 0)], [4, 5, 6])], 0)
    metadata, shape = replay_metadata(rig, problem)
    check(metadata, problem, shape.batch_size, 1, 0)
    metadata.page_table[1, 0] = 4
    with pytest.raises(AssertionError):
        check(metadata, problem, shape.batch_size, 1, 0)


# -- the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "nodes"), [(DECODE, 1), (TREE, 1), (BRANCHES, NUM_STEPS)], ids=str)
def test_the_schedule_is_one_node_a_step(case: Case, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of two layers records one schedule for each step, and the kernels of both layers read it."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    perform = Recorder.perform

    def count(self: Recorder, func: Any, args: Any, *more: Any) -> Any:
        calls.append((str(func), args))
        return perform(self, func, args, *more)

    monkeypatch.setattr(Recorder, "perform", count)
    config = make_config(case, 16, sliding_window=False)
    rig = Rig(config, backend=FA3Backend, in_graph=True)
    graphs = len(rig.lane.captured)
    assert sum("schedule_attention" in op for op, _ in calls) == nodes * graphs
    paged = [args for op, args in calls if "page_table_attention" in op and args[6] == 16]
    assert len(paged) == 2 * nodes * graphs
    assert all(args[13] is not None for args in paged)


def test_layers_with_a_window_are_given_no_schedule() -> None:
    """A schedule without blocks changes the layer without a window and not the layer with one."""
    rig = rig_of(make_config(DECODE))
    problem = Problem(DECODE, [ProblemRequest(1, [3, 4, 5], [Token(2, [6], None, 0)], [3, 4, 5, 6])], 0)
    rig.load(problem)
    batch = problem.batch()
    q, k, v = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    metadata = rig.backend.init_metadata_eager(batch)
    right = [rig.backend.forward(q, k, v, layer, metadata) for layer in rig.layers]
    metadata.scheduler_metadata.zero_()
    spoilt = [rig.backend.forward(q, k, v, layer, metadata) for layer in rig.layers]
    assert not torch.equal(right[0], spoilt[0])
    assert torch.equal(right[1], spoilt[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [TREE, BRANCHES], ids=str)
def test_a_sink_is_counted_once_in_a_cascade(case: Case) -> None:
    """For both kinds of tree, layers with sinks and a soft cap and without a window equal the oracle."""
    config = make_config(case, 16, sliding_window=False, softcap=True, sinks=True)
    hold_to_oracle(FA3Backend, config, max_examples=2)


@dataclass(frozen=True)
class Narrow(Config):
    """A lane whose second layer has a window shorter than a draft."""

    @property
    def layers(self) -> list[LayerSpec]:
        """The layers of `Config`, with a window of two keys in the second."""
        plain, special = super().layers
        return [plain, replace(special, sliding_window=2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [TREE, BRANCHES], ids=str)
def test_a_window_cuts_drafts_by_their_depth(case: Case) -> None:
    """A window shorter than a branch also hides its first drafts, counted from each token's position."""
    config = make_config(case)
    narrow = Narrow(**{f.name: getattr(config, f.name) for f in fields(config)})
    hold_to_oracle(FA3Backend, narrow, max_examples=2)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes_of_every_mode_answer_as_the_oracle(case: Case) -> None:
    """In every mode, with windows, caps and sinks, eager steps and strict replays equal the oracle."""
    hold_to_oracle(FA3Backend, make_config(case, 3, softcap=True, sinks=True), max_examples=1)


def test_an_idle_batch_has_metadata_of_no_rows() -> None:
    """Without requests, offsets are [0], per-request tensors are empty, and attention returns no rows."""
    rig = rig_of(make_config(DECODE, 16))
    metadata = rig.backend.init_metadata_eager(Problem(Case(ForwardMode.IDLE), [], 0).batch())
    assert metadata.cu_seqlens_q.tolist() == metadata.cu_seqlens_k.tolist() == [0]
    assert len(metadata.cache_seqlens) == len(metadata.page_table) == 0
    assert not metadata.scheduler_metadata.any()
    q, k = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
    assert rig.backend.forward(q, k, k, rig.layers[0], metadata).shape == (0, 4, 8)


# -- what is refused and declared ------------------------------------------------------------------


def test_a_tree_in_a_lane_of_chains_is_refused() -> None:
    """A tree mask in a lane with top-k 1 is refused; the error names the limit."""
    rig = rig_of(make_config(Case(VERIFY)))
    tokens = [Token(0, [10 + j], None, 0) for j in range(DRAFT_WIDTH)]
    problem = Problem(TREE, [ProblemRequest(1, [9], tokens, [9, 10, 11, 12, 13])], 0)
    with pytest.raises(EngineError, match=r"limits\.draft\.topk is 1"):
        rig.backend.init_metadata_eager(problem.batch())


def test_an_extend_batch_needs_its_lengths() -> None:
    """An extend without the number of new tokens of each request is refused."""
    rig = rig_of(make_config(Case(ForwardMode.EXTEND)))
    problem = Problem(Case(ForwardMode.EXTEND), [ProblemRequest(1, [], [Token(0, [9], None, 0)], [9])], 0)
    for name in ("extend_seq_lens", "extend_seq_lens_cpu"):
        batch = problem.batch()
        setattr(batch, name, None)
        with pytest.raises(EngineError, match="extend_seq_lens"):
            rig.backend.init_metadata_eager(batch)


def test_every_slot_is_declared_with_owner_and_reason() -> None:
    """Slots are int32 with owner and reason; no fill writes them; tree slots exist with top-k > 1 only."""
    backend = rig_of(make_config(DECODE)).backend
    plain = ["cu_seqlens_q", "cache_seqlens", "cu_seqlens_k", "page_table", "scheduler_metadata"]
    trees = ["tree.cu_seqlens_q", "tree.cache_seqlens", "tree.page_table"]
    trees += [f"tree.window{WINDOWS[0]}.cache_seqlens", f"tree.window{WINDOWS[0]}.page_table"]
    for topk, names in ((1, plain), (2, plain + trees)):
        slots = backend.declare_slots(Limits(4, 16, CONTEXT, 16, DraftLimits(3, topk, 4)))
        assert [slot.name for slot in slots] == [f"fa3.{name}" for name in names]
        for slot in slots:
            assert slot.owner == "fa3"
            assert slot.reason
            assert slot.padding_policy is PaddingPolicy.KEEP_PAD
            assert slot.dtype is torch.int32
            assert not slot.copy_from_fb


def test_eager_metadata_is_memory_of_its_own() -> None:
    """Eager metadata writes no slot of the backend."""
    rig = rig_of(make_config(BRANCHES))
    registry = rig.lane.registry
    slots = [s for s in registry or () if s.owner == "fa3" and s.buffer is not None]
    for slot in slots:
        assert slot.buffer is not None
        slot.buffer.fill_(-9)
    tokens = [Token(0, [10 + 3 * j + i for i in range(3)], None, 0) for j in range(2)]
    rig.backend.init_metadata_eager(Problem(BRANCHES, [ProblemRequest(1, [9], tokens, [9])], 0).batch())
    assert slots
    assert all(bool((s.buffer == -9).all()) for s in slots if s.buffer is not None)


def _missing(**changes: Any) -> list[str]:
    layer: dict[str, Any] = {"sliding_window": 3, "softcap": 2.0, "sinks": torch.ones(1)}
    asked = {"mode": VERIFY, "dtype": torch.float32, "device": CPU, "page_size": 7, "topk": 4}
    layers = [LayerSpec(0, 1, 1, 40, 24, scaling=1.0, **layer)]
    return FA3Backend.capabilities.missing(layers, **(asked | changes))


def test_declared_capabilities() -> None:
    """The backend declares graphs of every mode, all float dtypes, trees, windows, caps, sinks; no MLA."""
    declared = FA3Backend.capabilities
    assert declared.modes == set(ForwardMode)
    assert declared.graph_support is GraphSupport.ALWAYS
    assert declared.head_layouts == {HeadLayout.MHA, HeadLayout.GQA}
    assert declared.seq_len_fill_value == 1
    assert not declared.needs_host_plan
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert _missing(dtype=dtype) == []
    assert "dtype torch.int8" in _missing(dtype=torch.int8)[0]
