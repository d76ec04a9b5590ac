"""Recorded scenarios: what is read, what is refused, and a bug that only recorded steps show."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, GraphShape
from graphpact.attention import Buffers, Limits
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.errors import UsageError
from graphpact.recording import MOST_STEPS
from graphpact_conformance.draws.scenario import read
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options

PAGE = 16
FIRST = {"graphpact": "recording", "version": 1}
LANE: dict[str, Any] = {
    "lane": "main",
    "mode": "decode",
    "page_size": PAGE,
    "context": 96,
    "slots": 20 * PAGE,
    "rows": 6,
    "shapes": [[1, 1], [3, 3]],
    "draft": [1, 1, 1],
    "frozen": False,
}
RECORDED = [e for e in EXPERIMENTS if e.takes_recordings]


def request(row: int, cached: int, pages: list[int]) -> dict[str, Any]:
    """Return a request of a decode step; it has the first of ``pages`` that its length needs."""
    held = pages[: cached // PAGE + 1]
    return {"row": row, "cached": cached, "pages": held, "slots": [[held[-1] * PAGE + cached % PAGE]]}


def step(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a decode step of the lane."""
    return {"step": "main", "mode": "decode", "requests": [*requests], **changes}


def write(path: Path, *lines: object) -> Path:
    """Write a recording, and return its path."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


STEPS = [
    step(*([request(2, 3 + at, [9])] if at < 9 else []), request(1, 5 + at, [7, 3, 12])) for at in range(30)
]
"""One request that is joined by another at first, and grows over two page ends."""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return the file of these steps."""
    return write(tmp_path / "steps.jsonl", FIRST, LANE, *STEPS)


# -- running -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeptMetadata(ReferenceMetadata):
    """Metadata that also keeps the table and the length of each request row after its last step."""

    tables: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


class AppendsSlots(ReferenceBackend):
    """Keeps the table of a request; in its next step it appends the KV slot after its last one."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the reference, and a workspace for what is kept."""
        rows, columns = self.context.req_to_token.shape
        tables = metadata_slot("reference.tables", lambda *_: (rows, columns), torch.int64, role="workspace")
        lengths = metadata_slot("reference.lengths", lambda *_: (rows,), torch.int64, role="workspace")
        return [*super().declare_slots(limits), tables, lengths]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> KeptMetadata:
        """Return the metadata of the reference with the workspace."""
        usual = super().allocate_metadata(view, shape, buffers)
        values = {each.name: getattr(usual, each.name) for each in fields(usual)}
        kept = {name: buffers(f"reference.{name}") for name in ("tables", "lengths")}
        return KeptMetadata(**values, **kept)

    def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Fill all as the reference does, but the table; wrong where a new page begins."""
        super().fill_metadata(view, metadata)
        assert isinstance(metadata, KeptMetadata)
        tables, lengths = metadata.tables, metadata.lengths
        assert tables is not None
        assert lengths is not None
        rows, last = view.req_pool_indices, (view.seq_lens - 1)[:, None]
        fresh, before, end = self.context.req_to_token[rows].long(), tables[rows], (last - 1).clamp(min=0)
        follows = before.gather(1, end) == fresh.gather(1, end)
        follows &= lengths[rows][:, None] == last
        appended = before.scatter(1, last, before.gather(1, end) + 1)
        metadata.table.copy_(torch.where(follows, appended, fresh))
        tables[rows], lengths[rows] = metadata.table, view.seq_lens


def _results(backend: type[ReferenceBackend], options: Options, experiments: Iterable[Any]) -> list[Result]:
    plans = planned_lanes(backend, ReferenceRunner, options)
    return [r for plan in plans for r in examine_lane(plan, options, experiments=[*experiments])]


def test_recorded_lanes_have_the_sizes_of_the_engine(recording: Path) -> None:
    """A recorded lane has the shapes, page size, context, rows and pages of its engine, and all its steps."""
    (plan,) = planned_lanes(ReferenceBackend, ReferenceRunner, Options(scenario=str(recording)))
    config, recorded = plan.lane.config, plan.recorded
    assert recorded is not None
    assert [(s.batch_size, s.num_tokens) for s in config.shapes] == [(1, 1), (3, 3)]
    assert (config.page_size, config.context) == (PAGE, 96)
    assert config.num_rows >= 6
    assert config.num_pages > 19
    assert [[len(r.cached) for r in p.requests] for p in recorded.steps] == [
        [r["cached"] for r in s["requests"]] for s in STEPS
    ]
    assert str(plan) == "decode-page16-gqa-float32-recorded_main"


@pytest.mark.parametrize(
    "experiments",
    [
        pytest.param([e for e in EXPERIMENTS if e.repeats or e.takes_recordings], id="sequences"),
        pytest.param(EXPERIMENTS, id="all", marks=pytest.mark.sweep),
    ],
)
def test_a_right_backend_passes_its_recorded_lane(experiments: Sequence[Any], recording: Path) -> None:
    """The experiments run in a recorded lane of a right backend, and none has a finding."""
    options = Options(scenario=str(recording), examples=1)
    results = _results(ReferenceBackend, options, experiments)
    assert {r.outcome for r in results} == {Outcome.PASS}
    assert any("recorded_steps" in r.check for r in results)


@pytest.mark.sweep
def test_a_bug_that_only_steps_in_order_show() -> None:
    """A table that is appended to passes drawn batches in a plain lane; requests that are followed show it.

    A tall ladder has so many requests that one of them may follow another by chance.
    """
    drawn = Options(size="quick", shrink=False, lanes=("decode-page16-gqa-float32",))
    followed = [experiment for experiment in EXPERIMENTS if experiment.name == "whole_requests"]
    others = [experiment for experiment in EXPERIMENTS if experiment not in followed]
    assert {r.outcome for r in _results(AppendsSlots, drawn, others)} == {Outcome.PASS}
    assert Outcome.FAIL in {r.outcome for r in _results(AppendsSlots, drawn, followed)}


def test_recorded_steps_are_shrunk_to_those_that_matter(recording: Path) -> None:
    """Of thirty recorded steps two are left, of one request each: before and at the end of a page."""
    found = _results(AppendsSlots, Options(scenario=str(recording)), RECORDED)
    (failed,) = (r for r in found if r.rule == "GP02")
    assert failed.outcome is Outcome.FAIL
    located, wrong = failed.findings
    assert "metadata.table[0, 16]" in (located.field or "")
    assert "recorded step 2, after: decode, 1 request; row 1: 15 cached keys" in (wrong.field or "")
    assert "row 1: 16 cached keys" in (wrong.batch or "")
    assert f"--scenario {recording}" in (wrong.reproduce or "")


# -- reading -----------------------------------------------------------------------------------------

FAULTS: list[tuple[str, int, list[Any], str]] = [
    ("no JSON", 1, ["decode"], "JSON"),
    ("another version", 1, [FIRST | {"version": 2}], "version"),
    ("a step before its lane", 2, [FIRST, STEPS[0]], "lane"),
    ("an unknown field", 3, [FIRST, LANE, STEPS[0] | {"text": "x"}], "text"),
    ("a number as text", 3, [FIRST, LANE, step(request(1, 5, [1]) | {"row": "1"})], "row"),
    ("another mode", 3, [FIRST, LANE, STEPS[0] | {"mode": "extend"}], "extend"),
    ("an unknown mode", 3, [FIRST, LANE, STEPS[0] | {"mode": "x"}], "mode"),
    ("one lane twice", 3, [FIRST, LANE, LANE], "second lane"),
    ("a lane of huge context", 2, [FIRST, LANE | {"context": 10**9}], "context"),
    ("a cache of huge size", 2, [FIRST, LANE | {"slots": 2**40}], "slots"),
    ("a name with a path", 2, [FIRST, LANE | {"lane": "../x"}], "lane"),
    ("one row twice", 3, [FIRST, LANE, step(request(1, 5, [1]), request(1, 5, [2]))], "row"),
    ("a row that is not there", 3, [FIRST, LANE, step(request(6, 5, [1]))], "row"),
    ("scratch", 3, [FIRST, LANE, step(request(1, 5, [0]))], "page"),
    ("a page that is not there", 3, [FIRST, LANE, step(request(1, 5, [20]))], "page"),
    ("too few pages", 3, [FIRST, LANE, step(request(1, 20, [1, 2]) | {"pages": [1]})], "pages"),
    ("a slot of another position", 3, [FIRST, LANE, step(request(1, 5, [1]) | {"slots": [[17]]})], "slots"),
    ("too many tokens", 3, [FIRST, LANE, step(request(1, 5, [1]) | {"slots": [[21], [22]]})], "new tokens"),
    ("parents", 3, [FIRST, LANE, step(request(1, 5, [1]) | {"parents": [None]})], "parents"),
    ("accepted drafts", 3, [FIRST, LANE, step(request(1, 5, [1]) | {"accepted": 0})], "accepted"),
    ("beyond the context", 3, [FIRST, LANE, step(request(1, 96, [*range(1, 8)]))], "context"),
]


@pytest.mark.parametrize(
    ("number", "lines", "word"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_a_wrong_line_is_refused_with_its_number(
    number: int, lines: list[Any], word: str, tmp_path: Path
) -> None:
    """The error names file, line and field, and how to record again."""
    path = write(tmp_path / "steps.jsonl", *lines)
    with pytest.raises(UsageError) as raised:
        read(path)
    assert f"{path}, line {number}:" in raised.value.message
    assert word in raised.value.message
    assert "graphpact generate --record" in (raised.value.hint or "")


@pytest.mark.parametrize("content", [b"", b"\n", json.dumps(FIRST).encode(), b"\xff\xfe", b"\0" * 99])
def test_a_file_without_steps_is_refused(content: bytes, tmp_path: Path) -> None:
    """A file that is no recording, or has no step, is refused by its name."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(path.name)):
        read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path)


def test_a_recording_has_a_largest_number_of_steps(tmp_path: Path) -> None:
    """Steps beyond the limit are refused: the suite runs every one."""
    lines = [step(request(1, 5, [1]))] * (MOST_STEPS + 1)
    with pytest.raises(UsageError, match=f"more than {MOST_STEPS} steps"):
        read(write(tmp_path / "steps.jsonl", FIRST, LANE, *lines))


_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


@settings(derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """A recording with one value replaced is a recording, or a `UsageError`; nothing else is raised."""
    lines = json.loads(json.dumps([FIRST, LANE, *STEPS[:2]]))
    places: list[Callable[[Any], None]] = []

    def collect(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append(lambda value, node=node, key=key: node.__setitem__(key, value))
            collect(node[key])

    collect(lines)
    data.draw(st.sampled_from(places))(data.draw(_VALUES))
    path = write(tmp_path / "steps.jsonl", *lines)
    with suppress(UsageError):
        assert sum(len(recording.steps) for recording in read(path)) == 2
