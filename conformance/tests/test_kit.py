"""The suite's tools: random batches, the lanes of a backend, and planted bugs that must be caught."""

import re
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    LayerSpec,
    hookimpl,
)
from graphpact.attention import GraphSupport, HeadLayout
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.errors import EngineError
from graphpact.runners import RunnerContext
from graphpact_conformance.draws.batches import Drawn, draw, sequences
from graphpact_conformance.draws.cases import CASES, Case, static_shapes
from graphpact_conformance.draws.choice import DTYPES, PAGE_SIZES, configs_of
from graphpact_conformance.draws.chosen_batches import corner, neighbours, of_size
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.experiments import outputs
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import CPU, Rig
from oracle_kit import findings_of, hold_to_oracle


def _config(name: str) -> Config:
    """Return the configuration with the given name."""
    return next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == name)


# -- random batches --------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=150)
@given(data=st.data())
def test_a_batch_in_words_is_complete(data: st.DataObject) -> None:
    """The words of a batch describe every request completely, in order, without notation."""
    config = data.draw(st.sampled_from([*configs_of(ReferenceBackend.capabilities)]), label="config")
    for problem in (*data.draw(sequences(config)), *neighbours(config, corner(config))):
        size, *requests, seed = problem.words.split("; ")
        count = len(problem.requests)
        assert size == f"{problem.case}, {count} request{'' if count == 1 else 's'}"
        assert seed == f"seed {problem.seed}"
        for request, words in zip(problem.requests, requests, strict=True):
            said = [int(n) for n in re.findall(r"\d+", words.replace("none", "1"))]
            numbers = [request.row, len(request.cached), len(request.tokens)]
            numbers += [t.token_id for t in request.tokens]
            numbers += [slot for t in request.tokens for slot in t.slots]
            numbers += [1 if t.parent is None else t.parent for t in request.tokens if problem.case.tree]
            numbers += [request.accepted] * (problem.mode is ForwardMode.DRAFT_EXTEND)
            assert said == numbers
            assert not set(words) - set(string.ascii_letters + string.digits + " ,:")
        assert repr(problem) == f"<{problem.words}>"


@settings(derandomize=True, max_examples=150)
@given(data=st.data())
def test_a_sequence_is_what_it_says(data: st.DataObject) -> None:
    """Batches fit their captured shapes; no KV slot is scratch or used twice; page tables match the slots."""
    config = data.draw(st.sampled_from([*configs_of(ReferenceBackend.capabilities)]), label="config")
    case = config.case
    if case.mode is ForwardMode.IDLE:
        return
    drawn: Drawn = data.draw(sequences(config))
    context = RunnerContext(CPU, ReferenceBackend.capabilities, config.limits, mode=case.mode)
    runner = ReferenceRunner(context)
    fits = [runner.fit(problem.batch()) for problem in drawn]
    small, large = static_shapes(case)
    assert fits == [large, small, small, large]
    exact, _, idle, padded = drawn
    assert (len(exact.requests), len(exact.tokens)) == (large.batch_size, large.num_tokens)
    assert not idle.requests
    assert len(padded.requests) < large.batch_size
    for problem in (*drawn, *neighbours(config, padded), corner(config)):
        batch, table = problem.batch(), problem.page_table(config)
        slots = [s for r in problem.requests for s in r.cached]
        slots += [s for t in problem.tokens for s in t.slots]
        assert len(set(slots)) == len(slots)
        assert min(slots, default=config.page_size) >= config.page_size
        assert max(slots, default=0) < config.page_size * config.num_pages
        assert len({r.row for r in problem.requests} - {0}) == batch.batch_size
        keys = batch.seq_lens + (case.tokens_per_request or 0) * (case.mode is ForwardMode.TARGET_VERIFY)
        assert not batch.batch_size or int(keys.max()) <= table.shape[1]
        if problem.requests and case.topk == 1 and not case.tree:
            rows = [r.row for r in problem.requests for _ in r.tokens]
            slots_now = batch.out_cache_loc.view(len(rows), -1)[:, 0]
            assert torch.equal(table[rows, batch.positions].long(), slots_now)


def test_a_backend_that_declares_everything_gets_every_lane() -> None:
    """A backend that declares everything gets one lane per case, page size, head layout and dtype."""
    lanes = [*configs_of(ReferenceBackend.capabilities)]
    dtypes = [d for d in DTYPES if d in ReferenceBackend.capabilities.dtypes]
    assert len(dtypes) > 1
    assert {(c.case, c.page_size, c.dtype) for c in lanes} == {
        (case, page, dtype) for case in CASES for page in PAGE_SIZES for dtype in dtypes
    }
    assert len(lanes) == len(CASES) * len(PAGE_SIZES) * len(dtypes) * len(HeadLayout)
    assert len({str(c) for c in lanes}) == len(lanes)


def test_a_backend_gets_no_lane_that_it_does_not_declare() -> None:
    """Lanes have only the declared modes, widths, features, page sizes and head layouts."""
    declared = replace(
        ReferenceBackend.capabilities,
        modes=frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        head_layouts=frozenset({HeadLayout.MLA}),
        head_dims=frozenset({576}),
        page_sizes=frozenset({32}),
        trees=False,
        sinks=False,
        softcap=False,
        sliding_window=False,
    )
    names = {str(c): c for c in configs_of(declared)}
    assert {*names} == {
        f"{mode}-page32-mla-{dtype}"
        for mode in ("decode", "target_verify")
        for dtype in ("float32", "bfloat16")
    }
    for config in names.values():
        for layer in config.layers:
            assert (layer.head_dim, layer.kv_lora_rank) == (576, 512)
            assert (layer.sinks, layer.softcap, layer.sliding_window) == (None, None, None)


def test_a_lane_has_room_for_every_shape() -> None:
    """Limits, request rows and batches are those of all capture sizes, also if none contains the others.

    A shape that is captured twice, in two variants, is no smaller shape of the other.
    """
    sizes = [GraphShape(ForwardMode.EXTEND, 4, 8), GraphShape(ForwardMode.EXTEND, 1, 24)]
    sizes += [replace(size, variant="short") for size in sizes]
    config = replace(_config("extend-page16-mha-float32"), capture_shapes=tuple(sizes))
    assert (config.limits.max_bs, config.limits.max_num_tokens) == (4, 24)
    assert config.num_rows > 4
    for steps in draw(config, 20, 0):
        for problem in (steps.exact, steps.small, steps.padded):
            requests, tokens = len(problem.requests), len(problem.tokens)
            assert any(requests <= s.batch_size and tokens <= s.num_tokens for s in sizes)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([4, 7, 16, 24]), min_size=1, max_size=3, unique=True),
)
def test_batches_for_a_grid_of_shapes_replay(requests: list[int], tokens: list[int]) -> None:
    """With every pair of counts as a shape, each drawn batch has one that holds it."""
    sizes = [GraphShape(ForwardMode.EXTEND, n, t) for n in sorted(requests) for t in sorted(tokens)]
    config = replace(_config("extend-page16-mha-float32"), capture_shapes=tuple(sizes))
    for steps in draw(config, 6, 0):
        for problem in (steps.exact, steps.small, steps.padded):
            rows, new = len(problem.requests), len(problem.tokens)
            assert any(rows <= s.batch_size and new <= s.num_tokens for s in sizes)
        assert (len(steps.exact.requests), len(steps.exact.tokens)) == (max(requests), max(tokens))


def _declared(support: GraphSupport) -> Capabilities:
    return replace(ReferenceBackend.capabilities, graph_support=support)


class NeverCaptured(ReferenceBackend):
    """A backend that declares no support of graphs."""

    capabilities = _declared(GraphSupport.NEVER)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_declared_is_captured_and_nothing_else(case: Case) -> None:
    """A lane captures both of its shapes if the declared graph support covers its case, otherwise none."""
    config = _config(f"{case}-page16-mha-float32")
    for support in GraphSupport:
        backend = type("Declares", (ReferenceBackend,), {"capabilities": _declared(support)})
        shapes = [*Rig(config, backend=backend).lane.captured]
        assert shapes == (static_shapes(case)[::-1] if support.covers(case.needs) else [])


def test_a_lane_without_graphs_is_held_to_the_oracle_too() -> None:
    """Without graphs a correct backend agrees with the oracle, and a wrong one has a finding."""
    config = _config("extend-page16-mha-float32")
    hold_to_oracle(NeverCaptured, config, max_examples=2)
    wrong = type("Wrong", (PrefixForgotten,), {"capabilities": NeverCaptured.capabilities})
    assert any("an eager run: token" in str(f.field) for f in findings_of(wrong, config))


# -- planted bugs ----------------------------------------------------------------------------------


class OneStepShort(ReferenceBackend):
    """A backend whose draft queries see ``seq_lens + step`` keys, without their own."""

    def allocate_metadata(self, *args: Any) -> ReferenceMetadata:
        """Bind one column less."""
        metadata = super().allocate_metadata(*args)
        metadata.drafts = metadata.drafts[:, :-1]
        return metadata

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return one column less."""
        return super().drafts_of(view)[:, :-1]


class OneStepFar(ReferenceBackend):
    """A backend whose draft queries see the KV slot of the next step, which is not written yet."""

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return the columns of the next step."""
        assert view.draft_cache_loc is not None
        assert view.draft_step is not None
        return view.draft_cache_loc.roll(-1, 1)[:, : view.draft_step + 1]


class OneBranchForAll(ReferenceBackend):
    """A backend in which every branch of a request sees the keys of the first branch."""

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return the first branch's columns."""
        width = view.tokens_per_request
        return super().drafts_of(view)[::width].repeat_interleave(width, dim=0)


class PackedDraftExtend(ReferenceBackend):
    """A backend that assigns tokens to requests as if each had one token less in a uniform batch."""

    def fill_request(self, view: ForwardBatch, request: torch.Tensor) -> None:
        """Divide by a width that is one too small."""
        torch.arange(view.num_tokens, out=request)
        request.div_(view.tokens_per_request - 1, rounding_mode="floor")
        request.clamp_(max=view.batch_size - 1)


class StaleRows(ReferenceBackend):
    """A backend with the page table of the previous step's requests."""

    fill_is_device_only = False
    rows: torch.Tensor | None = None

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill, then write the table of the last step's rows over it."""
        super().fill_metadata(view, metadata)
        before, self.rows = self.rows, view.req_pool_indices.clone()
        if before is not None and len(before) == len(self.rows):
            metadata.table.copy_(self.context.req_to_token[before])


class PadsReadRowOne(ReferenceBackend):
    """A backend whose padding rows read request row 1 in a replay, not row 0; row 1 may be unowned."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: ReferenceMetadata
    ) -> ReferenceMetadata:
        """Refresh, with a table in which row 1 replaces row 0."""
        ReferenceBackend.init_metadata_replay(self, view=view, shape=shape, captured=captured)
        captured.table.copy_(self.context.req_to_token[view.req_pool_indices.clamp(min=1)])
        return captured


class PadsWriteFirstPage(ReferenceBackend):
    """A backend that writes padding tokens to the first page after scratch."""

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill, and move slot 0."""
        super().fill_metadata(view, metadata)
        metadata.out_cache_loc.clamp_(min=self.context.limits.page_size)


class TreeIgnored(ReferenceBackend):
    """A backend in which a draft token sees all drafts of its request."""

    def allocate_metadata(self, *args: Any) -> ReferenceMetadata:
        """Bind no mask."""
        metadata = super().allocate_metadata(*args)
        metadata.draft_mask = None
        return metadata


class DraftsUncounted(ReferenceBackend):
    """A backend that reads ``seq_lens`` in target verify as if it counted the drafts."""

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return the last key less the number of uncounted keys."""
        last = super().last_of(view, request)
        return (last - view.uncounted_keys).clamp(min=0)


class PrefixForgotten(ReferenceBackend):
    """A backend that places a chunk's queries at the beginning of the sequence."""

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return positions relative to the chunk."""
        assert view.extend_seq_lens is not None
        return super().last_of(view, request) - (view.seq_lens - view.extend_seq_lens)[request]


class LengthOfCapture(ReferenceBackend):
    """A backend in which no query sees further than the longest request at capture."""

    def allocate_metadata(self, view: ForwardBatch, *args: Any) -> ReferenceMetadata:
        """Store the longest length."""
        self.longest = max(view.seq_lens_cpu.tolist(), default=1)
        return super().allocate_metadata(view, *args)

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return the last key, limited by that length."""
        return super().last_of(view, request).clamp(max=self.longest - 1)


class ScratchSeen(ReferenceBackend):
    """A backend in which each query sees one key too many, which is scratch."""

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill, with scratch after the last key, and count one key more."""
        super().fill_metadata(view, metadata)
        at = torch.arange(metadata.table.shape[1], device=view.device)
        metadata.table.masked_fill_(at >= view.seq_lens[:, None], 0)
        metadata.last.add_(1)


class WindowOffByOne(ReferenceBackend):
    """A backend whose window is one key too wide, since it does not count the query itself."""

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend with the wider window."""
        if layer.sliding_window is not None:
            layer = replace(layer, sliding_window=layer.sliding_window + 1)
        return super().forward(q, k, v, layer, metadata)


class SinksIgnored(ReferenceBackend):
    """A backend that gives sinks no weight."""

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend without sinks."""
        return super().forward(q, k, v, replace(layer, sinks=None), metadata)


class CapIgnored(ReferenceBackend):
    """A backend that does not cap scores."""

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend without a cap."""
        return super().forward(q, k, v, replace(layer, softcap=None), metadata)


class HeadsInTurn(ReferenceBackend):
    """A backend that assigns key heads to query heads round-robin, not in groups."""

    def forward(self, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> torch.Tensor:
        """Attend with heads in another order, and restore the order."""
        group = layer.num_q_heads // layer.num_kv_heads
        order = torch.arange(layer.num_q_heads, device=q.device).view(group, -1).t().flatten()
        out = super().forward(q[:, order], k, v, layer, metadata)
        return out[:, order.argsort()]


class HostReads(ReferenceBackend):
    """A backend whose replay hook reads a length on the host."""

    fill_is_device_only = False

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill, and read the largest length."""
        super().fill_metadata(view, metadata)
        assert int(view.seq_lens.max()) >= 0


class Reallocates(ReferenceBackend):
    """A backend whose replay hook allocates metadata."""

    fill_is_device_only = False

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill, and bind another tensor."""
        super().fill_metadata(view, metadata)
        metadata.last = metadata.last.clone()


class EagerDiffers(ReferenceBackend):
    """A backend whose eager path forgets the last key."""

    def init_metadata_eager(self, *args: Any, **more: Any) -> ReferenceMetadata:
        """Make metadata, and shorten it."""
        metadata: ReferenceMetadata = super().init_metadata_eager(*args, **more)
        metadata.last.sub_(1).clamp_(min=0)
        return metadata


WRONG, NAN = "a replay: token", "the rows of token"
PLANTED: list[tuple[type[ReferenceBackend], str, str]] = [
    (OneStepShort, "draft_decode", WRONG),
    (OneStepFar, "draft_decode", NAN),
    (OneBranchForAll, "draft_decode_tree", WRONG),
    (PackedDraftExtend, "draft_extend", WRONG),
    (StaleRows, "decode", "out of"),
    (StaleRows, "mixed", "out of"),
    (PadsReadRowOne, "decode", "index out of range"),
    (PadsWriteFirstPage, "extend", "in KV slots ["),
    (TreeIgnored, "target_verify_tree", WRONG),
    (DraftsUncounted, "target_verify", WRONG),
    (PrefixForgotten, "extend", WRONG),
    (LengthOfCapture, "decode", WRONG),
    (ScratchSeen, "decode", WRONG),
    (WindowOffByOne, "target_verify_tree", WRONG),
    (SinksIgnored, "decode", WRONG),
    (CapIgnored, "decode", WRONG),
    (HeadsInTurn, "decode", WRONG),
    (HostReads, "decode", "while a replay is prepared"),
    (Reallocates, "decode", WRONG),
    (EagerDiffers, "mixed", "an eager run: token"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("planted", "case", "seen"), PLANTED, ids=[f"{p.__name__}-{case}" for p, case, _ in PLANTED]
)
def test_a_planted_bug_is_caught(planted: type[ReferenceBackend], case: str, seen: str) -> None:
    """A backend with one planted bug has a finding that shows this bug."""
    config = _config(f"{case}-page64-gqa-float32")
    found = findings_of(planted, config)
    assert any(seen in f"{f.field} {f.actual}" for f in found), found


class AnotherObject(ReferenceBackend):
    """A backend whose replay hook records the object that it was given and returns another one."""

    fill_is_device_only = False
    given: ClassVar[list[ReferenceMetadata]] = []

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: ReferenceMetadata
    ) -> ReferenceMetadata:
        """Record the given metadata, refresh it, and return a copy."""
        self.given.append(captured)
        ReferenceBackend.init_metadata_replay(self, view=view, shape=shape, captured=captured)
        return replace(captured)


def test_every_replay_is_given_what_was_captured() -> None:
    """Every replay hook gets the captured metadata, not the return value of the last replay hook."""
    config = _config("decode-page16-mha-float32")
    rig = Rig(config, backend=AnotherObject)
    problem = of_size(config, 1)
    for _ in range(2):
        assert rig.step(problem).error is None
    first, second = AnotherObject.given
    assert first is second


# -- fields without a slot -------------------------------------------------------------------------


class CarriesHiddenStates(ReferenceRunner):
    """A runner whose batches have a field of its own, with a slot."""

    def slots(self) -> Sequence[GraphSlot]:
        """Add the slot."""
        hidden = GraphSlot(
            "mine.hidden_states",
            lambda _, tokens: (tokens, 2),
            torch.float32,
            padding_policy=PaddingPolicy.ZERO,
            owner="mine",
        )
        return [*super().slots(), hidden]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Add the field."""
        return _with_hidden_states(super().dummy(shape))


class ForgetsHiddenStates(CarriesHiddenStates):
    """A runner whose batches have a field of its own, without a slot."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots of the base class."""
        return ReferenceRunner.slots(self)


class WithoutTreeMask(ReferenceRunner):
    """A runner whose ``slots()`` lack the mask that a verify needs."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots without the mask."""
        return [slot for slot in super().slots() if slot.name != "tree_mask"]


def _with_hidden_states(batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, extra={"mine.hidden_states": torch.ones(batch.num_tokens, 2)})


@pytest.mark.parametrize(
    ("runner", "refused"),
    [
        (CarriesHiddenStates, None),
        (ForgetsHiddenStates, "the batch carries 'mine.hidden_states', which .* has no slot for"),
        (ReferenceRunner, "the batch carries 'mine.hidden_states', which .* has no slot for"),
    ],
)
def test_an_extra_field_has_a_slot_or_is_refused(runner: type[ReferenceRunner], refused: str | None) -> None:
    """The lane refuses a batch with a field that has no slot, which a graph would ignore silently."""
    config = _config("draft_extend-page16-mha-float32")
    rig = Rig(config, backend=ReferenceBackend, runner=runner)
    problem = of_size(config, 1)
    step = rig.step(problem, batch=_with_hidden_states(rig.batch_of(problem)))
    if refused is None:
        assert step.error is None
        hidden = step.leaves["view.extra['mine.hidden_states']"].value
        assert hidden[:4].tolist() == [[1, 1]] * 4
        assert not hidden[4:].any()
    else:
        assert isinstance(step.error, EngineError)
        assert re.search(refused, step.error.message)


def test_a_field_without_a_slot_is_a_finding() -> None:
    """The finding names the field and the rule, and says to declare a slot."""
    config = _config("target_verify_tree-page16-mha-float32")
    lane = LaneUnderTest(config, runner=WithoutTreeMask, kind="runner")
    (steps,) = draw(config, 1, 0)
    with torch.inference_mode():
        (found,) = outputs.answers_replayed(lane, steps)
        assert "has no slot for" in str(lane.rig().step(steps[0]).error)
    assert (found.rule, found.field) == ("GP02", "batch.tree_mask")
    assert "declare a slot" in str(found.help)
