"""Results: a later run continues the file, and damaged or foreign files are refused."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpact.errors import UsageError
from graphpact_swarm.report.results import FILE, Results, SeedResult
from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.verdicts.judging import RunFinding, Verdict

HEAD = {"engine": "e", "release": "1.0", "setup": {"models": ["llama"], "settings": {}}}
FINDING = RunFinding(kind="leak", field="pages", step=4, request=1, text="3 pages")
SCENARIO = Scenario(
    engine="e", choice={"page_size": 16}, arrivals=(Arrival(prompt=(5, 6), max_new_tokens=2),)
)


def value(seed: int, *findings: RunFinding) -> dict[str, Any]:
    """Return what a worker answers about a seed."""
    scenario = Scenario(
        engine="e", choice={"page_size": seed % 3}, arrivals=SCENARIO.arrivals if findings else (), seed=seed
    ).to_json()
    if not findings:
        scenario.pop("arrivals")
    verdict = Verdict(findings=findings, steps=seed, coverage={"kind decode": seed}, digest="d").to_json()
    # What a worker says comes as JSON.
    told: dict[str, Any] = json.loads(
        json.dumps({"seed": seed, "scenario": scenario, "verdict": verdict, "start_seconds": 0.5})
    )
    return told


def opened(folder: Path, head: Mapping[str, Any] = HEAD) -> contextlib.closing[Results]:
    """Open the results of a folder, until the end of a block."""
    return contextlib.closing(Results.open(folder, head))


def written(folder: Path) -> Results:
    """Return the results of three seeds, one of which has a finding that was shrunk; their file is closed."""
    with opened(folder) as results:
        results.add(value(1))
        results.add(value(2, FINDING))
        results.add_smaller(FINDING, folder / "seed-2-leak.json", FINDING)
        results.add(value(3))
    return results


def test_a_run_is_continued(tmp_path: Path) -> None:
    """The file has everything: results, shrunk scenarios and coverage; another run adds to it."""
    first = written(tmp_path)
    with opened(tmp_path) as again:
        assert (again.results, again.smaller) == (first.results, first.smaller)
        assert (again.coverage.seen, again.coverage.pairs) == (first.coverage.seen, first.coverage.pairs)
        again.add(value(4))
        assert again.found() == {FINDING.signature: [again.results[2]]}
        assert again.results[2].scenario is not None
        assert again.results[1].scenario is None
    with opened(tmp_path) as last:
        assert [*last.results] == [1, 2, 3, 4]


def test_a_line_that_was_cut_is_run_again(tmp_path: Path) -> None:
    """Wherever a run was killed, the results before are kept, and what is added later can be read."""
    written(tmp_path)
    file = tmp_path / FILE
    whole = file.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in (begin + 1, (begin + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        with opened(tmp_path) as results:
            assert [*results.results] == [1, 2]
            results.add(value(3))
        assert file.read_bytes() == whole


def test_a_result_of_a_seed_replaces_an_earlier_one(tmp_path: Path) -> None:
    """The last line of a seed counts."""
    written(tmp_path)
    with opened(tmp_path) as results:
        results.add(value(1, FINDING))
    with opened(tmp_path) as results:
        assert results.results[1].verdict.findings == (FINDING,)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    """As long as results are open, nobody else opens them."""
    with opened(tmp_path), pytest.raises(UsageError):
        Results.open(tmp_path, HEAD)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"release": "1.1"}, "release"),
        ({"setup": {"models": ["llama"], "settings": {"a": 1}}}, "setup"),
        ({"release": "1.1", "engine": "f"}, "engine, release"),
    ],
)
def test_another_run_is_refused(changes: Mapping[str, Any], named: str, tmp_path: Path) -> None:
    """A file of another engine, release or setup is not continued; the error says what differs."""
    written(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(UsageError, match=f"is of a run with another {named}"):
        Results.open(tmp_path, {**HEAD, **changes})
    assert (tmp_path / FILE).read_bytes() == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(values: Any) -> list[tuple[Any, Any]]:
    """Return every container in JSON with each of its keys."""
    found = []
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    )
    for key, inner in items:
        found += [(values, key), *places(inner)]
    return found


@given(data=st.data())
def test_hostile_files_are_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file in which any one value is another is read, and summed up, or refused by an error of use."""
    folder = tmp_path_factory.mktemp("results")
    written(folder)
    file = folder / FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    container, key = data.draw(st.sampled_from(places(lines)))
    container[key] = data.draw(JSON)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        with opened(folder) as results:
            assert results.coverage
            assert list(results.by_feature()) is not None
            assert (results.found(), results.known()) is not None
    except UsageError as error:
        assert str(file) in str(error)  # noqa: PT017  it need not be raised


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"3\n",
        b"null\n",
        b"{\n",
        b"[" * 100_000 + b"\n",
        b"{}\n{}\n",
        b"{}\n3\n",
    ],
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """What is no file of results is an error that names it, and is left as it is."""
    file = tmp_path / FILE
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"results\.jsonl"):
        Results.open(tmp_path, HEAD)
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The error says which path, and that --out names another one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made") as told:
        Results.open(tmp_path / "file" / "folder", HEAD)
    assert "--out" in str(told.value)


def test_a_clean_result_has_no_requests() -> None:
    """Its seed says them; one with a finding has its scenario."""
    assert SeedResult.from_json(value(1)).scenario is None
    assert SeedResult.from_json(value(2, FINDING)).scenario is not None
