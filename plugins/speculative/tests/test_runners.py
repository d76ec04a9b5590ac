"""The runners: what their graphs compute equals the draft model in plain loops, and an eager step."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, ForwardMode, GraphShape, Lane, Limits, StepOutputs
from graphpact.attention import DraftLimits, GraphSupport
from graphpact.errors import ConfigError, EngineError
from graphpact.pact import walk
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.speculation import HIDDEN_STATES, SCORES
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_speculative import EagleDraftExtendRunner, EagleDraftRunner, FrozenKvMtpRunner
from rigs.draft_model import CPU, HIDDEN, ROWS, DraftModelRig, Node, Path, beam_search, drafts_of

DRAFT, EXTEND, DECODE = ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DECODE
GAP = 1e-3
"""Scores that are closer than this may have another order in float64, which changes the tree."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, which allows writes to the outputs of graphs."""
    with torch.inference_mode():
        yield


@st.composite
def _limits(draw: st.DrawFn) -> DraftLimits:
    """Return limits of chains and trees, of few steps and many, with few drafts and all candidates."""
    topk, num_steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    most = min(topk + (num_steps - 1) * topk**2, 10)
    return DraftLimits(num_steps, topk, 1 + draw(st.integers(1, most)))


_LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=3)  # the one shape has four requests
_PHASES = (Phase.explicit, Phase.generate)  # no shrinking: examples are small, and strict lanes are slow
_CASES = {
    "draft": _limits(),
    "lengths": st.lists(_LENGTHS, min_size=2, max_size=2),
    "seed": st.integers(0, 999),
}


def replayed(lane: Lane, rig: DraftModelRig, batch: ForwardBatch) -> StepOutputs:
    """Return the outputs of a replay, and require that they equal those of an eager step.

    The graph's outputs are invalid before the replay. The replay must not change the batch, nor the keys of
    the target and of the sequences.
    """
    caches, given_batch = [c.clone() for c in rig.caches], copy.deepcopy(batch.tensors())
    for captured in lane.captured.values():
        for output in captured.graph.outputs.values():
            output.fill_(-1)
    replays = lane.stats.replays
    outputs = lane.run(batch).clone()
    assert lane.stats.replays == replays + 1
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, given_batch[name])
    written = torch.zeros(len(caches[0]), dtype=torch.bool)
    written[0] = True
    written[batch.out_cache_loc] = True
    for at, (cache, old) in enumerate(zip(rig.caches, caches, strict=True)):
        kept = ~written if at > 1 else torch.ones_like(written)
        assert torch.equal(cache[kept].nan_to_num(7), old[kept].nan_to_num(7))
        cache.copy_(old)
    eager = lane.run_eager(batch)
    for name, output in eager.items():
        torch.testing.assert_close(outputs[name], output)
    for cache, old in zip(rig.caches, caches, strict=True):
        cache.copy_(old)
    return outputs


def expected_drafts(rig: DraftModelRig, batch: ForwardBatch) -> list[tuple[list[int], list[int]]]:
    """Return the drafts and parents of each request, found with the model in plain loops."""
    found, topk = [], rig.draft.topk
    for first in range(0, batch.num_tokens, topk):
        at = first // topk if batch.forward_mode is DRAFT else first
        row, cached = int(batch.req_pool_indices[at]), int(batch.seq_lens_cpu[at])
        hidden = batch.extra[HIDDEN_STATES][first]

        def expand(node: Node, _: int, level: int, row: int = row, cached: int = cached) -> object:
            hidden, path = node.data
            ahead = level if rig.frozen else level - 1
            chances, *data = rig.forward(node.token, hidden, cached + ahead, row, cached, path)
            return chances, data

        path: Path = []
        if rig.frozen:
            chances, hidden, path = rig.forward(int(batch.input_ids[first]), hidden, cached, row, cached, [])
            tokens = sorted(range(len(chances)), key=lambda t: -chances[t])[:topk]
            begin = [(token, chances[token]) for token in tokens]
        else:
            branches = slice(first, first + topk)
            scores = batch.extra[SCORES][branches].tolist()
            begin = list(zip(batch.input_ids[branches].tolist(), scores, strict=True))
        tokens, parents, gap = beam_search(begin, expand, (hidden, path), rig.draft)
        assume(gap > GAP)
        found.append((tokens, parents))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@settings(derandomize=True, max_examples=12, phases=_PHASES)
@given(**_CASES)
@example(draft=DraftLimits(1, 3, 4), lengths=[[3], [5, 2]], seed=1)  # no other level may be chosen from
def test_a_draft_is_that_of_the_model_in_plain_loops(
    *, strict: bool, draft: DraftLimits, lengths: Sequence[list[int]], seed: int
) -> None:
    """Replays draft what the model drafts in plain loops.

    Each branch attends to its own ancestors, whose keys other branches may have written.
    """
    rig = DraftModelRig(draft, seed)
    lane = rig.lane(DRAFT, EagleDraftRunner, strict=strict, sizes=[ROWS])
    for each in lengths:
        batch = rig.batch(DRAFT, each)
        expected = expected_drafts(rig, batch)
        assert list(drafts_of(replayed(lane, rig, batch))) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@settings(derandomize=True, max_examples=8, phases=_PHASES)
@given(**_CASES)
@example(draft=DraftLimits(1, 3, 4), lengths=[[3], [5, 2]], seed=1)  # no other level may be chosen from
def test_a_draft_on_frozen_kv_is_that_of_the_model_in_plain_loops(
    *, strict: bool, draft: DraftLimits, lengths: Sequence[list[int]], seed: int
) -> None:
    """Replays draft what the model drafts on the target's keys, and write no key at all, not even scratch."""
    rig = DraftModelRig(draft, seed, frozen=True)
    lane = rig.lane(DECODE, FrozenKvMtpRunner, strict=strict, sizes=[ROWS * draft.topk])
    for each in lengths:
        batch = rig.batch(DECODE, each)
        expected, caches = expected_drafts(rig, batch), [c.clone() for c in rig.caches]
        outputs = replayed(lane, rig, batch)
        assert all(torch.equal(c[0], old[0]) for c, old in zip(rig.caches, caches, strict=True))
        for row in range(draft.topk):
            rows = StepOutputs(**{name: (t[row:], "none") for name, t in outputs.items()})
            assert list(drafts_of(rows, draft.topk)) == expected


@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@settings(derandomize=True, max_examples=8, phases=_PHASES)
@given(**_CASES, data=st.data())
def test_an_extend_is_that_of_the_model_in_plain_loops(
    *, strict: bool, draft: DraftLimits, lengths: Sequence[list[int]], seed: int, data: st.DataObject
) -> None:
    """The outputs are those after the last accepted token, found in plain loops."""
    rig, width = DraftModelRig(draft, seed), draft.num_draft_tokens
    lane = rig.lane(EXTEND, EagleDraftExtendRunner, strict=strict, sizes=[ROWS])
    for each in lengths:
        correct = data.draw(st.lists(st.integers(0, width - 1), min_size=len(each), max_size=len(each)))
        batch = rig.batch(EXTEND, each, correct)
        found = []
        for i, cached in enumerate(each):
            path: Path = []
            for at in range(i * width, i * width + correct[i] + 1):
                token, hidden = int(batch.input_ids[at]), batch.extra[HIDDEN_STATES][at]
                row, position = int(batch.req_pool_indices[i]), int(batch.positions[at])
                chances, state, path = rig.forward(token, hidden, position, row, cached, path)
            found.append((chances, state))
        outputs = replayed(lane, rig, batch)
        for i, (chances, state) in enumerate(found):
            torch.testing.assert_close(outputs["hidden_states"][i].double(), state, atol=1e-4, rtol=1e-3)
            best = torch.tensor(chances).sort(descending=True).values[: draft.topk]
            torch.testing.assert_close(outputs["scores"][i], best, atol=1e-4, rtol=1e-3)
            chosen = torch.tensor(chances)[outputs["next_tokens"][i]]
            torch.testing.assert_close(chosen, best, atol=1e-4, rtol=1e-3)
            assert len(set(outputs["next_tokens"][i].tolist())) == draft.topk


def test_accepted_drafts_change_no_metadata() -> None:
    """Whatever was accepted, the metadata has the same bits, and a stride of ``num_draft_tokens``."""
    rig = DraftModelRig(DraftLimits(2, 2, 4))
    lane = rig.lane(EXTEND, EagleDraftExtendRunner, sizes=[ROWS])
    batch, seen = rig.batch(EXTEND, [3, 7, 5], [0, 0, 0]), []
    for correct in ([0, 1, 3], [3, 2, 0]):
        batch.num_correct_drafts = torch.tensor(correct, dtype=torch.int32)
        lane.run(batch)
        (captured,) = lane.captured.values()
        metadata = walk({"metadata": captured.metadata})
        seen.append({path: leaf.clone() for path, leaf in metadata if isinstance(leaf, torch.Tensor)})
        assert captured.metadata.request.tolist() == torch.arange(ROWS).repeat_interleave(4).tolist()
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(leaf, seen[1][path]) for path, leaf in seen[0].items())


RUNNERS = [(EagleDraftRunner, DRAFT), (EagleDraftExtendRunner, EXTEND), (FrozenKvMtpRunner, DECODE)]


def _context(mode: ForwardMode, draft: DraftLimits, max_bs: int = 8, **more: object) -> RunnerContext:
    limits = Limits(max_bs, max_bs * 8, 32, 1, draft)
    return RunnerContext(
        CPU,
        ReferenceBackend.capabilities,
        limits,
        mode=mode,
        lane="draft",
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("runner", "mode"), RUNNERS)
def test_hidden_states_have_a_slot_of_the_model_s_width(runner: type[GraphRunner], mode: ForwardMode) -> None:
    """Hidden states, and scores in a draft decode, have slots whose padding rows are zeros, and dummies."""
    each = runner(_context(mode, DraftLimits(3, 2, 4)))
    slots = {slot.name: slot for slot in each.slots() if slot.owner == "speculative"}
    assert slots.keys() == ({HIDDEN_STATES, SCORES} if mode is DRAFT else {HIDDEN_STATES})
    assert not any(slot.optional or slot.keeps_tail or slot.initial_value for slot in slots.values())
    assert slots[HIDDEN_STATES].dtype is torch.bfloat16
    dummy = each.dummy(each.shapes()[-1])
    for name, slot in slots.items():
        assert dummy.extra[name].shape == slot.shape_fn(0, dummy.num_tokens)
        assert dummy.extra[name].dtype is slot.dtype
    dummy.require_consistent()


@settings(derandomize=True, max_examples=40)
@given(requests=st.integers(1, 300), topk=st.integers(1, 5), width=st.integers(2, 6))
def test_the_largest_step_has_a_graph(requests: int, topk: int, width: int) -> None:
    """The default capture sizes end at the largest step of each lane, and have whole requests only."""
    draft = DraftLimits(3, topk, width)
    for runner, mode, rows, tokens in (
        (EagleDraftRunner, DRAFT, requests, topk),
        (EagleDraftExtendRunner, EXTEND, requests, width),
        (FrozenKvMtpRunner, DECODE, requests * topk, 1),
    ):
        if runner is not EagleDraftExtendRunner and width - 1 > topk + 2 * topk**2:
            continue
        shapes = runner(_context(mode, draft, rows)).shapes()
        assert shapes[-1] == GraphShape(mode, rows, rows * tokens)
        assert all(shape.batch_size % (rows // requests) == 0 for shape in shapes)


@pytest.mark.parametrize(("runner", "mode"), [RUNNERS[0], RUNNERS[2]])
@settings(derandomize=True, max_examples=60)
@given(num_steps=st.integers(1, 4), topk=st.integers(1, 4), more=st.integers(-2, 2))
def test_more_drafts_than_candidates_are_refused(
    runner: type[GraphRunner], mode: ForwardMode, num_steps: int, topk: int, more: int
) -> None:
    """Only a draft of more tokens than its tree has candidates is refused; the error has the limit."""
    candidates = sum(topk if level == 0 else topk * topk for level in range(num_steps))
    draft = DraftLimits(num_steps, topk, candidates + 1 + more)
    if more <= 0:
        runner(_context(mode, draft))
        return
    with pytest.raises(ConfigError) as error:
        runner(_context(mode, draft))
    for part in (
        f"speculative.num_draft_tokens = {draft.num_draft_tokens}",
        f"speculative.num_steps = {num_steps}",
        f"speculative.topk = {topk}",
        f"generates {candidates}",
        f"lower num_draft_tokens to {candidates + 1}",
    ):
        assert part in str(error.value)


def test_sizes_that_split_a_request_are_refused() -> None:
    """A capture size of the frozen lane that is no multiple of ``topk`` is refused, with both numbers."""
    context = _context(DECODE, DraftLimits(2, 3, 3), 12, batch_sizes=[3, 8])
    with pytest.raises(ConfigError, match=r"lanes\.draft\.batch_sizes has 8.*speculative\.topk = 3"):
        FrozenKvMtpRunner(context).shapes()
    assert FrozenKvMtpRunner(_context(DECODE, DraftLimits(2, 3, 3), 12, batch_sizes=[3, 6])).shapes()


@pytest.mark.parametrize(("runner", "mode"), [RUNNERS[0], RUNNERS[2]])
def test_batches_that_a_draft_cannot_begin_with_are_refused(
    runner: type[GraphRunner], mode: ForwardMode
) -> None:
    """Eager steps refuse a batch that lacks a field, or has another number of rows for each request."""
    rig = DraftModelRig(DraftLimits(2, 2, 3), frozen=mode is DECODE)
    lane = rig.lane(mode, runner, sizes=[2 * ROWS if mode is DECODE else ROWS])
    batch = rig.batch(mode, [4, 2])
    bare = copy.copy(batch)
    bare.extra = {name: t for name, t in batch.extra.items() if name != HIDDEN_STATES}
    with pytest.raises(EngineError, match=rf"no {HIDDEN_STATES}"):
        lane.run_eager(bare)
    narrow = copy.copy(batch)
    for name, tensor in batch.tensors().items():
        if tensor.shape[0] == 4 and mode is DRAFT:
            tensors = tensor[::2]
            narrow = narrow.with_tensors({name: tensors})
        elif mode is DECODE:
            narrow = narrow.with_tensors({name: tensor[:3]})
    if mode is DECODE:
        narrow.batch_size = 3
    with pytest.raises(EngineError, match=rf"{narrow.num_tokens} rows for {narrow.batch_size} requests"):
        lane.run_eager(narrow)


def test_the_runners_say_what_they_need() -> None:
    """The runners need graphs of uniform batches for branches and verified tokens, else of decodes."""
    assert [runner.needs for runner, _ in RUNNERS] == [
        GraphSupport.UNIFORM,
        GraphSupport.UNIFORM,
        GraphSupport.UNIFORM_DECODE,
    ]
    assert [runner.frozen_kv for runner, _ in RUNNERS] == [False, False, True]
    assert all(runner.modes == {mode} for runner, mode in RUNNERS)
