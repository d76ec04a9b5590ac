"""Tests that a plugin of version 1 runs on a core of version 2, and that a later plugin is refused in words.

The plugin is a distribution kept as sources, plugin_v1; it is built and unpacked as pip would. The core of
version 2 is a copy with additions of every kind.

Does not: test version 1 on version 1; every other test of plugins does.
"""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fake_site import Site
from rigs.command import Ended, command
from versions.raised import DEPRECATIONS, OLD_ARGUMENT, OLD_HOOK, VERSION_2, edited

ROOT = Path(__file__).parents[2]
V1 = {
    "v1_attention": "attention_backend",
    "v1_decode": "runner",
    "v1_driver": "graph_driver",
    "v1_log": "observer",
    "v1_repeat": "speculation",
}
PROMPTS = ("Return the number of", "Raise an error if the")
NAMED = (
    *("--set", "engine.attention_backend=v1_attention", "--set", "lanes.decode.runner=v1_decode"),
    *("--set", "lanes.decode.graph_driver=v1_driver", "--set", "engine.observers=['v1_log']"),
)
V2 = """
import os
from graphpact import hookimpl
from graphpact_cuda_graph import CudaGraphRunner

class Log:
    @hookimpl(wrapper=True)
    def populate(self, lane_name):
        write(f"populate in {lane_name}")
        return (yield)

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, live):
        write(f"replay of {live.batch_size} live")
        return (yield)

class Runner(CudaGraphRunner):
    def populate(self, registry, batch, shape, lane_name):
        write(f"filled in {lane_name}")
        super().populate(registry, batch, shape)

    def after_capture(self, shape):
        write(f"captured {shape.batch_size}")

def write(line):
    with open(os.environ["PLUGIN_V1_LOG"], "a") as file:
        file.write(line + "\\n")
"""
"""A plugin of version 2, which uses what it added."""


@pytest.fixture(scope="module")
def plugin_v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the distribution of version 1 is installed."""
    built = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", f"{built}"]
    subprocess.run(build, cwd=Path(__file__).parent / "plugin_v1", check=True, capture_output=True)
    (wheel,) = built.iterdir()
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)  # safe, since it is built from our own source
    return site


@pytest.fixture(scope="module")
def core_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a core and a suite of version 2."""
    return edited(tmp_path_factory.mktemp("core"), VERSION_2)


def generate(
    *options: str,
    folders: tuple[Path, ...] = (),
    log: Path | None = None,
    warnings: str = "",
    config: Path = ROOT / "examples/demo.toml",
) -> Ended:
    """Write twelve tokens after each prompt, greedily."""
    words = ("generate", "--config", config, "--json", "-q", "-n", "12", *options, *PROMPTS)
    variables = {"PLUGIN_V1_LOG": f"{log}", "PYTHONWARNINGS": warnings}
    return command(*words, folders=folders, environment=variables)


def texts(ended: Ended) -> list[str]:
    """Return the texts that a command wrote."""
    assert ended.status == 0, ended.err
    return [json.loads(line)["text"] for line in ended.out.splitlines()]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the texts of this core with first-party plugins."""
    return texts(generate())


@pytest.mark.sweep
def test_plugins_of_version_1_load_on_version_2(plugin_v1: Path, core_2: Path) -> None:
    """Every plugin of the old distribution, and every first-party one, loads on the newer core."""
    ended = command("plugins", "--json", folders=(core_2, plugin_v1))
    found = {each["name"]: each for each in json.loads(ended.out)}
    assert {name: found[name]["kind"] for name in V1} == V1
    assert {name: each["reason"] for name, each in found.items() if each["reason"]} == {}
    assert {found[name]["contract"] for name in V1} == {"1"}
    script = "import graphpact; print(graphpact.__file__, graphpact.CONTRACT_VERSION)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{core_2}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f"{core_2}/graphpact/__init__.py", "2"]


def test_plugins_of_both_versions_decode_in_one_engine(
    plugin_v1: Path, core_2: Path, expected: list[str], tmp_path: Path
) -> None:
    """Plugins of version 1 write the same tokens, beside an observer of version 2.

    Each observer gets the arguments that it names: those of version 1, and those that version 2 added.
    """
    site = Site(tmp_path / "site")
    site.add("v2", V2, offers={"v2_log": "Log"}, group="graphpact.observers", contract="2")
    log = tmp_path / "log"
    both = ("--set", "engine.observers=['v1_log', 'v2_log']", "--verify")
    ended = generate(*NAMED, *both, folders=(core_2, plugin_v1, site.root), log=log)
    assert texts(ended) == expected
    assert "Warning" not in ended.err
    lines = log.read_text(encoding="utf-8").splitlines()
    assert {"run_step extend 2", "run_step decode 2", "populate 2", "populate in decode"} <= {*lines}
    assert lines.count("init_metadata_replay V1Metadata") == lines.count("replay of 2 live") > 5


@pytest.mark.sweep
def test_what_version_2_added_is_optional_and_used(core_2: Path, expected: list[str], tmp_path: Path) -> None:
    """A runner of version 2 gets the new argument and the new call; one without them decodes the same."""
    site = Site(tmp_path / "site")
    site.add("v2", V2, offers={"v2_decode": "Runner"}, contract="2")
    log = tmp_path / "log"
    asked = ("--set", "lanes.decode.runner=v2_decode")
    assert texts(generate(*asked, folders=(core_2, site.root), log=log)) == expected
    captured = {f"captured {size}" for size in (1, 2, 4, 8)}
    assert captured | {"filled in decode"} == {*log.read_text(encoding="utf-8").splitlines()}
    assert texts(generate(folders=(core_2,))) == expected


@pytest.mark.sweep
def test_an_algorithm_of_version_1_drafts_on_version_2(
    plugin_v1: Path, core_2: Path, expected: list[str], tmp_path: Path
) -> None:
    """The old speculation algorithm, selected by name, gives the tokens of plain decoding."""
    config = tmp_path / "engine.toml"
    config.write_text(
        f"[model]\npath = {f'{ROOT}/examples/models/tiny-llama'!r}\n"
        "[engine]\nmax_num_seqs = 8\nmax_model_len = 512\n"
        "[speculative]\nalgorithm = 'v1_repeat'\nnum_steps = 2\n",
        encoding="utf-8",
    )
    ended = generate(config=config, folders=(core_2, plugin_v1))
    assert texts(ended) == expected


@pytest.mark.sweep
def test_plugins_of_version_1_are_conformant_on_version_2(
    plugin_v1: Path, core_2: Path, tmp_path: Path
) -> None:
    """The suite of version 2 finds the old backend, runner and driver conformant.

    It does not hold them to a rule that version 2 brought.
    """
    names = ("v1_attention", "v1_decode", "driver:v1_driver")
    ended = command("check", *names, "--quick", "--report", tmp_path, folders=(core_2, plugin_v1))
    assert ended.status == 0, ended.out
    report = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    outcomes: dict[str, set[str]] = {}
    for plugin in report["plugins"]:
        assert plugin["contract"] == "1"
        for result in plugin["results"]:
            outcomes.setdefault(result["rule"], set()).add(result["outcome"])
    assert outcomes["GP16"] == {"unsupported"}
    assert "pass" in outcomes["GP15"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("plugins",), 0),
        (("check", "v1_attention", "--quick"), 2),
        (("check", "driver:v1_driver", "--quick"), 2),
        (("generate", "--config", ROOT / "examples/demo.toml", *NAMED[:2], "x"), 2),
        (("generate", "--config", ROOT / "examples/demo.toml", *NAMED[6:], "x"), 2),
    ],
    ids=["plugins", "check a backend", "check a driver", "generate", "generate with an observer"],
)
def test_a_plugin_of_a_later_version_is_refused_unimported(
    words: tuple[str | Path, ...], status: int, plugin_v1: Path, tmp_path: Path
) -> None:
    """The same distribution, written for version 2, is refused on this core with the reason, unimported."""
    site = tmp_path / "site"
    (site / "plugin_v1").mkdir(parents=True)
    imported = tmp_path / "imported"
    (site / "plugin_v1/__init__.py").write_text(f"open({f'{imported}'!r}, 'w')\n", encoding="utf-8")
    (info,) = plugin_v1.glob("*.dist-info")
    (site / info.name).mkdir()
    for file in info.iterdir():
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            (site / info.name / file.name).write_text(re.sub(r"(?m)^1 = ", "2 = ", text), encoding="utf-8")
    ended = command(*words, folders=(site,), environment={"COLUMNS": "200"})
    assert ended.status == status
    said = " ".join((ended.out + ended.err).split())
    assert "written for contract version 2; this graphpact has version 1" in said
    assert not imported.exists()


# -- deprecation ---------------------------------------------------------------------------------

IMPLEMENTS = """
from graphpact import hookimpl
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend

class Fills(CudaGraphRunner):
    def populate(self, registry, batch, shape):
        super().populate(registry, batch, shape)

class Inherits(CudaGraphRunner):
    pass

class Takes(FlashInferBackend):
    def init_metadata_replay(self, view, shape, captured):
        return super().init_metadata_replay(view, shape, captured)

class Watches:
    @hookimpl(wrapper=True)
    def init_metadata_replay(self, view):
        return (yield)
"""


KEYS = {
    "runner": "lanes.decode.runner=fake_old",
    "attention_backend": "engine.attention_backend=fake_old",
    "observer": "engine.observers=['fake_old']",
}


@pytest.fixture(scope="module")
def deprecating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a core that deprecates a hook and an argument."""
    return edited(tmp_path_factory.mktemp("core"), DEPRECATIONS)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("runner", "Fills", OLD_HOOK),
        ("runner", "Inherits", None),
        ("attention_backend", "Takes", OLD_ARGUMENT),
        ("observer", "Watches", None),
    ],
    ids=lambda value: value if value in ("Fills", "Inherits", "Takes", "Watches") else "",
)
def test_a_deprecated_hook_or_argument_warns(
    kind: str, name: str, text: str | None, deprecating: Path, expected: list[str], tmp_path: Path
) -> None:
    """A plugin that implements what is deprecated decodes, and warns once with its line; others are silent.

    The base classes implement both; a plugin that inherits them is silent, too.
    """
    site = Site(tmp_path / "site")
    module = site.add("old", IMPLEMENTS, offers={"fake_old": name}, group=f"graphpact.{kind}s")
    ended = generate("--set", KEYS[kind], folders=(deprecating, site.root), warnings="default::FutureWarning")
    assert texts(ended) == expected
    warned = [line for line in ended.err.splitlines() if "Warning" in line]
    if text is None:
        assert warned == []
    else:
        (line,) = warned
        assert re.fullmatch(rf".*/{module}\.py:\d+: FutureWarning: {re.escape(text)}", line)


@pytest.mark.sweep
def test_the_suite_tells_the_author_of_a_deprecated_hook(deprecating: Path, tmp_path: Path) -> None:
    """``check`` finds the runner conformant, and shows the warning as a SHOULD with its line."""
    site = Site(tmp_path / "site")
    module = site.add("old", IMPLEMENTS, offers={"fake_old": "Fills"})
    ended = command(
        "check",
        "fake_old",
        "--quick",
        "--only",
        "GP01",
        "--report",
        tmp_path / "out",
        folders=(deprecating, site.root),
    )
    assert ended.status == 0, ended.out
    (plugin,) = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["plugins"]
    failed = [result for result in plugin["results"] if result["outcome"] == "fail"]
    assert [result["level"] for result in failed] == ["SHOULD"]
    (finding,) = failed[0]["findings"]
    assert OLD_HOOK in finding["actual"]
    assert f"{module}.py:" in finding["field"]
