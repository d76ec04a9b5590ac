"""Tests of broken, bare or full environments: streams, disks, signals, locales, variables, installations.

Does not: break Python itself, which for example cannot start in a removed directory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_site import installed
from graphpact_cli import main
from rigs.command import LIMIT, Ended, command

DEMO = Path(__file__).parents[2] / "examples/demo.toml"


def shell(line: str, *arguments: str | Path) -> Ended:
    """Run ``line`` in bash, where ``$G`` is the command and ``"$@"`` the arguments."""
    done = subprocess.run(
        ["/bin/bash", "-c", line, "bash", *map(str, arguments)],
        env={**os.environ, "G": f"{sys.executable} -m graphpact_cli", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


# -- streams -------------------------------------------------------------------------------------

FULL = "the output cannot be written to stdout: No space left on device"
CLOSED = "the output cannot be written to stdout: Bad file descriptor"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        pytest.param("$G explain GP01 >/dev/full", 3, FULL),
        pytest.param("$G --version >/dev/full", 3, FULL),
        pytest.param("$G explain --help >/dev/full", 3, FULL),
        pytest.param("$G explain GP01 >&-", 3, CLOSED),
        pytest.param("$G explain --json >/dev/full 2>&-", 3, ""),
        pytest.param("$G explain GP99 >&-", 2, "unknown rule 'GP99'"),
        pytest.param("$G explain GP99 2>&-", 2, ""),
        pytest.param("$G explain GP99 2>/dev/full", 2, ""),
        pytest.param("$G explain --nope 2>/dev/full", 2, ""),
        pytest.param("$G explain GP01 >/dev/null 2>&-", 0, ""),
        pytest.param("$G explain GP01 >/dev/null <&-", 0, ""),
        pytest.param("$G generate <&-", 2, "there is no prompt"),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(line: str, status: int, says: str) -> None:
    """With a full or closed stream a command prints one line, if it can, and ends with the right status."""
    done = shell(line)
    assert (done.status, done.out) == (status, "")
    assert done.err.count("error: ") == (1 if says else 0)
    assert says in done.err
    assert "Traceback" not in done.err
    assert "Exception ignored" not in done.err


def test_output_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    """If the encoding lacks a character, the output has its escape, and the command succeeds."""
    with pytest.MonkeyPatch.context() as patch, installed(tmp_path / "site", patch) as site:
        source = "def run() -> None:\n    print('caf\\u00e9 \\u2713')\n"
        site.add("says", source, offers={"fake-says": "run"}, group="graphpact.commands")
        ascii_only = {"PYTHONIOENCODING": "ascii"}
        done = command("fake-says", folders=(site.root,), environment=ascii_only)
    assert done == Ended(0, "caf\\xe9 \\u2713\n", "")


# -- disks ---------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_full_disk_keeps_the_pacts_that_were_saved(tmp_path: Path) -> None:
    """``pact save --force`` on a disk that fills up ends with status 3, and the old file is unchanged."""
    file = tmp_path / "pacts.json"
    file.write_text("old")
    arguments = ("pact", "save", file, "--force", "--config", DEMO)
    sets = ("--set", "lanes.decode.batch_sizes=[1]")
    done = shell('ulimit -f 4; $G "$@"', *arguments, *sets)
    assert (done.status, done.out) == (3, "")
    assert f"error: {file} cannot be written: File too large" in done.err
    assert "Traceback" not in done.err
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"pacts.json": "old"}


# -- interrupts ----------------------------------------------------------------------------------

INTERRUPT = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {raises}

sys.meta_path.insert(0, Interrupt())
from graphpact_cli import main
sys.exit(main(["generate", "--config", "{config}", "Hello"]))
"""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "module", ["typer", "rich.table", "importlib_metadata", "pydantic", "torch", "transformers"]
)
def test_an_interrupt_during_an_import_is_one(module: str) -> None:
    """Ctrl-C while a library is imported ends with status 130, without output or traceback."""
    program = INTERRUPT.format(module=module, config=DEMO, raises="raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_an_import_that_turns_an_interrupt_into_an_error_is_one() -> None:
    """If a library turns Ctrl-C into another error, the status is 130 too."""
    raises = "try: raise KeyboardInterrupt\n            except BaseException: raise ImportError('x')"
    program = INTERRUPT.format(module="torch", config=DEMO, raises=raises)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# -- variables -----------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_bare_environment_suffices() -> None:
    """Without a home, a temporary directory or a terminal, and with warnings as errors, text is generated."""
    odd = {
        "HOME": "/nonexistent",
        "TMPDIR": "/nonexistent",
        "COLUMNS": "1",
        "LINES": "x",
        "TERM": "dumb",
        "PYTHONWARNINGS": "error",
        "GRAPHPACT_TRACE": "0",
        "GRAPHPACT_TRACEBACK": "x",
    }
    done = command("generate", "--config", DEMO, "-q", "-n", "2", "Hello", environment=odd)
    assert done.status == 0
    assert done.out.startswith("Hello")
    assert "error" not in done.err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GRAPHPACT_DISABLE_PLUGINS", "*"),
        ("GRAPHPACT_DISABLE_PLUGINS", "runner:, eager"),
        ("GRAPHPACT_DISABLE_PLUGINS", "\udcff\x1b[2J"),
        ("GRAPHPACT_ENGINE", "1"),
        ("GRAPHPACT_", "1"),
        ("GRAPHPACT_LANES__A__B__C", "1"),
        ("GRAPHPACT_ENGINE__SEED", "9" * 5000),
        ("graphpact_engine__seed", "x"),
    ],
)
def test_an_odd_variable_is_refused_by_name(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown GRAPHPACT variable is named, and the command ends with status 2."""
    monkeypatch.setenv(variable, value)
    assert main(["generate", "--config", str(DEMO), "Hello"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert variable in err
    assert "\x1b" not in err


# -- installations -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["no metadata", "no name", "binary", "empty", "two versions"])
def test_a_broken_installation_does_not_hide_the_others(damage: str, tmp_path: Path) -> None:
    """A correct distribution is still listed beside a damaged one, without a traceback."""
    with pytest.MonkeyPatch.context() as patch, installed(tmp_path / "site", patch) as site:
        site.add("right", "", offers={"fake-right": "run"}, group="graphpact.commands")
        site.add("torn", "", offers={"fake-torn": "run"}, group="graphpact.commands")
        info = site.root / "fake_torn-1.0.dist-info"
        if damage == "no metadata":
            (info / "METADATA").unlink()
        elif damage == "no name":
            (info / "METADATA").write_text("Version: 1.0\n")
        elif damage == "binary":
            (info / "entry_points.txt").write_bytes(bytes(range(256)))
        elif damage == "empty":
            (info / "entry_points.txt").write_text("[graphpact.commands]\nx\n")
        else:
            site.add("torn", "", offers={"fake-torn": "run"}, version="2.0")
        done = command("--version", folders=(site.root,))
    assert done.status == 0
    assert "fake-right 1.0: command fake-right\n" in done.out
    assert "Traceback" not in done.err
