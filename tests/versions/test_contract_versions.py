"""Tests that the contract only grows: what a released version has stays, and what came since is listed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import graphpact
from graphpact import hookspecs
from graphpact_cli.releases.surface import Member
from graphpact_conformance.rules import RULES
from versions import contract
from versions.contract import CORE, NEXT, breaches, load, merged, read_contract, read_lists, released

WRITE = "PYTHONPATH=tests python -m versions"


def test_what_a_released_version_has_is_there_and_unchanged() -> None:
    """Nothing of any released version is removed, renamed, reordered or demanded anew."""
    assert [*breaches(merged(released().values()), read_contract() | read_lists())] == []


def test_what_came_since_is_listed_for_the_next_version() -> None:
    """The files of all versions and of the next one, together, are the contract of the core."""
    listed = merged([*released().values(), load(NEXT)])
    assert listed == read_contract() | read_lists(), f"write the list: {WRITE}"


def test_the_core_has_the_newest_version() -> None:
    """The core's number is that of the newest file, or one more once a version is being made."""
    newest = max(released())
    assert hookspecs.CONTRACT_VERSION in (newest, newest + 1)
    assert load(NEXT) or newest == hookspecs.CONTRACT_VERSION
    assert [*released()] == [*range(1, newest + 1)]


def test_every_rule_is_for_plugins_of_the_version_that_brought_it() -> None:
    """A rule's ``since`` is the version whose file lists it, so that older plugins are not held to it."""
    versions = {**released(), max(released()) + 1: load(NEXT)}
    brought = {name: number for number, members in versions.items() for name in members}
    assert {rule.id: rule.since for rule in RULES.values()} == {
        name.removeprefix("rule "): number for name, number in brought.items() if name.startswith("rule ")
    }


def test_hooks_have_one_result() -> None:
    """Each hook of the contract is ``firstresult``, and no function of hookspecs is a hook beside them."""
    names = {name for names in contract.HOOKS.values() for name in names}
    marked = {
        name: vars(value)["graphpact_spec"]
        for name, value in vars(hookspecs).items()
        if callable(value) and hasattr(value, "graphpact_spec")
    }
    assert marked.keys() == names
    assert all(options["firstresult"] for options in marked.values())


def test_the_contract_has_every_public_name_of_the_core() -> None:
    """Each name of ``graphpact.__all__`` is a member of the contract, but for markers and the version."""
    names = {name.rpartition(".")[2] for name in read_contract()}
    assert {*graphpact.__all__} - names == {"CONTRACT_VERSION", "hookimpl", "hookspec"}


CHANGES: dict[str, tuple[str, str, str, str | None]] = {
    "a hook's argument is gone": (
        "hookspecs.py",
        "def launch(lane: Any, prepared: Any)",
        "def launch(prepared: Any)",
        "graphpact.hookspecs.launch took (lane, prepared) and takes (prepared)",
    ),
    "a hook has an argument more": (
        "hookspecs.py",
        "def launch(lane: Any, prepared: Any)",
        "def launch(lane: Any, prepared: Any, stream: Any)",
        None,
    ),
    "an override lacks an argument": (
        "speculation.py",
        "def extend(self, step: ExtendStep)",
        "def extend(self, step: ExtendStep, more: int = 0)",
        "SpeculationAlgorithm.extend takes abstractmethod (self, step, more=0): plugins override",
    ),
    "a method is demanded": (
        "speculation.py",
        "    @abc.abstractmethod\n    def extend(",
        "    @abc.abstractmethod\n    def warm(self): ...\n\n    @abc.abstractmethod\n    def extend(",
        "SpeculationAlgorithm.warm is new and abstract",
    ),
    "a method is offered": (
        "speculation.py",
        "    @abc.abstractmethod\n    def extend(",
        "    def warm(self) -> None:\n        ...\n\n    @abc.abstractmethod\n    def extend(",
        None,
    ),
    "an abstract method has a body": (
        "speculation.py",
        "    @abc.abstractmethod\n    def extend(",
        "    def extend(",
        "SpeculationAlgorithm.extend was abstractmethod (self, step) and is (self, step)",
    ),
    "a field is renamed": (
        "batch.py",
        "    tree_mask: torch.Tensor | None = None\n",
        "    mask: torch.Tensor | None = None\n",
        "graphpact.batch.ForwardBatch.tree_mask is gone",
    ),
    "a field has no default": (
        "batch.py",
        "    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)\n",
        "    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)\n    owner: int\n",
        "graphpact.batch.ForwardBatch.owner is new and has no default",
    ),
    "a field is first": (
        "shapes.py",
        "    mode: ForwardMode\n",
        "    tier: int = 0\n    mode: ForwardMode\n",
        "the fields of graphpact.shapes.GraphShape have another order",
    ),
    "a field is last": (
        "batch.py",
        "    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)\n",
        "    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)\n    owner: int = 0\n",
        None,
    ),
    "a class variable is demanded": (
        "runners.py",
        "    frozen_kv: ClassVar[bool] = False\n",
        "    frozen_kv: ClassVar[bool] = False\n    title: ClassVar[str]\n",
        "GraphRunner.title is new and has no default",
    ),
    "a default is another": (
        "runners.py",
        "    max_padding_ratio: float = 2.0\n",
        "    max_padding_ratio: float\n",
        "RunnerContext.max_padding_ratio was (float, has a default) and is (float)",
    ),
    "a function's argument has no default": (
        "runners.py",
        "def dummy_batch(shape: GraphShape, context: RunnerContext)",
        "def dummy_batch(shape: GraphShape, context: RunnerContext, rows: int)",
        "graphpact.runners.dummy_batch: the new parameter rows has no default",
    ),
    "a method is another kind": (
        "runners.py",
        "    def fit(self, batch",
        "    @classmethod\n    def fit(self, batch",
        "GraphRunner.fit was (self, batch) and is classmethod (self, batch)",
    ),
}


@pytest.fixture(scope="module")
def now() -> dict[str, Member]:
    """Return the members of the contract."""
    return read_contract()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_an_addition_or_named(change: str, now: dict[str, Member], tmp_path: Path) -> None:
    """An edited core has only additions, or the member that breaks a plugin is named with the way out."""
    file, old, new, said = CHANGES[change]
    shutil.copytree(CORE / "graphpact", tmp_path / "graphpact", ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / "graphpact" / file).read_text(encoding="utf-8")
    assert source.count(old) == 1
    (tmp_path / "graphpact" / file).write_text(source.replace(old, new), encoding="utf-8")
    edited = read_contract(tmp_path)
    assert edited != now
    found = [*breaches(now, edited)]
    assert not found if said is None else any(said in breach for breach in found), found


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda name, member: replace(member, parts=("other", "MUST")), "rule GP03 was"),
        (lambda name, member: None, "rule GP03 is gone"),
    ],
)
def test_a_rule_stays(edit: Callable[[str, Member], Member | None], said: str) -> None:
    """A rule of a released version is not removed, and has its name and level."""
    before = read_lists()
    edited = edit("rule GP03", before["rule GP03"])
    after = {name: edited if name == "rule GP03" else member for name, member in before.items()}
    (found,) = breaches(before, {name: member for name, member in after.items() if member})
    assert said in found


def test_the_list_is_written_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lists additions, a member in each line, and writes nothing if one breaks a plugin."""
    monkeypatch.setattr(contract, "NEXT", tmp_path / "next.json")
    known = merged(released().values())
    gone = known.pop("rule GP03")
    monkeypatch.setattr(contract, "released", lambda: {1: known})
    assert contract.main() is None
    rows = json.loads((tmp_path / "next.json").read_text(encoding="utf-8"))
    assert {"name": gone.name, "kind": "rule", "parts": [*gone.parts], "marks": []} in rows
    (tmp_path / "next.json").unlink()
    monkeypatch.setattr(contract, "released", lambda: {1: known | {"x": replace(gone, name="rule GP99")}})
    assert "x is gone" in str(contract.main())
    assert not (tmp_path / "next.json").exists()
