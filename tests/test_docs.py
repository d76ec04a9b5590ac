"""Tests that the documentation agrees with the code."""

import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from graphpact.attention import AttentionBackend
from graphpact.lane import Lane
from graphpact.plugins import GROUPS
from graphpact_conformance.rules import RULES
from graphpact_engine.config import RESERVED_VARIABLES, config_keys
from support import load_reference

ROOT = Path(__file__).parents[1]
DRIVERS = ROOT / "conformance/graphpact_conformance/drivers"


def test_the_configuration_page_is_what_the_code_would_write() -> None:
    """docs/configuration.md is up to date: `python docs/reference.py` would change nothing."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == load_reference().configuration()
    assert all(f"`{key.name.rpartition('.')[2]}`" in page for key in config_keys())
    assert all(f"`{variable}`" in page for variable in RESERVED_VARIABLES)


def test_the_acts_on_the_graphs_page_are_those_of_the_table() -> None:
    """docs/graphs.md has every row of graph_acts.toml: `python docs/reference.py` would change nothing."""
    page = (ROOT / "docs/graphs.md").read_text(encoding="utf-8")
    assert page == load_reference().graphs(page)
    rows = tomllib.loads((DRIVERS / "graph_acts.toml").read_text(encoding="utf-8"))["act"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert page.count("\n| ") > len(rows)
    for row in rows:
        assert "|" not in f"{row['act']}{row['cuda']}{row.get('note', '')}"  # it would end its cell
        assert f"\n| {row['act']} | " in page


def test_the_rules_on_the_conformance_page_are_those_of_the_code() -> None:
    """docs/conformance.md has every rule and its story: `python docs/reference.py` would change nothing."""
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    assert page == load_reference().conformance(page)
    assert not any("|" in rule.requirement for rule in RULES.values())  # it would end its cell
    assert all(f"\n| {rule} | " in page for rule in RULES.values())


def test_the_picture_of_the_step_has_its_calls_and_both_ways_to_fill_metadata() -> None:
    """docs/step.svg names every call of the step in order, and the metadata of the hook and of the graph."""
    svg = (ROOT / "docs/step.svg").read_text(encoding="utf-8")
    drawn = " ".join(re.sub("<[^>]*>", " ", svg).split()).replace(" _replay", "_replay")
    calls = re.findall(
        r"self\._?(fit|populate|prepare_replay|init_metadata_replay)\(|(pact\.check|graph\.replay)\(",
        "".join(map(inspect.getsource, (Lane._fill, Lane.prepare, Lane._replay_or_run))),
    )
    calls.sort(key=lambda call: call[0] != "fit")  # it comes before the fill, which `prepare` calls
    places = [drawn.index("".join(call)) for call in calls]
    assert len(calls) == 6
    assert places == sorted(places)
    for name in ("fill_is_device_only", "fill_metadata", "plan_metadata", "init_metadata_capture"):
        assert hasattr(AttentionBackend, name)
        assert name in drawn
    assert "metadata_in_graph" in inspect.signature(Lane).parameters
    assert "metadata_in_graph" in drawn


def test_every_kind_of_plugin_is_on_the_page_of_plugins() -> None:
    """docs/plugins.md has the group of each kind and their number; each kind has a section or a page."""
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| `(graphpact\.\w+)` \|", page, re.MULTILINE)
    assert {group for _, group in rows} == set(GROUPS)
    numbers = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
    assert f"There are {numbers[len(rows)]} kinds:" in page
    pages = "".join(each.read_text(encoding="utf-8") for each in ROOT.glob("docs/plugins*.md"))
    for kind, _ in rows:
        assert re.search(rf"^##? An? {kind}$", pages, re.MULTILINE), kind


def test_links_in_the_texts_lead_somewhere() -> None:
    """Every relative link of the README and the docs leads to an existing file, and to a heading of it."""
    for text in load_reference().PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text.read_text(encoding="utf-8"))
        for target, anchor in links:
            file = text.parent / target if target else text
            assert file.exists(), f"{text.name}: {target}"
            assert not anchor or anchor in _anchors(file), f"{text.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that forges and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", load_reference().PAGES, ids=lambda page: f"{page.relative_to(ROOT)}")
def test_included_parts_are_what_the_code_would_write(page: Path) -> None:
    """The included parts of a page are up to date: `python docs/reference.py` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert text == load_reference().included(text)
    assert len(re.findall("<!-- include ", text)) == text.count("<!-- /include -->")


SCREEN = 60
"""Lines of a table that is written from the code, at most; the code of examples is whole."""


def test_a_written_part_of_a_page_fits_a_screen() -> None:
    """A table that code or a run writes into a page is a summary; a command makes a file of the details."""
    lengths = {}
    for page in load_reference().PAGES:
        text = page.read_text(encoding="utf-8")
        parts = re.findall(
            r"<!-- (?!include (?:file|source) |report )\w.*? -->\n(.*?)<!-- /", text, re.DOTALL
        )
        for at, part in enumerate(parts):
            lengths[page.name, at] = max(table.count("\n") for table in re.split(r"\n#+ ", part))
    assert len(lengths) > 15
    assert {where: length for where, length in lengths.items() if length > SCREEN} == {}
    for page in ("museum", "models"):
        lines = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("|") for line in lines) <= SCREEN, page


def test_every_page_is_in_the_index_of_the_site() -> None:
    """docs/index.md lists every page of docs, so that `make docs` builds and links it."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    pages = {page.stem for page in ROOT.glob("docs/*.md")} - {"index"}
    assert listed == {*pages, "reference/index"}


def test_the_architecture_page_has_the_step_every_distribution_and_every_contract() -> None:
    """The page shows the lane's own code, names each distribution's folder, and includes each contract."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for method in (Lane.prepare, Lane.launch):
        assert textwrap.dedent(inspect.getsource(method)).strip() in page
    folders = [f.parent.relative_to(ROOT) for f in ROOT.glob("*/**/pyproject.toml")]
    folders = [f for f in folders if f.parts[0] not in ("examples", "tests") and f.parts[0][0] != "."]
    assert len(folders) >= 10
    assert [f"{f}" for f in folders if f"| `{f}/` |" not in page] == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    assert [each for each in contracts if f"`{each}`: " not in page] == []
    picture = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    written_in_it = " ".join(re.sub("<[^>]*>", " ", picture).split())
    assert ", ".join(reversed(contracts["core-layers"]["layers"])) in written_in_it


def test_the_glossary_is_sorted_and_each_word_is_where_it_says() -> None:
    """Words are sorted and unique; each path in the last column exists, and its file has the names there."""
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    words = [row[0].strip("`").lower() for row in rows]
    assert len(words) > 100
    assert words == sorted(set(words))
    for word, _, where in rows:
        files = re.findall(r"`([\w/]+\.\w+)`", where)
        paths = [path for path in files if "/" in path]
        assert paths, word
        for path in paths:
            assert (ROOT / path).exists(), f"{word}: {path}"
        code = "".join((ROOT / path).read_text(encoding="utf-8") for path in paths)
        for name in re.findall(r"`(\w+(?:\.\w+)*)`", where):
            assert all(part in code for part in name.split(".")), f"{word}: {name}"


def test_the_folders_and_files_that_the_pages_name_are_there() -> None:
    """Paths in code quotes that begin with a folder of the repository exist; `NAME` stands for any."""
    begins = "core|cli/graphpact_cli|kernels|plugins|engine|conformance|museum|adapters|guard|integrations"
    begins += "|benchmarks|tests|examples|docs"
    for page in load_reference().PAGES:
        for path in re.findall(rf"`((?:{begins})/[\w./*-]*)`", page.read_text(encoding="utf-8")):
            pattern = path.rstrip("/").replace("NAME", "*")
            there = any(ROOT.glob(pattern)) or any(page.parent.glob(pattern))
            assert there, f"{page.relative_to(ROOT)}: {path}"
