"""Contents: what must be in the memory that a graph reads, and what a replay gives."""

import dataclasses
from typing import Any

import pytest
import torch
from small_engine import Backend, SmallEngine

from graphpact_guard import Expected, GraphKey, Guard, Settings
from graphpact_guard.contents import compare_outputs

KEY = GraphKey(runner="Runner", shape="4")


def _expected(actual: Any, expected: Any, live: int) -> Expected:
    return Expected(
        owner="Inputs",
        field="rows",
        actual=torch.tensor(actual),
        expected=torch.tensor(expected),
        live=live,
    )


@pytest.mark.parametrize(
    ("actual", "rule", "text"),
    [
        ([1, 2, 0, 0], None, ""),
        ([1, 7, 9, 0], "GP02", "row 1 (live) has 7, expected 2"),
        ([1, 2, 0, 9], "GP03", "row 3 (padding) has 9, expected 0"),
    ],
)
def test_the_first_wrong_row_is_named(actual: list[int], rule: str | None, text: str) -> None:
    """Live rows that differ were not refreshed, padding rows that differ are stale."""
    fault = _expected(actual, [1, 2, 0, 0], live=2).fault(KEY)
    assert (None if fault is None else fault.rule) == rule
    assert fault is None or fault.text == text


def test_a_difference_may_break_a_rule_of_its_own() -> None:
    """Where rows are not stale but laid out otherwise, the rule is given."""
    found = dataclasses.replace(_expected([0, 3, 5], [0, 4, 8], live=3), rule="GP07").fault(KEY)
    assert found is not None
    assert (found.rule, found.text) == ("GP07", "row 1 (live) has 3, expected 4")


def test_rows_of_a_table_are_compared_as_a_whole() -> None:
    """Of a table, the row is named and shown, cut after eight numbers."""
    actual = torch.zeros(2, 12, dtype=torch.int32)
    expected = actual.clone()
    actual[1, 11] = 5
    found = Expected(owner="B", field="page_table", actual=actual, expected=expected, live=2).fault(KEY)
    assert found is not None
    assert found.text.startswith("row 1 (live) has [0, 0, 0, 0, 0, 0, 0, 0]..., expected")


@pytest.mark.parametrize(
    ("replayed", "is_fault"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], False),
        ([[1.0, 2.0], [3.0, 4.0001]], False),
        ([[1.0, 2.0], [3.0, 4.1]], True),
        ([[1.0, float("nan")], [3.0, 4.0]], True),
        ([[1.0, 2.0]], True),
    ],
)
def test_outputs_may_differ_by_rounding_only(replayed: list[list[float]], is_fault: bool) -> None:  # noqa: FBT001
    """A replay may differ from an eager run by rounding; more, NaN, or another shape is a fault."""
    eager = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    faults = list(compare_outputs(KEY, {"logits": torch.tensor(replayed)}, {"logits": eager}))
    assert [(fault.rule, fault.field) for fault in faults] == ([("verify", "logits")] if is_fault else [])


def test_the_first_and_every_nth_replay_is_due() -> None:
    """Contents and verification are due in the first replay of each graph and in every N-th after it."""
    guard = Guard(Settings(guard=True, contents=3, verify=4), {})
    engine = SmallEngine(Backend(4), guard)
    key, due = engine.key(2), []
    for _ in range(9):
        ahead = guard.is_contents_due(key, ahead=True)
        engine.step(torch.ones(2), torch.ones(2, dtype=torch.int64))
        due.append((guard.is_contents_due(key), guard.is_verify_due(key), ahead))
    assert [contents for contents, _, _ in due] == [at % 3 == 0 for at in range(9)]
    assert [verify for _, verify, _ in due] == [at % 4 == 0 for at in range(9)]
    assert all(contents == ahead for contents, _, ahead in due)
    never = Guard(Settings(guard=True, contents=0), {})
    assert not never.is_contents_due(key)


def test_every_synthetic_step_is_due_and_counted_apart() -> None:
    """Before serving, every replay is due; counts begin anew after it, and a fault says when it was found."""
    guard = Guard(Settings(guard=True, contents=3, start=2), {})
    engine = SmallEngine(Backend(4), guard)
    key = engine.key(2)
    with guard.starting():
        for value in (1.0, 2.0):
            engine.step(torch.ones(2), torch.ones(2, dtype=torch.int64))
            assert guard.is_contents_due(key)
            assert guard.is_verify_due(key)
            guard.verify(key, {"out": torch.ones(1, 1)}, {"out": torch.full((1, 1), value)})
    assert guard.summary()["graphs"]["Runner[2]"] == {
        "replays": 0,
        "contents": 0,
        "verified": 0,
        "started": 2,
    }
    engine.step(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not guard.is_verify_due(key)
    guard.check_contents(key, [_expected([1, 9], [1, 0], live=1)])
    assert [(each["rule"], each["at_start"]) for each in guard.summary()["faults"]] == [
        ("verify", True),
        ("GP03", False),
    ]


def test_checks_are_counted_by_graph() -> None:
    """The summary says how often contents and outputs of each graph were checked: none is silently absent."""
    guard = Guard(Settings(guard=True), {})
    engine = SmallEngine(Backend(4), guard)
    engine.step(torch.ones(2), torch.ones(2, dtype=torch.int64))
    guard.check_contents(engine.key(2), [_expected([1, 9], [1, 0], live=1)])
    guard.verify(engine.key(2), {"out": torch.ones(1)}, {"out": torch.ones(1)})
    summary = guard.summary()
    assert summary["graphs"]["Runner[2]"] == {"replays": 1, "contents": 1, "verified": 1, "started": 0}
    assert summary["graphs"]["Runner[4]"] == {"replays": 0, "contents": 0, "verified": 0, "started": 0}
    assert [fault["rule"] for fault in summary["faults"]] == ["GP03"]
