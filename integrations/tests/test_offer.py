"""What commands get of an engine without importing it: whether it can run, and which process runs it."""

import importlib.util

import pytest

from graphpact.engines import ProcessOffer
from graphpact.plugins import Loaded, PluginInfo
from graphpact_cli.survey import describe_plugin
from graphpact_sglang.runs.offer import SglangOffer
from graphpact_vllm.runs.offer import VllmOffer

VERSIONS = {SglangOffer: "graphpact.engines.offer.version", VllmOffer: "graphpact_vllm.version"}
"""The function that each offer asks for the installed release."""


@pytest.mark.parametrize(
    ("offer", "installed", "reason"),
    [
        (SglangOffer, "0.5.23", None),
        (SglangOffer, "0.6.0", "SGLang 0.6.0 is none of 0.5.19, 0.5.21, 0.5.23"),
        (VllmOffer, "0.32.0+cpu", None),
        (VllmOffer, "0.33.0", "vLLM 0.33.0 is none of 0.32.0"),
    ],
)
def test_the_list_of_plugins_says_whether_it_can_run(
    monkeypatch: pytest.MonkeyPatch, offer: type[ProcessOffer], installed: str, reason: str | None
) -> None:
    """`graphpact plugins` shows an engine with the reason why it cannot run here, if it cannot."""
    monkeypatch.setattr(VERSIONS[offer], lambda name: {offer.distribution: installed}[name])
    info = PluginInfo("engine", offer.distribution, "graphpact-acme", "0.1.0", "graphpact_acme:Offer", "1")
    about = describe_plugin(Loaded(info, offer))
    assert about["unavailable"] == {offer.name: reason}


@pytest.mark.parametrize("offer", VERSIONS)
def test_its_job_is_a_module_of_the_integration(offer: type[ProcessOffer]) -> None:
    """The module that a run's process starts is there; it is not imported, since it needs the engine."""
    assert importlib.util.find_spec(offer.job_module) is not None
