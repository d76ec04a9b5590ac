"""Stand-ins for absent modules: the finders, and the objects that they serve."""

import importlib
import sys
from pathlib import Path

import pytest

from graphpact_adapters import stand_ins


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each test, remove the finders that it installed and the modules that it imported."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_an_absent_module_of_the_list_is_served_with_all_below_it() -> None:
    """A listed absent module imports, its submodules too, and each attribute is a stand-in."""
    stand_ins.install(["no_such"])
    deep = importlib.import_module("no_such.deep.er")
    assert deep.Thing is deep.Thing
    assert issubclass(deep.Thing.member, stand_ins.StandIn)


def test_an_absent_module_that_is_not_listed_raises_as_usual() -> None:
    """An absent module outside the list is named in the usual error, also one that begins alike."""
    stand_ins.install(["no_such"])
    for name in ("no_such_either", "graphpact.no_such"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_a_module_that_is_there_is_never_replaced_by_the_list_of_absent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed module in the absent list is used; one in the heavy list is replaced."""
    (tmp_path / "really_here.py").write_text("there = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    stand_ins.install(["really_here"])
    assert importlib.import_module("really_here").there == 1
    del sys.modules["really_here"]
    stand_ins.install([], ["really_here"])
    assert issubclass(importlib.import_module("really_here").there, stand_ins.StandIn)


def test_a_stand_in_takes_every_shape_that_an_import_needs() -> None:
    """A stand-in can be called, subscripted, united with types, subclassed, and used as a decorator."""
    stand_ins.install(["no_such"])
    made = importlib.import_module("no_such").Made

    def function() -> int:
        return 3

    class Derived(made, flag=True):
        def __init__(self, value: int) -> None:
            self.value = value

    assert made(function) is function
    assert made(num_warps=4)(function) is function
    assert made[int] is made
    assert made | None is made
    assert None | made is made
    assert list(made) == []
    assert Derived(5).value == 5
    with pytest.raises(AttributeError, match="Derived has no attribute 'other'"):
        Derived.other  # noqa: B018  it is read


def test_calls_are_seen_once_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later call is listed, except uses as a decorator; all callers get the same list."""
    monkeypatch.setattr(stand_ins, "_watchers", [])
    stand_ins.called.cache_clear()
    stand_ins.install(["no_such"])
    made = importlib.import_module("no_such.deep").Made
    made(1)
    calls = stand_ins.called()
    made.plan(1, 2)
    made(test_calls_are_seen_once_they_are_asked_for)
    assert stand_ins.called() is calls
    made.run()
    assert calls == ["no_such.deep.Made.plan", "no_such.deep.Made.run"]
    stand_ins.called.cache_clear()
