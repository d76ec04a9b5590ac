"""The light side of generated load: features, refusals and arguments, without SGLang."""

import sys
from pathlib import Path
from typing import Any

import pytest

from graphpact.engines import EngineStart
from graphpact.errors import UsageError
from graphpact_sglang.load.offer import FEATURES, SglangLoadOffer, arguments_of, words_of
from graphpact_sglang.runs.offer import SglangOffer

PLAIN: dict[str, Any] = {feature.name: feature.values[0] for feature in FEATURES}
MODEL = Path(__file__).parents[3] / "examples/models/tiny-llama"


def _arguments(**choice: Any) -> dict[str, Any]:
    return arguments_of(EngineStart(choice=PLAIN | choice, model=MODEL, drafts={"eagle": Path("head")}))


def test_the_offer_is_built_without_the_engine() -> None:
    """Features and refusals are asked in a process without SGLang."""
    offer = SglangOffer().under_load()
    assert isinstance(offer, SglangLoadOffer)
    assert {feature.name for feature in offer.features()} >= {"page_size", "chunk", "drafts", "overlap"}
    assert offer.refused(EngineStart(choice=PLAIN, model=MODEL)) is None
    assert "sglang" not in sys.modules


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"chunk": 24, "page_size": 16}, "divisible"),
        ({"mixed_chunk": True, "drafts": "standalone"}, "drafts"),
        ({"parallel": "dp2", "drafts": "standalone"}, "dp attention"),
    ],
)
def test_a_refusal_says_why(choice: dict[str, Any], named: str) -> None:
    """The reason is SGLang's own, in words."""
    reason = SglangLoadOffer().refused(EngineStart(choice=PLAIN | choice, model=MODEL))
    assert reason is not None
    assert named in reason


def test_a_tree_of_drafts_beside_a_window_is_refused_with_pages(tmp_path: Path) -> None:
    """SGLang starts, and raises in its first step; so a model without a window is taken."""
    choice = PLAIN | {"drafts": "standalone_tree", "page_size": 4, "backend": "fa3"}
    for window, is_refused in (("24", True), ("null", False)):
        (tmp_path / "config.json").write_text(f'{{"sliding_window": {window}}}')
        reason = SglangLoadOffer().refused(EngineStart(choice=choice, model=tmp_path))
        assert (reason is not None) == is_refused


def test_data_parallel_attention_is_for_models_with_experts(tmp_path: Path) -> None:
    """Each rank runs its own requests, in as many processes."""
    choice = PLAIN | {"parallel": "dp2"}
    offer, how = SglangLoadOffer(), EngineStart(choice=choice, model=tmp_path, rank=1, port=4000)
    (tmp_path / "config.json").write_text("{}")
    assert "dense" in str(offer.refused(how))
    (tmp_path / "config.json").write_text('{"num_experts": 4}')
    assert offer.refused(how) is None
    assert (offer.ranks(choice), offer.shares_requests(choice)) == (2, False)
    found = arguments_of(how)
    assert (found["tp_size"], found["attn_dp_size"], found["nccl_port"]) == (2, 2, 4000)


def test_a_choice_becomes_arguments() -> None:
    """Each feature is an argument of SGLang's; settings win."""
    found = _arguments(page_size=4, chunk=16, prefix_cache=True, overlap=True, prefill_graph=[8, 24])
    assert (found["page_size"], found["chunked_prefill_size"]) == (4, 16)
    assert not found["disable_radix_cache"]
    assert not found["disable_overlap_schedule"]
    assert found["cuda_graph_bs_prefill"] == [8, 24]
    how = EngineStart(choice=PLAIN, model=MODEL, settings={"page_size": 32})
    assert arguments_of(how)["page_size"] == 32


def test_drafts_are_by_the_model_itself_or_by_a_head() -> None:
    """A head has a folder; without one the message says how to give it."""
    assert _arguments(drafts="standalone")["speculative_draft_model_path"] == str(MODEL)
    assert _arguments(drafts="eagle")["speculative_draft_model_path"] == "head"
    assert _arguments(drafts="eagle_tree")["speculative_eagle_topk"] == 2
    with pytest.raises(UsageError, match="need a draft model"):
        arguments_of(EngineStart(choice=PLAIN | {"drafts": "eagle"}, model=MODEL))


def test_the_run_that_others_are_compared_to_is_eager() -> None:
    """It has no graphs, no drafts and no guard."""
    how = EngineStart(choice=PLAIN | {"drafts": "standalone"}, model=MODEL, is_eager=True)
    found = arguments_of(how)
    assert found["cuda_graph_backend_decode"] == found["cuda_graph_backend_prefill"] == "disabled"
    assert "speculative_algorithm" not in found
    assert words_of(how) == "tape"
    strict = EngineStart(choice=PLAIN, model=MODEL, is_strict=True)
    assert words_of(strict) == "tape:strict,guard,contents:1,verify:1"


def test_ranks_of_tensor_parallelism_share_requests() -> None:
    """Two processes, which run the same requests."""
    offer = SglangLoadOffer()
    assert (offer.ranks(PLAIN), offer.ranks(PLAIN | {"parallel": "tp2"})) == (1, 2)
    assert offer.shares_requests(PLAIN | {"parallel": "tp2"})
