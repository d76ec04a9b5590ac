"""The algorithms: the batches of their lanes, and the request state that they keep."""

import copy
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from graphpact import EagerReason, ForwardBatch, ForwardMode, Lane, StepOutputs
from graphpact.attention import DraftLimits
from graphpact.runners import EagerRunner, GraphRunner
from graphpact.speculation import (
    HIDDEN_STATES,
    DecodeStep,
    ExtendStep,
    SpeculationAlgorithm,
    SpeculationContext,
    Verified,
)
from graphpact_speculative import (
    Eagle,
    EagleDraftExtendRunner,
    EagleDraftRunner,
    FrozenKvMtp,
    FrozenKvMtpRunner,
)
from rigs.draft_model import CONTEXT, HIDDEN, ROWS, VOCAB, DraftModelRig

RUNNERS: dict[str, type[GraphRunner]] = {
    "eager": EagerRunner,
    "eagle_draft": EagleDraftRunner,
    "eagle_draft_extend": EagleDraftExtendRunner,
    "frozen_kv_mtp": FrozenKvMtpRunner,
}
DRAFTS = [DraftLimits(1, 1, 2), DraftLimits(3, 1, 3), DraftLimits(3, 2, 6), DraftLimits(2, 3, 4)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as engines run the algorithms."""
    with torch.inference_mode():
        yield


class Engine:
    """Requests whose tokens and target hidden states are known; the draft model has real lanes.

    Verification accepts as many drafts as a test sets, whatever was drafted, and the known tokens follow.
    """

    def __init__(
        self,
        kind: type[SpeculationAlgorithm],
        draft: DraftLimits,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rig = DraftModelRig(draft, seed, frozen=kind is FrozenKvMtp, dtype=dtype)
        self.algorithm = kind(SpeculationContext(draft, CONTEXT, HIDDEN, HIDDEN, dtype))
        self.draft = draft
        self.lanes: dict[str, Lane] = {}
        """The lanes that have run."""
        self.fails: str | None = None
        """The lane that fails."""
        self.state = {
            name: torch.full((ROWS + 1, *row), -1, dtype=dtype)
            for name, (row, dtype) in self.algorithm.state().items()
        }
        self.ran: list[str] = []
        self.batches: dict[str, ForwardBatch] = {}
        self.sequences = self.rig.tokens(ROWS + 1, CONTEXT)
        self.hidden = self.rig.random(ROWS + 1, CONTEXT, HIDDEN)
        self.drafts: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def run(self, lane: str, batch: ForwardBatch) -> StepOutputs:
        """Run a step of a lane and keep its batch; the lane is captured before its first step."""
        self.begin(lane)
        if lane not in self.lanes:
            role = self.algorithm.lanes[lane]
            sizes = [ROWS * (self.draft.topk if self.rig.frozen else 1)]
            self.lanes[lane] = self.rig.lane(role.mode, RUNNERS[role.runner], sizes=sizes)
        self.batches[lane] = batch
        return self.lanes[lane].run(batch)

    def begin(self, lane: str) -> None:
        """Record that a lane runs a step, or raise if it is the lane that fails."""
        self.ran.append(lane)
        if lane == self.fails:
            raise RuntimeError(lane)

    def extend(self, rows: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> None:
        """Let the algorithm read tokens ``begin`` to ``end`` of some requests."""
        new = end - begin
        at = torch.cat([torch.arange(a, b) for a, b in zip(begin.tolist(), end.tolist(), strict=True)])
        of = rows.repeat_interleave(new)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(rows),
            input_ids=self.sequences[of, at],
            positions=at,
            out_cache_loc=self.rig.table[of, at].long(),
            req_pool_indices=rows,
            seq_lens=end,
            seq_lens_cpu=end.clone(),
            extend_seq_lens=new,
            extend_seq_lens_cpu=new.clone(),
        )
        step = ExtendStep(
            batch=batch,
            hidden_states=self.hidden[of, at],
            next_token_ids=self.sequences[of, at + 1],
            state=self.state,
            run=self.run,
        )
        unchanged(step, self.algorithm.extend)

    def decode(self, rows: torch.Tensor, lens: torch.Tensor, correct: torch.Tensor) -> None:
        """Let the algorithm decode requests of ``lens`` tokens; ``correct`` of their drafts are accepted."""
        width = self.draft.num_draft_tokens

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            self.begin("verify")
            self.drafts = drafts.clone(), parents if parents is None else parents.clone()
            at = lens[:, None] + torch.arange(width)
            accepted = torch.arange(width) <= correct[:, None]
            tokens = torch.where(accepted, self.sequences[rows[:, None], at + 1], VOCAB - 1)
            hidden = torch.where(accepted[..., None], self.hidden[rows[:, None], at], 7.0)
            return Verified(
                hidden_states=hidden.flatten(0, 1),
                next_token_ids=tokens.flatten(),
                num_correct_drafts=correct,
            )

        step = DecodeStep(
            token_ids=self.sequences[rows, lens],
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            cache_loc=self.rig.cache_loc(rows, lens),
            state=self.state,
            run=self.run,
            verify=verify,
        )
        unchanged(step, self.algorithm.decode)


def unchanged(step: ExtendStep | DecodeStep, call: Callable[..., None]) -> None:
    """Call an algorithm with ``step``, and require that it changes only the request state."""
    tensors = {name: getattr(step, name) for name in type(step).__slots__}
    batch = tensors.pop("batch", None)
    tensors |= {} if batch is None else batch.tensors()
    before = {name: copy.deepcopy(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    call(step)
    assert all(torch.equal(tensors[name], old) for name, old in before.items())


def same_rows(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], rows: torch.Tensor) -> None:
    """Require that two request states agree in ``rows``."""
    for name, tensor in a.items():
        torch.testing.assert_close(tensor[rows], b[name][rows], atol=1e-6, rtol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("kind", [Eagle, FrozenKvMtp])
@settings(derandomize=True, max_examples=4, phases=[Phase.generate])
@given(seed=st.integers(0, 999), bs=st.integers(1, 3), data=st.data())
def test_steps_lead_to_the_state_of_one_long_prompt(
    kind: type[SpeculationAlgorithm], draft: DraftLimits, seed: int, bs: int, data: st.DataObject
) -> None:
    """A prompt in chunks and steps that accept drafts leave the state that one long prompt leaves.

    So every token is read at its own position, with its own hidden state, into its own KV slot. Rejected
    drafts leave nothing behind.
    """
    # In float32, rounding may change a score by 3e-4, because the order of sums differs.
    engine, whole = (Engine(kind, draft, seed, torch.float64) for _ in range(2))
    rows = engine.rig.rows(bs)
    counts = st.lists(st.integers(1, 5), min_size=bs, max_size=bs).map(torch.tensor)
    middle, rest = data.draw(counts), data.draw(counts)
    if kind is FrozenKvMtp:
        engine.rig.fill_cache(rows, torch.full((bs,), CONTEXT))
    engine.extend(rows, torch.zeros_like(middle), middle)
    lens = middle + rest
    engine.extend(rows, middle, lens)
    for _ in range(3):
        most = draft.num_draft_tokens - 1
        correct = torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=bs, max_size=bs)))
        engine.decode(rows, lens, correct.int())
        lens = lens + correct + 1
        whole.extend(rows, torch.zeros_like(lens), lens)
        same_rows(engine.state, whole.state, rows)
    others = torch.tensor([row for row in range(ROWS + 1) if row not in rows.tolist()])
    assert all(bool((tensor[others] == -1).all()) for tensor in engine.state.values())


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("kind", [Eagle, FrozenKvMtp])
def test_a_step_runs_graphs_in_the_order_of_the_lanes(
    kind: type[SpeculationAlgorithm], draft: DraftLimits
) -> None:
    """A step drafts, verifies once, and then prepares the next draft, all in captured shapes.

    A chain has no parents; a tree has one for each draft.
    """
    engine = Engine(kind, draft)
    rows, lens = engine.rig.rows(2), torch.tensor([4, 9])
    engine.rig.fill_cache(rows, lens)
    engine.extend(rows, torch.zeros_like(lens), lens)
    engine.ran.clear()
    engine.decode(rows, lens, torch.tensor([1, 0], dtype=torch.int32))
    assert engine.ran == ["draft", "verify", *(["draft_extend"] if kind is Eagle else [])]
    assert engine.drafts is not None
    drafts, parents = engine.drafts
    assert drafts.shape == (2, draft.num_draft_tokens - 1)
    assert (parents is None) == (draft.topk == 1)
    if parents is not None:
        assert bool((parents <= torch.arange(draft.num_draft_tokens - 1)).all())
    for name, lane in engine.lanes.items():
        eager = {EagerReason.NO_GRAPHS} if name == "draft_prefill" else set()
        assert {reason for _, reason in lane.stats.eager} == eager


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_drafts_take_the_slots_of_the_next_positions(draft: DraftLimits) -> None:
    """Each branch has separate KV slots; those of a chain follow the sequence in its request's row."""
    engine = Engine(Eagle, draft)
    rows, lens = engine.rig.rows(2), torch.tensor([4, 9])
    engine.extend(rows, torch.zeros_like(lens), lens)
    engine.decode(rows, lens, torch.tensor([1, 0], dtype=torch.int32))
    slots = engine.batches["draft"].out_cache_loc
    assert slots.shape == (2 * draft.topk, draft.num_steps)
    assert slots.unique().numel() == slots.numel()
    width = draft.topk * draft.num_steps
    following = engine.rig.table[rows[:, None], lens[:, None] + torch.arange(width)]
    assert torch.equal(slots.view(2, width), following.long())


@pytest.mark.parametrize(
    ("kind", "lane"), [(kind, lane) for kind in (Eagle, FrozenKvMtp) for lane in kind.lanes]
)
def test_a_step_that_fails_changes_no_request(kind: type[SpeculationAlgorithm], lane: str) -> None:
    """Whichever lane fails, the request state is as before the step."""
    engine = Engine(kind, DRAFTS[2])
    rows, lens = engine.rig.rows(2), torch.tensor([4, 9])
    engine.rig.fill_cache(rows, lens)
    engine.extend(rows, torch.zeros_like(lens), lens)
    before = {name: tensor.clone() for name, tensor in engine.state.items()}
    engine.fails = lane
    correct = torch.tensor([1, 0], dtype=torch.int32)
    step = engine.extend if lane == "draft_prefill" else engine.decode
    with pytest.raises(RuntimeError, match=lane):
        step(rows, lens, lens + 2 if lane == "draft_prefill" else correct)
    assert all(torch.equal(engine.state[name], old) for name, old in before.items())


def test_a_frozen_draft_begins_at_the_newest_token() -> None:
    """The rows of a request are equal: the newest token, its position, scratch slots, the cached length."""
    engine = Engine(FrozenKvMtp, DRAFTS[2])
    rows, lens = engine.rig.rows(2), torch.tensor([4, 9])
    engine.rig.fill_cache(rows, lens)
    engine.extend(rows, torch.zeros_like(lens), lens)
    engine.decode(rows, lens, torch.tensor([1, 0], dtype=torch.int32))
    batch = engine.batches["draft"]
    assert batch.input_ids.tolist() == engine.sequences[rows, lens].repeat_interleave(2).tolist()
    for lengths in (batch.positions, batch.seq_lens, batch.seq_lens_cpu):
        assert lengths.tolist() == [4, 4, 9, 9]
    assert batch.out_cache_loc.tolist() == [0] * 4
    assert torch.equal(batch.extra[HIDDEN_STATES], engine.hidden[rows, lens - 1].repeat_interleave(2, 0))
