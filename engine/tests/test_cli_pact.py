"""Tests of ``graphpact pact``: pacts are saved, shown and compared, and files are validated."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from graphpact_cli import main
from graphpact_engine.cli.pact import pact
from graphpact_engine.saved_pacts import SavedPacts
from graphpact_tape.tape import Tape

DEMO = Path(__file__).parents[2] / "examples/demo.toml"
ENGINE = ["--config", str(DEMO), "--set", 'engine.device="cpu"']


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove graphpact's variables from the environment."""
    for name in ("GRAPHPACT_DISABLE_PLUGINS", "GRAPHPACT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of the demo's pacts."""
    file = tmp_path_factory.mktemp("pacts") / "demo.json"
    assert main(["pact", "save", str(file), *ENGINE]) == 0
    return file


@pytest.fixture
def edited(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that applies a change to a copy of the demo's file."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        document = json.loads(saved.read_text(encoding="utf-8"))
        change(document)
        file = tmp_path / "edited.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        return file

    return edit


def _promise(document: dict[str, Any], pact: int, path: str) -> dict[str, Any]:
    promise: dict[str, Any]
    (promise,) = [p for p in document["pacts"][pact]["promises"] if p["path"] == path]
    return promise


# -- save ------------------------------------------------------------------------------------------


def test_saving_writes_every_captured_shape(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has each shape of each lane that captures, and no address of this process."""
    pacts = SavedPacts.load(saved).pacts
    assert [(pact.lane, pact.batch_size) for pact in pacts] == [("decode", n) for n in (8, 4, 2, 1)]
    promises = {promise.path: promise for promise in pacts[1].promises}
    indptr = promises["metadata.kv_indptr"].tensor
    assert indptr is not None
    assert (indptr.shape, indptr.dtype, indptr.offset) == ((5,), "int32", 0)
    assert indptr.slot == "slot 'flashinfer.kv_indptr' of flashinfer"
    assert promises["metadata"].type == "graphpact_flashinfer.metadata.FlashInferMetadata"
    assert promises["view.batch_size"].value == 4
    assert "address" not in saved.read_text(encoding="utf-8")


@pytest.mark.sweep
def test_two_engines_of_one_configuration_promise_the_same(saved: Path, tmp_path: Path) -> None:
    """Engines of one configuration in two processes save equal files; stderr names the file."""
    again = tmp_path / "again.json"
    done = subprocess.run(
        [sys.executable, "-m", "graphpact_cli", "pact", "save", str(again), *ENGINE],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-1] == f"4 pacts saved in {again}"
    assert again.read_bytes() == saved.read_bytes()
    assert main(["pact", "diff", str(saved), str(again)]) == 0


def test_the_engine_is_the_one_that_was_asked_for(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """``--model`` and ``--set`` select the engine, as they do for ``generate``."""
    file = tmp_path / "pacts.json"
    options = ["-m", str(checkpoint("llama")), "-s", "lanes.decode.batch_sizes=[3]"]
    assert main(["pact", "save", str(file), *options, "-s", 'engine.device="cpu"']) == 0
    assert [str(pact.shape) for pact in SavedPacts.load(file).pacts] == ["decode[bs=3, tokens=3]"]


@pytest.mark.parametrize("where", ["there.json", ".", "missing/pacts.json"])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_built(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing file, a directory, and a path in a missing directory end with 2; no engine is built."""

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("an engine was built")

    monkeypatch.setattr("graphpact_engine.cli.pact.build_engine", refuse)
    (tmp_path / "there.json").write_text("mine")
    assert main(["pact", "save", str(tmp_path / where), *ENGINE]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(tmp_path / where) in err
    assert "help: name a" in err
    assert (tmp_path / "there.json").read_text() == "mine"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sees", "says"),
    [
        ("dispatched", "tensors of the backend that torch operations read, but not"),
        (
            "unknown",
            "lane decode: each pact covers view and metadata, but no tensors of the backend",
        ),
        ("all", None),
    ],
)
def test_what_pacts_do_not_cover_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sees: str,
    says: str | None,
) -> None:
    """If a driver does not report all external tensors, ``save`` and ``show`` say what the pacts cover."""
    if sees == "unknown":
        monkeypatch.setattr(Tape, "external_tensors", lambda _: None)
    else:
        monkeypatch.setattr(Tape, "sees", sees)
    assert main(["pact", "save", str(tmp_path / "pacts.json"), *ENGINE]) == 0
    err = capsys.readouterr().err
    assert ("lane decode: " in err) == (says is not None)
    assert says is None or says in " ".join(err.split())
    assert {pact.externals for pact in SavedPacts.load(tmp_path / "pacts.json").pacts} == {sees}
    assert main(["pact", "show", str(tmp_path / "pacts.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        says or "promises; covers view, metadata, and tensors of the backend that the graph"
    ).removeprefix("lane decode: each pact ") in shown


def test_force_writes_over_a_file(saved: Path, tmp_path: Path) -> None:
    """``--force`` replaces an existing file."""
    file = tmp_path / "pacts.json"
    file.write_text("old" * 100_000)
    assert main(["pact", "save", str(file), "--force", *ENGINE]) == 0
    assert file.read_bytes() == saved.read_bytes()


def test_an_engine_without_graphs_has_nothing_to_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no lane captures, ``save`` ends with status 2, says why of each lane, and writes no file."""
    file = tmp_path / "pacts.json"
    for setting, why in (("runner=eager", "captures nothing"), ("capture=false", "capture = false")):
        assert main(["pact", "save", str(file), *ENGINE, "-s", f"lanes.decode.{setting}"]) == 2
        err = capsys.readouterr().err
        assert re.search(f"no pact to save: lanes.decode: [^;]*{why}; lanes.prefill: ", err)
    assert not file.exists()


def test_an_engine_that_cannot_be_built_is_the_usual_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without a checkpoint, no model, and an unknown key end with status 2, an error and no file."""
    file = tmp_path / "pacts.json"
    for options in (["-m", str(tmp_path)], [], ["-s", "engine.sede=1"]):
        assert main(["pact", "save", str(file), *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
    assert not file.exists()


# -- show ------------------------------------------------------------------------------------------


def test_people_read_a_table_for_each_shape(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each lane and shape has a heading, and a row for each field with type, promise and slot.

    Fields that are None have no row; a line below the table names them.
    """
    assert main(["pact", "show", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    headings = [line for line in lines if line.startswith("lane decode, ")]
    assert [line.partition(": ")[0] for line in headings] == [
        f"lane decode, decode[bs={n}, tokens={n}]" for n in (8, 4, 2, 1)
    ]
    assert lines.count("field type promises memory") == 4
    assert (
        "metadata.kv_indptr torch.Tensor int32 [9], stride [1], on cpu"
        " slot 'flashinfer.kv_indptr' of flashinfer + 0 bytes"
    ) in lines
    assert "metadata graphpact_flashinfer.metadata.FlashInferMetadata" in lines
    assert "view.batch_size int = 8" in lines
    assert not [line for line in lines if "NoneType" in line]
    absent = [line.partition(": ")[2].split(", ") for line in lines if line.startswith("These fields ")]
    pacts = json.loads(saved.read_text(encoding="utf-8"))["pacts"]
    assert absent == [[p["path"] for p in each["promises"] if p["type"] == "NoneType"] for each in pacts]
    assert "view.tree_mask" in absent[0]


def test_bounds_and_foreign_memory_are_shown_as_such(
    edited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bounds and tensors outside all slots are shown as such; control characters are escaped."""

    def change(document: dict[str, Any]) -> None:
        _promise(document, 0, "metadata.max_kv_len")["value"] = 64
        _promise(document, 0, "view.input_ids")["tensor"].update(slot=None, offset=None)
        document["pacts"][0]["lane"] = "[red]\x1b[2J"

    assert main(["pact", "show", str(edited(change))]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "metadata.max_kv_len int <= 64" in lines
    assert "view.input_ids torch.Tensor int64 [8], stride [1], on cpu no slot" in lines
    assert lines[0].startswith("lane [red]\\x1b[2J, ")
    assert "\x1b" not in out


def test_a_file_without_pacts_is_said_to_have_none(
    edited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without pacts is no error: stdout stays empty, and stderr says that there is none."""
    file = edited(lambda document: document.update(pacts=[]))
    assert main(["pact", "show", str(file)]) == 0
    assert capsys.readouterr() == ("", f"{file} contains no pact\n")


def test_shown_as_json_it_is_the_document(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints the document of the file."""
    assert main(["pact", "show", "--json", str(saved)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text(encoding="utf-8"))


# -- diff ------------------------------------------------------------------------------------------


def _mutate(document: dict[str, Any]) -> None:
    _promise(document, 0, "metadata.max_kv_len")["value"] = 64
    _promise(document, 1, "metadata.kv_indptr")["tensor"].update(shape=[9], slot=None)
    del document["pacts"][3]


def test_equal_files_end_with_0(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file compared with itself has no difference, as text and as JSON."""
    assert main(["pact", "diff", str(saved), str(saved)]) == 0
    assert capsys.readouterr() == ("All promises are equal.\n", "")
    assert main(["pact", "diff", "--json", str(saved), str(saved)]) == 0
    assert json.loads(capsys.readouterr().out) == {"equal": True, "changes": []}


def test_different_files_end_with_1_and_what_changed(
    saved: Path, edited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each change is a row with lane, shape, field, old and new; the last line counts them."""
    assert main(["pact", "diff", str(saved), str(edited(_mutate))]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    slot, fields = (
        "slot 'flashinfer.kv_indptr' of flashinfer",
        len(SavedPacts.load(saved).pacts[3].promises),
    )
    assert lines == [
        "lane shape field what old new",
        "decode decode[bs=8, tokens=8] metadata.max_kv_len value 512 64",
        "decode decode[bs=4, tokens=4] metadata.kv_indptr shape [5] [9]",
        f"decode decode[bs=4, tokens=4] metadata.kv_indptr slot {slot} -",
        f"decode decode[bs=1, tokens=1] shape {fields} fields -",
        "",
        "4 differences in 3 shapes.",
    ]


def test_differences_as_json(
    saved: Path, edited: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json`` has the same changes, and the status stays 1."""
    assert main(["pact", "diff", "--json", str(saved), str(edited(_mutate))]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is False
    assert report["changes"][1] == {
        "lane": "decode",
        "shape": "decode[bs=4, tokens=4]",
        "path": "metadata.kv_indptr",
        "what": "shape",
        "old": [5],
        "new": [9],
    }
    assert len(report["changes"]) == 4


@pytest.mark.parametrize("command", [["show"], ["diff"]])
@pytest.mark.parametrize("content", [None, "not json", '{"format": 1}', "newer"])
def test_a_file_that_is_none_of_ours_ends_with_2(
    command: list[str],
    content: str | None,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file that is missing, invalid or of a newer format is an error with its name and a help."""
    file = tmp_path / "bad.json"
    if content == "newer":
        content = saved.read_text(encoding="utf-8").replace('"format": 2', '"format": 3')
    if content is not None:
        file.write_text(content, encoding="utf-8")
    others = [str(saved)] if command == ["diff"] else []
    assert main(["pact", *command, *others, str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {file} ")
    assert "\n  help: " in err


@pytest.mark.parametrize("arguments", [[], ["save"], ["show"], ["diff", "one.json"], ["shw"]])
def test_a_misspelt_command_line_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing command or file and an unknown command end with status 2 and without a traceback."""
    assert main(["pact", *arguments]) == 2
    assert "Traceback" not in "".join(capsys.readouterr())


COMMANDS: dict[str, Any] = typer.main.get_group(pact).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``-h`` prints the help on stdout, with every argument and every option of the command."""
    assert main(["pact", command, "-h"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    named = [p.opts if p.param_type_name == "option" else [p.metavar] for p in COMMANDS[command].params]
    assert named
    assert all(name in out for names in named for name in names)
