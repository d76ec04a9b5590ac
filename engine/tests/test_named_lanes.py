"""Tests of engines with several lanes of one mode: choice of a lane, tokens, and reports."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpact import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import EagerReason, GraphShape
from graphpact_cli import main
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from support import Catalog

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
PROMPTS = ["Return a ", "The ", "If ", "x"]
FEW = ['lanes.few.mode="decode"', "lanes.few.batch_sizes=[1,2]", "lanes.decode.batch_sizes=[4]"]
SMALL = ["engine.max_num_seqs=4", "engine.max_model_len=64"]


def build(*overrides: str, **options: Any) -> Engine:
    """Return a small engine on the shipped model."""
    always = [f'model.path="{TINY}"', 'engine.device="cpu"', *SMALL]
    config = EngineConfig.load(env={}, overrides=[*always, *overrides])
    return Engine(config, catalog=Catalog(), **options)


def tokens(engine: Engine) -> list[list[int]]:
    """Return the tokens of four requests of different lengths, whose batch shrinks from four to one."""
    for number, prompt in enumerate(PROMPTS, 1):
        engine.add(prompt, SamplingParams(max_new_tokens=3 * number, ignore_eos=True))
    got: dict[str, list[int]] = {}
    while engine.scheduler.has_work:
        for request in engine.step():
            got[request.request_id] = list(request.output_token_ids)
    return list(got.values())


def replays(engine: Engine) -> dict[str, int]:
    """Return the number of replays of each lane."""
    return {lane.name: lane.stats.replays for lane in engine.lanes}


class ShortRunner(CudaGraphRunner):
    """A runner that leaves batches with a request of more than 8 keys to another lane."""

    LONG = EagerReason("long", "a request is long")
    declines = (LONG,)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape for short requests."""
        return self.LONG if max(batch.seq_lens_cpu.tolist(), default=0) > 8 else super().fit(batch)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of an engine with one lane for decode, which runs eagerly."""
    with build("lanes.decode.runner=eager") as engine:
        return tokens(engine)


def test_a_lane_replays_what_the_one_before_it_declines(expected: list[list[int]]) -> None:
    """A later lane of the same shapes is built, and takes exactly the batches that the first declines."""
    config = EngineConfig.load(
        env={},
        overrides=[
            f'model.path="{TINY}"',
            'engine.device="cpu"',
            *SMALL,
            'lanes.short.mode="decode"',
            'lanes.short.runner="short"',
            'lanes.decode.runner="cuda_graph"',
        ],
    )
    with Engine(config, catalog=Catalog(short=ShortRunner)) as engine:
        assert tokens(engine) == expected
        by_lane = replays(engine)
        assert min(by_lane["short"], by_lane["decode"]) > 0
        assert not [s for lane in engine.lanes if lane.name != "prefill" for s in lane.stats.eager]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["lanes.few.attention_backend=fa3"],
        ["lanes.few.strict=true", "lanes.decode.strict=true", "engine.num_pages=16"],
    ],
    ids=["alike", "other-backend", "strict"],
)
def test_each_batch_runs_in_the_first_lane_that_fits(more: list[str], expected: list[list[int]]) -> None:
    """Batches of one or two requests replay in one lane and larger ones in another; tokens are the same."""
    with build(*FEW, *more, "verify.replay_against_eager=1.0") as engine:
        assert [lane.name for lane in engine.lanes] == ["few", "decode", "prefill"]
        assert tokens(engine) == expected
        assert replays(engine) == {"few": 6, "decode": 5, "prefill": 0}
        assert sum(verifier.verified for verifier in engine.verifiers) == 11
        assert not any(lane.stats.eager for lane in engine.lanes[:2])


def test_a_batch_that_fits_no_lane_runs_eagerly_in_the_first(expected: list[list[int]]) -> None:
    """If no lane of a mode has a shape, the first lane runs eagerly and counts its own reason."""
    sizes = ['lanes.one.mode="decode"', "lanes.one.batch_sizes=[1]", "lanes.decode.batch_sizes=[2]"]
    with build(*sizes) as engine:
        assert tokens(engine) == expected
        one, decode, _ = engine.lanes
        assert one.stats.eager == Counter({(ForwardMode.DECODE, EagerReason.OVER_LARGEST): 5})
        assert (one.stats.replays, decode.stats.replays) == (3, 3)
        assert not decode.stats.eager


def test_an_eager_lane_may_come_first(expected: list[list[int]]) -> None:
    """A first lane without graphs runs the batches for which the other lanes have no shape."""
    more = ['lanes.rest.mode="decode"', "lanes.rest.runner=eager", "lanes.decode.batch_sizes=[1]"]
    with build(*more) as engine:
        assert tokens(engine) == expected
        assert replays(engine) == {"rest": 0, "decode": 3, "prefill": 0}
        assert engine.lanes[0].stats.eager.total() == 8


def test_a_closed_engine_runs_in_the_first_lane(expected: list[list[int]]) -> None:
    """After `close` no lane has a shape, and the first lane of each mode runs all batches eagerly."""
    engine = build(*FEW)
    engine.close()
    assert tokens(engine) == expected
    assert [lane.stats.eager.total() > 0 for lane in engine.lanes] == [True, False, True]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ['lanes.a.mode="decode"', 'lanes.b.mode="decode"'],
            r"lanes\.b, after lanes\.a .*never runs",
        ),
        (
            ['lanes.a.mode="prefill"', 'lanes.b.mode="prefill"'],
            r"lanes\.b, after lanes\.a .*never runs",
        ),
        (["lanes.a.batch_sizes=[9]", 'lanes.a.mode="decode"'], r"lanes\.a\.batch_sizes has 9"),
        (
            ['lanes.a.mode="prefill"', "lanes.a.runner=cuda_graph"],
            r"lanes\.a\.runner: .*not extend",
        ),
        (
            ['lanes.a.mode="decode"', "lanes.a.strict=true", "lanes.a.runner=eager"],
            r"lanes\.a\.strict",
        ),
    ],
)
def test_a_lane_that_cannot_be_is_refused_by_name(overrides: list[str], says: str) -> None:
    """A wrong lane is an error with the lane's name, before anything is captured."""
    captured: list[Any] = []
    with pytest.raises(ConfigError, match=says):
        build(*overrides, on_capture=lambda *args: captured.append(args))
    assert captured == []


def test_captures_are_counted_lane_by_lane() -> None:
    """`on_capture` gets the lane's name, the shape, and how many of the lane's shapes are captured."""
    told: list[tuple[str, int, int, int]] = []
    with build(*FEW, on_capture=lambda name, s, n, m: told.append((name, s.batch_size, n, m))):
        assert told == [("few", 2, 1, 2), ("few", 1, 2, 2), ("decode", 4, 1, 1)]


@pytest.mark.parametrize(("overrides", "most"), [([], 1), (FEW, 3)])
def test_runners_are_asked_no_more_than_needed(
    overrides: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one lane of a mode a step calls `fit` once; with two, once for each lane, and once to run."""
    asked = Counter[int]()
    fit: Callable[..., GraphShape | EagerReason] = CudaGraphRunner.fit
    step = 0

    def counted(self: CudaGraphRunner, batch: ForwardBatch) -> GraphShape | EagerReason:
        asked[step] += 1
        return fit(self, batch)

    with build(*overrides) as engine:
        monkeypatch.setattr(CudaGraphRunner, "fit", counted)
        for prompt in PROMPTS[:3]:
            engine.add(prompt, SamplingParams(max_new_tokens=5, ignore_eos=True))
        while engine.scheduler.has_work:
            step += 1
            engine.step()
    assert max(asked.values()) == most
    assert asked[1] == 0  # the prefill lane captures nothing


# -- reports -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a configuration with two lanes for decode."""
    path = tmp_path / "lanes.toml"
    path.write_text(
        f'[model]\npath = "{TINY}"\n[engine]\ndevice = "cpu"\nmax_num_seqs = 4\n'
        '[lanes.long]\nmode = "decode"\nbatch_sizes = [1, 2]\n[lanes.decode]\n'
    )
    return str(path)


def test_the_table_of_a_run_has_every_lane(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``graphpact generate`` lists the shapes and eager runs of each lane under the lane's name."""
    assert main(["generate", "--config", file, "-n", "4", "Return ", "-s", "lanes.decode.strict=true"]) == 0
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    shapes = [(row[0], row[1], row[3]) for row in rows if row and row[0] in ("long", "decode")]
    assert shapes == [
        ("long", "decode[bs=1,", "3"),
        ("long", "decode[bs=2,", "0"),
        *(("decode", f"decode[bs={size},", "0") for size in (1, 2, 4)),
    ]
    (eager,) = (" ".join(row) for row in rows if row and row[0] == "prefill")
    assert eager == "prefill mixed, eager 1 this lane captures nothing"


def test_memory_and_pacts_go_by_the_names_of_lanes(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``doctor --memory`` and ``pact save`` use the lanes' names; JSON has the name of the eager reason."""
    assert main(["doctor", "--memory", "--json", "--config", file]) == 0
    found = {lane["name"]: lane for lane in json.loads(capsys.readouterr().out)["memory"]["lanes"]}
    assert [(name, lane["absent"]) for name, lane in found.items()] == [
        ("long", None),
        ("decode", None),
        ("prefill", "no_graphs"),
    ]
    assert found["long"]["own_nbytes"] < found["decode"]["own_nbytes"]
    assert main(["doctor", "--memory", "--config", file]) == 0
    assert "lane prefill: no graph-resident memory; this lane captures" in capsys.readouterr().out
    saved = tmp_path / "pacts.json"
    assert main(["pact", "save", str(saved), "--config", file]) == 0
    pacts = json.loads(saved.read_text())["pacts"]
    assert Counter(pact["lane"] for pact in pacts) == {"long": 2, "decode": 3}


def test_a_wrong_lane_is_a_readable_error(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line a wrong lane is a message with status 2, without a traceback."""
    assert main(["generate", "--config", file, "x", "--set", "lanes.long.runer=eager"]) == 2
    err = capsys.readouterr().err
    assert "did you mean lanes.long.runner?" in err
    assert "Traceback" not in err
    assert main(["generate", "--config", file, "x", "--set", "lanes.long.batch_sizes=[1,2,4]"]) == 2
    assert "lanes.decode, after lanes.long of the same mode, never runs" in capsys.readouterr().err
