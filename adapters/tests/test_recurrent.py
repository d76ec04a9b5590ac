"""The kernel model of recurrent states, its oracle, and builders under both: right ones, and planted bugs."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import recurrent_builders as made
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, KernelRefusal
from graphpact_adapters.builder_lanes import backend_of
from graphpact_adapters.recurrent_states import UNOWNED, StateMemory, accepted_of, state_name
from graphpact_adapters.vllm import Builders, RecurrentReads
from graphpact_adapters.vllm.readers import read_vllm_metadata
from graphpact_conformance.draws.batches import Drawn, sequences
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.results import Finding
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.suite.run import run_once
from graphpact_conformance.targets import Options

OPTIONS = Options(size="quick", shrink=False)
CPU = torch.device("cpu")


def lanes_of(make: Callable[..., object], **options: Any) -> list[PlannedLane]:
    """Return the quick lanes of a factory."""
    return [*Builders(make, kind="mamba", **options).lanes(OPTIONS)]


def lane_of(make: Callable[..., object], mode: ForwardMode) -> LaneUnderTest:
    """Return the first quick lane of a kind of step."""
    return next(plan.lane for plan in lanes_of(make) if plan.lane.config.case.mode is mode)


def findings_of(make: Callable[..., object], *, unusual: bool = False, **options: Any) -> Iterator[Finding]:
    """Yield the findings of all experiments in the plain lanes of a quick run, or in its unusual ones."""
    plans = [plan for plan in lanes_of(make, **options) if bool(plan.lane.config.unusual) is unusual]
    assert plans
    for plan in plans:
        for experiment in Builders(make, kind="mamba").experiments:
            done = run_once(experiment, plan, OPTIONS, None, plan.lane.anew(experiment.examines))
            assert (done.error, done.not_run) == (None, None), (str(plan), experiment.name)
            yield from done.findings


# -- builders ---------------------------------------------------------------------------------------------


RIGHT = pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(made.Scan, {}),
        pytest.param(made.Scan, {"read": made.uniform}),
        pytest.param(made.UpdatedScan, {}),
        pytest.param(made.Delta, {}),
        pytest.param(made.NoAccepted, {}),
    ],
    ids=["scan", "scan without offsets", "updated scan", "delta", "no accepted, with offsets"],
)


@pytest.mark.sweep
@RIGHT
def test_a_right_builder_passes_in_unusual_lanes(make: type[made.Builder], options: dict[str, Any]) -> None:
    """Right builders have no finding in lanes with long or large batches, or slots high in the cache."""
    assert [*findings_of(make, unusual=True, **options)] == []


@pytest.mark.few(2)
@RIGHT
def test_a_right_builder_passes(make: type[made.Builder], options: dict[str, Any]) -> None:
    """Builders whose replays are right have no finding in plain lanes of decodes and of drafts."""
    modes = {plan.lane.config.case.mode for plan in lanes_of(make, **options)}
    assert modes == {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
    assert [*findings_of(make, **options)] == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "options", "rule", "field"),
    [
        pytest.param(made.StalePadding, {}, "GP03", "state_indices"),
        pytest.param(made.StaleAccepted, {}, "GP02", "num_accepted_tokens"),
        pytest.param(made.NoAccepted, {"read": made.uniform}, "GP04", "num_accepted_tokens[1] = 0"),
        pytest.param(made.FreshIndices, {}, "GP01", "state_indices"),
        pytest.param(made.SharedWithFirst, {}, "GP01", "KV-cache group 1: state_indices"),
        pytest.param(made.UpdatedRows, {}, "GP01", "KV-cache group 1: num_accepted_tokens"),
        pytest.param(made.FirstGroup, {}, None, "an eager run"),
        pytest.param(made.FrozenCount, {}, "GP08", "num_requests"),
        pytest.param(made.CapturedWithoutDrafts, {}, "GP10", "the launches of the kernel"),
        pytest.param(made.PaddingIsPrefill, {}, "GP10", "the launches of the kernel"),
        pytest.param(made.KeptAccepted, {}, "GP01", "num_accepted_tokens"),
        pytest.param(made.WritesLent, {}, "GP19", "block_tables[0]"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_bug_is_found(
    make: type[made.Builder], options: dict[str, Any], rule: str | None, field: str
) -> None:
    """Each planted bug has a finding of its rule with its field; replays have findings of no other rule."""
    found = [*findings_of(make, **options)]
    mine = [each for each in found if each.rule == rule and (each.field or "").startswith(field)]
    assert mine, [(each.rule, each.field, each.actual) for each in found]
    assert {each.rule for each in found} <= {rule, None}


def test_the_overwritten_state_is_named() -> None:
    """A padding row with an old state index writes a state row that its request no longer owns."""
    lane = lane_of(made.StalePadding, ForwardMode.DECODE)
    rig, steps = lane.rig(), lane.drawn(1, 0)[0]
    rig.step(steps.exact)
    step = rig.step(steps.small)
    name = state_name(0)
    wrong = rig.cache.differs(name, step.caches[name], lane.answer(rig, steps.small).caches[name])
    rows = wrong.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert rows
    assert rig.cache.place(name, rows) == (f"{name} in state rows {rows}", ())


def test_later_groups_are_updated_from_the_first() -> None:
    """With ``supports_update_block_table`` only the first group builds, at captures and at replays."""
    calls: list[tuple[str, int]] = []

    class Counted(made.UpdatedScan):
        """Records which builder is called."""

        def build(self, *args: Any, **kwargs: Any) -> made.ScanMetadata:
            calls.append(("build", id(self)))
            return super().build(*args, **kwargs)

        def update_block_table(self, *args: Any) -> made.ScanMetadata:
            calls.append(("update", id(self)))
            return super().update_block_table(*args)

    lane = lane_of(Counted, ForwardMode.DECODE)
    rig = lane.rig()
    first, second = map(id, backend_of(rig).builders)
    assert {*calls} == {("build", first), ("update", second)}
    calls.clear()
    for problem in lane.drawn(1, 0)[0]:
        rig.step(problem)
    assert calls == [("build", first), ("update", second)] * (len(calls) // 2) != []


def test_an_idle_rank_replays_a_dummy() -> None:
    """A replay without requests gets the metadata of a capture, so it writes no state but scratch."""
    lane = lane_of(made.Delta, ForwardMode.TARGET_VERIFY)
    rig, steps = lane.rig(), lane.drawn(1, 0)[0]
    rig.step(steps.exact)
    step = rig.step(steps.idle)
    assert step.replays == 1
    assert all(bool((step.caches[state_name(layer)][1:] == UNOWNED).all()) for layer in (0, 1))


# -- the oracle and the state memory ----------------------------------------------------------------------


def summed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the state after all tokens, computed element by element."""
    heads, wide, out = keys.shape[1], keys.shape[2], values.shape[2]
    state = torch.zeros(heads, wide, out, dtype=torch.float64)
    for token in range(len(keys)):
        for head in range(heads):
            for a in range(wide):
                for b in range(out):
                    state[head, a, b] += float(keys[token, head, a]) * float(values[token, head, b])
    return state


LAYER = LayerSpec(0, 4, 2, 3, 2, scaling=0.5)


@given(st.integers(1, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 9))
def test_the_kernel_is_a_plain_loop(cached: int, counts: Sequence[int], seed: int) -> None:
    """Outputs and written states of the kernel are those of a loop over tokens, heads and elements."""
    rng = torch.Generator().manual_seed(seed)
    tokens, columns = sum(counts), max(*counts, 1)
    q, k, v = (torch.randn(tokens, heads, width, generator=rng) for heads, width in ((4, 3), (2, 3), (2, 2)))
    old_k, old_v = (torch.randn(len(counts), cached, 2, width, generator=rng) for width in (3, 2))
    accepted = [1 + at % columns for at in range(len(counts))]
    table = 1 + torch.randperm(len(counts) * columns, generator=rng).view(len(counts), columns)
    states = torch.randn(1 + table.numel(), 2, 3, 2, generator=rng, dtype=torch.float64)
    for row, column in enumerate(accepted):
        states[table[row, column - 1]] = summed(old_k[row], old_v[row])
    slots = tokens + 1
    cache = SimpleNamespace(k=[torch.zeros(slots, 2, 3)], v=[torch.zeros(slots, 2, 2)], states=[states])
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    reads = RecurrentReads(
        table.int(),
        torch.arange(tokens),
        tokens,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
    )
    before = states.clone()
    out = reads.attend(q, k, v, LAYER, cache, 1)
    for row, count in enumerate(counts):
        for at in range(count):
            token = starts[row] + at
            keys, values = (
                torch.cat([old[row], new[starts[row] : token + 1]]) for old, new in ((old_k, k), (old_v, v))
            )
            state = summed(keys, values)
            torch.testing.assert_close(states[table[row, at]], state)
            for head in range(4):
                right = 0.5 * q[token, head].double() @ state[head // 2]
                torch.testing.assert_close(out[token, head], right.float())
        kept = table[row, count:]
        assert torch.equal(states[kept], before[kept])
    assert torch.equal(states[0], before[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_the_oracle_is_a_plain_loop(mode: ForwardMode) -> None:
    """The answer's outputs and states are those of a loop over the cached and new tokens of each request."""
    lane = lane_of(made.Scan, mode)
    rig = lane.build(capture=False)
    cache, config = rig.cache, lane.config
    assert isinstance(cache, StateMemory)
    for problem in lane.drawn(1, 0)[0]:
        answer = rig.answer(problem)
        rig.load(problem)
        batch = rig.batch_of(problem)
        row = column = 0
        for layer in config.layers:
            q, k, v = rig.net.project(layer.layer_id, batch.input_ids, batch.positions, batch)
            width, row = layer.num_q_heads * layer.v_head_dim, 0
            for request in problem.requests:
                old_k, old_v = cache.kv.k[layer.layer_id], cache.kv.v[layer.layer_id]
                state = summed(old_k[request.cached], old_v[request.cached])
                blocks = cache.blocks_of(request, layer.layer_id)
                for at in range(len(request.tokens)):
                    state = state + summed(k[row : row + 1], v[row : row + 1])
                    torch.testing.assert_close(answer.caches[state_name(layer.layer_id)][blocks[at]], state)
                    right = layer.scaling * torch.einsum("hk,hkv->hv", q[row].double(), state).flatten()
                    torch.testing.assert_close(answer.rows["rows"][row, column : column + width], right)
                    row += 1
            column += width


@given(st.data())
def test_states_before_a_step(data: st.DataObject) -> None:
    """Only the column of the accepted tokens has the sum of all cached keys, and other rows are unowned."""
    config = lane_of(made.Scan, ForwardMode.TARGET_VERIFY).config
    memory = StateMemory(config, CPU)
    steps: Drawn = data.draw(sequences(config))
    blocks = memory.state_blocks[1:].flatten().tolist()
    assert sorted(blocks) == [*range(1, 1 + len(blocks))]
    for problem in steps:
        memory.load(problem)
        for layer, states in enumerate(memory.states):
            owned = [0]
            for request in problem.requests:
                rows = memory.blocks_of(request, layer)
                owned += rows
                keys, values = memory.kv.k[layer][request.cached], memory.kv.v[layer][request.cached]
                right = torch.einsum("thk,thv->hkv", keys.double(), values.double())
                accepted = accepted_of(request, problem, len(rows))
                assert int(memory.num_accepted[request.row]) == accepted
                is_right = [torch.allclose(states[row], right) for row in rows]
                assert is_right == [column == accepted - 1 for column in range(len(rows))]
            unowned = [row for row in range(len(states)) if row not in owned]
            assert bool((states[unowned] == UNOWNED).all())


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        (
            {"state_indices": [[1, 2], [3, 99]]},
            "GP04",
            "request 1: state index 99; the state memory has 6",
        ),
        ({"state_indices": [[1, 2], [-1, 4]]}, "GP04", "request 1: state index -1"),
        ({"num_accepted_tokens": [1, 0]}, "GP04", "request 1: num_accepted_tokens is 0"),
        ({"num_accepted_tokens": [3, 1]}, "GP04", "request 0: num_accepted_tokens is 3"),
        ({"num_accepted_tokens": [1]}, "GP05", "num_accepted_tokens 1"),
        ({"query_start_loc": [0, 2, 5]}, "GP05", r"query_start_loc is \[0, 2, 5\] for 4 of 4 tokens"),
        ({"query_start_loc": [0, 3, 4]}, "GP05", "request 0: 3 queries; state_indices has 2 columns"),
        ({"num_requests": 3}, "GP05", "3 requests: state_indices has 2 rows"),
    ],
)
def test_reads_out_of_bounds_are_refused(changes: dict[str, Any], rule: str, said: str) -> None:
    """The kernel refuses what would be read or written out of bounds, with the rule and the request."""
    values: dict[str, Any] = {
        "state_indices": [[1, 2], [3, 4]],
        "query_start_loc": [0, 2, 4],
        "num_accepted_tokens": [1, 2],
    } | changes
    tensors = {name: torch.tensor(v, dtype=torch.int32) for name, v in values.items() if isinstance(v, list)}
    reads = RecurrentReads(slot_mapping=torch.full((4,), -1), num_tokens=4, **(values | tensors))
    cache = SimpleNamespace(
        k=[torch.zeros(4, 2, 3)], v=[torch.zeros(4, 2, 2)], states=[torch.zeros(6, 2, 3, 2).double()]
    )
    q, k, v = torch.ones(4, 4, 3), torch.ones(4, 2, 3), torch.ones(4, 2, 2)
    with pytest.raises(KernelRefusal, match=said) as refused:
        reads.attend(q, k, v, LAYER, cache, 1)
    assert refused.value.rule == rule


@pytest.mark.parametrize("index", [0, -1])
def test_skipped_rows_are_neither_read_nor_written(index: int) -> None:
    """A request whose state index is skipped has zeros as outputs; row 0 is scratch for other kernels."""
    states = torch.ones(3, 2, 3, 2, dtype=torch.float64)
    cache = SimpleNamespace(k=[torch.zeros(2, 2, 3)], v=[torch.zeros(2, 2, 2)], states=[states])
    table, slots = torch.tensor([index, 2], dtype=torch.int32), torch.tensor([0, 1])
    inputs = torch.ones(2, 4, 3), torch.ones(2, 2, 3), torch.ones(2, 2, 2)
    out = RecurrentReads(table, slots, 2, skipped=(index,)).attend(*inputs, LAYER, cache, 1)
    assert bool((out[0] == 0).all())
    assert bool((out[1] == 0.5 * 3 * 2).all())
    assert [bool((state == 1).all()) for state in states] == [True, True, False]
    if index == 0:
        RecurrentReads(table, slots, 2, skipped=(-1,)).attend(*inputs, LAYER, cache, 1)
        assert bool((states[0] == 2).all())


def test_a_skipped_column_is_not_written() -> None:
    """A token whose state index is skipped has its output, and its state is written nowhere."""
    states = torch.ones(3, 2, 3, 2, dtype=torch.float64)
    cache = SimpleNamespace(k=[torch.zeros(2, 2, 3)], v=[torch.zeros(2, 2, 2)], states=[states])
    starts = torch.tensor([0, 2], dtype=torch.int32)
    for index in (0, -1):
        reads = RecurrentReads(
            torch.tensor([[2, index]]), torch.tensor([0, 1]), 2, query_start_loc=starts, skipped=(index,)
        )
        states.fill_(1)
        out = reads.attend(torch.ones(2, 4, 3), torch.ones(2, 2, 3), torch.ones(2, 2, 2), LAYER, cache, 1)
        assert out[:, 0, 0].tolist() == [0.5 * 3 * 2, 0.5 * 3 * 3]
        assert states[:, 0, 0, 0].tolist() == [1, 1, 2]


def test_reads_need_states() -> None:
    """For recurrent reads in a lane of another kind, the error names the kind to give."""
    reads = RecurrentReads(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), 1)
    cache = SimpleNamespace(k=[torch.zeros(1, 2, 3)], v=[torch.zeros(1, 2, 2)])
    with pytest.raises(ConfigError, match='kind="mamba"'):
        reads.attend(torch.ones(1, 4, 3), torch.ones(1, 2, 3), torch.ones(1, 2, 2), LAYER, cache, 1)


# -- readers ----------------------------------------------------------------------------------------------


def fields(**values: Any) -> SimpleNamespace:
    """Return metadata without prefills, and with some fields."""
    return SimpleNamespace(num_prefills=0, num_decodes=2, num_decode_tokens=4, num_reqs=2, **values)


def test_linear_attention_skips_minus_one() -> None:
    """The reader of linear attention takes the state indices of decodes, and skips only -1."""
    indices, slots = torch.tensor([5, -1], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    found = read_vllm_metadata(
        fields(state_indices_tensor=indices, query_start_loc=torch.arange(3), seq_lens=torch.ones(2)), slots
    )
    assert isinstance(found, RecurrentReads)
    assert found.state_indices is indices
    assert (found.num_requests, found.skipped, found.num_accepted_tokens) == (2, (-1,), None)


@pytest.mark.parametrize("prefills", [1, 3])
def test_prefills_are_refused(prefills: int) -> None:
    """For a step with prefills, the error of a decode reader names the steps to check."""
    metadata = made.ScanMetadata(prefills, 1, 1, 1, torch.ones(1, 1), None, None, 1)
    with pytest.raises(ConfigError, match=f"{prefills} prefills") as refused:
        read_vllm_metadata(metadata, torch.zeros(1))
    assert "ForwardMode.DECODE" in str(refused.value)
