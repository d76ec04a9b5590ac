"""What commands get of SGLang without importing it: whether it can run, and which process runs it."""

import importlib.util

import pytest

from graphpact import engines
from graphpact.plugins import Loaded, PluginInfo
from graphpact_cli.survey import describe_plugin
from graphpact_sglang.offer import SglangOffer


@pytest.mark.parametrize(
    ("installed", "reason"), [("0.5.23", None), ("0.6.0", "SGLang 0.6.0 is none of 0.5.19, 0.5.21, 0.5.23")]
)
def test_the_list_of_plugins_says_whether_it_can_run(
    monkeypatch: pytest.MonkeyPatch, installed: str, reason: str | None
) -> None:
    """`graphpact plugins` shows an engine with the reason why it cannot run here, if it cannot."""
    monkeypatch.setattr(engines, "version", lambda name: {"sglang": installed}[name])
    info = PluginInfo(
        "engine", "sglang", "graphpact-sglang", "0.1.0", "graphpact_sglang.offer:SglangOffer", "1"
    )
    about = describe_plugin(Loaded(info, SglangOffer))
    assert about["unavailable"] == {"SGLang": reason}


def test_its_job_is_a_module_of_the_integration() -> None:
    """The module that a run's process starts is there; it is not imported here, because it needs SGLang."""
    assert importlib.util.find_spec(SglangOffer.job_module) is not None
