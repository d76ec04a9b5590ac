"""Mixed steps of an engine: running requests decode beside the chunks of prompts."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact.runners import EagerRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.request import RequestState
from graphpact_flashinfer import FlashInferBackend
from support import ROOT, Catalog, reference_tokens

TINY = ROOT / "examples/models/tiny-llama"
NEW = 12
TIGHT = ["engine.page_size=4", "engine.num_pages=17"]  # some request is preempted
_draw = random.Random(3)
# Of one token to many chunks; they arrive while others decode.
PROMPTS = [[_draw.randrange(2, 199) for _ in range(length)] for length in (1, 5, 40, 17, 3, 33)]


class ExtendRunner(EagerRunner):
    """A runner without the mode mixed."""

    modes = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})


class ExtendBackend(FlashInferBackend):
    """A backend without the mode mixed."""

    capabilities = replace(
        FlashInferBackend.capabilities, modes=frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
    )


PLUGINS = {"extending": ExtendRunner, "extends": ExtendBackend}


def make_engine(path: Path, *overrides: str, catalog: PluginCatalog | None = None) -> Engine:
    """Build an engine on a CPU that runs half the prompts at once and verifies every replay."""
    common = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=16",
        "engine.max_model_len=64",
        "verify.replay_against_eager=1.0",
        *overrides,
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=common), catalog=catalog)


def serve(engine: Engine, **sampling: Any) -> tuple[list[list[int]], int]:
    """Run the prompts, a new one every other step; return their tokens, and the number of mixed steps.

    Every request that runs before a mixed step gets a token in it, unless the step preempts it.
    """
    prompts, requests, mixed = [*PROMPTS], [], 0
    prefill = next(lane for lane in engine.lanes if lane.name == "prefill")
    step = 0
    while prompts or engine.scheduler.has_work:
        if prompts and step % 2 == 0:
            params = SamplingParams(max_new_tokens=NEW, seed=len(requests), **sampling)
            requests.append(engine.add(prompts.pop(0), params))
        running = [one for one in requests if one.state is RequestState.RUNNING]
        preempted = [one.num_preemptions for one in running]
        before = prefill.stats.replays + prefill.stats.eager.total()
        got = engine.step()
        if running and prefill.stats.replays + prefill.stats.eager.total() > before:
            mixed += engine.scheduler.mixed
            stayed = [r for r, n in zip(running, preempted, strict=True) if r.num_preemptions == n]
            assert all((one in got) is engine.scheduler.mixed for one in stayed)
        step += 1
    engine.scheduler.check_invariants()
    assert engine.memory.pages.num_free == engine.memory.pages.num_pages
    return [one.output_token_ids for one in requests], mixed


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "backend", "overrides"),
    [
        ("llama", "flashinfer", ["engine.max_prefill_chunk=7", "lanes.decode.strict=true", *TIGHT]),
        pytest.param(
            "gemma2",
            "flashinfer",
            ["engine.max_prefill_chunk=5", "engine.page_size=1"],
            marks=pytest.mark.sweep,
        ),
        pytest.param("mistral", "fa3", TIGHT, marks=pytest.mark.sweep),
        pytest.param("gpt_oss", "fa3", ["engine.max_prefill_chunk=5"], marks=pytest.mark.sweep),
        (
            "deepseek_v3",
            "trtllm_mla",
            ["engine.max_prefill_chunk=7", "engine.page_size=32", "lanes.decode.strict=true"],
        ),
    ],
)
def test_mixed_steps_change_no_token(
    architecture: str, backend: str, overrides: list[str], checkpoint: Callable[..., Path]
) -> None:
    """Greedy tokens equal transformers', and drawn tokens those of steps that take turns."""
    path = checkpoint(architecture)
    options = [f"engine.attention_backend={backend}", *overrides]
    mixing, taking_turns = make_engine(path, *options), make_engine(path, *options, "engine.mixed=false")
    for sampling in ({}, {"temperature": 1.5, "ignore_eos": True}):
        tokens, mixed = serve(mixing, **sampling)
        assert (tokens, 0) == serve(taking_turns, **sampling)
        assert mixed > 5
        if not sampling:
            assert tokens == [reference_tokens(path, prompt, NEW) for prompt in PROMPTS]
    assert bool(mixing.scheduler.num_preemptions) is (TIGHT[-1] in overrides)
    for engine, mode in ((mixing, ForwardMode.MIXED), (taking_turns, ForwardMode.EXTEND)):
        decode, prefill = engine.lanes
        assert {mode for mode, _ in prefill.stats.eager} == {mode} == {prefill.backend.context.mode}
        assert not decode.stats.eager
        assert engine.verifiers[0].verified == decode.stats.replays > 5


def test_mixed_steps_replay_graphs(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner with the mode mixed captures it, and one set of graphs serves every prefill step, strictly."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from recipes.prefill_grid import PrefillGrid

    path = checkpoint("llama")
    options = ('lanes.prefill.runner="grid"', "lanes.prefill.strict=true", "engine.max_prefill_chunk=12")
    engine = make_engine(path, *options, catalog=Catalog(grid=PrefillGrid))
    tokens, mixed = serve(engine)
    assert mixed > 5
    assert tokens == serve(make_engine(path, "engine.mixed=false"))[0]
    prefill = engine.lanes[1].stats
    assert not prefill.eager
    assert {shape.mode for shape in prefill.shapes} == {ForwardMode.MIXED}
    assert all(verifier.verified == verifier.lane.stats.replays > 5 for verifier in engine.verifiers)


# -- where steps are mixed ---------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], ForwardMode.MIXED),
        (["engine.mixed=true"], ForwardMode.MIXED),
        (["engine.mixed=false"], ForwardMode.EXTEND),
        (["lanes.prefill.runner=extending"], ForwardMode.EXTEND),
        (["lanes.prefill.attention_backend=extends"], ForwardMode.EXTEND),
        (["lanes.decode.attention_backend=extends"], ForwardMode.MIXED),
    ],
)
def test_prefill_lanes_are_mixed_where_runner_and_backend_are(
    overrides: list[str], mode: ForwardMode
) -> None:
    """The mode of the prefill lane is mixed exactly if all that serve it declare so, unless it is set."""
    decode, prefill = make_engine(TINY, *overrides, catalog=Catalog(**PLUGINS)).lanes
    assert decode.backend.context.mode is ForwardMode.DECODE
    assert prefill.backend.context.mode is mode


SPECULATION = [
    "speculative.algorithm=eagle",
    f'speculative.draft_model="{TINY}-eagle"',
]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["lanes.prefill.runner=extending"],
            [
                "lanes.prefill.runner: 'extending' serves decode, extend, not mixed",
                'select another runner ("eager"',
            ],
        ),
        (
            ["lanes.prefill.attention_backend=extends"],
            ["lanes.prefill, 'extends', lacks the mode mixed"],
        ),
        (
            ["lanes.other.mode=prefill", "lanes.other.runner=extending"],
            ["lanes.other.runner: 'extending'"],
        ),
        (SPECULATION, ["speculative.algorithm is 'eagle'", "remove [speculative]"]),
    ],
)
def test_mixed_steps_that_cannot_be_are_refused(overrides: list[str], says: list[str]) -> None:
    """The refusal of ``mixed = true`` names plugin, missing mode and fix, before the model is read."""
    catalog = Catalog(**PLUGINS) if overrides is not SPECULATION else PluginCatalog.scan()
    with pytest.raises(ConfigError) as refused:
        make_engine(Path("absent"), "engine.mixed=true", *overrides, catalog=catalog)
    assert refused.value.message.startswith("engine.mixed = true, but ")
    assert all(words in str(refused.value) for words in [*says, "or set engine.mixed = false"])


def test_a_chunk_larger_than_a_step_is_refused() -> None:
    """``max_prefill_chunk`` over ``max_num_batched_tokens`` is refused with both."""
    with pytest.raises(ConfigError, match=r"max_prefill_chunk is 17; a step has at most 16 tokens"):
        make_engine(TINY, "engine.max_prefill_chunk=17")
