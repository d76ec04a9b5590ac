"""The museum: every exhibit is caught under its own rule, every variant passes, and the page is current."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from conformance_reports import finding
from graphpact_cli import children, main
from graphpact_conformance.draws.cases import CASES
from graphpact_conformance.rules import RULES
from graphpact_museum import ROOMS, gallery
from graphpact_museum.cli import describe
from graphpact_museum.collection import EXHIBITS, VARIANTS
from graphpact_museum.exhibit import Exhibit, Variant
from graphpact_museum.gallery import Visit, visit_all
from support import load_reference

ROOT = Path(__file__).parents[2]
DRAFT = {"eagle_draft", "eagle_draft_extend", "frozen_kv_mtp"}
PREFILL = {"breakable_cuda_graph", "piecewise_cuda_graph"}
OURS = {"flashinfer", "fa3", "trtllm_mla", "cuda_graph", "cpu_graph", "tape", *DRAFT, *PREFILL}


@pytest.fixture(scope="module")
def visits(request: pytest.FixtureRequest) -> dict[str, Visit]:
    """Return the visits of the selected tests by name, made once in two processes.

    Exhibits are checked only for their own rule.
    """
    params = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {p.id for p in params if p is not None and {"exhibit", "variant"} & {*p.params}}
    pieces = [piece for piece in (*EXHIBITS, *VARIANTS) if piece.name in wanted]
    return {visit.piece.name: visit for visit in visit_all(pieces, workers=2, quick=True)}


@pytest.mark.sweep
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit_is_caught_under_its_own_rule(exhibit: Exhibit, visits: dict[str, Visit]) -> None:
    """The suite finds the bug; the finding has expected, actual, a field or hook, help, and a command."""
    seen = visits[exhibit.name]
    assert seen.is_right, describe(seen)
    found = seen.findings[exhibit.rule]
    assert found.expected
    assert found.actual
    assert found.field or found.hook
    assert found.help
    assert found.reproduce
    assert "does not have the attribute" not in found.actual  # an error of mock: nothing was planted


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_right_plugin_in_another_style_passes(variant: Variant, visits: dict[str, Visit]) -> None:
    """A variant has no finding, with or without a rule."""
    seen = visits[variant.name]
    assert seen.is_right, describe(seen)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["fa3-lengths-cast", pytest.param("flashinfer-planned-by-pages", marks=pytest.mark.sweep)]
)
def test_the_advice_begins_with_the_metadata_at_fault(name: str) -> None:
    """A bug whose outputs look like memory shared by graphs is reported first by the hook and the field."""
    (exhibit,) = [e for e in EXHIBITS if e.name == name]
    told = describe(visit_all([exhibit])[0])
    assert "GP15" in told["findings"]
    assert load_reference()._begins_right(told)


def test_a_lost_visit_is_an_error() -> None:
    """A process that ends without a visit gives an error that says how it ended, not a verdict."""
    told: list[Visit] = []
    task = gallery._VisitTask(VARIANTS[0], told.append, quick=True)
    task.limit = 0.0
    children.run([task], 1)
    assert told == [task.visit]
    assert not task.visit.is_right
    assert "it did not finish within 0 s" in task.visit.errors[0]


def test_the_collection_is_broad() -> None:
    """There are at least 80 exhibits, and two per rule. At least half are in our plugins, in every mode."""
    assert len(EXHIBITS) >= 80
    assert len({p.name for p in (*EXHIBITS, *VARIANTS)}) == len(EXHIBITS) + len(VARIANTS)
    assert min(Counter(e.rule for e in EXHIBITS)[rule] for rule in RULES) >= 2
    ours = [e for e in EXHIBITS if e.base in OURS]
    assert len(ours) >= len(EXHIBITS) / 2
    assert {str(case) for case in CASES} <= {lane for e in ours for lane in e.lanes}
    assert {e.base for e in ours} == OURS
    assert {"backend", "runner", "driver", "registry", "capture sizes", "batch"} == {e.site for e in EXHIBITS}
    assert len(VARIANTS) >= 5


def test_every_exhibit_names_a_public_thread() -> None:
    """Each exhibit names a thread as repository and number, and no two exhibits plant the same bug."""
    for exhibit in EXHIBITS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", exhibit.thread), exhibit.name
        assert exhibit.planted.endswith(".")
    planted = Counter((e.planted, e.base, e.lanes) for e in EXHIBITS)
    assert not [what for what, count in planted.items() if count > 1]


def test_the_page_is_what_the_museum_shows() -> None:
    """docs/reference/museum.md is what `docs/tools/reference.py --museum` writes if all visits are right.

    The line about exhibits that break several rules follows from whole visits, and is not compared.
    """
    right = [{**describe(Visit(piece)), "is_right": True} for piece in (*EXHIBITS, *VARIANTS)]
    page = (ROOT / "docs/reference/museum.md").read_text(encoding="utf-8")
    assert _without_several(page) == _without_several(load_reference().museum(right))


def _without_several(page: str) -> str:
    return re.sub(r"^Of \d+ that break.*$", "", page, flags=re.MULTILINE)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--list --only`` lists the exhibits of a rule, each with its thread, and runs nothing."""
    runs = Mock(return_value=[])
    monkeypatch.setattr("graphpact_museum.gallery.visit_all", runs)
    assert main(["museum", "--list", "--only", "GP03", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {t["name"] for t in told} == {e.name for e in EXHIBITS if e.rule == "GP03"}
    assert all("#" in t["thread"] for t in told)
    assert not runs.called
    main(["museum", "--only", "GP03"])
    assert runs.called


def test_the_command_shows_one_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Every piece is in one ``--room``; an unknown room is a usage error; ``--help`` has an example."""
    shown = []
    for room in ROOMS:
        assert main(["museum", "--list", "--room", room, "--json"]) == 0
        shown += [t["name"] for t in json.loads(capsys.readouterr().out)]
    assert sorted(shown) == sorted(p.name for p in (*EXHIBITS, *VARIANTS))
    assert main(["museum", "--room", "paddings"]) == 2
    assert "did you mean 'padding'?" in capsys.readouterr().err
    assert main(["museum", "--help"]) == 0
    assert "--room padding --quick" in capsys.readouterr().out


def test_the_help_of_the_command_is_light() -> None:
    """The help of the command imports neither a room of the museum nor the suite."""
    code = """
import sys
from graphpact_cli import children, main
assert main(["museum", "--help"]) == 0
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported = {*done.stderr.split()}
    assert "graphpact_museum.cli" in imported
    heavy = {"graphpact_museum.collection", "graphpact_museum.exhibit", "graphpact_conformance.suite"}
    assert not imported & (heavy | {"hypothesis", "jinja2", "pytest"})


@pytest.mark.sweep
def test_the_command_shows_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """With one exhibit and one variant the command prints one caught, one passed, and ends with status 0."""
    names = [EXHIBITS[0].name, VARIANTS[0].name]
    assert main(["museum", *names, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 exhibits caught under their own rule, 1 of 1 right plugins pass" in out
    assert all(name in out for name in names)


def test_an_exhibit_that_is_missed_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1 if an exhibit has no finding or a variant has one, and 0 if a variant has none."""
    alarm = {"GP03": finding()}
    seen = [Visit(piece, lanes=("decode",)) for piece in (EXHIBITS[0], VARIANTS[0])]
    seen.append(Visit(VARIANTS[1], alarm, lanes=("decode",)))

    def some_seen(pieces: Any, *args: Any, **more: Any) -> list[Visit]:
        """Return visits without a finding, except for one false alarm."""
        return [v for v in seen if v.piece in pieces]

    monkeypatch.setattr("graphpact_museum.gallery.visit_all", some_seen)
    assert main(["museum", EXHIBITS[0].name]) == 1
    assert "MISSED" in capsys.readouterr().out
    assert main(["museum", VARIANTS[0].name]) == 0
    assert "ALARM" not in capsys.readouterr().out
    assert main(["museum", VARIANTS[0].name, VARIANTS[1].name]) == 1
    assert "ALARM" in capsys.readouterr().out


def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown exhibit is a usage error with the nearest name; an empty selection has status 5."""
    assert main(["museum", EXHIBITS[0].name + "x"]) == 2
    assert EXHIBITS[0].name in capsys.readouterr().err
    assert main(["museum", VARIANTS[0].name, "--only", "GP01"]) == 5
