"""Drafts of the real SGLang on a tape: no wrong token is accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODEL, Run, requests, run_in_child
from safetensors.torch import save_file

from graphpact_sglang.load.in_process import InProcessEngine

DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": str(MODEL.with_name("tiny-llama-eagle")),
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
TREE = DRAFTS | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
STANDALONE = DRAFTS | {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(MODEL)}
FA3 = {"attention_backend": "fa3", "cuda_graph_backend_prefill": "disabled"}
RUNNERS = (
    "DecodeCudaGraphRunner",
    "draft EAGLEDraftCudaGraphRunner",
    "draft EAGLEDraftExtendCudaGraphRunner",
)
VERIFIED = "tape,guard,contents:1,verify:1"


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE3 head with random weights for the shipped model: it reads hidden states of three layers."""
    folder = tmp_path_factory.mktemp("eagle3")
    config = json.loads((MODEL.with_name("tiny-llama-eagle") / "config.json").read_text())
    size, inner, kv, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size")
    )
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    kv *= config["head_dim"]
    shapes = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (vocab, size),
        "midlayer.self_attn.q_proj.weight": (size, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, size),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 14 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def plain() -> Run:
    """The eager run without drafts."""
    off = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    return run_in_child("tape", requests(every=0), **off, attention_backend="torch_native")


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        pytest.param(VERIFIED, DRAFTS, marks=pytest.mark.smoke),
        ("tape:strict,guard,contents:1", DRAFTS),
        ("tape:strict,guard,contents:1,verify:1", DRAFTS | {"max_running_requests": 16}),
        (VERIFIED, TREE),
        ("tape:strict,guard,contents:1", TREE),
        (VERIFIED, DRAFTS | {"page_size": 16}),
        (VERIFIED, STANDALONE),
        (VERIFIED, DRAFTS | FA3),
        (VERIFIED, TREE | FA3 | {"page_size": 16}),
    ],
    ids=[
        "chain",
        "strict",
        "strict with more requests than graphs have",
        "tree",
        "strict tree",
        "pages",
        "standalone",
        "fa3",
        "fa3 tree with pages",
    ],
)
def test_drafted_answers_are_those_without_drafts(plain: Run, words: str, arguments: dict[str, Any]) -> None:
    """In batches of 1 to 8, the tokens are the plain ones, without a fault.

    The second round finds every prompt in the prefix cache.
    """
    run = run_in_child(words, rounds=2, **arguments)
    assert run.tokens == plain.tokens
    assert run.faults == []
    for runner in RUNNERS:
        assert run.replays(runner) > 20
    checked = run.state["guard"]["graphs"].items()
    assert all(
        counts["contents"] == counts["replays"] for name, counts in checked if name.startswith(RUNNERS)
    )
    if "verify" in words:  # the draft's own graph is held to its pact; only tokens come out of it
        graphs = run.state["guard"]["graphs"].items()
        verified = {name.partition("[")[0] for name, counts in graphs if counts["verified"]}
        assert verified == {RUNNERS[0], RUNNERS[2]}


@pytest.mark.parametrize("words", [VERIFIED, "tape:strict,guard,contents:1"], ids=["fast", "strict"])
def test_a_head_that_reads_several_layers_changes_no_answer(plain: Run, eagle3: Path, words: str) -> None:
    """EAGLE3: the target gives out hidden states of several layers, and no wrong draft is accepted."""
    head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(eagle3)}
    run = run_in_child(words, **TREE | head)
    assert run.tokens == plain.tokens
    assert run.faults == []
    for runner in RUNNERS:
        assert run.replays(runner) > 10


def test_drafts_are_accepted() -> None:
    """A verification gives more than two tokens of a request: the drafts are those of the head, not noise."""
    one = requests(["Return the number of"], max_new_tokens=32)
    run = run_in_child("tape", one, **DRAFTS)
    assert len(run.tokens[0]) == 32
    assert run.replays("DecodeCudaGraphRunner") <= 15


def _kept(worker_field: str, buffer: str, method: str) -> Callable[[InProcessEngine], None]:
    """Return a plant: padding rows of a static input of a draft's runner are not reset."""

    def plant(engine: InProcessEngine) -> None:
        runner = getattr(engine.scheduler.draft_worker.draft_worker, worker_field)
        setattr(getattr(runner.buffers, buffer), method, lambda *args: None)

    return plant


@pytest.mark.parametrize(
    ("plant", "owner", "field", "graph"),
    [
        (_kept("cuda_graph_runner", "topk_p", "zero_"), "EagleDraftInputBuffers", "topk_p", RUNNERS[1]),
        (
            _kept("cuda_graph_runner_for_draft_extend", "num_correct_drafts", "fill_"),
            "EagleDraftExtendInputBuffers",
            "num_correct_drafts",
            RUNNERS[2],
        ),
    ],
    ids=["draft", "extend"],
)
def test_padding_rows_of_a_draft_that_are_left_are_named(
    plain: Run, plant: Callable[[InProcessEngine], None], owner: str, field: str, graph: str
) -> None:
    """Rows that an earlier, larger batch left are named; verification keeps the answers right."""
    run = run_in_child("tape,guard,contents:1", plant=plant, **DRAFTS)
    assert run.tokens == plain.tokens
    assert {fault[:3] for fault in run.faults} == {("GP03", owner, field)}
    assert {fault[3].partition("[")[0] for fault in run.faults} == {graph}
