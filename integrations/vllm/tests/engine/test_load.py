"""vLLM under generated load: every value of every feature starts, and what is planted is reported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import sweep_but
from kinds import save_kind
from loaded import PLAIN, Outcome, given, load, load_ranks
from plants import Stale, use

from graphpact.engines import EngineStart, InjectedFault, PromptRequest
from graphpact_vllm.load.engine import LoadedVllm
from graphpact_vllm.load.offer import VllmLoad
from graphpact_vllm.load.steps import forwards_of

RUNNERS = ("V1", "V2")
VALUES = [
    (feature.name, at)
    for feature in VllmLoad().features()
    for at in range(1, len(feature.values))
    if feature.name not in ("runner", "parallel")
]
USUAL = {
    (("drafts", 2), "V1"),
    (("cache_pages", 1), "V1"),
    (("cudagraph_mode", 3), "V1"),
    (("async_scheduling", 1), "V2"),
    (("drafts", 4), "V2"),
}
NEEDS = {
    "pieces": {"cudagraph_mode": "PIECEWISE"},
    "drafts": {"capture_sizes": [4, 8, 16, 32]},
    "cudagraph_mode": {"capture_sizes": [8, 24, 64]},
}
"""Other values with which a feature shows."""


@pytest.fixture(scope="module")
def eager() -> Outcome:
    """The run to which others are compared."""
    outcome = load({}, is_eager=True)
    assert outcome.is_clean()
    assert outcome.replays() == 0
    return outcome


def _value(name: str, at: int) -> Any:
    return next(each.values[at] for each in VllmLoad().features() if each.name == name)


# -- features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_plainest_choice_gives_the_eager_answers(eager: Outcome, runner: str, is_strict: bool) -> None:  # noqa: FBT001
    """Both model runners, on the fast and on the strict tape."""
    outcome = load({"runner": runner}, is_strict=is_strict)
    assert outcome.tokens == eager.tokens
    assert outcome.is_clean(), outcome
    assert outcome.replays("decode") > 5
    assert {step.reason for step in outcome.steps if step.graph} == {None}


@pytest.mark.parametrize(("value", "runner"), sweep_but(USUAL, VALUES, RUNNERS))
def test_each_value_of_a_feature_gives_the_eager_answers(
    eager: Outcome, value: tuple[str, int], runner: str
) -> None:
    """It starts on the strict tape, with poison in blocks that nobody owns."""
    name, at = value
    choice = {"runner": runner, **NEEDS.get(name, {}), name: _value(name, at)}
    if choice.get("backend") == "CPU_ATTN":
        choice |= {"page_size": 32, "cudagraph_mode": "PIECEWISE"}
    outcome = load(choice, is_strict=True)
    assert outcome.tokens == eager.tokens
    assert outcome.is_clean(), outcome
    kinds = {step.kind for step in outcome.steps}
    assert ("verify" in kinds) == (name == "drafts")
    if name == "cudagraph_mode":
        assert outcome.replays("mixed") > 0


@pytest.mark.parametrize(
    ("kind", "runner"), sweep_but({("windows", "V1")}, ["windows", "mamba2", "mla"], RUNNERS)
)
def test_other_kinds_of_models_run_on_poison(kind: str, runner: str, tmp_path: Path) -> None:
    """Layers with windows, recurrent layers and latents, in a cache for one request."""
    model, its = save_kind(kind, tmp_path), _random_requests(8)[1:]
    one = load({}, its, model=model, is_eager=True)
    for choice in ({}, {"cache_pages": "starved", "chunk": 24}):
        outcome = load({"runner": runner} | choice, its, model=model, is_strict=True)
        assert outcome.tokens == one.tokens
        assert outcome.is_clean(), outcome


@pytest.mark.parametrize("runner", sweep_but({("V2",)}, RUNNERS))
def test_ranks_of_tensor_parallelism_run_all_requests(eager: Outcome, runner: str, tmp_path: Path) -> None:
    """Both ranks have the same tokens and steps."""
    model = save_kind("moe", tmp_path)
    its = _random_requests(6)
    one = load({}, its, model=model, is_eager=True)
    ranks = load_ranks({"parallel": "tp2", "runner": runner}, [its, its], model, is_strict=True)
    for rank in ranks:
        assert rank.is_clean(), rank
        assert rank.tokens == one.tokens
    assert ranks[0].steps == ranks[1].steps


@pytest.mark.parametrize("runner", sweep_but({("V1",)}, RUNNERS))
def test_ranks_of_data_parallelism_run_their_own(runner: str, tmp_path: Path) -> None:
    """A rank that ends before the other, and arrives before it, runs idle batches."""
    model = save_kind("moe", tmp_path)
    its = _random_requests(6)
    one = load({}, its, model=model, is_eager=True)
    ranks = load_ranks({"parallel": "dp2", "runner": runner}, [its[::2], its[1:2]], model)
    for rank in ranks:
        assert rank.is_clean(), rank
    assert ranks[0].tokens == one.tokens[::2]
    assert ranks[1].tokens == one.tokens[1:2]
    assert any(step.kind == "idle" and step.graph for step in ranks[1].steps)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_same_requests_give_the_same_steps(runner: str) -> None:
    """With stop tokens, aborts, a starved cache and logprobs."""
    its = given(max_new_tokens=20, with_logprobs=True)
    for request in its[::3]:
        request.aborted_in = 6
    its[1].stop_token_ids = range(0, 200, 3)
    choice = {"runner": runner, "cache_pages": "starved", "prefix_cache": True, "chunk": 24}
    settings = {"max_model_len": 80}
    first, second = (load(choice, its, settings=settings) for _ in range(2))
    assert first.is_clean(), first
    assert first.steps == second.steps
    assert first.requests == second.requests
    stopped = first.requests[1]
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids[-1] % 3 == 0
    assert len(stopped.output_logprobs) == len(stopped.output_ids)
    assert first.requests[0].finish_reason == "abort"
    assert first.landmarks.cache_tokens == 80


@pytest.mark.sweep
def test_drafts_of_a_model_end_data_parallelism_of_v2(tmp_path: Path) -> None:
    """Why it is refused: vLLM's drafter runs one token more of each request than other ranks are told."""
    its, choice = _random_requests(2), {"parallel": "dp2", "drafts": "draft_model:1", "runner": "V2"}
    model = save_kind("moe", tmp_path)
    assert VllmLoad().refused(EngineStart(choice=PLAIN | choice, model=model)) is not None
    for rank in load_ranks(choice, [its, its], model):
        assert rank.error is not None
        assert "assert num_tokens_across_dp_cpu[dp_rank] == batchsize" in rank.error


@pytest.mark.sweep
def test_a_prompt_of_one_token_loses_its_state_in_v1(tmp_path: Path) -> None:
    """Model runner V1 replays a graph of decodes for it, and Mamba2 plans a prefill: issue 57720 of vLLM.

    The guard names the numbers that differ. Model runner V2 runs it eagerly.
    """
    model, its = save_kind("mamba2", tmp_path), _random_requests(1)
    one = load({}, its, model=model, is_eager=True)
    first, second = (load({"runner": runner}, its, model=model) for runner in RUNNERS)
    assert second.tokens == one.tokens
    assert second.is_clean(), second
    assert first.tokens != one.tokens
    assert ("GP08", "Mamba2AttentionMetadataBuilder.metadata.num_prefills") in [
        (fault.rule, fault.field) for fault in first.faults
    ]


def test_a_run_of_a_drafter_begins_with_a_graph_that_was_seen() -> None:
    """Graphs of the pieces of a model are one run of it."""
    one, other = ("a", None), ("b", None)
    assert [*forwards_of([one, other, one, other])] == [one, one]  # type: ignore[list-item]
    assert [*forwards_of([])] == []


def _random_requests(count: int) -> list[PromptRequest]:
    return [
        PromptRequest(
            token_ids=[3 + (at * 7 + n) % 190 for n in range(1 + at * 5)], max_new_tokens=8, arrives_in=at
        )
        for at in range(count)
    ]


# -- what is planted -----------------------------------------------------------------------------------


def _keep_blocks(engine: LoadedVllm) -> None:
    """Do not free the blocks of the first request that ends."""
    manager = engine.engine.core.scheduler.kv_cache_manager
    free = manager.free

    def forget(request: Any) -> None:
        manager.free = free

    manager.free = forget


def _keep_row(engine: LoadedVllm) -> None:
    """Do not free the row of the first request that ends."""
    runner = engine.engine.model_runner
    rows = runner.req_states if hasattr(runner, "req_states") else runner.input_batch
    remove = rows.remove_request

    def forget(name: str) -> None:
        if name in rows.req_id_to_index:
            rows.remove_request = remove

    rows.remove_request = forget


@pytest.mark.parametrize(
    ("plant", "runner", "words"),
    [
        (_keep_blocks, "V1", ["KV blocks were not returned", "references", "the blocks by request"]),
        (_keep_row, "V2", ["rows of the request states"]),
    ],
)
def test_what_is_not_freed_is_named(
    plant: Callable[[LoadedVllm], None], runner: str, words: Sequence[str]
) -> None:
    """Blocks and rows."""
    outcome = load({"runner": runner}, plant=plant)
    assert outcome.error is None
    for each in words:
        assert any(each in leak for leak in outcome.leaks or ()), outcome.leaks


def test_a_stale_block_table_is_named() -> None:
    """The guard names it, and tokens are wrong."""
    outcome = load({"prefix_cache": True}, before=use(Stale), is_strict=True)
    assert ("GP02", "Stale.block_table") in [
        (fault.rule, fault.field.replace("Builder", "").replace("metadata.", "")) for fault in outcome.faults
    ], outcome.faults


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_write_to_a_block_of_nobody_is_named(runner: str) -> None:
    """A step whose tokens are written to the last block, which is free."""

    def plant(engine: LoadedVllm) -> None:
        caches = [cache for cache in engine.engine.model_runner.kv_caches if isinstance(cache, torch.Tensor)]

        def write(key: Any, reason: Any) -> None:
            caches[0][-1] = 1

        from graphpact_vllm.hooks import InProcess

        InProcess.counts.listeners.append(write)

    outcome = load({"runner": runner}, plant=plant, is_strict=True)
    assert outcome.error is not None
    assert "none of its requests owns" in outcome.error
    assert "GP04" not in outcome.error  # the rule is an attribute
    assert load({"runner": runner}, plant=plant).error is None


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_of_the_model_ends_the_engine(eager: Outcome, runner: str) -> None:
    """It comes in its pass, and requests keep what they have."""
    outcome = load({"runner": runner}, faults=[InjectedFault(kind="raise", at=5)])
    assert "InjectedError: injected in pass 5" in str(outcome.error)
    assert outcome.steps[-1].at == 5
    assert any(outcome.tokens)
    for found, right in zip(outcome.tokens, eager.tokens, strict=True):
        assert found == right[: len(found)]


@pytest.mark.parametrize("choice", [{}, {"runner": "V2", "async_scheduling": True, "prefix_cache": True}])
def test_a_full_cache_only_delays(eager: Outcome, choice: dict[str, Any]) -> None:
    """Requests are preempted or wait, and no token differs."""
    faults = [InjectedFault(kind="full", at=at, passes=3) for at in (2, 8)]
    outcome = load(choice, faults=faults, is_strict=True)
    assert outcome.tokens == eager.tokens
    assert outcome.is_clean(), outcome
    assert [step.requests for step in outcome.steps] != [step.requests for step in eager.steps]
    again = [
        at
        for step in outcome.steps
        for at, kept in zip(step.requests, step.computed, strict=True)
        if not kept
    ]
    assert ("prefix_cache" in choice) or len(again) > len(set(again)), "no request was preempted"


def test_requests_that_are_not_done_are_an_error() -> None:
    """What they have got is filled in."""
    outcome = load({}, most_passes=4)
    assert "NotDoneError" in str(outcome.error)
    assert any(outcome.tokens)
