"""Host state of plugins, and replays that skip its changes."""

from collections import deque
from copy import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from graphpact import ForwardMode
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.experiments.python_state import python_state
from graphpact_conformance.lane.host_state import changed, emptied, host_state, lines_of_writes, restore
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.results import Finding


class _Plugin:
    """An object with host state of several kinds."""

    of_class: ClassVar[int] = 0

    def __init__(self) -> None:
        self.count, self.sizes, self.by_name = 0, [1], {"a": [2]}
        self.tensor = torch.zeros(2)
        self.inner = SimpleNamespace(turn=0)
        self.driver = object()

    def run(self, name: str) -> None:
        """Change one attribute."""
        match name:
            case "count":
                self.count += 1
            case "sizes":
                self.sizes.append(3)
            case "by_name":
                self.by_name["a"].append(4)
            case "tensor":
                self.tensor = torch.zeros(2)
            case "inner":
                self.inner.turn = 1
            case "of_class":
                type(self).of_class = self.of_class + 1
            case "new":
                self.new = 1
            case "driver":
                self.driver = object()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *((name, f"_Plugin.{name}") for name in ("count", "sizes", "by_name", "tensor", "of_class", "new")),
        ("inner", "_Plugin.inner.turn"),
    ],
)
def test_a_change_is_seen_and_undone(name: str, shown: str) -> None:
    """Each kind of change is named by its attribute, and the state after `restore` is the one before."""
    plugin = _Plugin()
    kept = plugin.sizes
    before = host_state(plugin)
    plugin.run(name)
    after = host_state(plugin)
    assert changed(before, after) == [shown]
    restore(shown, before, after)
    assert not changed(before, host_state(plugin))
    assert plugin.sizes is kept


class _Sizes(list[int]):
    """A list of a plugin's own class."""


@pytest.mark.parametrize("container", [{"a": 1}, [1, 2], {1, 2}, deque([1, 2]), _Sizes([1, 2])], ids=str)
def test_containers_get_their_contents_back_in_place(container: Any) -> None:
    """After `restore`, and after `emptied`, each kind of container is the same object with equal contents."""
    plugin, right = _Plugin(), copy(container)
    plugin.sizes = container
    before = host_state(plugin)
    container.clear()
    restore("_Plugin.sizes", before, host_state(plugin))
    assert (plugin.sizes, plugin.sizes is container) == (right, True)
    with emptied(container):
        assert not container
    assert container == right


def test_contents_of_tensors_and_the_lane_are_no_host_state() -> None:
    """A write into a tensor, and another driver, change nothing."""
    plugin = _Plugin()
    before = host_state(plugin)
    plugin.tensor.fill_(1)
    plugin.run("driver")
    assert not changed(before, host_state(plugin))


def test_the_line_of_a_write_is_named() -> None:
    """The line that sets an attribute is that of the plugin, and the class is as it was afterwards."""
    plugin = _Plugin()
    with lines_of_writes(plugin) as lines:
        plugin.run("count")
    assert lines.keys() == {"_Plugin.count"}
    assert "test_python_state.py" in lines["_Plugin.count"]
    assert "in _Plugin.run" in lines["_Plugin.count"]
    assert "__setattr__" not in vars(_Plugin)


class _Counts(ReferenceBackend):
    """A right backend that counts calls, and keeps what it returned last."""

    calls = 0

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, and count."""
        self.calls += 1
        self.last = super().forward(*args)
        return self.last


class _Drops(_Counts):
    """A backend whose fill drops the table of keys once the region has set a flag."""

    fill_is_device_only = False
    is_off = False

    def fill_metadata(self, view: Any, metadata: Any) -> None:
        """Fill, and use the flag."""
        super().fill_metadata(view, metadata)
        if self.is_off:
            metadata.table.zero_()

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend; a run with other numbers of rows than those of graphs sets the flag."""
        self.is_off = len(args[0]) not in (2, 4)
        return super().forward(*args)


def findings_of(backend: type[ReferenceBackend]) -> list[Finding]:
    """Return the findings of the experiment in a decode lane."""
    config = next(iter(configs_of(backend.capabilities, torch.device("cpu"), [Case(ForwardMode.DECODE)])))
    lane = LaneUnderTest(config, backend)
    (steps,) = lane.drawn(1, 0)
    with torch.inference_mode():
        return [*python_state(lane, steps)]


def test_a_count_that_no_result_depends_on_is_no_finding() -> None:
    """The region may count its runs, and keep tensors."""
    assert not findings_of(_Counts)


def test_the_attribute_is_named_and_counts_beside_it_are_not() -> None:
    """Of several attributes that replays skip, only the one that changes results is named, with its line."""
    (found,) = findings_of(_Drops)
    assert (found.rule, found.hook, found.field) == ("GP10", "forward", "_Drops.is_off")
    assert "in _Drops.forward" in found.actual
