"""The compiled decode runner: capture sizes, padding, outputs, and eager runs without a compiler."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    Lane,
    LayerSpec,
    Limits,
    StepOutputs,
)
from graphpact.errors import ConfigError
from graphpact.runners import RunnerContext
from graphpact.step import Attend
from graphpact_cli import main
from graphpact_cpu_graph import NO_COMPILER, CpuGraphRunner, inductor
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.memory import EngineMemory
from graphpact_engine.plans import plan_lanes
from graphpact_flashinfer import FlashInferBackend
from support import Catalog, survey_here

CPU = torch.device("cpu")
TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
DTYPE, CONTEXT, ROWS, VOCAB, WIDTH = torch.float64, 8, 4, 7, 4
SLOTS = 1 + ROWS * CONTEXT
LAYER = LayerSpec(0, 1, 1, WIDTH, WIDTH, scaling=0.5)


def runner(max_bs: int = 8, **context: Any) -> CpuGraphRunner:
    """Return a runner for steps of ``max_bs`` requests."""
    limits = Limits(max_bs, max_bs, CONTEXT, 1)
    return CpuGraphRunner(RunnerContext(CPU, FlashInferBackend.capabilities, limits, **context))


class Rig:
    """A compiled lane of one capture size over a model of one attention layer, and batches for it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.weights = [self._random(VOCAB, WIDTH) for _ in range(4)]
        caches = [torch.zeros(SLOTS, 1, WIDTH, dtype=DTYPE) for _ in range(2)]
        self.kv = SimpleNamespace(k=caches[:1], v=caches[1:])
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        limits = Limits(ROWS, ROWS, CONTEXT, 1)
        self.runner = runner(ROWS, batch_sizes=[ROWS])
        self.lane = Lane(
            "decode",
            model=self.model,
            runner=self.runner,
            backend=FlashInferBackend(BackendContext(CPU, DTYPE, [LAYER], limits, self.table, self.kv)),
            driver=InductorDriver(CPU),
        )
        self.lane.capture_all()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, generator=self.generator)

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Embed tokens and positions, attend, unembed."""
        at = batch.positions[:, None] * 0.1
        q, k, v = ((w[batch.input_ids] + at)[:, None] for w in self.weights[:3])
        attended = attend(q, k, v, LAYER, metadata)[:, 0]
        return StepOutputs(logits=(attended @ self.weights[3].t(), "bs"))

    def batch(self, lengths: list[int]) -> ForwardBatch:
        """Return a batch of requests of ``lengths`` on the last rows; all other memory is poison."""
        size, lens = len(lengths), torch.tensor(lengths)
        rows = torch.arange(ROWS, ROWS - size, -1)
        self.table[1:] = SLOTS + 1
        for cache in (self.kv.k[0], self.kv.v[0]):
            cache[1:] = float("nan")
        for row, length in zip(rows.tolist(), lengths, strict=True):
            first = 1 + (row - 1) * CONTEXT
            self.table[row, :length] = torch.arange(first, first + length, dtype=torch.int32)
            for cache in (self.kv.k[0], self.kv.v[0]):
                cache[first : first + length - 1] = self._random(length - 1, 1, WIDTH)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=torch.randint(VOCAB, (size,), generator=self.generator),
            positions=lens - 1,
            out_cache_loc=self.table[rows, lens - 1].long(),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
        )


@pytest.fixture(scope="module")
def rig(compiler: None) -> Rig:
    """Return a lane, compiled once."""
    with torch.inference_mode():
        return Rig()


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
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=ROWS))
def test_replays_equal_eager_runs(lengths: list[int], rig: Rig) -> None:
    """The replay of any batch that fits, after any other batch, equals its eager run."""
    batch = rig.batch(lengths)
    (captured,) = rig.lane.captured.values()
    captured.graph.outputs.logits.fill_(float("nan"))
    replayed = rig.lane.run(batch).clone().logits
    torch.testing.assert_close(replayed, rig.lane.run_eager(batch).logits, rtol=0, atol=1e-9)


def test_the_tail_is_scratch_after_a_larger_batch(rig: Rig) -> None:
    """Padding rows hold no earlier batch: they are row 0, KV slot 0, position 0, the fill length."""
    shape = GraphShape(ForwardMode.DECODE, ROWS, ROWS)
    view = rig.lane.captured[shape].context.view
    for lengths in ([8, 7, 6, 5], [3]):
        rig.lane.run(rig.batch(lengths))
    assert view.req_pool_indices.tolist() == [ROWS, 0, 0, 0]
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
    """A driver that the configuration names is used, or is an error at start if it is unavailable."""
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
