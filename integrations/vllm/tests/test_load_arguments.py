"""What a choice of features is for vLLM. No engine starts here, and vLLM is not imported."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from graphpact.engines import EngineStart
from graphpact_vllm.load.arguments import (
    FEATURES,
    arguments_of,
    drafts_of,
    max_len_of,
    refused,
    variables_of,
)
from graphpact_vllm.load.offer import VllmLoad
from graphpact_vllm.runs.offer import VllmOffer

PLAIN = {feature.name: feature.values[0] for feature in FEATURES}


def start(model: Path, **changed: Any) -> EngineStart:
    """Return a start with a choice that differs from the plainest one."""
    return EngineStart(choice=PLAIN | changed, model=model)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the configuration of a dense model."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    return tmp_path


def test_the_offer_is_made_without_vllm(model: Path) -> None:
    """A command asks for features in a process that has not imported the engine."""
    script = (
        "import sys; from graphpact_vllm.runs.offer import VllmOffer; load = VllmOffer().under_load();"
        "from graphpact.engines import EngineStart; from pathlib import Path;"
        f"choice = {{each.name: each.values[-1] for each in load.features()}}; model = Path({str(model)!r});"
        "load.refused(EngineStart(choice=choice, model=model));"
        "load.ranks(choice); load.variables(); sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_features_are_ready_for_json_and_differ() -> None:
    """Each feature has several values, and none twice."""
    for feature in VllmOffer().under_load().features():
        texts = [json.dumps(value) for value in feature.values]
        assert len(set(texts)) == len(texts) > 1


def test_a_choice_becomes_arguments(model: Path) -> None:
    """Sizes of the cache follow from the longest request; settings win."""
    plain = arguments_of(start(model))
    assert plain["num_gpu_blocks_override"] == 8 * 7 + 1
    assert plain["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    starved = arguments_of(start(model, cache_pages="starved", page_size=32))
    assert starved["num_gpu_blocks_override"] == 4 + 1
    (model / "config.json").write_text('{"layer_types": ["sliding_attention", "full_attention"]}')
    windows = arguments_of(start(model, cache_pages="starved", page_size=32))
    assert windows["num_gpu_blocks_override"] == 2 * 8 + 1 + 1
    how = EngineStart(choice=PLAIN, model=model, settings={"max_model_len": 64, "dtype": "bfloat16"})
    assert max_len_of(how) == 64
    assert arguments_of(how)["dtype"] == "bfloat16"


def test_an_eager_run_has_no_graphs_and_no_drafts(model: Path) -> None:
    """The run to which others are compared is plain."""
    how = EngineStart(choice=PLAIN | {"drafts": "ngram:3"}, model=model, is_eager=True)
    found = arguments_of(how)
    assert found["enforce_eager"]
    assert not {"speculative_config", "compilation_config"} & found.keys()


def test_words_follow_from_the_choice(model: Path) -> None:
    """The strict tape, but for pieces of a compiled model; each rank has its variables."""
    strict = EngineStart(choice=PLAIN, model=model, is_strict=True)
    assert variables_of(strict)["GRAPHPACT"] == "tape:strict,guard,contents:1,verify:1"
    pieces = PLAIN | {"cudagraph_mode": "PIECEWISE"}
    assert variables_of(EngineStart(choice=pieces, model=model))["VLLM_USE_BREAKABLE_CUDAGRAPH"] == "1"
    compiled = EngineStart(choice=pieces | {"pieces": "compiled"}, model=model, is_strict=True)
    assert variables_of(compiled)["GRAPHPACT"].startswith("tape,")
    rank = EngineStart(choice=PLAIN | {"parallel": "dp2"}, model=model, rank=1, port=4000)
    assert variables_of(rank)["VLLM_DP_RANK"] == "1"


def test_refused_combinations_have_a_reason(model: Path) -> None:
    """VLLM has no asynchronous scheduling with n-grams, and no data parallelism of dense models offline."""
    assert "async" in str(refused(start(model, drafts="ngram:1", async_scheduling=True)))
    assert refused(start(model, drafts="draft_model:1", async_scheduling=True)) is None
    load, dense = VllmLoad(), start(model, parallel="dp2")
    assert "dense" in str(load.refused(dense))
    (model / "config.json").write_text(json.dumps({"num_experts": 4}))
    assert load.refused(dense) is None
    pieces = start(model, parallel="dp2", cudagraph_mode="PIECEWISE", pieces="compiled")
    assert "compiled" in str(load.refused(pieces))
    assert load.refused(start(model, parallel="dp2", cudagraph_mode="PIECEWISE", pieces="breakable")) is None


@pytest.mark.parametrize(("value", "expected"), [(None, (None, 0)), ("ngram:3", ("ngram", 3))])
def test_drafts_have_a_method_and_a_number(value: str | None, expected: tuple[str | None, int]) -> None:
    """``ngram:3`` is three drafts by n-grams."""
    assert drafts_of({"drafts": value}) == expected


def test_most_combinations_are_not_refused(model: Path) -> None:
    """A refusal is an exception among all pairs of values, for a model with experts."""
    (model / "config.json").write_text(json.dumps({"num_experts": 4}))
    pairs = [
        {one.name: a, other.name: b}
        for one, other in product(FEATURES, FEATURES)
        for a, b in product(one.values, other.values)
        if one.name < other.name
    ]
    assert sum(refused(start(model, **pair)) is not None for pair in pairs) < len(pairs) / 15
