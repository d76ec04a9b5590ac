"""Recordings that are read, and those that are refused: damaged, too large, or made to harm."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpact.errors import UsageError
from graphpact.recording import MOST_BYTES, MOST_LANES, LaneLine, RecordingWriter, StepLine, read_recording
from graphpact.recording.lines import HEADER, text_of
from recorded_lanes import DECODE, STEPS


def _text(*lines: LaneLine | StepLine | dict[str, Any]) -> str:
    return "".join(map(text_of, lines))


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """A step of every kind, in lanes of every kind, is read as it was written."""
    path = tmp_path / "steps.jsonl"
    with RecordingWriter(path) as writer:
        for lane, step in STEPS:
            writer.write(lane, step)
    found = [(each.line, step) for each in read_recording(path) for step in each.steps.values()]
    assert found == STEPS
    assert writer.num_steps == len(STEPS)


HOSTILE = [
    ("a value twice as deep as Python's stack", b'{"lane":' + b"[" * 10**6, "invalid JSON"),
    ("a number with more digits than Python reads", b'{"lane":' + b"9" * 5000 + b"}", "invalid JSON"),
    ("a number that is none", _text(DECODE).replace('"rows":9', '"rows":NaN').encode(), "rows"),
    ("a number that is infinite", _text(DECODE).replace('"rows":9', '"rows":1e999').encode(), "rows"),
    ("a truth value", _text(DECODE).replace('"page_size":4', '"page_size":true').encode(), "page_size"),
    ("a whole number with a point", _text(DECODE).replace('"rows":9', '"rows":9.0').encode(), "rows"),
    ("another encoding", _text(DECODE).encode("utf-16"), "invalid JSON"),
    ("half a character", _text(DECODE).replace('"lane":"decode"', '"lane":"\\ud800"').encode(), "lane"),
    ("a long unknown field", b'{"step":"x","' + b"y" * 10**6 + b'":1}', "unknown field"),
    ("a list", b"[]", "needs an object"),
    ("a missing field", b'{"step":"decode","mode":"decode"}', "requests: the field is missing"),
]


@pytest.mark.parametrize(("line", "words"), [each[1:] for each in HOSTILE], ids=[each[0] for each in HOSTILE])
def test_a_hostile_line_is_refused_in_a_short_message(line: bytes, words: str, tmp_path: Path) -> None:
    """The error names the line and the fault, can be printed, and does not repeat a huge value."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(_text(HEADER).encode() + line)
    with pytest.raises(UsageError) as raised:
        read_recording(path)
    assert f"{path}, line 2: " in raised.value.message
    assert words in raised.value.message
    assert len(raised.value.message.encode()) < len(str(path)) + 300


def test_a_line_that_was_cut_is_named_with_the_command_that_drops_it(tmp_path: Path) -> None:
    """A writer that is killed leaves a part of a line; all lines before it are a recording."""
    path = tmp_path / "steps.jsonl"
    lane, step = STEPS[0]
    path.write_text(_text(HEADER, lane, step, step))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="line 4: invalid JSON") as raised:
        read_recording(path)
    assert raised.value.hint is not None
    assert f"head -n -1 {path} > " in raised.value.hint
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert [each.steps for each in read_recording(path)] == [{3: step}]


def test_a_recording_has_a_largest_size(tmp_path: Path) -> None:
    """More bytes or more lanes than a reader takes are refused, whatever is in them."""
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(UsageError, match=f"more than {MOST_BYTES} bytes"):
        read_recording(path)
    lanes = [{**vars(DECODE), "mode": "decode", "lane": f"lane{at}"} for at in range(MOST_LANES + 1)]
    path.write_text(_text(HEADER, *lanes))
    with pytest.raises(UsageError, match=f"line {MOST_LANES + 2}: more than {MOST_LANES} lanes"):
        read_recording(path)


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 12), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


@settings(derandomize=True, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_step_of_any_kind_with_one_other_value_is_read_or_refused(
    data: st.DataObject, tmp_path: Path
) -> None:
    """One value in any place is replaced, or one field is left out: nothing but a `UsageError` is raised."""
    lane, step = data.draw(st.sampled_from(STEPS))
    lines: list[Any] = [json.loads(text_of(line)) for line in (HEADER, lane, step)]
    changes: list[Callable[[Any], None]] = []

    def collect(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            changes.append(lambda value, node=node, key=key: node.__setitem__(key, value))
            changes.append(lambda _, node=node, key=key: node.__delitem__(key))
            collect(node[key])

    collect(lines)
    data.draw(st.sampled_from(changes))(data.draw(_VALUES))
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with suppress(UsageError):
        (found,) = read_recording(path)
        assert len(found.steps) == 1
