"""Tests of use by a third party: wheels in an environment without this repository, command and decorator.

The wheels are built offline, from `examples/third_party` and the packages of this repository that it needs.
Other dependencies are linked from the environment of the tests, except graphpact and its plugins.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from screenshots import RIGHT, WRONG

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/third_party"
NEEDED = ("core", "cli", "plugins/tape", "conformance")
"""The packages that ``graphpact[conformance]`` installs."""

PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass
class Elsewhere:
    """A virtual environment, and a folder to work in."""

    venv: Path
    work: Path

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command of the environment, verify its exit status, and return its stdout."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRAPHPACT"))}
        done = subprocess.run(
            [str(self.venv / "bin" / command[0]), *command[1:]],
            cwd=self.work,
            env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def plant(self, right: str, wrong: str) -> None:
        """Plant the bug in the installed plugin."""
        (file,) = self.venv.glob("lib/python*/site-packages/my_attention/backend.py")
        text = file.read_text()
        assert text.count(right) == 1
        file.write_text(text.replace(right, wrong))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Return an environment with the wheels of graphpact and of the example, and the example's tests."""
    root = tmp_path_factory.mktemp("elsewhere")
    wheels, borrowed, venv, work = (root / n for n in ("wheels", "borrowed", "venv", "work"))
    for source in (*(ROOT / folder for folder in NEEDED), EXAMPLE):
        _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), cwd=source)
    _run("-m", "venv", "--without-pip", str(venv))
    python = str(venv / "bin/python")
    built = map(str, wheels.glob("*.whl"))
    _run("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", *built)
    borrowed.mkdir()
    for folder in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for installed in folder.iterdir():
            if "graphpact" not in installed.name:
                (borrowed / installed.name).symlink_to(installed)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    shutil.copytree(EXAMPLE / "tests", work / "tests")
    text = (work / "tests/test_conformance.py").read_text()
    (work / "one_lane.py").write_text(text.replace('_attention"', '_attention", lanes=["dec*"]'))
    return Elsewhere(venv, work)


def _run(*arguments: str, cwd: Path | None = None) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sweep
def test_nothing_of_this_repository_is_there(elsewhere: Elsewhere) -> None:
    """All packages come from their wheels, and no other plugin of this repository is installed."""
    code = """
        import sys, graphpact, my_attention
        from graphpact.plugins import PluginCatalog
        there = {"graphpact", "graphpact-cli", "graphpact-tape", "graphpact-conformance", "my-attention"}
        print(graphpact.__file__, my_attention.__file__, *sys.path)
        print({info.distribution for info in PluginCatalog.scan().infos()} == there)
    """
    paths, alone = elsewhere.run("python", "-c", textwrap.dedent(code)).splitlines()
    assert all(Path(file).is_relative_to(elsewhere.venv) for file in paths.split()[:2])
    assert not any(Path(path).is_relative_to(ROOT) for path in paths.split())
    assert alone == "True"


@pytest.mark.sweep
def test_the_example_keeps_the_pact_by_command(elsewhere: Elsewhere) -> None:
    """`graphpact check` ends with status 0."""
    few = ("--lane", "decode-page16-*", "--only", "GP03")
    assert "conformant on the tape" in elsewhere.run("graphpact", "check", "my_attention", "--quick", *few)


@pytest.mark.sweep
def test_the_example_keeps_the_pact_by_pytest(elsewhere: Elsewhere) -> None:
    """The example's own tests pass, and none is skipped."""
    found = elsewhere.run(*PYTEST, "-W", "error")
    assert re.search(r"^22 passed in ", found, re.MULTILINE)


@pytest.mark.sweep
def test_a_bug_in_the_installed_plugin_is_reported_and_reproduced(elsewhere: Elsewhere) -> None:
    """Padding rows with stale pages are reported by the command, by its reproduce line, and by pytest."""
    assert WRONG in (EXAMPLE / "README.md").read_text()  # the example's README describes this bug
    elsewhere.plant(RIGHT, WRONG)
    try:
        found = elsewhere.run("graphpact", "check", "my_attention", "--quick", "--lane", "dec*", status=1)
        finding = found[found.index("✗ GP03 stale-pad-tail") :]
        for name, text in (
            ("hook", "init_metadata_replay"),
            ("field", r"metadata\.page_table\[\d+, 0\].*slot 'my_attention\.page_table'"),
            ("expected", "every entry that the replay reads is written in this step"),
            ("actual", "holds values of an earlier batch"),
        ):
            assert re.search(rf"^│ +{name} +{text}", finding, re.MULTILINE)
        again = re.search(r"reproduce +(graphpact check .* --only GP03 .*)", finding)
        assert again is not None
        found = elsewhere.run(*shlex.split(again[1]), status=1)
        assert "✗ GP03 stale-pad-tail" in found
        assert "metadata.page_table[" in found
        found = elsewhere.run(*PYTEST, "--import-mode=importlib", "one_lane.py", status=1)
        failure = found[found.index("AssertionError: GP03 stale-pad-tail: A padding row") :]
        assert again[1] in failure
        assert "init_metadata_replay" in failure
    finally:
        elsewhere.plant(WRONG, RIGHT)
