"""Backends with SGLang's interface under the adapter: planted public bugs are found, right ones pass."""

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from adapter_checks import assert_found, assert_right, findings_of, results_of
from sglang_backends import (
    LANES,
    PLANTED,
    UNUSUAL,
    AsksTheHost,
    DecodeGraphsOnly,
    DraftBackend,
    DraftOfTooFew,
    DraftWithLastStep,
    InGraphBackend,
    PagedBackend,
    PairBackend,
    PairForEarlierReleases,
    Planted,
    SlotsBackend,
    UncalledPair,
    under_test,
)

from graphpact.attention import KVBuffers, LayerSpec
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, KernelRefusal
from graphpact_adapters.builder_lanes import backend_of, ended_right
from graphpact_adapters.faults import HELP
from graphpact_adapters.kernel_reads import IndexedReads
from graphpact_adapters.sglang import Backends
from graphpact_adapters.sglang.backend import SglangBackend
from graphpact_adapters.sglang.batch import SglangForwardMode
from graphpact_adapters.sglang.readers import read_sglang_metadata, widened
from graphpact_adapters.vllm.backend import VllmBackend
from graphpact_conformance.draws.chosen_batches import half_size_batch
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options

FOREIGN = (
    "build()",
    "builder",
    "the constructor",
    "max_num_seqs",
    "num_speculative_tokens",
    "KV-cache group",
)
"""Words of another engine and of the suite."""
TWINS = {(each.twin, each.read, each.options): each.lane for each in PLANTED}


def plan_of(backends: Backends, lane: str) -> Any:
    """Return the lane of a short name."""
    (plan,) = backends.lanes(Options(size="quick", lanes=(LANES[lane],)))
    return plan


def name_of(value: object) -> str:
    """Return the id of a parameter."""
    return getattr(value, "__name__", str(value))


@pytest.mark.few(3)
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    """A public bug is found under its rule, with the author's field, both values and the batch.

    Findings name no method, option or class of another engine.
    """
    findings = findings_of(planted.subject(), LANES[planted.lane])
    assert_found(findings, planted.rule, planted.field)
    for finding in findings:
        told = f"{finding.field} {finding.expected} {finding.actual} {finding.help}"
        assert [word for word in FOREIGN if word in told] == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "reader", "options", "lane"),
    [pytest.param(*twin, lane) for twin, lane in sorted(TWINS.items(), key=str)],
    ids=name_of,
)
def test_the_right_twin_passes(
    make: type[Any], reader: Callable[..., Any] | None, options: Any, lane: str
) -> None:
    """The backend without the bug passes in a lane in which a bug is found."""
    assert_right(under_test(make, reader, **dict(options)), LANES[lane])


@pytest.mark.few(2)
@pytest.mark.parametrize(("make", "reader"), UNUSUAL, ids=name_of)
def test_a_right_backend_in_unusual_style_passes(make: type[Any], reader: Callable[..., Any] | None) -> None:
    """Style is free: kinds of metadata, shorter views, metadata made in the graph, the older pair, pools."""
    assert_right(under_test(make, reader), LANES["decode"])


def test_the_planted_bugs_are_public_and_of_many_kinds() -> None:
    """Twelve bugs or more have threads, and together they break most rules that a wrong replay can break."""
    assert len({planted.thread for planted in PLANTED} - {"no thread"}) >= 12
    assert {planted.rule for planted in PLANTED} >= {"GP01", "GP02", "GP03", "GP04", "GP08", "GP13", "GP20"}


def test_a_finding_speaks_of_the_backend() -> None:
    """A finding has the names of the backend's methods and metadata."""
    (finding, *_) = findings_of(PLANTED[0].subject(), LANES["decode"])
    assert finding.hook == "init_forward_metadata_out_graph"
    assert str(finding.field).startswith("cache_seqlens_int32[")
    assert "init_forward_metadata_out_graph() returned another tensor" in finding.actual


def test_a_host_read_in_the_graph_is_found_with_its_line() -> None:
    """SGLang's rule for in-graph work is checked: the finding has the call and its line."""
    planted = next(each for each in PLANTED if each.make is AsksTheHost)
    (finding,) = findings_of(planted.subject(), LANES["decode"])
    assert finding.rule == "GP20"
    assert "Tensor.tolist()" in finding.actual
    assert "longest = max(self.keys(batch).tolist())" in finding.actual


def test_a_draft_may_have_a_backend_for_its_last_step() -> None:
    """SGLang's drafts have a backend for each step that attends, and may have one for the last step."""
    assert_right(under_test(DraftWithLastStep), LANES["draft"])


def test_the_error_for_too_few_draft_backends_names_the_missing_one() -> None:
    """A missing backend of a draft is a finding in SGLang's names, and not one of a graph (GP20)."""
    (finding,) = findings_of(under_test(DraftOfTooFew), LANES["draft"])
    assert finding.rule is None
    assert re.search(r"DraftOfTooFew\.attn_backends has \d of \d backends", finding.actual)
    assert "speculative_num_steps" in finding.actual
    assert "speculative_num_steps - 1 backends" in str(finding.help)


def test_a_pair_that_is_not_called_is_reported() -> None:
    """A backend with the pair and empty inherited methods is refused: SGLang calls the empty methods."""
    (finding,) = findings_of(under_test(UncalledPair), LANES["decode"])
    assert finding.actual == (
        "UncalledPair prepares graphs in init_forward_metadata_capture_cuda_graph and"
        " init_forward_metadata_replay_cuda_graph, which SGLang no longer calls; it calls"
        " init_forward_metadata_out_graph, and EngineBase.init_forward_metadata_out_graph does nothing"
    )
    assert "move their work to init_forward_metadata_out_graph" in str(finding.help)


def test_a_pair_beside_methods_that_work_is_kept_for_earlier_releases() -> None:
    """The pair is no fault if there are no other methods, or if the other methods do the work."""
    for make in (PairBackend, PairForEarlierReleases):
        assert_right(under_test(make), LANES["decode"])


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode", "verify", "draft_extend"])
def test_graphs_are_declared_by_kind_of_step(lane: str) -> None:
    """A backend without graphs for some modes passes if it declares so; its eager steps are checked.

    Without the declaration the finding says how to declare it.
    """
    declared = under_test(DecodeGraphsOnly, graph_modes=frozenset({ForwardMode.DECODE}))
    results = [*results_of(declared, LANES[lane])]
    assert [r.findings for r in results if r.findings] == []
    assert any(result.outcome is Outcome.PASS for result in results)
    plan = plan_of(declared, lane)
    assert bool(plan.lane.rig().lane.captured) is (lane == "decode")
    if lane != "decode":
        finding = findings_of(under_test(DecodeGraphsOnly), LANES[lane])[0]
        assert "NotImplementedError: graphs are for decode only" in finding.actual
        assert "Backends(make, graph_modes={ForwardMode.DECODE})" in str(finding.help)


def test_graphs_that_a_backend_leaves_out_are_tried() -> None:
    """A whole run tries a plain lane of each captured kind of step that `graph_modes` lacks."""
    few = under_test(PairForEarlierReleases, graph_modes=frozenset({ForwardMode.DECODE}))
    tried = dict(few.probes(Options()))
    assert set(tried) == {"target_verify in graph_modes", "draft_extend in graph_modes"}
    for plan in tried.values():
        assert plan.lane.rig().lane.captured
    assert [*under_test(PairForEarlierReleases).probes(Options())] == []


def test_every_help_has_the_names_of_its_engine() -> None:
    """All help texts are complete for both engines, and those for one engine do not name the other."""
    for backend, foreign in ((SglangBackend, FOREIGN), (VllmBackend, ("init_cuda_graph_state", "SGLang"))):
        calls = {"replay": "init_forward_metadata_out_graph" if backend is SglangBackend else "build"}
        words = asdict(backend.words)
        for told in [*(text.format(**calls, **words) for text in HELP.values()), *words.values()]:
            assert [word for word in foreign if word in told] == []


@pytest.mark.sweep
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_bug_is_found_in_a_quick_run(planted: Planted) -> None:
    """All quick lanes together find the bug under its rule, and no lane has a fault of the suite."""
    assert planted.rule in {finding.rule for finding in findings_of(planted.subject())}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "reader", "options"),
    sorted(
        {*TWINS} | {(*each, ()) for each in UNUSUAL},
        key=str,
    ),
    ids=name_of,
)
def test_a_right_backend_passes_a_quick_run(
    make: type[Any], reader: Callable[..., Any] | None, options: Any
) -> None:
    """A right backend passes in every quick lane that it supports."""
    assert_right(under_test(make, reader, **dict(options)))


# -- the runner's part ---------------------------------------------------------------------------------


class Watching(PagedBackend):
    """Keeps every batch that it is given, by the phase."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.seen: dict[str, Any] = {}

    def init_forward_metadata(self, batch: Any) -> None:
        """Keep the batch of an eager step."""
        self.seen["eager"] = batch
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        """Keep the batch of a capture or a replay."""
        self.seen["capture" if in_capture else "replay"] = batch
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return a length that differs from all other numbers here."""
        return 3


def watched(lane: str) -> tuple[Any, Any, Any]:
    """Return what a backend was given in a lane, the batch that was replayed, and the rig."""
    backends = under_test(Watching)
    under = plan_of(backends, lane).lane
    rig = under.rig()
    problem = half_size_batch(under.config)
    problem = type(problem)(problem.case, problem.requests[:1], problem.seed)
    rig.step(problem)
    backend = backend_of(rig)
    assert isinstance(backend, SglangBackend)
    return backend.builders[0], problem, rig


@pytest.mark.parametrize(("lane", "width"), [("decode", 1), ("verify", 4), ("draft_extend", 4)])
def test_a_replay_is_padded_as_the_engine_pads(lane: str, width: int) -> None:
    """Padding rows have request row 0, KV slot 0 and the fill value; the live slots are another tensor."""
    backend, problem, _ = watched(lane)
    captured, batch = backend.seen["capture"], backend.seen["replay"]
    bs, length = batch.batch_size, problem.batch().seq_lens.item()
    assert bs == 2
    assert batch.num_padding == 1
    assert batch.seq_lens[:bs].tolist() == batch.seq_lens_cpu[:bs].tolist() == [length, 3]
    assert batch.req_pool_indices[:bs].tolist() == [problem.requests[0].row, 0]
    assert batch.seq_lens_sum == length + 3
    assert batch.out_cache_loc.tolist() == problem.batch().out_cache_loc.tolist()
    assert captured.out_cache_loc.tolist() == [*problem.batch().out_cache_loc.tolist(), *[0] * width]
    assert captured.out_cache_loc.data_ptr() != batch.out_cache_loc.data_ptr()
    assert captured.seq_lens.data_ptr() == batch.seq_lens.data_ptr()


def test_a_draft_extend_shows_its_buffers_whole() -> None:
    """At a replay of a draft extend the lengths are longer than the batch, as the engine gives them."""
    backend, _, _ = watched("draft_extend")
    assert len(backend.seen["replay"].seq_lens) == 4 > backend.seen["replay"].batch_size


def test_a_verify_has_the_live_mask_at_a_replay_and_the_runners_at_a_capture() -> None:
    """The mask of a capture is all True; the mask of a replay is the chain of only the live requests."""
    backend, problem, _ = watched("verify")
    assert bool(backend.seen["capture"].spec_info.custom_mask.all())
    cached = len(problem.requests[0].cached)
    mask = backend.seen["replay"].spec_info.custom_mask.view(4, cached + 4)
    assert bool(mask[:, :cached].all())
    assert torch.equal(mask[:, cached:], torch.ones(4, 4, dtype=torch.bool).tril())


def test_modes_are_the_engines() -> None:
    """A backend gets SGLang's modes, ``DRAFT_EXTEND_V2`` for a draft extend; a draft lane has 3 steps."""
    assert watched("decode")[0].seen["replay"].forward_mode is SglangForwardMode.DECODE
    assert watched("draft_extend")[0].seen["replay"].forward_mode.is_draft_extend_v2()
    assert plan_of(under_test(DraftBackend), "draft").lane.config.case.num_steps == 3


def test_the_work_in_the_graph_is_recorded_before_attention() -> None:
    """The graph repeats the backend's recorded work: lengths are refreshed without a call of the backend."""
    under = plan_of(under_test(InGraphBackend), "decode").lane
    rig = under.rig()
    problem = half_size_batch(under.config)
    calls = [0]
    (backend,) = backend_of(rig).builders
    assert isinstance(backend, InGraphBackend)
    backend.init_forward_metadata_in_graph = lambda _: calls.append(1)  # type: ignore[method-assign]
    assert ended_right(under, rig, rig.step(problem))
    assert calls == [0]


# -- readers ---------------------------------------------------------------------------------------------


def test_metadata_of_no_known_form_is_refused_with_its_fields() -> None:
    """The error of a reader has the fields that it looked for and those that are there, and what to do."""
    metadata = type("Metadata", (), {})()
    metadata.tiles = 3
    with pytest.raises(ConfigError, match=r"page_table, block_kv_indices or kv_indptr.*tiles") as caught:
        read_sglang_metadata(metadata, None)
    assert "read=" in str(caught.value.hint)


def test_a_view_is_widened_to_the_end_of_its_memory() -> None:
    """A kernel uses an address, so a widened view also has the numbers after its end."""
    memory = torch.arange(12)
    assert widened(memory.view(3, 4)[1, :2]).tolist() == [*range(4, 12)]


class _Cache(KVBuffers):
    def __init__(self, slots: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k = [torch.randn(slots, 1, 8, generator=generator)]
        self.v = [torch.randn(slots, 1, 8, generator=generator)]


LAYER = LayerSpec(0, 2, 1, 8, 8, scaling=0.3)


def _attended(reads: IndexedReads, tokens: int) -> torch.Tensor:
    q = torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(1))
    return reads.attend(q, None, None, LAYER, _Cache(16), 1)


@pytest.mark.parametrize("masked", [False, True])
def test_new_keys_follow_those_of_the_list(masked: bool) -> None:
    """A list of prefixes with new slots after them is attended as the whole list, by a causal mask too."""
    slots, new = [7, 2, 9, 4, 11], [3, 5, 8, 12]
    whole = IndexedReads(
        kv_indptr=torch.tensor([0, 5, 9]),
        kv_indices=torch.tensor([*slots[:3], *new[:2], *slots[3:], *new[2:]]),
        slot_mapping=torch.tensor(new),
        qo_indptr=torch.tensor([0, 2, 4]),
    )
    masks = [torch.ones(2, n + 2, dtype=torch.uint8).tril(n).flatten() for n in (3, 2)]
    prefixes = IndexedReads(
        kv_indptr=torch.tensor([0, 3, 5]),
        kv_indices=torch.tensor([*slots, 99, 99]),
        slot_mapping=torch.tensor(new),
        qo_indptr=torch.tensor([0, 2, 4]),
        appends_new=True,
        custom_mask=torch.cat(masks) if masked else None,
        mask_indptr=torch.tensor([0, 10, 18]) if masked else None,
    )
    torch.testing.assert_close(_attended(prefixes, 4), _attended(whole, 4))


@pytest.mark.parametrize(
    ("indptr", "rule", "said"),
    [
        ([0, 3, 9], "GP13", "3:9 of 5"),
        ([0, 4, 3], "GP07", "4:3 of 5"),
        ([0, 3], "GP05", "both need one more"),
    ],
)
def test_offsets_that_leave_the_list_are_refused(indptr: list[int], rule: str, said: str) -> None:
    """Offsets beyond the list, falling ones and another number of requests are refused, each by its rule."""
    reads = IndexedReads(
        kv_indptr=torch.tensor(indptr),
        kv_indices=torch.arange(5),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
        qo_indptr=torch.tensor([0, 1, 2]),
    )
    with pytest.raises(KernelRefusal, match=said) as caught:
        _attended(reads, 2)
    assert caught.value.rule == rule


def test_a_mask_that_is_too_short_is_refused() -> None:
    """A mask that lacks rows of a request is refused, because a kernel would read past its end."""
    reads = IndexedReads(
        kv_indptr=torch.tensor([0, 3]),
        kv_indices=torch.arange(5),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
        qo_indptr=torch.tensor([0, 2]),
        appends_new=True,
        custom_mask=torch.ones(9, dtype=torch.uint8),
        mask_indptr=torch.tensor([0]),
    )
    with pytest.raises(KernelRefusal, match="its mask is 0:10 of 9") as caught:
        _attended(reads, 2)
    assert caught.value.rule == "GP13"


def test_backends_may_be_given_with_their_options() -> None:
    """An entry point may name an object; its lanes have only its page sizes."""
    plans = under_test(SlotsBackend, page_sizes=(64,)).lanes(Options(size="quick"))
    assert {plan.lane.config.page_size for plan in plans} == {64}
