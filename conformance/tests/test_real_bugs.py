"""The stories of the rules: one complete story per rule, each about a public thread."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from graphpact_conformance.real_bugs import REAL_BUGS, RealBug
from graphpact_conformance.rules import RULES

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([^`]+)`")
SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
of_every_rule = pytest.mark.parametrize("story", REAL_BUGS.values(), ids=REAL_BUGS.keys())


def test_every_rule_has_a_story_and_no_other_has() -> None:
    """Every rule has one story, in the order of the rules, and each is about a different thread."""
    assert list(REAL_BUGS) == list(RULES)
    assert len({story.thread for story in REAL_BUGS.values()}) == len(REAL_BUGS)


@of_every_rule
def test_a_url_is_that_of_its_thread(story: RealBug) -> None:
    """The URL has the repository and the number of the story's thread, on GitHub."""
    repository, number = story.thread.split("#")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    assert number.isdigit()
    pattern = rf"https://github\.com/{re.escape(repository)}/(pull|issues)/{number}"
    assert re.fullmatch(pattern, story.url)


def test_the_seeds_tell_their_rules() -> None:
    """The five pull requests that the contract is based on are the stories of their rules."""
    seeds = {"GP03": 26292, "GP05": 21452, "GP07": 21987, "GP10": 26742, "GP11": 22404}
    for rule, number in seeds.items():
        assert REAL_BUGS[rule].url == f"https://github.com/sgl-project/sglang/pull/{number}"


@of_every_rule
def test_a_story_is_printed_in_full(story: RealBug) -> None:
    """Every part of a story is one paragraph of whole sentences; the story itself has three to six."""
    for part in fields(story):
        text = getattr(story, part.name)
        assert text
        assert text == " ".join(text.split())
    assert 3 <= len(SENTENCE_END.findall(story.story)) <= 6
    for text in (story.story, story.detection, story.fix):
        assert text.endswith(".")
        assert text.count("`") % 2 == 0
        assert len(SENTENCE_END.findall(text)) >= 2
    assert "finding" in story.detection  # it says what the finding names


@of_every_rule
def test_what_is_to_be_changed_exists(story: RealBug) -> None:
    """Every name in code quotes of a story's fix is a name in the code of the core or of a plugin."""
    sources = [*ROOT.glob("core/graphpact/**/*.py"), *ROOT.glob("plugins/*/graphpact_*/*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.name != "stories.py")
    words = set(re.findall(r"\w+", code))
    shown = CODE.findall(story.fix)
    assert shown
    names = {name for span in shown for name in re.findall(r"[A-Za-z_]\w*", span)}
    assert names - words <= {"acme"}  # a made-up plugin


def test_the_page_tells_every_rule_and_its_thread() -> None:
    """docs/reference/rules.md has one row per rule, with the requirement and the thread of its story."""
    page = (ROOT / "docs/reference/rules.md").read_text(encoding="utf-8")
    for rule in RULES.values():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {rule} |"))
        assert f"| {rule.requirement} |" in row
        assert REAL_BUGS[rule.id].url in row
