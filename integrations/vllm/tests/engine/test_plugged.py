"""graphpact's attention backends inside the real vLLM, by name: its eager answers, and a silent guard."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import NGRAMS, REPEATED, ROOT, Run, requests, run_in_child, sweep_but
from kinds import save_kind

from graphpact import AttentionBackend, Capabilities, ForwardBatch
from graphpact.attention import GraphSupport
from graphpact.batch import ForwardMode
from graphpact.engines import PromptRequest
from graphpact_fa3 import FA3Backend
from graphpact_vllm.attention import plugged

FAST, STRICT = "tape,guard,contents:1,verify:1", "tape:strict,guard,contents:1"
EAGER = {"enforce_eager": True, "attention_backend": "CPU_ATTN"}
FLASHINFER, FA3, THIRD = "GRAPHPACT_FLASHINFER", "GRAPHPACT_FA3", "GRAPHPACT_MY_ATTENTION"
"""Two backends of this repository, and that of a third party, ``examples/third_party``."""
RUNNERS = (1, 2)
SIZES = {"mode": 0, "cudagraph_capture_sizes": [4, 8, 16, 32]}
DRAFTS = NGRAMS["speculative_config"]


@pytest.fixture(scope="module")
def eager() -> Run:
    """The run of vLLM's own eager engine."""
    return run_in_child("tape", requests(every=0), runner=1, **EAGER)


@pytest.mark.parametrize(
    ("backend", "words", "runner"),
    [
        pytest.param(FA3, FAST, 2, marks=pytest.mark.smoke),
        *sweep_but({(FLASHINFER, STRICT, 2), (THIRD, FAST, 1)}, [FLASHINFER, THIRD], [FAST, STRICT], RUNNERS),
        *sweep_but({(FA3, STRICT, 1)}, [FA3], [STRICT], RUNNERS),
        pytest.param(FA3, FAST, 1, marks=pytest.mark.sweep),
    ],
)
def test_a_backend_of_graphpact_gives_the_eager_answers(
    eager: Run, backend: str, words: str, runner: int
) -> None:
    """Its metadata from vLLM's batches, and its attention, give vLLM's eager tokens, and no fault."""
    run = run_in_child(words, rounds=2, runner=runner, attention_backend=backend, block_size=16)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.replays() > 20
    assert run.verified() == (run.replays() if words == FAST else 0)


@pytest.mark.parametrize(
    ("backend", "runner"), sweep_but({(FLASHINFER, 2), (THIRD, 1)}, [FLASHINFER, FA3, THIRD], RUNNERS)
)
def test_drafts_replay_full_graphs_of_several_tokens(backend: str, runner: int) -> None:
    """Drafts are verified in full graphs; those of the third party hold mixed steps."""
    given = requests(REPEATED, 32, every=0)
    eager = run_in_child("tape", given, runner=1, **EAGER)
    run = run_in_child(
        FAST,
        given,
        runner=runner,
        attention_backend=backend,
        speculative_config=DRAFTS,
        compilation_config=SIZES | {"cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    drafted = [counts for name, counts in run.state["steps"]["graphs"].items() if "requests" in name]
    assert sum(counts["replays"] for counts in drafted) > 4


@pytest.mark.parametrize(
    ("backend", "runner"), sweep_but({(FA3, 2), (FLASHINFER, 1)}, [FLASHINFER, FA3, THIRD], RUNNERS)
)
def test_batches_with_a_prefill_replay_full_graphs(eager: Run, backend: str, runner: int) -> None:
    """With full graphs for all batches, each step is a mixed one, and prompts are replayed too."""
    run = run_in_child(
        FAST,
        runner=runner,
        attention_backend=backend,
        compilation_config=SIZES | {"cudagraph_mode": "FULL"},
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.verified() == run.replays() > 20
    assert not any(each["kind"] == "mixed" for each in run.state["steps"]["eager"])


@pytest.mark.parametrize(
    ("kind", "backend"),
    sweep_but(
        {("some windows", FA3), ("windows and sinks", FLASHINFER)},
        ["some windows", "windows and sinks"],
        [FLASHINFER, FA3],
    ),
)
def test_layers_of_several_kinds_are_served(kind: str, backend: str, tmp_path: Path) -> None:
    """Layers with and without a window, in two KV-cache groups, and layers with sinks, give eager tokens."""
    model = str(save_kind(kind, tmp_path))
    given = [
        PromptRequest(token_ids=[3 + (at * 7 + n) % 190 for n in range(size)], max_new_tokens=8)
        for at, size in enumerate((5, 24, 2, 40))
    ]
    arguments: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, "max_model_len": 128}
    eager = run_in_child("tape", given, runner=2, **arguments | EAGER)
    run = run_in_child(FAST, given, runner=2, attention_backend=backend, **arguments)
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert run.verified() == run.replays() > 4


# -- a plugin with a fault -----------------------------------------------------------------------------


class Rebound(FA3Backend):
    """Makes a new page table in each replay."""

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata, in another page table than that of the capture."""
        metadata.page_table = metadata.page_table.clone()
        super().refresh_metadata(view, metadata)


class Stale(FA3Backend):
    """Does not refresh its lengths in replays."""

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata, and put the lengths of the step before back."""
        before = metadata.cache_seqlens.clone()
        super().refresh_metadata(view, metadata)
        metadata.cache_seqlens.copy_(before)


def _serve(plugin: type[AttentionBackend]) -> Callable[[], None]:
    """Return a function that serves ``plugin`` under the name of FA3."""

    def register() -> None:
        setattr(plugged, FA3, plugged.plug(plugin, FA3))

    return register


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        (Rebound, ("GP01", "ReboundBuilder", "metadata.step.page_table")),
        (Stale, ("GP02", "StaleBuilder", "step.cache_seqlens")),
    ],
)
def test_a_plugin_with_a_fault_is_named(
    eager: Run, plugin: type[AttentionBackend], named: tuple[str, str, str], runner: int
) -> None:
    """A plugin that binds a new tensor at replay, or leaves one stale, answers wrong and is named."""
    arguments = {"before": _serve(plugin), "runner": runner, "attention_backend": FA3}
    run = run_in_child("tape,guard,contents:1", **arguments)
    assert named in [fault[:3] for fault in run.faults]
    assert run.tokens != eager.tokens
    assert run_in_child("tape", **arguments).tokens == run.tokens


# -- at the door ---------------------------------------------------------------------------------------


def _declaring(**changes: Any) -> Callable[[], None]:
    """Return a function that serves FA3 with other capabilities."""
    capabilities = dataclasses.replace(FA3Backend.capabilities, **changes)
    return _serve(type("Declaring", (FA3Backend,), {"capabilities": capabilities}))


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"page_sizes": frozenset({1, 64})}, r"page size 16 \(has 1, 64\)"),
        ({"head_dims": frozenset({128})}, r"head_dim 32 \(has 128\)"),
        ({"modes": frozenset({ForwardMode.DECODE, ForwardMode.IDLE})}, r"mode mixed \(has decode, idle\)"),
    ],
)
def test_a_plugin_that_cannot_serve_the_model_is_refused(changes: dict[str, Any], lacks: str) -> None:
    """The start ends with what the plugin lacks."""
    with pytest.raises(AssertionError, match=rf"Declaring cannot serve this model in vLLM: .*{lacks}"):
        run_in_child("tape", before=_declaring(**changes), attention_backend=FA3, block_size=16)


def test_latents_are_refused() -> None:
    """A model with latents ends the start, with the backend that serves them."""
    model = str(ROOT / "examples/models/tiny-deepseek")
    with pytest.raises(AssertionError, match=r"GRAPHPACT_FA3 cannot serve .* latents \(MLA\)"):
        run_in_child("tape", model=model, attention_backend=FA3, hf_overrides={"topk_method": "noaux_tc"})


def test_an_unknown_name_is_refused_with_the_names_that_are_there() -> None:
    """VLLM lists the graphpact backends that are installed."""
    with pytest.raises(AssertionError, match=rf"GRAPHPACT_FA4.*{FA3}.*{FLASHINFER}.*{THIRD}"):
        run_in_child("tape", attention_backend="GRAPHPACT_FA4")


@pytest.mark.parametrize(
    ("support", "modes", "level"),
    [
        (GraphSupport.NEVER, set(ForwardMode), "NEVER"),
        (GraphSupport.UNIFORM_DECODE, set(ForwardMode), "UNIFORM_SINGLE_TOKEN_DECODE"),
        (GraphSupport.UNIFORM, set(ForwardMode), "UNIFORM_BATCH"),
        (GraphSupport.UNIFORM, {ForwardMode.DECODE, ForwardMode.MIXED}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        (GraphSupport.ALWAYS, {ForwardMode.DECODE, ForwardMode.MIXED}, "ALWAYS"),
    ],
)
def test_capabilities_are_vllms_levels(support: GraphSupport, modes: set[ForwardMode], level: str) -> None:
    """Without a kind of step for drafts, only the graphs of decodes of one token are left of UNIFORM."""
    declared: Capabilities = dataclasses.replace(
        FA3Backend.capabilities, graph_support=support, modes=frozenset(modes)
    )
    assert plugged.support_of(declared).name == level


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_plugin_with_graphs_of_decodes_only_captures_no_drafts(runner: int) -> None:
    """VLLM captures what the level says, and runs the other steps eagerly."""
    given = requests(REPEATED, 16, every=0)
    eager = run_in_child("tape", given, runner=1, **EAGER)
    run = run_in_child(
        FAST,
        given,
        runner=runner,
        before=_declaring(graph_support=GraphSupport.UNIFORM_DECODE),
        attention_backend=FA3,
        speculative_config=DRAFTS,
        compilation_config=SIZES | {"cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    assert run.tokens == eager.tokens
    assert run.faults == []
    assert not any("requests" in name for name in run.state["steps"]["graphs"])
