"""``graphpact plugins``: everything is listed, and what is broken breaks nothing."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpact.cli import main
from graphpact.cli.plugins import KindOption
from graphpact.plugins import KINDS

BROKEN = """
    print("[noise]")
    import a_module_that_nobody_has
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return what installs a distribution ``cli-fake`` with one runner, as its metadata has it."""
    monkeypatch.delenv("GRAPHPACT_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(source: str, contract: str = "1") -> None:
        (tmp_path / "cli_fake.py").write_text(textwrap.dedent(source))
        info = tmp_path / "cli_fake-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cli-fake\nVersion: 2.5\n")
        (info / "RECORD").write_text("")
        (info / "entry_points.txt").write_text(
            f"[graphpact.contract]\n{contract} = x:y\n"
            "[graphpact.runners]\ncli_fake_runner = cli_fake:Runner\n"
        )

    yield add
    sys.modules.pop("cli_fake", None)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Return what ``plugins --json`` says, by name."""
    assert main(["plugins", "--json", *arguments]) == 0
    return {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)}


def test_first_party_plugins_are_listed_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` gives kind, name, origin, status and reason of each plugin, and nothing on stderr."""
    assert main(["plugins", "--json"]) == 0
    out, err = capsys.readouterr()
    plugins = {(p["kind"], p["name"]): p for p in json.loads(out)}
    assert err == ""
    assert {
        ("attention_backend", "flashinfer"),
        ("runner", "cuda_graph"),
        ("runner", "eager"),
        ("graph_driver", "tape"),
        ("graph_driver", "cuda"),
    } <= set(plugins)
    ours = plugins["attention_backend", "flashinfer"]
    assert ours["distribution"] == "graphpact-flashinfer"
    assert ours["version"][0].isdigit()
    assert (ours["status"], ours["reason"]) == ("loaded", None)
    assert plugins["runner", "cuda_graph"]["modes"] == ["decode"]


def test_backends_show_what_they_declare(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend's entry has its declared capabilities; what knows none has null."""
    plugins = listed(capsys)
    declared = plugins["flashinfer"]["capabilities"]
    assert declared["modes"] == ["decode", "extend"]
    assert declared["graph_support"] == "uniform_decode"
    assert "float32" in declared["dtypes"]
    assert declared["devices"] == ["cpu", "cuda"]
    assert declared["page_sizes"] is None
    assert declared["features"] == ["sliding_window", "softcap", "sinks"]
    assert plugins["tape"]["capabilities"] is None


def test_people_read_the_same_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--json`` the list is a table on stdout, capabilities included, one row unbroken."""
    assert main(["plugins"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    assert ["runner", "cuda_graph", "graphpact-cuda-graph"] in [row[:3] for row in rows]
    assert ["graph", "support", "uniform_decode"] in rows
    assert "sliding_window, softcap, sinks" in out


def test_only_one_kind_is_listed_where_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``--kind`` leaves the other kinds out."""
    assert {p["kind"] for p in listed(capsys, "--kind", "graph_driver").values()} == {
        "graph_driver"
    }


def test_every_kind_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``--kind`` takes exactly the kinds that there are, and lists them where it is given another."""
    assert tuple(KindOption) == KINDS
    assert main(["plugins", "--kind", "driver"]) == 2
    err = capsys.readouterr().err
    assert all(kind in err for kind in KINDS)


def test_a_broken_plugin_is_a_row_with_its_reason(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin that cannot be imported is listed as rejected, says why, and the status is 0."""
    install(BROKEN)
    plugins = listed(capsys)
    assert plugins["cli_fake_runner"]["status"] == "rejected"
    assert "a_module_that_nobody_has" in plugins["cli_fake_runner"]["reason"]
    assert plugins["cli_fake_runner"]["version"] == "2.5"
    assert plugins["cuda_graph"]["status"] == "loaded"


def test_what_a_plugin_prints_is_not_our_data(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Output of a plugin that is being imported goes to stderr, so that stdout stays JSON."""
    install(BROKEN)
    assert main(["plugins", "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err == "[noise]\n"


def test_another_contract_is_named_to_people(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table names both contract versions of a plugin that was written for another one."""
    install("Runner = None", contract="7")
    assert main(["plugins", "--kind", "runner"]) == 0
    (row,) = [r for r in capsys.readouterr().out.splitlines() if "cli_fake_runner" in r]
    assert "rejected" in row
    assert "cli-fake 2.5" in row
    assert "contract version 7" in row
