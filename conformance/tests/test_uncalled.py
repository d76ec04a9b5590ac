"""Methods that a plugin overrides and no lane of a run called: the report lists them as not checked."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from graphpact import ForwardBatch
from graphpact.attention import AttentionBackend
from graphpact.plugins import PluginCatalog
from graphpact.runners import DecodeRunner
from graphpact.shapes import EagerReason
from graphpact_conformance import suite
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.uncalled import uncalled_methods, watched_calls
from graphpact_conformance.merge import merged
from graphpact_conformance.report.digest import unchecked
from graphpact_conformance.results import PluginResults, Result
from graphpact_conformance.targets import Options, Target
from support import ListedCatalog

QUICK = Options(size="quick", shrink=False, only=frozenset({"GP14"}), lanes=("decode-*",))


class Refreshes(ReferenceBackend):
    """Has a method for replays, which no lane calls, because its hook for replays does not call it."""

    __module__ = __name__

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata."""
        self.fill_metadata(view, metadata)

    def init_metadata_replay(self, view: ForwardBatch, shape: Any, captured: Any) -> Any:
        """Plan, and leave the rest to the graph."""
        self._run(None, view, captured)
        return captured


class Plans(DecodeRunner):
    """A runner that says on which devices it captures nothing."""

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return None: it captures on every device."""
        return None


def examined(
    monkeypatch: pytest.MonkeyPatch, cls: type[AttentionBackend], part: tuple[int, int] = (0, 1)
) -> PluginResults:
    """Return the results of a backend in one part of its lanes."""
    monkeypatch.setattr(PluginCatalog, "scan", lambda: ListedCatalog(mine=cls))
    results: list[Result] = []
    target = Target("attention_backend", "mine")
    plugin = suite.examine(target, QUICK, Mock(found=results.append), part=part)
    return plugin.model_copy(update={"results": results})


def told(plugin: PluginResults) -> list[str]:
    """Return the lines about methods that were never called."""
    return [line for line in unchecked(plugin) if "never called" in line]


def test_a_method_that_no_lane_calls_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the method and when a lane calls it; called methods and the suite's are not listed."""
    (line,) = told(examined(monkeypatch, Refreshes))
    assert line.startswith("refresh_metadata: never called here; a lane calls it before a replay")
    assert told(examined(monkeypatch, ReferenceBackend)) == []


def test_only_methods_that_no_part_of_a_run_called_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that the lanes of another process called is not listed."""
    nothing = examined(monkeypatch, Refreshes)
    called = nothing.model_copy(update={"results": [r for r in nothing.results if r.check != "calls"]})
    assert len(told(merged([nothing, nothing]))) == 1
    assert told(merged([nothing, called])) == []


def test_methods_are_as_before_after_a_run() -> None:
    """A watched method notes its first call and is the class's own again; it is so at the end, too."""
    cls, before = Plans, vars(Plans)["eager_reason"]
    with watched_calls([cls, Refreshes]) as called:
        assert _names(cls, called) == ["eager_reason"]
        cls.eager_reason(torch.device("cpu"))
        assert vars(cls)["eager_reason"] is before
        assert _names(cls, called) == []
        assert _names(Refreshes, called) == ["refresh_metadata", "init_metadata_replay"]
    assert "first" not in {method.__code__.co_name for method in _methods(Refreshes)}


def _names(cls: type[Any], called: set[str]) -> list[str]:
    return [each.name for each in uncalled_methods([cls], called)]


def _methods(cls: type[Any]) -> Sequence[Any]:
    return [vars(cls)[name] for name in ("refresh_metadata", "init_metadata_replay")]
