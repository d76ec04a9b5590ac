"""Tests that the documentation agrees with the code."""

import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import graphpact
import graphpact.attention
from graphpact import ForwardBatch, GraphRunner, StepOutputs
from graphpact.attention import AttentionBackend
from graphpact.graphs import DeclaredMemory
from graphpact.lane import Lane
from graphpact.step import Attend
from graphpact_conformance.experiments.base import differences
from graphpact_conformance.problems import VOCAB, Config, configs_of, draw
from graphpact_conformance.reference import ReferenceBackend
from graphpact_conformance.rig import Rig
from graphpact_conformance.rules import RULES
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import RESERVED_VARIABLES, EngineConfig, config_keys
from graphpact_tape.tape import TapeDriver
from support import load_reference
from svg_kit import SCHEMES, Scheme, contrast, stylesheet, written

ROOT = Path(__file__).parents[1]


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
    rows = tomllib.loads((ROOT / "docs/graph_acts.toml").read_text(encoding="utf-8"))["act"]
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


@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
def test_the_example_of_the_graphs_page_runs(*, strict: bool) -> None:
    """The example of docs/graphs.md is legal on either tape, and gives the results of eager execution."""
    page = (ROOT / "docs/graphs.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {
        "DeclaredMemory": DeclaredMemory,
        "driver": TapeDriver(torch.device("cpu"), strict=strict),
        "x": torch.zeros(4),
        "staging": torch.zeros(4),
        "model": lambda x: x * 2 + 1,
        "batches": [torch.full((4,), float(n)) for n in range(3)],
        "answers": [],
    }
    exec(example, names)  # noqa: S102  our own page
    assert [a.tolist() for a in names["answers"]] == [[2.0 * n + 1] * 4 for n in range(3)]


PICTURES = sorted(ROOT.glob("docs/*.svg"))
COLUMN = 830  # pixels: where a README is shown


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_can_be_read_on_a_light_and_on_a_dark_page(picture: Path, scheme: Scheme) -> None:
    """Every text has a contrast of 4.5 to what is below it, stays inside of it, and has 10 pixels.

    The palette is in the picture's own style, and the size is that in a README's column.
    """
    svg = picture.read_text(encoding="utf-8")
    (css,) = re.findall(r"<style>(.*?)</style>", svg, flags=re.DOTALL)
    assert stylesheet(css, "light") != stylesheet(css, "dark")
    assert stylesheet(css, scheme)[":root"]["color-scheme"] == "light dark"
    texts = list(written(svg, scheme))
    assert len(texts) > 20
    width = float(re.findall(r'viewBox="0 0 (\d+) ', svg)[0])
    for text in texts:
        assert contrast(text.colour, text.below.colour) >= 4.5, text
        assert text.below.left <= text.left, text
        assert text.right <= text.below.right, text
        assert text.below.top <= text.top, text
        assert text.bottom <= text.below.bottom, text
        assert text.size * min(1, COLUMN / width) >= 10, text
    for one, other in itertools.combinations(texts, 2):
        apart = one.right <= other.left or other.right <= one.left
        assert apart or one.bottom <= other.top + 3 or other.bottom <= one.top + 3, (one, other)


def test_the_picture_of_the_step_has_its_calls_and_both_ways_to_fill_metadata() -> None:
    """docs/step.svg names every call of the step in order, and the metadata of the hook and of the graph."""
    svg = (ROOT / "docs/step.svg").read_text(encoding="utf-8")
    drawn = " ".join(text.text for text in written(svg, "light")).replace(" _replay", "_replay")
    calls = re.findall(
        r"self\._?(fit|populate|prepare_replay|init_metadata_replay)\(|(pact\.check|graph\.replay)\(",
        inspect.getsource(Lane.prepare) + inspect.getsource(Lane.launch),
    )
    places = [drawn.index("".join(call)) for call in calls]
    assert len(calls) == 6
    assert places == sorted(places)
    for name in ("fill_is_device_only", "fill_metadata", "plan_metadata", "init_metadata_capture"):
        assert hasattr(AttentionBackend, name)
        assert name in drawn
    assert "metadata_in_graph" in inspect.signature(Lane).parameters
    assert "metadata_in_graph" in drawn


def test_the_example_of_the_generation_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/generation.md runs on the shipped model with a chat template."""
    page = (ROOT / "docs/generation.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    model = shutil.copytree(ROOT / "examples/models/tiny-llama", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }} ")
    config = EngineConfig.load(None, env={}, overrides=[f'model.path="{model}"'])
    with Engine(config) as engine:
        names: dict[str, Any] = {"engine": engine, "SamplingParams": SamplingParams}
        exec(example, names)  # noqa: S102  our own page
        assert not engine.scheduler.has_work
    assert names["request"].output_token_ids
    assert len(capsys.readouterr().out) > 50


def test_links_in_the_texts_lead_somewhere() -> None:
    """Every relative link of the README and the docs leads to an existing file."""
    for text in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text.read_text(encoding="utf-8")):
            assert (text.parent / target).exists(), f"{text.name}: {target}"


def test_the_keys_that_the_readme_shows_exist() -> None:
    """The README's example configuration has only existing keys, with valid values."""
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        EngineConfig.model_validate(tomllib.loads(block))


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.stem)
def test_included_parts_are_what_the_code_would_write(page: Path) -> None:
    """The included parts of a page are up to date: `python docs/reference.py` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert text == load_reference().included(text)
    assert len(re.findall("<!-- include ", text)) == text.count("<!-- /include -->")


def test_the_architecture_page_has_the_step_every_distribution_and_every_contract() -> None:
    """The page shows the lane's own code, names each distribution's folder, and includes each contract."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for method in (Lane.prepare, Lane.launch):
        assert textwrap.dedent(inspect.getsource(method)).strip() in page
    folders = [f for f in ROOT.glob("**/pyproject.toml") if "examples" not in f.parts]
    folders = [f.parent.relative_to(ROOT) for f in folders if f.parent != ROOT]
    assert len(folders) >= 10
    assert [f"{f}" for f in folders if f"| `{f}/` |" not in page] == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    assert [each for each in contracts if f"`{each}`: " not in page] == []
    picture = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert ", ".join(reversed(contracts["core-layers"]["layers"])) in picture


def test_the_glossary_is_sorted_and_each_word_is_where_it_says() -> None:
    """Words are sorted and unique; each path in the last column exists, and its file has the names there."""
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][
        1:
    ]
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
    begins = "core|kernels|plugins|engine|conformance|tests|examples|docs"
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
    for page in pages:
        for path in re.findall(rf"`((?:{begins})/[\w./*-]*)`", page.read_text(encoding="utf-8")):
            pattern = path.rstrip("/").replace("NAME", "*")
            assert any(ROOT.glob(pattern)), f"{page.relative_to(ROOT)}: {path}"


class Drafts(Rig):
    """The suite's rig of a draft decode, with a model that runs one step in each call."""

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return as logits some columns of the first layer's attention output."""
        layer = self.layers[0]
        q, k, v = self._project(0, batch.input_ids, batch.positions)
        columns = attend(q, k, v, layer, metadata).flatten(1)
        return StepOutputs(logits=(columns[:, :VOCAB], "tokens"))


def _shown(name: str) -> type[GraphRunner]:
    """Return the runner called ``name`` that docs/plugins.md shows."""
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"```python\n(class {name}\(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {**vars(graphpact), **vars(graphpact.attention)}
    names |= {"torch": torch, "replace": dataclasses.replace}
    exec(code, names)  # noqa: S102  our own page
    return cast("type[GraphRunner]", names[name])


def _lane_of(mode: str) -> Config:
    name = f"{mode}-page16-gqa-float32"
    return next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == name)


def test_the_runner_with_attention_outside_of_the_graph_runs() -> None:
    """The runner of docs/plugins.md records one segment more than there are layers, and equals the oracle."""
    config = _lane_of("decode")
    rig = Rig(config, backend=ReferenceBackend, runner=_shown("AttentionOutside"), pact="always")
    (steps,) = draw(config, 1, 0)
    for problem in steps:
        step = rig.step(problem)
        assert step.error is None
        assert not differences(rig, step, rig.answer(problem))
    assert {c.graph.num_segments for c in rig.lane.captured.values()} == {len(rig.layers) + 1}
    assert rig.lane.stats.replays


def test_the_runner_with_a_forward_pass_for_each_draft_step_runs() -> None:
    """The runner of docs/plugins.md replays to the tokens that an eager run drafts."""
    config = _lane_of("draft_decode")
    rig = Drafts(config, backend=ReferenceBackend, runner=_shown("DraftLoop"), pact="always")
    (steps,) = draw(config, 1, 0)
    for problem in steps:
        rig.load(problem)
        batch = rig.batch_of(problem)
        drafted = rig.lane.run(batch).clone()
        assert drafted.axes == {"draft_tokens": "tokens"}
        assert drafted["draft_tokens"].shape == (batch.num_tokens, batch.num_draft_steps)
        assert drafted["draft_tokens"].equal(rig.lane.run_eager(batch)["draft_tokens"])
    assert rig.lane.stats.replays == len(steps)
