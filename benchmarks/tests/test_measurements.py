"""Every measurement runs with --quick through the command; counts are checked, times are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiling import compiler  # noqa: F401  a fixture
from graphpact_bench import cli, examples
from graphpact_bench.report import BenchReport
from graphpact_bench.ways.base import WaySetting
from graphpact_bench.ways.engines import EngineWay
from graphpact_bench.ways.table import WAYS
from graphpact_bench.ways.ties import TieJudge
from graphpact_cli import main
from graphpact_cpu_graph import inductor

SHAPE = "64x1:heads=4,kv_heads=2,intermediate=96"
PLAIN = ["eager", "tape", "tape-strict", "generate", "generate-static", "continuous"]
COMPILING = ["cpu_graph", "compile", "generate-compiled"]
APART = [way for way in WAYS if WAYS[way].is_apart]
Bench = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Bench:
    """Return a function that runs the command, and returns the tables of the JSON, and stdout."""

    def run(*arguments: str, status: int = 0) -> tuple[list[dict[str, Any]], str]:
        file = tmp_path / "out.json"
        assert main(["bench", *arguments, "--json", str(file)]) == status, capsys.readouterr().err
        report = BenchReport.model_validate_json(file.read_text(encoding="utf-8"))
        return report.model_dump()["tables"], capsys.readouterr().out

    return run


@pytest.fixture(params=[pytest.param(None, marks=pytest.mark.sweep), "no C++ compiler here"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Make compilation impossible and return the reason; return None if there is a compiler."""
    why: str | None = request.param
    if why is None:
        request.getfixturevalue("compiler")
    else:
        monkeypatch.setattr(inductor, "missing_compiler", lambda: why)
    return why


def column(table: dict[str, Any], *keys: str) -> list[tuple[Any, ...]]:
    """Return the values of some columns, row by row."""
    return [tuple(row[key] for key in keys) for row in table["rows"]]


def reasons(table: dict[str, Any]) -> dict[str, str]:
    """Return why each thing is skipped."""
    return {each["what"]: each["reason"] for each in table["skipped"]}


def test_a_fill_is_one_operation_on_a_cpu(bench: Bench) -> None:
    """Both sides leave the same rows; a fill of a lane is one operation, a loop one or two for each slot."""
    (table,), out = bench("fill", "--quick")
    lanes = column(table, "registry", "slots", "raw", "padded", "fill_ops", "one_by_one_ops")
    assert [(*row[:2], row[2] < row[3], *row[4:]) for row in lanes if row[0].endswith("lane")] == [
        ("decode lane", 6, True, 1, 12),
        ("decode lane", 6, True, 1, 12),
        ("decode lane", 6, False, 1, 6),
        ("prefill lane", 3, True, 1, 6),
        ("prefill lane", 3, False, 1, 3),
    ]
    assert "a ratio of at most 0.20" in out


def test_every_backend_has_its_metadata_work_in_the_graph_and_before_it(bench: Bench) -> None:
    """A graph with the metadata work has more nodes than one without; latents have a separate model."""
    (table,), _ = bench("metadata", "--quick")
    assert table["skipped"] == []
    rows = dict(zip(column(table, "backend", "work"), column(table, "nodes"), strict=True))
    backends = {backend for backend, _ in rows}
    assert backends >= {"fa3", "flashinfer", "trtllm_mla"}
    for backend in backends:
        assert rows[backend, "in the graph"] > rows[backend, "before the graph"]
    assert {m for b, m in column(table, "backend", "model") if b == "trtllm_mla"} == {"DeepSeek (MLA)"}


def test_the_parts_of_a_step_are_those_of_the_lane_and_around_it(bench: Bench) -> None:
    """Every part has a row and a share of the replay; compiled ways are left out with the reason."""
    (table,), out = bench("step", "--quick")
    assert [part for (part,) in column(table, "part")] == [
        "registry fill",
        "metadata hook, work in the graph",
        "metadata hook, work before the graph",
        *(f"pact check, {mode}" for mode in ("sampled", "always")),
        *(f"Lane.run without the graph, pact {mode}" for mode in ("off", "sampled", "always")),
        "outside the lane: schedule",
        "outside the lane: sample",
        "outside the lane: schedule and sample",
        "tape replay by itself",
    ]
    assert table["rows"][-1]["of_tape"] == 1
    assert "cpu_graph" in reasons(table)
    assert "cpu_graph is skipped" in out


def test_every_way_decodes_the_same_tokens(fault: str | None, bench: Bench) -> None:
    """Every way has a row for each batch size, or a reason on stdout and in the JSON."""
    named = [option for way in WAYS if "cpu" in WAYS[way].devices for option in ("--way", way)]
    (table,), out = bench("decode", "--quick", "--model-shape", SHAPE, *named)
    ways = [way for way in WAYS if way in PLAIN or (way in COMPILING and fault is None)]
    assert column(table, "batch", "way") == [(size, way) for size in (1, 2) for way in ways]
    missing = {} if fault is None else dict.fromkeys(COMPILING, fault)
    found = reasons(table)
    assert {way: found.pop(way) for way in APART} == {
        way: f"it runs in an environment of its own, and none is named: --python-of {way}=PYTHON"
        for way in APART
    }
    assert found == missing
    for what, reason in missing.items():
        assert f"{what} is skipped: {reason}" in out.splitlines()
    assert "all ways generate the same tokens; x: a factor of speed" in out
    assert all(row["x_generate"] > 0 for row in table["rows"])


def test_a_quick_run_leaves_out_what_compiles(bench: Bench) -> None:
    """Without --way, nothing is compiled, and each way that would be has a line."""
    (table,), _ = bench("decode", "--quick", "--batch", "2", "--rounds", "2")
    assert "medians over the steps of 2 round(s)" in table["title"]
    assert column(table, "batch", "way") == [(2, way) for way in PLAIN]
    assert {*reasons(table)} == {*COMPILING, *APART}


def test_a_way_that_writes_other_tokens_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints both rows and no table, and its status is 1."""
    write = EngineWay.write

    def lie(way: EngineWay, prompts: list[list[int]], count: int) -> Any:
        written = write(way, prompts, count)
        if way.name == "tape":
            written.tokens[0][-1] ^= 1
        return written

    monkeypatch.setattr(EngineWay, "write", lie)
    assert main(["bench", "decode", "--quick", "--way", "tape"]) == 1
    told = capsys.readouterr()
    assert "batch 1, row 0: 'tape' writes [" in told.err
    assert "'eager' writes [" in told.err
    assert "step ms" not in told.out


def test_in_bfloat16_a_difference_is_a_tie_or_an_error(bench: Bench, tmp_path: Path) -> None:
    """Ways agree up to ties, which are counted; tokens with distant logits are not a tie."""
    (table,), out = bench("decode", "--quick", "--dtype", "bfloat16")
    assert column(table, "batch", "way") == [(size, way) for size in (1, 2) for way in PLAIN]
    assert "up to ties" in out
    shape = cli.make_options({**dict.fromkeys(_NONE), "--model-shape": [SHAPE]}, (), quick=True, narrow=False)
    from graphpact_bench.models import save_model

    save_model(tmp_path / "model", shape.shapes[0], 16)
    setting = WaySetting(tmp_path / "model", shape.shapes[0], (1,), 8, 8, "bfloat16")
    judge = TieJudge(setting)
    logits = judge.exact(torch.tensor([[1, 2, 3]])).logits[0, -1]
    best, second, *_, worst = logits.argsort(descending=True).tolist()
    assert not judge([1, 2, 3], best, worst)
    assert judge([1, 2, 3], best, best)
    with torch.no_grad():
        judge.exact.lm_head.weight[second] = judge.exact.lm_head.weight[best]
    assert judge([1, 2, 3], best, second)


_NONE = ("--dtype", "--device", "--model-shape", "--batch", "--rounds", "--python-of")


def test_checks_are_measured_from_the_pact_to_a_strict_lane(bench: Bench) -> None:
    """Host work has a row for each installed observer; whole steps for verification and a strict lane."""
    (host, whole), out = bench("checks", "--quick")
    assert [lane for (lane,) in column(host, "lane")] == [
        "pact off",
        "pact sampled, 1 of 100",
        "pact always",
        "a null observer",
        "observer metrics",
        "observer trace",
    ]
    assert [lane for (lane,) in column(whole, "lane")] == [
        "pact off",
        "pact always",
        "verify 1 of 100",
        "verify all",
        "strict lane",
    ]
    assert host["rows"][0]["more_us"] == 0
    assert "populate" not in out  # what an observer prints


def test_every_way_to_prefill_is_measured_on_equal_tokens(fault: str | None, bench: Bench) -> None:
    """Every way has a row for each length, with and without padding, and every skipped way a reason."""
    graphs = [f"{name}-{driver}" for driver in ("tape", "inductor") for name in ("breakable", "piecewise")]
    named = [
        option for way in (*graphs, "lane-compiled", "generate", "continuous") for option in ("--way", way)
    ]
    (table,), out = bench("prefill", "--quick", *named)
    compiled = fault is None
    through = graphs if compiled else graphs[:2]
    ways = ["eager", *through, *["lane-compiled"][: int(compiled)], "generate", "continuous"]
    assert column(table, "tokens", "graph", "way") == [
        (length, count if way in graphs else None, way)
        for length, count in ((4, 4), (5, 8), (8, 8))
        for way in ways
    ]
    assert reasons(table) == ({} if compiled else dict.fromkeys([*graphs[2:], "lane-compiled"], fault))
    losses = [row for row in table["rows"] if row["graph"] and row["x_eager"] < 1]
    assert sum(line.startswith("loses: ") for line in out.splitlines()) == len(losses)


def test_every_captured_shape_has_its_time_and_its_memory(bench: Bench) -> None:
    """Each kind of graph has a row for each size; a graph of more rows keeps more memory."""
    (table,), _ = bench("capture", "--quick")
    kinds = ["tape", "tape-strict", "breakable-tape", "piecewise-tape"]
    assert [graphs for (graphs,) in column(table, "graphs")] == [kind for kind in kinds for _ in range(2)]
    memory = [kib for (kib,) in column(table, "memory_kib")]
    assert all(large > small > 0 for large, small in zip(memory[::2], memory[1::2], strict=True))
    assert {*reasons(table)} == {"cpu_graph", "breakable-inductor", "piecewise-inductor"}


@pytest.mark.sweep
def test_every_way_to_draft_is_measured_on_equal_tokens(bench: Bench) -> None:
    """All drafts give the tokens of plain decoding; a row's factors are consistent; a loss has a reason."""
    (table,), out = bench("speculation", "--quick")
    assert "--quick" in reasons(table)["graphs inductor"]
    names = ["plain", *(f"{a}, {s}" for a in ("eagle", "frozen_kv_mtp") for s in ("chain", "tree"))]
    assert column(table, "batch", "way", "graphs") == [
        (size, name, graphs) for size in (1, 2) for name in names for graphs in ("tape", "none")
    ]
    for row in table["rows"]:
        drafts = row["way"] != "plain"
        assert row["x_plain"] * row["x_steps"] * row["x_step_time"] == pytest.approx(1)
        assert (row["accepted"] > 1.3, row["x_steps"] < 0.8) == (drafts, drafts)
        parts = [row[part] for part in ("draft", "verify", "draft_extend", "rest")]
        assert [part is not None for part in parts] == [
            drafts,
            drafts,
            row["way"].startswith("eagle"),
            drafts,
        ]
        shares = [part for part in parts if part is not None]
        assert not drafts or (sum(shares) == pytest.approx(1) and min(shares) >= 0)
        reason = f"batch {row['batch']}, {row['way']}, graphs {row['graphs']}: loses. "
        assert any(line.startswith(reason) for line in out.splitlines()) is (drafts and row["x_plain"] < 1)


def test_without_the_examples_a_measurement_is_skipped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the package is installed without the repository, the reason is on stdout and in the JSON."""
    monkeypatch.setattr(examples, "_HERE", tmp_path)
    (table,), out = bench("speculation", "--quick")
    assert table["rows"] == []
    assert "installed without them" in reasons(table)["speculation"]
    assert "speculation is skipped: its model is among the examples" in out


@pytest.mark.sweep
def test_an_exchange_is_measured_against_its_collective(bench: Bench) -> None:
    """Two processes time both parts, and what the exchange adds is the difference from the first row."""
    (table,), out = bench("ranks", "--quick")
    assert column(table, "part") == [("the collective alone",), ("RankExchange.tell",)]
    alone, exchange = table["rows"]
    assert min(alone["us_best"], exchange["us_best"]) > 0
    assert (alone["more_us"], alone["more_us_best"]) == (0, 0)
    assert exchange["more_us_best"] == pytest.approx(exchange["us_best"] - alone["us_best"])
    assert "adds at most 60 us" in out


@pytest.mark.sweep
def test_a_rank_that_fails_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the rank, its status, and the last line that it wrote."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert main(["bench", "ranks", "--quick"]) == 3
    told = capsys.readouterr().err
    assert "rank 0 ended with status 1: " in told
    assert "no_such_interface" in told


@pytest.mark.sweep
def test_without_a_name_the_first_five_are_measured(bench: Bench, tmp_path: Path) -> None:
    """`graphpact bench` without names measures the parts, and decode with quick ways only; it draws them."""
    tables, _ = bench("--quick", "--plot", str(tmp_path / "out.svg"))
    names = [table["name"] for table in tables]
    assert names == ["fill", "metadata", "step", "decode", "checks: host work", "checks"]
    ways = {way for (way,) in column(tables[3], "way")}
    assert ways == {"eager", "tape", "generate", "generate-static"}
    assert "decode step" in (tmp_path / "out.svg").read_text(encoding="utf-8")


def test_json_to_stdout_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` writes one object and no table; the report says what it ran on."""
    threads = torch.get_num_threads()
    assert main(["bench", "fill", "--quick", "--threads", "2", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["threads"] == 2
    assert report["machine"]["versions"]["graphpact-bench"]
    assert report["quick"] is True
    assert torch.get_num_threads() == threads


def test_the_help_explains_every_measurement_and_way(capsys: pytest.CaptureFixture[str]) -> None:
    """`graphpact bench --help` names each measurement, `all`, and each way."""
    assert main(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*cli.MEASUREMENTS, cli.ALL, *WAYS))


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["decoded"], "no measurement is called 'decoded'", "did you mean 'decode'?"),
        (["fill", "--batch", "2"], "--batch concerns none of fill", "it is an option of decode"),
        (["decode", "--way", "tap"], "no way is called 'tap'", "did you mean 'tape'?"),
        (["decode", "--way", "cuda"], "does not run on cpu", None),
        (["decode", "--python-of", "llama.cpp"], "is not WAY=PYTHON", "vllm-cpu=.venv-vllm/bin/python"),
        (["decode", "--python-of", "vllm=python"], "environment of their own are vllm-cpu, llama.cpp", None),
        (
            ["fill", "--python-of", "llama.cpp=python"],
            "--python-of concerns none of fill",
            "of decode, prefill",
        ),
        (["prefill", "--quick", "--way", "tape"], "prefill has no way 'tape'", None),
        (["decode", "--dtype", "float16"], "--dtype float16 is not allowed", "use float32 or bfloat16"),
        (["decode", "--device", "tpu"], "--device tpu is not allowed", "use cpu or cuda"),
        (["decode", "--model-shape", "big"], "'big' is not a shape of a model", "576x30"),
        (["fill", "--plot", "out.txt"], "not a file of a picture", "use .svg or .png"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and options that make no sense are errors of the user, with the nearest that does."""
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert hint is None or hint in told
