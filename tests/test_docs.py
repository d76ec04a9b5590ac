"""Tests that the documentation agrees with the code."""

import html
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from command_line import WRITER
from pages import API
from screenshots import FOLDER, PICTURES

from graphpact import hookspecs
from graphpact.attention import AttentionBackend
from graphpact.lane import Lane
from graphpact.plugins import GROUPS, PluginCatalog
from graphpact_conformance.real_bugs import REAL_BUGS
from graphpact_conformance.rules import RULES
from graphpact_engine.config import RESERVED_VARIABLES, config_keys
from support import load_reference

ROOT = Path(__file__).parents[1]
DRIVERS = ROOT / "conformance/graphpact_conformance/drivers"


def test_the_configuration_page_is_what_the_code_would_write() -> None:
    """The page has every key: `python docs/tools/reference.py` would change nothing."""
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert page == load_reference().configuration()
    assert all(f"`{key.name.rpartition('.')[2]}`" in page for key in config_keys())


def test_every_variable_of_the_code_is_on_the_page_of_variables() -> None:
    """The page lists exactly the variables that the code reads, and every name of a variable is on it."""
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(GRAPHPACT\w*)` \|", page, re.MULTILINE))
    folders = [path.parent for path in ROOT.glob("**/pyproject.toml") if path.parent != ROOT]
    sources = [s for f in folders if ".venv" not in f"{f}" for s in f.glob("graphpact*/**/*.py")]
    sources.append(ROOT / "tests/peers/wheels.py")
    read = "_VARIABLE|FILE_VARIABLE|environ|env"
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    named = {name for line in code.splitlines() for name in re.findall(r'"(GRAPHPACT\w*)"', line)
             if re.search(read, line)}  # fmt: skip
    assert listed == {*named, *RESERVED_VARIABLES}


def test_the_acts_on_their_page_are_those_of_the_table() -> None:
    """The page has every row of graph_acts.toml, in cells."""
    page = (ROOT / "docs/reference/graph-acts.md").read_text(encoding="utf-8")
    rows = tomllib.loads((DRIVERS / "graph_acts.toml").read_text(encoding="utf-8"))["act"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert page.count("\n| ") > len(rows)
    for row in rows:
        assert "|" not in f"{row['act']}{row['cuda']}{row.get('note', '')}"  # it would end its cell
        assert f"\n| {row['act']} | " in page


def test_the_rules_on_their_page_are_those_of_the_code() -> None:
    """The page of rules has every rule, and the gallery the story and the exhibits of every rule."""
    page = (ROOT / "docs/reference/rules.md").read_text(encoding="utf-8")
    assert not any("|" in rule.requirement for rule in RULES.values())  # it would end its cell
    assert all(f"\n| {rule} | " in page for rule in RULES.values())
    gallery = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/explanation/bugs").glob("*.md")]
    for rule in RULES.values():
        (story,) = (text for text in gallery if f"\n## {rule}\n" in text)
        assert REAL_BUGS[rule.id].url in story
    assert sum(text.count("| exhibit | what is planted") for text in gallery) == len(RULES)


def test_every_hook_is_on_the_page_of_hooks() -> None:
    """The page of hooks has the signature of each hook of the contract."""
    page = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "graphpact_spec")]
    assert len(hooks) == 8
    assert [name for name in hooks if f"\ndef {name}(" not in page] == []


def test_the_picture_of_the_step_has_its_calls_and_both_ways_to_fill_metadata() -> None:
    """The picture names every call of the step in order, and the metadata of the hook and of the graph."""
    svg = (ROOT / "docs/pictures/step.svg").read_text(encoding="utf-8")
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


def test_every_kind_of_plugin_is_on_the_page_of_entry_points() -> None:
    """The page has the group of each kind and their number; each kind has a page or a section of one."""
    page = (ROOT / "docs/reference/entry-points.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w ]+)\]\(([^)]*)\) \| `(graphpact\.\w+)` \|", page, re.MULTILINE)
    assert {group for *_, group in rows} == set(GROUPS)
    numbers = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
    assert f"There are {numbers[len(rows)]} kinds:" in page
    assert len({target for _, target, _ in rows}) == len(rows)


def test_links_in_the_texts_lead_somewhere() -> None:
    """Every relative link of every page leads to an existing file, and to a heading of it."""
    for text in load_reference().PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", _prose(text))
        for target, anchor in links:
            file = text.parent / target if target else text
            if API in file.resolve().parents:  # only the site has it
                continue
            assert file.exists(), f"{text.name}: {target}"
            assert not anchor or anchor in _anchors(file), f"{text.name}: {target}#{anchor}"


def _prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that forges and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", load_reference().PAGES, ids=lambda page: f"{page.relative_to(ROOT)}")
def test_included_parts_are_what_the_code_would_write(page: Path) -> None:
    """The included parts of a page are up to date: `python docs/tools/reference.py` would change nothing."""
    text = page.read_text(encoding="utf-8")
    if "<!-- include help " in text and f"{WRITER}." not in text:
        pytest.skip(f"another typer than {WRITER} wrote the help of commands")
    assert text == load_reference().included(text)
    assert len(re.findall("<!-- include ", text)) == text.count("<!-- /include -->")


SCREEN = 60
"""Lines of a table that is written from the code, at most; the code of examples is whole."""


def test_a_written_part_of_a_page_fits_a_screen() -> None:
    """A table that code or a run writes into a page is a summary; a command makes a file of the details."""
    lengths = {}
    for page in load_reference().PAGES:
        text = page.read_text(encoding="utf-8")
        code = "include (?:file|source|part|help|hooks) |report |not run: |run by "
        parts = re.findall(rf"<!-- (?!{code})\w.*? -->\n(.*?)<!-- /", text, re.DOTALL)
        for at, part in enumerate(parts):
            lengths[page.name, at] = max(table.count("\n") for table in re.split(r"\n#+ ", part))
    assert len(lengths) > 15
    assert {where: length for where, length in lengths.items() if length > SCREEN} == {}
    for page in ("museum", "models"):
        lines = (ROOT / f"docs/reference/{page}.md").read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("|") for line in lines) <= SCREEN, page


LONGEST, LONGEST_README = 400, 150
"""Lines of a page, and of the README."""


def test_a_page_is_short() -> None:
    """No page has more than 400 lines, written parts included, and the README at most 150."""
    pages = [page for page in load_reference().PAGES if page.name != "CHANGELOG.md"]
    lengths = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in pages}
    assert len(lengths) > 80
    assert {page: length for page, length in lengths.items() if length > LONGEST} == {}
    assert lengths[ROOT / "README.md"] <= LONGEST_README


SECTIONS = ("tutorial", "how-to", "reference", "explanation", "explanation/bugs")


@pytest.mark.parametrize("section", SECTIONS)
def test_an_index_has_each_page_of_its_section(section: str) -> None:
    """The index has each page twice: in a list of the site, and as a link with a sentence or in a table."""
    folder = ROOT / "docs" / section
    index = (folder / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^([\w/-]+)$", index, re.MULTILINE)
    pages = {page.stem for page in folder.glob("*.md")} - {"index"}
    below = {f"{page.parent.name}/index" for page in folder.glob("*/index.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | below
    linked = set(re.findall(r"^- \[[^]]+\]\(([\w/.-]+)\): .+\.$", index, re.MULTILINE))
    table = set(re.findall(r"^\| .*?\[[^]]+\]\(([\w/.-]+)\) \|", index, re.MULTILINE))
    assert {f"{page}.md" for page in pages | below} <= linked | table


def test_the_landing_page_leads_to_each_section() -> None:
    """`docs/index.md` lists the sections; every page is in one, and is a page of the site."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^([\w/-]+)$", index, re.MULTILINE)
    assert [f"{section}/index" for section in SECTIONS[:4]] == listed
    docs = ROOT / "docs"
    folders = {f"{p.parent.relative_to(docs)}" for p in load_reference().PAGES if docs in p.parents}
    assert folders == {".", *SECTIONS}


ARCHITECTURE = ("architecture", "step", "folders-core", "folders-engine", "changes")


def test_the_pages_of_architecture_have_the_step_every_distribution_and_every_contract() -> None:
    """The pages show the lane's own code, name each distribution's folder, and include each contract."""
    pages = [(ROOT / f"docs/explanation/{name}.md").read_text(encoding="utf-8") for name in ARCHITECTURE]
    page = "".join(pages)
    for method in (Lane.prepare, Lane.launch):
        assert textwrap.dedent(inspect.getsource(method)).strip() in page
    folders = [f.parent.relative_to(ROOT) for f in ROOT.glob("*/**/pyproject.toml")]
    folders = [f for f in folders if f.parts[0] not in ("examples", "tests") and f.parts[0][0] != "."]
    assert len(folders) >= 10
    distributions = (ROOT / "docs/reference/distributions.md").read_text(encoding="utf-8")
    assert [f"{f}" for f in folders if f"| `{f}/` |" not in page] == []
    assert [f"{f}" for f in folders if f"| `{f}/` |" not in distributions] == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    assert [each for each in contracts if f"`{each}`: " not in page] == []
    picture = (ROOT / "docs/pictures/architecture.svg").read_text(encoding="utf-8")
    written_in_it = " ".join(re.sub("<[^>]*>", " ", picture).split())
    assert ", ".join(reversed(contracts["core-layers"]["layers"])) in written_in_it


def test_the_glossary_is_sorted_and_each_word_is_where_it_says() -> None:
    """Words are sorted and unique; each path in the last column exists, and its file has the names there."""
    page = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8")
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


def test_pictures_of_commands_are_small_used_and_of_this_version() -> None:
    """Each picture has its command, is on a page, is small, and contains no path of a machine."""
    pages = "".join(page.read_text(encoding="utf-8") for page in load_reference().PAGES)
    commands = {info.name for info in PluginCatalog.scan(env={}).infos("command")}
    for name, picture in PICTURES.items():
        file = FOLDER / f"{name}.svg"
        svg = html.unescape(file.read_text(encoding="utf-8")).replace("\xa0", " ")
        assert f"pictures/{name}.svg)" in pages, name
        assert f"$ {picture.command}" in re.sub("<[^>]*>", "", svg), name
        assert picture.command.split()[1] in commands, name
        assert file.stat().st_size < 30_000, name
        assert not re.search(r"/(?:home|tmp|root|Users)/|url\(.?http", svg), name
    assert {path.stem for path in FOLDER.glob("*.svg")} == {*PICTURES, "step", "architecture"}
