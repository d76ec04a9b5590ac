"""Tests of ``graphpact plugins``: all plugins are listed, and a broken one does not break the list."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import CONTRACT_VERSION
from graphpact.attention import KernelProvider
from graphpact.plugins import KINDS
from graphpact_cli import main
from graphpact_flashinfer import FlashInferBackend
from support import survey_here

BROKEN = """
    print("[noise]")
    import a_module_that_nobody_has
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Yield a function that installs a distribution ``cli-fake`` with the metadata of one runner."""
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
    """Return the entries of ``plugins --json`` by name."""
    assert main(["plugins", "--json", *arguments]) == 0
    return {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)}


@pytest.mark.sweep
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
    assert plugins["runner", "cuda_graph"]["modes"] == ["decode", "target_verify"]
    lanes = plugins["speculation", "frozen_kv_mtp"]["lanes"]
    assert lanes == {"draft": "frozen_kv_mtp", "verify": "cuda_graph"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import plugins in this process."""
    survey_here(monkeypatch)


@pytest.mark.usefixtures("here")
def test_backends_show_what_they_declare(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend's entry has its declared capabilities; a plugin without capabilities has null."""
    can = FlashInferBackend.capabilities
    plugins = listed(capsys)
    declared = plugins["flashinfer"]["capabilities"]
    assert declared["modes"] == sorted(mode.value for mode in can.modes)
    assert declared["graph_support"] == can.graph_support.value
    assert "float32" in declared["dtypes"]
    assert declared["devices"] == sorted(can.devices)
    assert declared["page_sizes"] == (can.page_sizes and sorted(can.page_sizes))
    assert plugins["tape"]["capabilities"] is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "sinks", "trees"])
def test_each_feature_of_a_backend_is_listed_where_it_is_declared(
    feature: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows, caps, sinks and trees are each among a backend's features only if they are declared."""
    for has in (True, False):
        can = replace(FlashInferBackend.capabilities, **{feature: has})
        monkeypatch.setattr(FlashInferBackend, "capabilities", can)
        assert (feature in listed(capsys)["flashinfer"]["capabilities"]["features"]) is has


class Native(KernelProvider):
    """A provider whose `unavailable` prints and raises."""

    name = "native"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Raise the error of a broken library."""
        print("[noise]")  # noqa: T201  what a plugin does
        raise OSError(f"libacme.so\nis not for {device}")


class Portable(KernelProvider):
    """A provider of kernels for a CPU and the second GPU."""

    name = "portable"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason against the first GPU, and None for other devices."""
        return "taken" if device == torch.device("cuda:0") else None


@pytest.mark.usefixtures("here")
def test_kernel_providers_are_shown_by_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each provider has None or a reason per device, as data and as a row; an exception is a reason."""
    monkeypatch.setattr(FlashInferBackend, "providers", (Native, Portable))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert listed(capsys, "-k", "attention_backend")["flashinfer"]["providers"] == {
        "native": {
            device: f"OSError: libacme.so is not for {device}" for device in ("cpu", "cuda:0", "cuda:1")
        },
        "portable": {"cpu": None, "cuda:0": "taken", "cuda:1": None},
    }
    assert main(["plugins", "-k", "attention_backend"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "portable kernels cpu: available; cuda:0: taken; cuda:1: available" in rows
    assert any(row.startswith("native kernels cpu: OSError: libacme.so is not for cpu;") for row in rows)
    monkeypatch.setattr(FlashInferBackend, "providers", ())
    plugins = listed(capsys)
    assert plugins["flashinfer"]["providers"] is None
    assert plugins["tape"]["providers"] is None


def test_listing_plugins_imports_nothing_heavy() -> None:
    """``plugins`` imports neither transformers nor a vendor's kernel library, and stderr stays empty."""
    program = (
        "import sys; from graphpact_cli import main; main(['plugins', '--json'])\n"
        "heavy = {'transformers', 'flashinfer', 'flash_attn', 'flash_attn_interface', 'sgl_kernel'}\n"
        "sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("here")
def test_people_read_the_same_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--json`` the list is a table on stdout, with capabilities and rows that are not wrapped."""
    assert main(["plugins"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    assert ["runner", "cuda_graph", "graphpact-cuda-graph"] in [row[:3] for row in rows]
    support = FlashInferBackend.capabilities.graph_support
    assert ["graph", "support", support.value] in rows
    assert "sliding_window, softcap, sinks" in out


@pytest.mark.usefixtures("here")
def test_only_one_kind_is_listed_where_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``--kind`` leaves the other kinds out."""
    assert {p["kind"] for p in listed(capsys, "--kind", "graph_driver").values()} == {"graph_driver"}


def test_every_kind_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """For an unknown ``--kind`` the error lists the kinds of plugins."""
    assert main(["plugins", "--kind", "driver"]) == 2
    err = capsys.readouterr().err
    assert all(kind in err for kind in KINDS)


@pytest.mark.sweep
def test_a_broken_plugin_is_a_row_with_its_reason(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin that cannot be imported is listed as rejected with the reason, and the status is 0."""
    install(BROKEN)
    plugins = listed(capsys)
    assert plugins["cli_fake_runner"]["status"] == "rejected"
    assert "a_module_that_nobody_has" in plugins["cli_fake_runner"]["reason"]
    assert plugins["cli_fake_runner"]["version"] == "2.5"
    assert plugins["cuda_graph"]["status"] == "loaded"


@pytest.mark.sweep
def test_what_a_plugin_prints_is_not_our_data(
    install: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Output of a plugin that is being imported goes to stderr, so that stdout stays JSON."""
    install(BROKEN)
    assert main(["plugins", "--json"]) == 0
    out, err = capfd.readouterr()
    json.loads(out)
    assert err == "[noise]\n"


@pytest.mark.usefixtures("here")
def test_another_contract_is_named_to_people(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table names the contract version of a plugin of another contract, and the version of graphpact."""
    install("Runner = None", contract="7")
    assert main(["plugins", "--kind", "runner"]) == 0
    (row,) = [r for r in capsys.readouterr().out.splitlines() if "cli_fake_runner" in r]
    assert "rejected" in row
    assert "cli-fake 2.5" in row
    assert f"contract version 7; this graphpact has version {CONTRACT_VERSION}" in row


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("stranger", [object, "portable", type("Nameless", (KernelProvider,), {})])
def test_what_is_no_provider_keeps_a_backend_from_loading(
    stranger: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend with an invalid provider is listed as rejected, and others as loaded."""
    monkeypatch.setattr(FlashInferBackend, "providers", (stranger,))
    found = listed(capsys, "-k", "attention_backend")
    assert found["flashinfer"]["status"] == "rejected"
    assert "FlashInferBackend.providers has" in found["flashinfer"]["reason"]
    assert (found["trtllm_mla"]["status"], found["trtllm_mla"]["reason"]) == ("loaded", None)
