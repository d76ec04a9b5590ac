"""The command of an integration: the comparison of two runs, and what it refuses. No engine starts here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import typer

from graphpact.engines import EngineAnswer, EngineJob, EngineResult, ProcessOffer
from graphpact_cli import main
from graphpact_cli.engine_runs import LaptopEngine, engine_app

MODEL = Path(__file__).parents[2] / "examples/models/tiny-llama"


class AcmeOffer(ProcessOffer):
    """An engine of a third party; each run gives the next of its results."""

    name: ClassVar[str] = "Acme"
    distribution: ClassVar[str] = "acme"
    supported: ClassVar[tuple[str, ...]] = ("1.0",)
    job_module: ClassVar[str] = "graphpact_acme.job"
    make_target: ClassVar[str] = "acme"

    def __init__(self) -> None:
        self.reason: str | None = None
        self.results: list[EngineResult] = []
        self.asked: list[tuple[str, EngineJob]] = []

    def unavailable(self) -> str | None:
        """Return the planted reason."""
        return self.reason

    def run(self, words: str, job: EngineJob) -> EngineResult:
        """Note the job, and return the next result."""
        self.asked.append((words, job))
        return self.results.pop(0)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AcmeOffer:
    """An engine whose integration is installed, with the command ``acme``."""
    offer = AcmeOffer()
    app = engine_app(
        LaptopEngine(
            offer=offer,
            checkpoint="model",
            laptop={"device": "cpu", "dtype": "float32"},
            graphs={"graph_sizes": [1, 2]},
            eager={"enforce_eager": True, "dtype": "float64"},
            left_out=("graph_", "speculative"),
        )
    )

    @app.command("diff")
    def diff(release: str) -> None:
        typer.echo(f"compared with {release}")

    info = tmp_path / "graphpact_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphpact-acme\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[graphpact.contract]\n1 = x:y\n[graphpact.commands]\nacme = graphpact_acme:app\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "graphpact_acme", SimpleNamespace(app=app))
    return offer


def _result(*token_ids: list[int], states: list[dict[str, Any] | None] | None = None) -> EngineResult:
    answers = [EngineAnswer(text=f" {ids}", token_ids=ids, logprobs=[-0.5] * len(ids)) for ids in token_ids]
    return EngineResult(answers=answers, states=states or [None])


def _state(replays: int = 3, faults: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    counts = {
        "capture_seconds": 0.1,
        "nodes": 209,
        "replays": replays,
        "raw": 2 * replays,
        "padded": 4 * replays,
    }
    eager = [{"mode": "extend", "reason": "padding to 16 tokens is too much", "steps": 2}]
    return {
        "steps": {"graphs": {"DecodeRunner[4]": counts}, "eager": eager},
        "guard": {"faults": list(faults)},
    }


FAULT = {
    "rule": "GP01",
    "owner": "AcmeBackend",
    "field": "forward_metadata.kv_indptr",
    "graph": "DecodeRunner[4]",
    "text": "address captured 0x1, got 0x2",
}


def _run(*options: str) -> int:
    return main(["acme", "run", "--model", str(MODEL), *options])


def test_two_equal_runs_pass(acme: AcmeOffer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Texts go to stdout, the table of replays and eager steps to stderr, both runs to the report."""
    acme.results = [_result([1, 2]), _result([1, 2], states=[_state()])]
    report = tmp_path / "run.json"
    assert _run("a prompt", "--report", str(report)) == 0
    out, err = capsys.readouterr()
    assert out == "a prompt [1, 2]\n"
    assert "DecodeRunner[4]        3     6    50.0%   100 ms    209" in err
    assert "extend, eager          2" in err
    assert "3 replays; 2 eager steps; 0 faults; 1 of 1 answers have the eager tokens" in err
    assert json.loads(report.read_text())["tape"]["answers"][0]["token_ids"] == [1, 2]


def test_each_run_gets_its_arguments(acme: AcmeOffer) -> None:
    """Arguments of ``--set`` win in both runs; the eager run gets none of graphs and drafts."""
    acme.results = [_result([1]), _result([1], states=[_state()])]
    sets = ("page_size=16", "speculative_tokens=3", 'graph_mode={"decode": "full"}', "dtype=bfloat16")
    options = [word for text in sets for word in ("--set", text)]
    assert _run("a prompt", "-n", "5", "--words", "guard,verify:1", *options) == 0
    (words, eager), (taped_words, taped) = acme.asked
    assert (words, taped_words) == ("", "tape,guard,verify:1")
    common = {"device": "cpu", "model": str(MODEL), "page_size": 16, "dtype": "bfloat16"}
    assert eager.engine == common | {"enforce_eager": True}
    assert taped.engine == common | {
        "graph_sizes": [1, 2],
        "graph_mode": {"decode": "full"},
        "speculative_tokens": 3,
    }
    assert eager.max_new_tokens == taped.max_new_tokens == 5


def test_packages_that_were_stood_in_for_are_named(
    acme: AcmeOffer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list of the eager run is printed; with ``--json`` stdout has both runs alone."""
    eager = EngineResult(answers=_result([1]).answers, states=[None], stood_in=["decord", "xgrammar"])
    acme.results = [eager, _result([1], states=[_state()])]
    assert _run("a prompt", "--json") == 0
    out, err = capsys.readouterr()
    assert "not installed, and stood in for: decord, xgrammar\n" in err
    assert json.loads(out)["eager"]["stood_in"] == ["decord", "xgrammar"]


@pytest.mark.parametrize(
    ("taped", "message"),
    [
        (
            _result([1, 3], states=[_state()]),
            "the answer to prompt 0 differs: eager ' [1, 2]', tape ' [1, 3]'",
        ),
        (
            _result([1, 2], states=[_state(faults=(FAULT,))]),
            "AcmeBackend.forward_metadata.kv_indptr in DecodeRunner[4]: address captured 0x1",
        ),
        (_result([1, 2], states=[_state(replays=0)]), "nothing was replayed"),
    ],
    ids=["tokens", "fault", "no replay"],
)
def test_a_difference_a_fault_or_no_replay_fails(
    acme: AcmeOffer, capsys: pytest.CaptureFixture[str], taped: EngineResult, message: str
) -> None:
    """Each gives exit status 1 and says what it is, after the texts and the table."""
    acme.results = [_result([1, 2]), taped]
    assert _run("a prompt", "--strict") == 1
    out, err = capsys.readouterr()
    assert message in err
    assert out.startswith("a prompt")
    assert acme.asked[1][0] == "tape:strict,guard"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "there is no prompt"),
        (("x", "--set", "page_size"), "--set 'page_size' is not KEY=VALUE"),
        (("x", "--set", "=16"), "--set '=16' is not KEY=VALUE"),
        (("x", "--set", "page size=16"), "'page size' is no name of an argument"),
        (("--file", "missing.txt"), "the prompt file missing.txt cannot be read: No such file"),
        (("x", "--model", "/nowhere"), "--model /nowhere: there is no config.json"),
    ],
)
def test_wrong_options_are_refused(
    acme: AcmeOffer, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    """A wrong option gives exit status 2, before an engine starts."""
    assert _run(*options) == 2
    assert message in capsys.readouterr().err
    assert acme.asked == []


def test_without_the_engine_the_command_says_how_to_get_it(
    acme: AcmeOffer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the engine cannot run, the reason and the command of its own environment are printed."""
    acme.reason = "Acme is not installed in this environment"
    assert _run("x") == 2
    err = capsys.readouterr().err
    assert "Acme is not installed in this environment\n" in err
    assert "`make acme`, and then .venv-acme/bin/graphpact acme run" in err


def test_prompts_come_from_a_file_too(acme: AcmeOffer, tmp_path: Path) -> None:
    """Each non-blank line of the file is a prompt, after those of the arguments."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two\n")
    acme.results = [_result([1], [2], [3]), _result([1], [2], [3], states=[_state()])]
    assert _run("zero", "--file", str(file)) == 0
    assert acme.asked[0][1].prompts == ["zero", "one", " two"]


def test_an_integration_may_add_commands(acme: AcmeOffer, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that the integration adds stands beside ``run``, whose help names the engine."""
    assert main(["acme", "diff", "1.1"]) == 0
    assert capsys.readouterr().out == "compared with 1.1\n"
    assert main(["acme", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Continue prompts greedily with Acme" in shown
    assert "diff" in shown
