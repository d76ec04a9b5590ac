"""Tests of `graphpact new` as an author uses it: from wheels, outside of this repository, up to an engine.

What runs in SGLang and in vLLM is in the tests of the integrations.
"""

import re
from pathlib import Path

import pytest

from elsewhere import Elsewhere
from graphpact_scaffold.kinds import NewKind

ROOT = Path(__file__).parents[2]
NEEDED = (
    *("core", "cli", "kernels", "plugins/tape", "plugins/cuda_graph", "plugins/flashinfer"),
    *("engine", "conformance", "adapters", "scaffold"),
)
"""What ``graphpact[scaffold]`` and the extra ``test`` of a new plugin install."""
FOLDERS = {kind: f"acme-{kind.value}" for kind in NewKind}
KINDS = pytest.mark.parametrize("kind", NewKind)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Return an environment with the wheels of graphpact, and a new plugin of each kind, installed."""
    made = Elsewhere.make(tmp_path_factory.mktemp("newcomer"), [ROOT / folder for folder in NEEDED])
    for kind, folder in FOLDERS.items():
        made.run("graphpact", "new", kind.value, folder)
        made.install("--editable", folder)
    return made


@pytest.mark.sweep
@KINDS
def test_a_new_plugin_is_found(elsewhere: Elsewhere, kind: NewKind) -> None:
    """`graphpact plugins` lists it under its kind, from its own distribution, and rejects nothing."""
    name = FOLDERS[kind].replace("-", "_")
    listed = elsewhere.run("graphpact", "plugins", "--kind", kind.offers)
    assert re.search(
        rf"^{kind.offers} +{name} +{FOLDERS[kind]} 0\.1\.0 +(loaded|installed)", listed, re.MULTILINE
    ), listed


@pytest.mark.sweep
@KINDS
def test_a_new_plugin_is_conformant(elsewhere: Elsewhere, kind: NewKind) -> None:
    """The command of its README for the time of writing ends with status 0.

    Those for a release do so too, and make a badge with a tier.
    """
    folder = elsewhere.work / FOLDERS[kind]
    readme = (folder / "README.md").read_text()
    quick, whole, badge = re.findall(
        r"^graphpact (check .* --quick(?= )|check .* --report build$|report .* --badge badge.svg$)",
        readme,
        re.MULTILINE,
    )
    for command in (quick, whole):
        told = elsewhere.run("graphpact", *command.split(), folder=folder.name)
        assert re.search("^conformant", told, re.MULTILINE)
    elsewhere.run("graphpact", *badge.split(), folder=folder.name)
    assert "silver" in (folder / "badge.svg").read_text()


@pytest.mark.sweep
@KINDS
def test_the_tests_of_a_new_plugin_pass(elsewhere: Elsewhere, kind: NewKind) -> None:
    """The suite passes as tests; for a plugin of graphpact the engine, which selects it by its name, too."""
    found = elsewhere.run(
        "python", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", folder=FOLDERS[kind]
    )
    is_of_graphpact = kind.offers != "adapter"
    assert re.search(r"^\d+ passed", found, re.MULTILINE)
    assert ("is not installed" in found) != is_of_graphpact
