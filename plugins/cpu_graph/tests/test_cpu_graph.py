"""The compiled decode runner: capture sizes, padding, outputs, and eager runs without a compiler."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    ForwardMode,
    Limits,
)
from graphpact.errors import ConfigError
from graphpact.runners import RunnerContext
from graphpact_cli import main
from graphpact_cpu_graph import NO_COMPILER, CpuGraphRunner, inductor
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.memory import EngineMemory
from graphpact_engine.plans import plan_lanes
from graphpact_flashinfer import FlashInferBackend
from rigs.lane import CONTEXT, CPU, MAX_BS, SHAPE_OF, LaneRig
from support import Catalog, survey_here

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"


def runner(max_bs: int = 8, **context: Any) -> CpuGraphRunner:
    """Return a runner for steps of ``max_bs`` requests."""
    limits = Limits(max_bs, max_bs, CONTEXT, 1)
    return CpuGraphRunner(RunnerContext(CPU, FlashInferBackend.capabilities, limits, **context))


@pytest.fixture(scope="module")
def rig(compiler: None) -> LaneRig:
    """Return a lane of one capture size, compiled once."""
    with torch.inference_mode():
        return LaneRig(runner=CpuGraphRunner, driver=InductorDriver(CPU), batch_sizes=[MAX_BS])


# -- capture sizes ---------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=60)
@given(largest=st.integers(1, 300))
def test_the_default_sizes_are_few_and_cover_every_step(largest: int) -> None:
    """By default the runner captures the powers of two below the largest step, and the largest step."""
    sizes = [shape.batch_size for shape in runner(largest).shapes()]
    assert sizes[-1] == largest
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    assert len(sizes) == (largest - 1).bit_length() + 1


# -- replays ---------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=60)
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=MAX_BS))
def test_replays_equal_eager_runs(lengths: list[int], rig: LaneRig) -> None:
    """The replay of any batch that fits, after any other batch, equals its eager run."""
    batch = rig.batch(*lengths)
    (captured,) = rig.lane.captured.values()
    captured.graph.outputs.logits.fill_(float("nan"))
    replayed = rig.lane.run(batch).clone().logits
    torch.testing.assert_close(replayed, rig.lane.run_eager(batch).logits, rtol=0, atol=1e-9)


def test_the_tail_is_scratch_after_a_larger_batch(rig: LaneRig) -> None:
    """Padding rows contain no earlier batch: they have row 0, KV slot 0, position 0 and the fill length."""
    shape = SHAPE_OF[MAX_BS]
    view = rig.lane.captured[shape].context.view
    for lengths in ([8, 7, 6, 5], [3]):
        rig.lane.run(rig.batch(*lengths))
    assert view.req_pool_indices.tolist() == [1, 0, 0, 0]
    assert view.out_cache_loc[1:].tolist() == view.positions[1:].tolist() == [0, 0, 0]
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [3, 1, 1, 1]


# -- the engine ------------------------------------------------------------------------------------


def configure(*overrides: str) -> EngineConfig:
    """Return a configuration of a small engine whose decode lane is compiled."""
    return EngineConfig.load(
        None,
        env={},
        overrides=[
            f'model.path="{TINY}"',
            'engine.device="cpu"',
            "engine.max_num_seqs=3",
            "lanes.decode.batch_sizes=[3]",
            'lanes.decode.runner="cpu_graph"',
            *overrides,
        ],
    )


def tokens(engine: Engine) -> list[list[int]]:
    """Return the tokens that an engine generates for prompts that end at different times."""
    prompts = ["Return a ", "The ", "If it is "]
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, (9, 14, 4), strict=True)
    ]
    while engine.scheduler.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


@pytest.mark.sweep
def test_tokens_are_those_of_the_tape(compiler: None) -> None:
    """Compiled graphs, with every replay verified, generate the same tokens as the tape."""
    with Engine(configure('lanes.decode.runner="cuda_graph"'), catalog=Catalog()) as engine:
        assert engine.lanes[0].driver.name == "tape"
        expected = tokens(engine)
    with Engine(configure("verify.replay_against_eager=1.0"), catalog=Catalog()) as engine:
        lane = engine.lanes[0]
        assert lane.driver.name == "inductor"
        assert tokens(engine) == expected
        assert lane.stats.replays == lane.stats.pact_checks == 13
        assert not lane.stats.eager


# -- no compiler -----------------------------------------------------------------------------------


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the compiler unavailable."""
    monkeypatch.setattr(inductor, "missing_compiler", lambda: "no C++ compiler: install one")


def test_without_a_compiler_decode_runs_eagerly(
    without_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode runs eagerly with the tokens of the tape, one warning, and the reason counted in every step."""
    with Engine(configure('lanes.decode.runner="cuda_graph"'), catalog=Catalog()) as engine:
        expected = tokens(engine)
    config = configure("verify.replay_against_eager=1.0")
    with caplog.at_level(logging.WARNING), Engine(config, catalog=Catalog()) as engine:
        assert tokens(engine) == expected
        stats = engine.lanes[0].stats
        assert stats.eager == {(ForwardMode.DECODE, NO_COMPILER): 13}
        assert stats.replays == 0
        assert EngineMemory.of(engine).lanes[0].absent == NO_COMPILER
    said = [r.getMessage() for r in caplog.records if r.name == "graphpact_engine.plans"]
    (said,) = [text for text in said if "eagerly" in text]
    for part in ("lanes.decode", "'cpu_graph'", "eagerly", "'inductor'", "install one"):
        assert part in said


def test_a_named_driver_is_never_given_up(without_compiler: None) -> None:
    """A driver that the configuration names is used; if it is unavailable, this is an error at start."""
    named = configure('lanes.decode.graph_driver="inductor"')
    with pytest.raises(ConfigError, match=r"lanes\.decode\.graph_driver: 'inductor': no C\+\+ comp"):
        plan_lanes(named, Catalog(), CPU)
    plan = plan_lanes(configure('lanes.decode.graph_driver="tape"'), Catalog(), CPU)[0]
    assert (plan.driver.name, plan.eager_reason) == ("tape", None)


def test_another_device_is_an_error() -> None:
    """On a GPU the runner is refused at start; only a missing compiler makes the lane eager."""
    with pytest.raises(ConfigError, match="'inductor': it compiles for the CPU, not for cuda"):
        plan_lanes(configure(), Catalog(), torch.device("cuda"))


def test_an_eager_lane_still_refuses_impossible_sizes(without_compiler: None) -> None:
    """Invalid batch sizes are refused without a compiler too."""
    sizes = "lanes.decode.batch_sizes=[9]"
    with pytest.raises(ConfigError, match="batch_sizes has 9"):
        Engine(configure(sizes), catalog=Catalog())


def test_doctor_and_plugins_tell_of_it(
    without_compiler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands report the missing compiler; doctor warns that the lane runs eagerly."""
    survey_here(monkeypatch)
    monkeypatch.setenv("GRAPHPACT_LANES__DECODE__RUNNER", "cpu_graph")
    monkeypatch.setenv("GRAPHPACT_ENGINE__DEVICE", "cpu")
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    (driver,) = [d for d in report["drivers"] if (d["name"], d["device"]) == ("inductor", "cpu")]
    assert driver["unavailable"] == "no C++ compiler: install one"
    (problem,) = [p for p in report["problems"] if "lane decode" in p["what"]]
    assert problem["severity"] == "warning"
    assert "runs eagerly" in problem["what"]
    assert main(["plugins", "--json"]) == 0
    plugins = {p["name"]: p for p in json.loads(capsys.readouterr().out)}
    assert plugins["inductor"]["unavailable"]["cpu"] == "no C++ compiler: install one"
    assert plugins["cpu_graph"]["driver"] == "inductor"
    assert main(["plugins"]) == 0
    assert "cpu: no C++ compiler: install one" in capsys.readouterr().out
