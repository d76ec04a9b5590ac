"""Tests of observers: found as plugins, nested around the hooks in the lane's order, or rejected."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_site import Site, installed
from graphpact.errors import RejectedPluginError
from graphpact.plugins import Loaded, PluginCatalog, Rejected
from rigs.lane import SHAPE_OF, LaneRig

HOOKS = ["populate", "prepare_replay", "init_metadata_replay", "run_step"]
CALLS: list[str] = []
"""The calls that the fake observers of a test record."""

OBSERVER = """
    from graphpact.hookspecs import hookimpl
    from test_observers_calls import CALLS

    class Observer:
        def __init__(self, name="{name}"):
            self.name = name

        def _around(self, hook):
            CALLS.append(f"{{self.name}} before {{hook}}")
            result = yield
            CALLS.append(f"{{self.name}} after {{hook}}")
            return result

        @hookimpl(wrapper=True)
        def populate(self, batch):
            return (yield from self._around("populate"))

        @hookimpl(wrapper=True)
        def prepare_replay(self, shape):
            return (yield from self._around("prepare_replay"))

        @hookimpl(wrapper=True)
        def init_metadata_replay(self, captured):
            return (yield from self._around("init_metadata_replay"))

        @hookimpl(wrapper=True)
        def run_step(self, lane, batch):
            return (yield from self._around("run_step"))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield an empty site, with a module through which observers record their calls in `CALLS`."""
    calls = types.ModuleType("test_observers_calls")
    calls.CALLS = CALLS  # type: ignore[attr-defined]
    CALLS.clear()
    monkeypatch.setitem(sys.modules, calls.__name__, calls)
    with installed(tmp_path / "site", monkeypatch) as made:
        yield made


def observers(site: Site, *names: str) -> list[Any]:
    """Install a distribution for each name, and return instances of the observers in the catalog."""
    for name in names:
        source = OBSERVER.format(name=name)
        site.add(name, source, offers={f"fake_{name}": "Observer"}, group="graphpact.observers")
    catalog = PluginCatalog.scan()
    return [catalog.select("observer", f"fake_{name}")() for name in names]


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
def test_observers_of_two_distributions_nest_in_the_declared_order(
    site: Site, names: tuple[str, str]
) -> None:
    """Around every hook of a replay the first observer is outermost, whatever its name."""
    rig = LaneRig(observers=observers(site, *names), capture=False)
    rig.lane.capture(SHAPE_OF[4])
    CALLS.clear()
    with torch.inference_mode():
        rig.lane.run(rig.batch(3, 2, 4))
    outer, inner = names
    around = [
        f"{outer} before {{}}",
        f"{inner} before {{}}",
        f"{inner} after {{}}",
        f"{outer} after {{}}",
    ]
    step = [line.format(hook) for hook in HOOKS[:3] for line in around]
    whole = [line.format("run_step") for line in around]
    assert [*whole[:2], *step, *whole[2:]] == CALLS


def test_observers_see_eager_steps_too(site: Site) -> None:
    """A step without a graph goes through `run_step` of every observer, and through no other hook."""
    rig = LaneRig(observers=observers(site, "one", "two"))
    CALLS.clear()
    with torch.inference_mode():
        rig.lane.run(rig.batch(1, 1, 1, 1, 1))
    assert CALLS == [
        "one before run_step",
        "two before run_step",
        "two after run_step",
        "one after run_step",
    ]
    assert rig.lane.stats.eager.total() == 1


def test_what_the_inner_observer_returns_is_what_the_outer_gets(site: Site) -> None:
    """Outputs pass from the innermost observer outwards, and the step returns those of the outermost."""
    source = """
    from graphpact.hookspecs import hookimpl
    from graphpact import StepOutputs

    def adding(number, factor):
        class Adds:
            @hookimpl(wrapper=True)
            def run_step(self):
                outputs = yield
                return StepOutputs(logits=(outputs.logits * factor + number, "bs"))
        return Adds

    Adds, Doubles = adding(1, 1), adding(0, 2)
    """
    group = "graphpact.observers"
    site.add("one", source, offers={"fake_adds": "Adds"}, group=group)
    site.add("two", source, offers={"fake_doubles": "Doubles"}, group=group)
    catalog = PluginCatalog.scan()
    adds, doubles = (catalog.select("observer", n)() for n in ("fake_adds", "fake_doubles"))
    with torch.inference_mode():
        plain = LaneRig()
        expected = plain.lane.run(plain.batch(3, 2)).logits
        for order, result in (
            ([adds, doubles], expected * 2 + 1),
            ([doubles, adds], (expected + 1) * 2),
        ):
            rig = LaneRig(observers=order)
            assert torch.equal(rig.lane.run(rig.batch(3, 2)).logits, result)


BAD = {
    "idle": ("class Observer: pass", "Observer implements no hook"),
    "unmarked": (
        "class Observer:\n    def run_step(self, lane, batch): yield",
        "Observer implements no hook",
    ),
    "answers": (
        """
        from graphpact.hookspecs import hookimpl
        class Observer:
            @hookimpl
            def run_step(self, lane, batch): return None
            @hookimpl(wrapper=True)
            def populate(self): return (yield)
        """,
        "Observer: an observer may only wrap hooks; run_step lacks wrapper=True",
    ),
    "old": (
        """
        from graphpact.hookspecs import hookimpl
        class Observer:
            @hookimpl(hookwrapper=True)
            def populate(self): yield
        """,
        "Observer: an observer may only wrap hooks; populate lacks wrapper=True",
    ),
    "misspelt": (
        """
        from graphpact.hookspecs import hookimpl
        class Observer:
            @hookimpl(wrapper=True)
            def run_steps(self): return (yield)
        """,
        "Observer implements an unknown hook 'run_steps'; did you mean 'run_step'",
    ),
    "arguments": (
        """
        from graphpact.hookspecs import hookimpl
        class Observer:
            @hookimpl(wrapper=True)
            def run_step(self, view): return (yield)
        """,
        "Argument(s) {'view'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "function": ("def Observer(): pass", "refers to a function, not to a class"),
}


def test_what_is_no_observer_is_rejected_with_the_reason(site: Site) -> None:
    """A class without hooks, or with an unknown or non-wrapper hook, is rejected; a good one loads."""
    group = "graphpact.observers"
    site.add("good", OBSERVER.format(name="good"), offers={"fake_good": "Observer"}, group=group)
    for name, (source, _) in BAD.items():
        site.add(name, source, offers={f"fake_{name}": "Observer"}, group=group)
    catalog = PluginCatalog.scan()
    found = {info.name: catalog.load(info) for info in catalog.infos("observer")}
    assert isinstance(found["fake_good"], Loaded)
    for name, (_, says) in BAD.items():
        plugin = found[f"fake_{name}"]
        assert isinstance(plugin, Rejected)
        assert says in plugin.reason
        with pytest.raises(RejectedPluginError, match="was rejected"):
            catalog.select("observer", f"fake_{name}")
