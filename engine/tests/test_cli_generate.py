"""Tests of ``graphpact generate``: sources of prompts, output, errors, and reports on stderr."""

import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from graphpact.batch import ForwardMode
from graphpact.lane import LaneStats, ShapeStats
from graphpact.shapes import GraphShape
from graphpact_cli import main
from graphpact_engine.cli.progress import capture_progress
from graphpact_engine.cli.report import _rows
from graphpact_engine.cli.writers import JsonWriter, TextWriter, Writer
from graphpact_engine.deltas import Delta
from graphpact_engine.engine import Engine
from graphpact_engine.request import FinishReason
from graphpact_engine.verify import Verifier

MODEL_LEN = 64
KEYS = ["prompt", "text", "token_ids", "finish_reason"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    """Return a small random Llama with a byte-level tokenizer that puts a token before every text.

    The folder's name has characters that need quoting.
    """
    path = tmp_path_factory.mktemp("tiny") / "a 'model' \"with\" = [all] # of \\ it, é"
    shutil.copytree(
        checkpoint("llama", num_hidden_layers=1, vocab_size=258, max_position_embeddings=MODEL_LEN),
        path,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {byte: i for i, byte in enumerate(alphabet, 2)}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        bos_token="<s>",  # noqa: S106  no secret: a token of text
        eos_token="</s>",  # noqa: S106
    ).save_pretrained(path)
    return path


@pytest.fixture
def generate(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``generate`` on the tiny model: status, stdout, stderr."""
    monkeypatch.delenv("GRAPHPACT_TRACEBACK", raising=False)

    def run(*arguments: str, model: Path | None = tiny) -> tuple[int, str, str]:
        capsys.readouterr()
        named = () if model is None else ("--model", str(model))
        status = main(["generate", *named, "--ignore-eos", "--max-new-tokens=6", *arguments])
        return status, *capsys.readouterr()

    return run


Generate = Callable[..., tuple[int, str, str]]


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Replace stdin by ``content``; it is no terminal."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def prompts_of(run: tuple[int, str, str]) -> list[str]:
    """Assert that a ``--json`` run succeeded, and return the prompts in its output."""
    status, out, err = run
    assert status == 0, err
    return [json.loads(line)["prompt"] for line in out.splitlines()]


# -- output ----------------------------------------------------------------------------------------


def test_json_is_one_object_a_line_in_the_order_of_the_prompts(generate: Generate, tiny: Path) -> None:
    """Each prompt has one line, an object of four keys in this order; its text is the decoded tokens."""
    prompts = ["abcdef", "x", "Return ", "x"]
    status, out, _ = generate("--json", *prompts)
    assert status == 0
    objects = [json.loads(line) for line in out.splitlines()]
    assert [o["prompt"] for o in objects] == prompts
    assert all(list(o) == KEYS for o in objects)
    assert all(len(o["token_ids"]) == 6 and o["finish_reason"] == "length" for o in objects)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert [o["text"] for o in objects] == [
        tokenizer.decode(o["token_ids"], skip_special_tokens=True) for o in objects
    ]
    assert objects[1] == objects[3]
    assert objects[0]["token_ids"] != objects[1]["token_ids"]


def test_text_is_prompt_and_continuation_with_a_blank_line_between(generate: Generate) -> None:
    """If stdout is no terminal it gets plain text, the same with and without streaming."""
    answers = [json.loads(line) for line in generate("--json", "abc", "x ")[1].splitlines()]
    expected = "\n".join(a["prompt"] + a["text"] + "\n" for a in answers)
    for option in ((), ("--stream",), ("--no-stream",), ("--quiet",)):
        assert generate(*option, "abc", "x ")[:2] == (0, expected)


def test_the_model_s_end_token_ends_a_text(
    tiny: Path, generate: Generate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--ignore-eos`` the end token ends the text with reason ``stop``."""
    second = json.loads(generate("--json", "abc")[1])["token_ids"][1]
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": second}))
    assert main(["generate", "--model", str(model), "--json", "abc"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] == "stop"
    assert len(answer["token_ids"]) <= 2
    status, out, _ = generate("--json", "abc", model=model)
    assert (status, json.loads(out)["finish_reason"]) == (0, "length")


def deltas(*pieces: tuple[int, str, FinishReason | None]) -> list[Delta]:
    """Return a delta for each piece: prompt, text, finish reason."""
    return [Delta(index, 7, text, reason) for index, text, reason in pieces]


INTERLEAVED = deltas((1, "B", None), (0, "a", None), (2, "x", "stop"), (1, "C", "length"), (0, "b", "length"))


def written(writer: Writer, steps: Sequence[Delta], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the text that ``writer`` writes at each step."""
    said = []
    for delta in steps:
        writer.push(delta)
        said.append(capsys.readouterr().out)
    return said


def test_only_the_first_unfinished_prompt_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    """Text of concurrent prompts is streamed in prompt order: each waits only for those before it."""
    said = written(TextWriter(["0", "1", "2"], live=True), INTERLEAVED, capsys)
    assert said == ["", "0a", "", "", "b\n\n1BC\n\n2x\n"]


def test_whole_answers_come_as_soon_as_their_turn_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without streaming, an answer is written as soon as it and those before it are finished."""
    steps = deltas((1, "B", "stop"), (0, "a", None), (0, "b", "stop"), (2, "x", None))
    said = written(TextWriter(["0", "1", "2"], live=False), steps, capsys)
    assert said == ["", "", "0ab\n\n1B\n", ""]


def test_json_lines_come_as_soon_as_their_turn_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON line is written once its prompt and those before it are finished."""
    said = written(JsonWriter(["0", "1", "2"]), INTERLEAVED, capsys)
    assert said[:4] == ["", "", "", ""]
    assert [json.loads(line)["text"] for line in said[4].splitlines()] == ["ab", "BC", "x"]


def test_what_a_model_writes_cannot_command_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences in prompt and text are printed as escapes on a terminal, and unchanged elsewhere."""
    steps = deltas((0, "\x1b]0;[b]own\x07\n\tme", "stop"))
    assert written(TextWriter(["p\x1b[2J"], live=True), steps, capsys) == [
        "p\x1b[2J\x1b]0;[b]own\x07\n\tme\n"
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    (said,) = written(TextWriter(["p\x1b[2J"], live=True), steps, capsys)
    assert "\\x1b[2J" in said
    assert said.endswith("\\x1b]0;[b]own\\x07\n\tme\n")


def test_an_unfinished_line_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """`close` ends an unfinished line, so that later output starts on a new line."""
    writer = TextWriter(["0"], live=True)
    written(writer, deltas((0, "a", None)), capsys)
    writer.close()
    assert capsys.readouterr().out == "\n"


# -- sources of prompts ----------------------------------------------------------------------------


def test_a_file_holds_one_prompt_a_line(generate: Generate, tmp_path: Path) -> None:
    """Each line is a prompt, after those of the arguments; blank lines are skipped, other blanks kept."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone \r\n\n   \n  two\x0bé\u2028x\nthree".encode())
    run = generate("--json", "--file", str(file), "zero")
    assert prompts_of(run) == ["zero", "one ", "  two\x0bé\u2028x", "three"]


def test_stdin_is_read_where_there_is_no_other_prompt(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdin gives one prompt per line, if no argument and no file gives a prompt, or the file is ``-``."""
    (tmp_path / "prompts.txt").write_text("of the file\n")
    set_stdin(monkeypatch, b"one\n\n two\n")
    assert prompts_of(generate("--json", "zero")) == ["zero"]
    of_the_file = ("--file", str(tmp_path / "prompts.txt"))
    assert prompts_of(generate("--json", *of_the_file)) == ["of the file"]
    assert prompts_of(generate("--json", *of_the_file, "zero")) == ["zero", "of the file"]
    assert prompts_of(generate("--json")) == ["one", " two"]
    set_stdin(monkeypatch, b"three\n")
    assert prompts_of(generate("--json", "--file", "-", "zero")) == ["zero", "three"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n  \n", "there is no prompt in the prompt file"),
        (b"fine\nbad \xff\n", "line 2 is not UTF-8 text: byte 0xff"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_prompts_is_refused(
    content: bytes | None, says: str, generate: Generate, tmp_path: Path
) -> None:
    """A prompt file that is missing, blank or not text ends with 2; the error's first line names it."""
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    status, out, err = generate("--file", str(file))
    assert (status, out) == (2, "")
    assert says in err.splitlines()[0]
    assert str(file) in err.splitlines()[0]


def test_a_terminal_is_not_waited_for(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any prompt, stdin is not read if it is a terminal; the error says how to give a prompt."""
    set_stdin(monkeypatch, b"typed\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    status, out, err = generate()
    assert (status, out) == (2, "")
    assert err.startswith("error: there is no prompt\n  help: ")
    assert "--file" in err


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x", ""], ["prompt 2 is empty"]),
        (["x\udcff"], ["prompt 1 is not UTF-8 text"]),
        (["x" * MODEL_LEN], [f"{MODEL_LEN + 1} tokens", f"at most {MODEL_LEN - 1}"]),
        (["x", "--max-new-tokens", "0"], ["max_new_tokens", "got 0"]),
        (["x", "--temperature", "-1"], ["temperature", "got -1"]),
        (["x", "--top-p", "1.5"], ["top_p", "got 1.5"]),
        (["x", "--top-k", "-2"], ["top_k", "got -2"]),
        (["x", "--seed", "-1"], ["engine.seed", "-1"]),
        (["x", "--set", "engine.max_num_seqs=0"], ["engine.max_num_seqs = 0", "from 1 "]),
        (["x", "--set", "engin.seed=1"], ["engin.seed", "did you mean engine.seed"]),
        (["x", "--set", "verify.pact=alway"], ["verify.pact", "did you mean always"]),
        (["x", "--set", "seed"], ["'seed'", "key=value"]),
        (["x", "--set", "engine.attention_backend=flashinfr"], ["did you mean 'flashinfer'"]),
        (["x", "--set", "lanes.decode.runner=cuda_grph"], ["did you mean 'cuda_graph'"]),
        (["x", "--set", "lanes.decode.graph_driver=tap"], ["did you mean 'tape'"]),
        (["x", "--set", "lanes.decode.graph_driver=cuda"], ["graph_driver", "not on cpu"]),
        (["x", "--set", "engine.max_model_len=999"], ["999", str(MODEL_LEN)]),
        (["x", "--config", "/no/such.toml"], ["/no/such.toml", "No such file"]),
    ],
)
def test_what_cannot_be_had_is_one_error(
    arguments: list[str], says: list[str], generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong option, key, name or prompt is one error with status 2, and no step is run."""

    def step(_: Engine) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr(Engine, "step", step)
    status, out, err = generate(*arguments, "--set", "engine.device=cpu")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert all(fragment in err for fragment in says), err
    assert "Traceback" not in err


def test_no_model_is_an_error_that_names_the_option(generate: Generate) -> None:
    """Without a model, the error names the option and the section that give one."""
    status, out, err = generate("x", model=None)
    assert (status, out) == (2, "")
    assert "--model" in err
    assert "[model]" in err


def no_directory(model: Path) -> None:
    """Remove the directory."""
    shutil.rmtree(model)


def no_config(model: Path) -> None:
    """Remove ``config.json``."""
    (model / "config.json").unlink()


def truncate(model: Path) -> None:
    """Remove the last bytes of the weights."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickle_weights(model: Path) -> None:
    """Replace the weights by a pickle."""
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def no_tokenizer(model: Path) -> None:
    """Remove the tokenizer."""
    for file in model.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_directory, "no such directory"),
        (no_config, "config.json"),
        (truncate, "not a complete safetensors file"),
        (pickle_weights, "pickle"),
        (no_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_checkpoint_is_one_error(
    damage: Callable[[Path], None], says: str, generate: Generate, tiny: Path, tmp_path: Path
) -> None:
    """A damaged checkpoint ends with 2, its path in the first line of the error, and no traceback."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    damage(model)
    status, out, err = generate("x", model=model)
    assert (status, out) == (2, "")
    first = err.splitlines()[0]
    assert first.startswith("error: ")
    assert str(model) in first
    assert says in first
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["generate", "doctor --memory"])
def test_a_path_without_a_checkpoint_is_refused_before_slow_imports(command: str, tmp_path: Path) -> None:
    """In a new process, a model path that is no checkpoint is an error before torch is imported."""
    program = (
        "import sys\nfrom graphpact_cli import main\n"
        f"status = main([*{command.split()!r}, '--model', {str(tmp_path)!r}])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {tmp_path}: not a checkpoint: there is no config.json")


# -- options and configuration ---------------------------------------------------------------------


def test_options_win_over_the_configuration_file(generate: Generate, tiny: Path, tmp_path: Path) -> None:
    """``--model`` and ``--seed`` override the file; the other keys are taken from the file."""
    file = tmp_path / "engine.toml"
    file.write_text('[model]\npath = "/nowhere"\n[engine]\nseed = 2\n[lanes.decode]\nrunner = "eager"\n')
    status, out, err = generate("--config", str(file), "--json", "x")
    assert status == 0
    assert json.loads(out)["prompt"] == "x"
    assert "decode, eager" in err
    drawn = ("--json", "--temperature=2", "x")
    of_the_file, of_the_option, expected = (
        generate(*options, *drawn)[1]
        for options in (
            ("--config", str(file)),
            ("--config", str(file), "--seed=1"),
            ("--seed=1", "--set", "lanes.decode.runner=eager"),
        )
    )
    assert of_the_option == expected != of_the_file
    status, _, err = generate("--config", str(file), "x", model=None)
    assert status == 2
    assert "/nowhere" in err


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["8", "'quoted'", "true", "[1]", " blanks "])
def test_a_model_s_folder_may_have_any_name(
    name: str, generate: Generate, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose name looks like a TOML value, or has blanks, is found by its name."""
    shutil.copytree(tiny, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert generate("x", model=Path(name))[0] == 0


def test_what_a_plugin_prints_is_not_in_the_text(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that a plugin prints while it is imported or built goes to stderr, so that stdout stays JSON."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loud_cli_plugin.py").write_text(
        "from graphpact.runners import EagerRunner\n"
        "print('[noise]')\n"
        "class Loud(EagerRunner):\n"
        "    def __init__(self, context):\n"
        "        print('[built]')\n"
        "        super().__init__(context)\n"
    )
    info = tmp_path / "loud_cli_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-cli-plugin\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[graphpact.contract]\n1 = x:y\n[graphpact.runners]\nloud = loud_cli_plugin:Loud\n"
    )
    status, out, err = generate("--json", "x", "--set", "lanes.prefill.runner=loud")
    assert status == 0
    assert json.loads(out)["prompt"] == "x"
    assert err.startswith("[noise]\n")
    assert "[built]\n" in err


def test_a_seed_repeats_a_run(generate: Generate) -> None:
    """Equal seeds give equal tokens, another seed gives others, and equal prompts of one run differ."""

    def drawn(seed: int) -> list[list[int]]:
        out = generate("--json", "--temperature=2", f"--seed={seed}", "x", "x")[1]
        return [json.loads(line)["token_ids"] for line in out.splitlines()]

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first
    assert first[0] != first[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("option", ["--top-k=3", "--top-p=0.5", "--min-p=0.1"])
def test_sampling_options_that_change_nothing_are_reported(option: str, generate: Generate) -> None:
    """Options of drawing at temperature 0 warn on stderr, also with ``--quiet``; the run goes on."""
    status, out, err = generate(option, "x", "--quiet")
    assert status == 0
    assert out
    assert err.startswith("warning: --top-p, --top-k and --min-p")
    assert generate(option, "--temperature=1", "x", "--quiet")[2] == ""


# -- reports ---------------------------------------------------------------------------------------


def table_of(err: str) -> dict[str, list[str]]:
    """Return the other cells of each row of the table on stderr, by lane and shape."""
    rows = [re.split("  +", line.strip()) for line in err.splitlines()]
    return {f"{row[0]}: {row[1]}": row[2:] for row in rows if row[0] in {"decode", "prefill"}}


def test_the_table_counts_replays_and_padding(generate: Generate) -> None:
    """Three prompts in a shape of four give one replay per decode step, and a quarter of padding rows."""
    _, _, err = generate("a", "b", "c", "--set", "lanes.decode.batch_sizes=[1, 4]")
    rows = table_of(err)
    assert rows["decode: decode[bs=4, tokens=4]"][:3] == ["5", "15", "25.0%"]
    assert rows["decode: decode[bs=1, tokens=1]"][:2] == ["0", "0"]
    assert rows["prefill: mixed, eager"] == ["1", "this lane captures nothing"]
    last = err.splitlines()[-1]
    for part in ("5 replays", "1 eager run;", "5 pact checks", "2 shapes captured", "18 tokens"):
        assert part in last
    assert "verified" not in last


def test_the_table_counts_tokens_of_prefills() -> None:
    """The column of tokens has the live tokens of a prefill shape, not its requests."""
    shape = GraphShape(ForwardMode.EXTEND, 4, 16)
    stats = LaneStats({shape: ShapeStats(replays=1, raw_rows=2, raw_tokens=12)})
    lane: Any = SimpleNamespace(name="prefill", stats=stats)
    ((_, printed, replays, tokens, padding, *_),) = _rows(lane, bars=False)
    assert (printed, replays, tokens, padding) == (shape, 1, 12, "25.0%")


def test_the_table_says_why_a_decode_ran_eagerly(generate: Generate) -> None:
    """A batch that is larger than the largest captured shape is counted under that reason."""
    _, _, err = generate("a", "b", "c", "--set", "lanes.decode.batch_sizes=[1, 2]")
    reason = "larger than the largest captured shape"
    assert table_of(err)["decode: decode, eager"] == ["5", reason]


def test_unused_shapes_share_a_row(generate: Generate) -> None:
    """Shapes that were never replayed share one row if a lane has many shapes."""
    sizes = list(range(1, 12))
    _, _, err = generate("a", "--set", "engine.max_num_seqs=11", "--set", f"lanes.decode.batch_sizes={sizes}")
    rows = table_of(err)
    assert rows["decode: decode[bs=1, tokens=1]"][0] == "5"
    assert rows["decode: 10 more shapes"][-1] == "never replayed"
    assert len(rows) == 3


def test_quiet_says_nothing_where_all_is_well(generate: Generate) -> None:
    """``--quiet`` leaves stderr empty; progress is not shown if stderr is no terminal."""
    assert generate("--quiet", "--verify", "x")[2] == ""
    assert "capturing" not in generate("x")[2]


@pytest.mark.sweep
def test_transformers_is_silent(tiny: Path) -> None:
    """In a new process the command keeps progress bars and logs of transformers off stderr.

    At most one line is left: which kernels run on a machine without those of the vendor.
    """
    loud = {
        "TRANSFORMERS_VERBOSITY",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        "HF_HUB_DISABLE_PROGRESS_BARS",
    }
    command = [sys.executable, "-m", "graphpact_cli", "generate", "-q", "-m", str(tiny), "x"]
    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name not in loud},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert re.fullmatch(r"(attention backend '\w+' runs (compiled|portable) kernels; .*\n)?", done.stderr)
    assert done.stdout.startswith("x")


def test_progress_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal stderr shows the lane and the shape of a capture; ``quiet`` gives no callback."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with capture_progress("[m]") as on_capture:
        assert on_capture is not None
        on_capture("decode", GraphShape(ForwardMode.DECODE, 2, 2), 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading [m]" in err
    assert "capturing decode: decode[bs=2" in err
    assert "1/2" in err
    with capture_progress("m", quiet=True) as on_capture:
        assert on_capture is None


# -- verification --------------------------------------------------------------------------------


def test_verify_compares_every_replay(generate: Generate) -> None:
    """``--verify`` verifies all replays, and says which were held to the bit and the largest difference."""
    status, _, err = generate("--verify", "abc", "x")
    assert status == 0
    assert re.search(
        r"5 of 5 replays verified, largest difference \S+ \(5 equal to the bit", err.splitlines()[-1]
    )


def test_set_has_the_last_word_on_the_share(generate: Generate) -> None:
    """``--set verify.replay_against_eager`` overrides ``--verify``; a share that selects none is reported."""
    share = ("--set", "verify.replay_against_eager=1e-12")
    status, _, err = generate("--verify", *share, "x")
    assert status == 0
    assert "0 of 5 replays verified" in err
    assert "warning: no replay was verified: a share of 1e-12 selected none of 5 replays" in err


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_nothing_verified_is_not_passed_over(quiet: tuple[str, ...], generate: Generate) -> None:
    """If no step was replayed, ``--verify`` warns and gives the reason, also with ``--quiet``; status 0."""
    status, out, err = generate("--verify", "--set", "lanes.decode.runner=eager", *quiet, "x")
    assert status == 0
    assert out
    assert "warning: no replay was verified: no step was replayed" in err
    assert "this lane captures nothing" in err


def test_a_broken_promise_ends_with_its_own_status(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that differs from its eager run is an error with status 1, after a complete line on stdout."""
    real = Verifier._compare

    def planted(self: Verifier, what: str, replayed: torch.Tensor, eager: torch.Tensor, **more: Any) -> None:
        real(self, what, replayed + 100, eager, **more)

    monkeypatch.setattr(Verifier, "_compare", planted)
    status, out, err = generate("--verify", "--stream", "abc")
    assert status == 1
    assert out.startswith("abc")
    assert out.endswith("\n")
    table, _, message = err.partition(
        "error: lane 'decode': replay and an eager run of the same padded rows differ: decode[bs="
    )
    assert "decode[bs=1, tokens=1]" in table
    assert "KV slot" in message or "logits of request" in message
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "terminal", "streams"),
    [
        (("--stream",), False, True),
        (("--no-stream",), True, False),
        ((), True, True),
        ((), False, False),
    ],
)
def test_an_interrupted_run_leaves_whole_lines(
    options: tuple[str, ...],
    terminal: bool,  # noqa: FBT001  a case
    streams: bool,  # noqa: FBT001  a case
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control-C ends with 130; text that was streamed, by default on a terminal, ends with a newline."""
    real = Engine.step
    steps = []

    def step(self: Engine) -> Any:
        steps.append(1)
        if len(steps) > 2:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    status, out, err = generate(*options, "abc")
    assert status == 130
    assert out.startswith("abc") is streams
    assert out.endswith("\n") is streams
    assert err.strip() == ""


# -- what is written about a run -------------------------------------------------------------------


def test_a_run_writes_its_trace_and_metrics(generate: Generate, tmp_path: Path) -> None:
    """The files have the run's steps, and answers and summary are as without them."""
    trace, metrics = tmp_path / "trace.json", tmp_path / "metrics.prom"
    status, out, err = generate("abc", f"--trace={trace}", f"--metrics={metrics}")
    assert (status, out) == generate("abc")[:2] == (0, out)
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("step") == 6
    assert f"{len(names)} events written to {trace}" in err
    lines = metrics.read_text().splitlines()
    assert 'graphpact_replays_total{lane="decode",mode="decode",shape="bs=1,tokens=1"} 5.0' in lines
    assert 'graphpact_engine_phase_seconds_count{phase="step"} 6.0' in lines


def test_an_observer_that_is_selected_and_asked_for_measures_once(generate: Generate, tmp_path: Path) -> None:
    """``--metrics`` with the observer ``metrics`` in the configuration gives each sample once."""
    metrics = tmp_path / "metrics.prom"
    assert generate("abc", f"--metrics={metrics}", "--set", 'engine.observers=["metrics"]')[0] == 0
    assert metrics.read_text().count('seconds_count{lane="decode"') == 1


def test_a_trace_is_whole_if_the_model_cannot_be_loaded(generate: Generate, tmp_path: Path) -> None:
    """A run that fails before its first step leaves a trace that can be opened."""
    trace, model = tmp_path / "trace.json", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert generate("abc", f"--trace={trace}", model=model)[0] == 2
    assert [event["name"] for event in json.loads(trace.read_text())["traceEvents"]] == ["process_name"]


def test_logs_as_json_are_all_of_stderr(generate: Generate) -> None:
    """With ``--log-format json`` every line of stderr is an object, and later runs print none."""
    status, _, err = generate("abc", "xyz", "--log-format=json")
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert status == 0
    assert {"shape captured", "engine started", "eager run", "request finished"} <= set(events)
    assert events.count("request finished") == 2
    assert "request finished" not in generate("abc")[2]


def test_logs_as_text_come_with_the_summary(generate: Generate) -> None:
    """With ``--log-format text`` events are lines of words; strings with spaces are quoted."""
    err = generate("abc", "--log-format=text")[2]
    assert "info: request finished request=0 reason=length prompt_tokens=4 generated_tokens=6" in err
    assert 'why="this lane captures nothing"' in err
    assert "1 eager run;" in err


@pytest.mark.parametrize("option", ["--trace", "--metrics"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    option: str, generate: Generate, tmp_path: Path
) -> None:
    """A path in a folder that is missing is a usage error; no text is generated."""
    status, out, err = generate("abc", f"{option}={tmp_path / 'none' / 'file'}")
    assert (status, out) == (2, "")
    assert "cannot be written" in err


def test_a_port_that_is_taken_is_refused(generate: Generate) -> None:
    """The error names the port and what to do; no text is generated."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = generate("abc", f"--metrics-port={port}")
    assert (status, out) == (2, "")
    assert f"metrics cannot be served at port {port}" in err
    assert "0 for any free one" in err


def test_metrics_need_their_extra_and_say_so(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without prometheus-client the options are refused with the command that installs it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "graphpact_engine.metrics", raising=False)
    status, out, err = generate("abc", f"--metrics={tmp_path / 'metrics'}")
    assert (status, out) == (2, "")
    assert 'pip install "graphpact-engine[metrics]"' in err
