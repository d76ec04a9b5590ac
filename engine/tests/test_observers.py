"""Observers that a configuration or a caller selects, and refused ones."""

import io
from collections.abc import Generator
from typing import Any

import pytest
import torch
from importlib_metadata import EntryPoint

from graphpact.errors import ConfigError, PluginError, RejectedPluginError, UnknownPluginError
from graphpact.hookspecs import hookimpl
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_engine.build_lanes import build_observers
from graphpact_engine.config import EngineConfig
from graphpact_engine.selection import require_observers, select_observers
from graphpact_engine.trace import HookTrace
from rigs.lane import LaneRig

TARGETS = {
    "trace": "graphpact_engine.trace:HookTrace",
    "broken": "graphpact_engine.trace:no_such_class",
}


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove GRAPHPACT_TRACE from the environment of the test."""
    monkeypatch.delenv("GRAPHPACT_TRACE", raising=False)


def select(*names: str) -> list[tuple[str, type[Any]]]:
    """Return names and classes of the observers that a configuration with ``names`` selects."""
    listed = ", ".join(map(repr, names))
    config = EngineConfig.load(env={}, overrides=[f"engine.observers=[{listed}]"])
    group = "graphpact.observers"
    catalog = PluginCatalog(
        {
            PluginInfo("observer", name, "acme", "1", target, "1"): EntryPoint(name, target, group)
            for name, target in TARGETS.items()
        }
    )
    return select_observers(config, catalog)


class Steps:
    """A valid observer of steps."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Generator[None, Any, Any]:
        """Return the outputs of the step unchanged."""
        return (yield)


class Answers:
    """A class with a hook that is not a wrapper."""

    @hookimpl
    def populate(self) -> None:
        """Do nothing."""


class Misspelt:
    """A class with a misspelt hook."""

    @hookimpl(wrapper=True)
    def run_steps(self) -> Generator[None, Any, Any]:
        """Return the result unchanged; no lane calls it."""
        return (yield)


def test_observers_are_selected_in_the_order_of_the_configuration() -> None:
    """Observers are selected in the configured order; without names there are none."""
    assert select() == []
    assert select("trace") == [("trace", HookTrace)]
    assert [name for name, _ in select("trace", "trace")] == ["trace", "trace"]


def test_names_of_observers_are_answered_like_those_of_other_plugins() -> None:
    """The error for an unknown name has the nearest name; for a broken plugin, the reason."""
    with pytest.raises(UnknownPluginError, match=r"no observer is called 'trase'(.|\n)*mean 'trace'"):
        select("trace", "trase")
    with pytest.raises(RejectedPluginError, match=r"observer broken \(acme 1\) was rejected: .*no_such"):
        select("broken")


def test_an_error_in_the_constructor_of_an_observer_names_it() -> None:
    """An exception of an observer's constructor becomes a PluginError with the observer's name."""

    class Raises:
        def __init__(self) -> None:
            raise OSError("no socket")

    with pytest.raises(PluginError, match="observer 'acme' cannot be used: it raised OSError: no socket"):
        build_observers([("trace", HookTrace), ("acme", Raises)])


def test_each_lane_has_observers_of_its_own() -> None:
    """Every call builds new observers, in the order of the selection."""
    selected = [("trace", HookTrace), ("steps", Steps)]
    once, again = build_observers(selected), build_observers(selected)
    assert [type(observer) for observer in once] == [HookTrace, Steps]
    assert not set(map(id, once)) & set(map(id, again))


@pytest.mark.parametrize(("value", "traces"), [("1", 1), ("0", 0), ("", 0)])
def test_the_variable_traces_once(value: str, traces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRAPHPACT_TRACE=1 adds a trace before other observers, unless a trace is selected."""
    monkeypatch.setenv("GRAPHPACT_TRACE", value)
    kinds = [type(observer) for observer in build_observers([("steps", Steps)])]
    assert kinds == [HookTrace] * traces + [Steps]
    selected = [("steps", Steps), ("trace", HookTrace)]
    assert [type(observer) for observer in build_observers(selected)] == [Steps, HookTrace]


@pytest.mark.parametrize(
    ("observer", "says"),
    [
        (Steps, "it is the class Steps, not an instance of it"),
        (object(), "object implements no hook"),
        (Answers(), "populate lacks wrapper=True"),
        (Misspelt(), "unknown hook 'run_steps'; did you mean 'run_step'"),
    ],
)
def test_what_cannot_observe_is_refused(observer: object, says: str) -> None:
    """An invalid observer of a caller is refused; the error has its index and fault."""
    require_observers([Steps(), HookTrace()])
    with pytest.raises(ConfigError, match=rf"observers\[1\] is not an observer: .*{says}"):
        require_observers([Steps(), observer])


def test_the_trace_writes_a_line_for_each_hook_and_each_step() -> None:
    """The observer ``trace`` writes a line for each hook of a replay in order, and the step last."""
    said = io.StringIO()
    rig = LaneRig(observers=[HookTrace(said)])
    with torch.inference_mode():
        rig.lane.run(rig.batch(3, 2))
    lines = said.getvalue().splitlines()[-4:]
    assert [line.split()[1] for line in lines] == [
        "populate",
        "prepare_replay",
        "init_metadata_replay",
        "step",
    ]
    assert "step of lane 'decode': decode of 2 requests -> StepOutputs(logits=(2, 7)" in lines[-1]
