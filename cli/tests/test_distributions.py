"""The installed distributions, and the help for a plugin that is not installed."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fake_site import installed
from graphpact.errors import ConfigError, UnknownPluginError
from graphpact.plugins import GROUPS, PluginCatalog
from graphpact_cli import distributions, main
from graphpact_cli.distributions import FIRST_PARTY, help_for

ROOT = Path(__file__).parents[2]


def _projects() -> dict[str, dict[str, Any]]:
    """Return the table ``project`` of each distribution of this repository by its name."""
    files = [p for w in ("*", "plugins/*", "integrations/*") for p in ROOT.glob(f"{w}/pyproject.toml")]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project for project in projects}


def test_version_names_every_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints each distribution of this repository, one a line, and each plugin by name."""
    assert main(["--version"]) == 0
    out, err = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert set(_projects()) <= set(lines)
    assert all(version[0].isdigit() for version in lines.values())
    assert err == ""
    for info in PluginCatalog.scan(env={}).infos():
        offers = lines[info.distribution].partition(": ")[2].split("; ")
        (names,) = [each.partition(" ")[2] for each in offers if each.startswith(f"{info.kind} ")]
        assert info.name in names.split(", ")


def test_other_distributions_are_named_if_they_have_plugins_or_our_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third party's distribution with a plugin is listed, one without is not; metadata may be broken."""
    with installed(tmp_path / "site", monkeypatch) as site:
        site.add("one", "", offers={"fake_one": "Runner"}, version="1.5")
        site.add("none", "", offers={"fake_none": "main"}, group="console_scripts", contract=None)
        torn = site.root / "graphpact_torn-1.0.dist-info"
        torn.mkdir()
        (torn / "METADATA").write_text("Metadata-Version: 2.1\n")
        kernels = site.root / "graphpact_more-2.0.dist-info"
        kernels.mkdir()
        (kernels / "METADATA").write_text("Metadata-Version: 2.1\nName: graphpact-more\nVersion: 2.0\n")
        found = distributions.installed_distributions()
    assert next(iter(found)) == "graphpact"
    assert found["fake-one"] == ("1.5", "runner fake_one")
    assert found["graphpact-more"] == ("2.0", "")
    assert "fake-none" not in found


def test_the_table_has_every_plugin_of_this_repository() -> None:
    """The plugins of each distribution in the table are those of its pyproject.toml."""
    offered: dict[str, dict[str, list[str]]] = {}
    for name, project in _projects().items():
        groups = project.get("entry-points", {})
        offered[name] = {kind: sorted(groups[group]) for group, kind in GROUPS.items() if group in groups}
    table = {name: {k: sorted(n) for k, n in kinds.items()} for name, kinds in FIRST_PARTY.items()}
    assert table == offered


def _unknown(kind: str, name: str) -> UnknownPluginError:
    with pytest.raises(UnknownPluginError) as refused:
        PluginCatalog({}).select(kind, name)  # type: ignore[call-overload]
    return refused.value


@pytest.mark.parametrize(
    ("kind", "name", "owner"),
    [(k, n, owner) for owner, kinds in FIRST_PARTY.items() for k, names in kinds.items() for n in names],
)
def test_a_plugin_that_is_not_installed_has_a_pip_command(
    kind: str, name: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help for each plugin of this repository that is not installed is the pip command."""
    monkeypatch.setattr(distributions, "_is_installed", lambda _: False)
    assert help_for(_unknown(kind, name)) == f"pip install {owner}"


def test_a_misspelt_plugin_that_is_not_installed_has_name_and_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The help for a misspelt name has the right name, and the pip command only if it is not installed."""
    error = _unknown("attention_backend", "flash_infer")
    assert help_for(error) == error.hint == "`graphpact plugins` lists what is installed"
    monkeypatch.setattr(distributions, "_is_installed", lambda _: False)
    assert help_for(error) == "did you mean 'flashinfer'? pip install graphpact-flashinfer"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("it is so", hint="do this"),
        UnknownPluginError("it is so", hint="do this"),
        UnknownPluginError("it is so", hint="do this", kind="sampler", name="greedy"),
        UnknownPluginError("it is so", hint="do this", kind="runner", name="zzzzzz"),
    ],
)
def test_the_help_for_another_error_is_its_hint(
    error: UnknownPluginError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error about anything else, or about a name like none of ours, keeps its hint."""
    monkeypatch.setattr(distributions, "_is_installed", lambda _: False)
    assert help_for(error) == "do this"


def test_a_command_that_is_not_installed_has_its_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line prints the help: without the engine, ``graphpact generate`` names its distribution."""
    monkeypatch.setattr(PluginCatalog, "scan", lambda **_: PluginCatalog({}))
    monkeypatch.setattr(distributions, "_is_installed", lambda _: False)
    assert main(["generate", "--anything"]) == 2
    assert "no command is called 'generate'" in (err := capsys.readouterr().err)
    assert err.endswith("\n  help: pip install graphpact-engine\n")
