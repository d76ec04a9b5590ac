"""Tests of use by a third party: wheels in an environment without this repository, command and decorator.

The wheels are built offline, from `examples/third_party` and the packages of this repository that it needs.
"""

import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
from screenshots import RIGHT, WRONG

from elsewhere import Elsewhere

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/third_party"
NEEDED = ("core", "cli", "plugins/tape", "conformance")
"""The packages that ``graphpact[conformance]`` installs."""

PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


def plant(elsewhere: Elsewhere, right: str, wrong: str) -> None:
    """Plant the bug in the installed plugin."""
    (file,) = elsewhere.venv.glob("lib/python*/site-packages/my_attention/backend.py")
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Return an environment with the wheels of graphpact and of the example, and the example's tests."""
    sources = [*(ROOT / folder for folder in NEEDED), EXAMPLE]
    made = Elsewhere.make(tmp_path_factory.mktemp("elsewhere"), sources)
    shutil.copytree(EXAMPLE / "tests", made.work / "tests")
    text = (made.work / "tests/test_conformance.py").read_text()
    (made.work / "one_lane.py").write_text(text.replace('_attention"', '_attention", lanes=["dec*"]'))
    return made


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
    plant(elsewhere, RIGHT, WRONG)
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
        plant(elsewhere, WRONG, RIGHT)
