"""Plugins that declare less are conformant if they are right, and fail under a rule if they are not.

A backend may support graphs of some batches only, a runner may capture few shapes. The suite runs eagerly
what cannot be captured, and says so.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from conformance_reports import drawn, report
from graphpact import Capabilities, ForwardBatch, ForwardMode, GraphShape
from graphpact.attention import AttentionBackend, Buffers, GraphSupport
from graphpact.plugins import PluginCatalog
from graphpact.runners import GraphRunner
from graphpact_conformance import suite
from graphpact_conformance.claims import claims_of
from graphpact_conformance.draws.cases import CASES, SEGMENTS, Case
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.merge import hints_of
from graphpact_conformance.report import to_html
from graphpact_conformance.results import ExitCode, Outcome, Result
from graphpact_conformance.rules import RULES
from graphpact_conformance.suite.target import probe, unsupported
from graphpact_conformance.targets import Options, Target, TargetKind
from support import ListedCatalog

FULL = Options(size="quick", examples=1, shrink=False)
"""Options with which lanes that are not full compare only eager and replayed outputs."""
LIGHT = replace(FULL, size="normal")
"""Options with which lanes that are not full also check padding and the largest step."""
RIGHT = ReferenceBackend.capabilities
MODES = {
    "decode": {ForwardMode.DECODE},
    "extend": {ForwardMode.EXTEND},
    "decode and extend": {ForwardMode.DECODE, ForwardMode.EXTEND},
    "verify alone": {ForwardMode.TARGET_VERIFY},
    "all": set(ForwardMode),
}
MINOR = {"decode", "verify alone"}
"""Sets that the others have too, for the sweeps."""


def declaring(base: type[AttentionBackend] = ReferenceBackend, **declared: Any) -> type[AttentionBackend]:
    """Return a backend that declares something else."""
    body = {"capabilities": replace(base.capabilities, **declared), "__module__": base.__module__}
    return type("Declares", (base,), body)


def checked(
    backend: type[AttentionBackend] = ReferenceBackend,
    runner: type[GraphRunner] = ReferenceRunner,
    *,
    full: bool = False,
    options: Options = LIGHT,
) -> dict[Case, list[Result]]:
    """Return the results of each plain lane; all experiments run if ``full``, or without graphs."""
    kind: TargetKind = "runner" if backend is ReferenceBackend else "attention_backend"
    found = {}
    for plan in suite.planned_lanes(backend, runner, FULL, kind=kind, values=()):
        is_full = full or plan.lane.captures_nothing
        found[plan.lane.config.case] = list(suite.examine_lane(replace(plan, is_full=is_full), options))
    return found


def require_right(found: Mapping[Case, Sequence[Result]]) -> None:
    """Assert that everything passed, except for what is not declared."""
    wrong = [
        (r.lane, r.rule, r.outcome.value, r.reason, r.findings)
        for results in found.values()
        for r in results
        if r.outcome not in (Outcome.PASS, Outcome.UNSUPPORTED)
    ]
    assert not wrong
    assert found
    for results in found.values():
        assert any(r.outcome is Outcome.PASS for r in results)


# -- levels of graph support -----------------------------------------------------------------------


def _require_level(modes: set[ForwardMode], support: GraphSupport, *, full: bool) -> None:
    backend = declaring(modes=frozenset(modes), graph_support=support)
    found = checked(backend, full=full, options=FULL)
    require_right(found)
    assert {*found} == {case for case in (*CASES, SEGMENTS) if case.mode in modes}
    for case, results in found.items():
        says = f"no graphs: needs graph support {case.needs.value!r}, declared {support.value!r}"
        says += "; eager steps were checked"
        for result in results:
            is_shown = result.rule is None or support.covers(case.needs)
            assert (result.outcome is Outcome.PASS) is is_shown
            assert result.reason == (None if is_shown else says)


@pytest.mark.few(1)
@pytest.mark.parametrize("support", [*GraphSupport])
@pytest.mark.parametrize(
    "modes",
    [pytest.param(m, marks=pytest.mark.sweep) if m in MINOR else m for m in MODES],
)
def test_a_right_backend_of_every_level_is_conformant(modes: str, support: GraphSupport) -> None:
    """No level or set of modes has a failure or error; eager runs are checked where none is captured.

    The results of a lane that cannot be captured say so, for every rule.
    """
    _require_level(MODES[modes], support, full=False)


@pytest.mark.sweep
@pytest.mark.parametrize("support", [level for level in GraphSupport if level is not RIGHT.graph_support])
def test_a_right_backend_of_every_level_keeps_every_rule(support: GraphSupport) -> None:
    """The same with all experiments, for every mode; `test_suite` has those of the level that is left out."""
    _require_level(MODES["all"], support, full=True)


@pytest.mark.parametrize(
    ("lanes", "verdict"),
    [
        pytest.param((), "conformant on the tape", marks=pytest.mark.sweep),
        (("extend-page16-gqa-float32",), "conformant without graphs"),
    ],
)
def test_what_is_not_captured_is_reported(
    lanes: tuple[str, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminal, page and results say of a lane without graphs why it has none, and what was checked.

    The verdict names no driver where nothing was captured.
    """
    modes = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
    backend = declaring(modes=modes, graph_support=GraphSupport.UNIFORM_DECODE)
    catalog = ListedCatalog(mine=backend)
    monkeypatch.setattr(PluginCatalog, "scan", lambda: catalog)
    results: list[Result] = []
    listener = Mock(found=results.append)
    target = Target("attention_backend", "mine")
    plugin = suite.examine(target, replace(FULL, lanes=lanes), listener)
    made = report(plugin.model_copy(update={"results": results}))
    says = "no graphs: needs graph support 'always', declared 'uniform_decode'; eager steps were checked"
    told = [r for r in results if r.lane.startswith("extend-") and r.rule]
    assert {(r.outcome, r.reason) for r in told} == {(Outcome.UNSUPPORTED, says)}
    assert {r.rule for r in told} == {*RULES}
    assert f"extend: {says} ({len(told)} unsupported)" in (text := drawn(made, 200))
    assert f"extend: {says} ({len(told)} unsupported)" in html.unescape(to_html(made))
    assert text.count(verdict) == 1
    assert made.exit_code is ExitCode.CONFORMANT


@pytest.mark.sweep
def test_a_level_that_is_too_low_is_reported() -> None:
    """A backend whose graphs work beyond its declared support has a hint, and one without has none.

    A claim silences it, as for every capability.
    """
    modes = frozenset({ForwardMode.EXTEND})
    others = {f"mode {mode.value}": "unknown" for mode in ForwardMode if mode not in modes}
    for base, works in ((ReferenceBackend, True), (CannotCaptureRagged, False)):
        backend = declaring(base, modes=modes, graph_support=GraphSupport.UNIFORM)
        backend.claims = others
        probed = probe(backend, LIGHT)
        assert probed == [("graphs always", works)]
        hints = hints_of(claims_of(backend, [], probed))
        assert ["it works and is not declared" in hint for hint in hints] == [True] * works
        backend.claims = {**others, "graphs always": "not_implemented"}
        assert probe(backend, LIGHT) == []


class FillsFromTheHost(ReferenceBackend):
    """A backend whose fill takes lengths from the host: right in a hook, and a constant in a graph."""

    capabilities = replace(RIGHT, modes=frozenset({ForwardMode.DECODE}))
    claims = {  # noqa: RUF012  a ClassVar there
        f"mode {mode.value}": "unknown" for mode in ForwardMode if mode is not ForwardMode.DECODE
    }
    fill_is_device_only = False

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return the last positions, from host lengths."""
        return torch.tensor(view.seq_lens_cpu.tolist(), device=view.device)[request] - 1


DEVICE_ONLY = "feature fill_is_device_only"


@pytest.mark.sweep
def test_a_preparation_that_graphs_record_is_proved_by_its_lanes() -> None:
    """Lanes whose graphs record the fill show the declaration; a fill from host lengths fails there."""
    for base, is_right in ((ReferenceBackend, True), (FillsFromTheHost, False)):
        backend: Any = type("Declares", (base,), {"fill_is_device_only": True, "__module__": base.__module__})
        backend.capabilities = FillsFromTheHost.capabilities
        plans = suite.planned_lanes(backend, ReferenceRunner, FULL, values=())
        shown = []
        for plan in plans:
            results = list(suite.examine_lane(plan, FULL))
            failed = {r.rule for r in results if r.outcome is Outcome.FAIL}
            assert bool(failed) is not is_right
            assert is_right or failed & {"GP02", "GP08", "GP10"}
            shown.append((plan.lane.config, not failed))
        claims = {claim.capability: claim for claim in claims_of(backend, shown)}
        assert claims[DEVICE_ONLY].shown == ("pass" if is_right else "fail")


@pytest.mark.sweep
def test_a_preparation_that_could_be_recorded_is_a_hint() -> None:
    """An undeclared fill is tried in a graph: one that works is a hint, one that does not is none.

    A claim silences it, and a backend with a second method for replays is not asked.
    """
    for base, works in ((ReferenceBackend, True), (FillsFromTheHost, False)):
        backend: Any = type("Hides", (base,), {"fill_is_device_only": False, "__module__": base.__module__})
        backend.capabilities, backend.claims = FillsFromTheHost.capabilities, FillsFromTheHost.claims
        probed = probe(backend, LIGHT)
        assert probed == [(DEVICE_ONLY, works)]
        hints = hints_of(claims_of(backend, [], probed))
        assert [hint.startswith(DEVICE_ONLY) for hint in hints] == [True] * works
        backend.claims = {**FillsFromTheHost.claims, DEVICE_ONLY: "not_implemented"}
        assert probe(backend, LIGHT) == []
        backend.claims = FillsFromTheHost.claims
        backend.refresh_metadata = lambda self, view, metadata: self.fill_metadata(view, metadata)
        assert probe(backend, LIGHT) == []


class CannotCaptureRagged(ReferenceBackend):
    """A backend whose graphs hold uniform batches only; eager batches may be ragged."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> ReferenceMetadata:
        """Refuse a ragged batch in a graph."""
        assert view.extend_seq_lens is None or not buffers.in_graph
        return super().allocate_metadata(view, shape, buffers)


class CapturesRaggedAsUniform(ReferenceBackend):
    """A backend whose graphs give every request the same number of tokens; eager batches may be ragged."""

    def fill_request(self, view: ForwardBatch, request: torch.Tensor) -> None:
        """Divide the tokens evenly in a graph."""
        super().fill_request(view, request)
        if self._registry is not None and self._registry.slot_of(request) is not None:
            width = max(view.num_tokens // max(view.batch_size, 1), 1)
            torch.arange(view.num_tokens, out=request)
            request.div_(width, rounding_mode="floor").clamp_(max=view.batch_size)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("backend", "rule"), [(CannotCaptureRagged, "GP12"), (CapturesRaggedAsUniform, "GP04")]
)
def test_a_level_that_is_not_kept_fails(backend: type[ReferenceBackend], rule: str) -> None:
    """A backend that declares more than its graphs hold fails, without an error of the suite.

    It is conformant with its real support. With eager attention it is right with any declared support.
    """
    modes = frozenset({ForwardMode.EXTEND})
    require_right(checked(declaring(backend, modes=modes, graph_support=GraphSupport.UNIFORM)))
    is_refused = backend is CannotCaptureRagged
    found = checked(declaring(backend, modes=modes), full=is_refused)
    require_right({SEGMENTS: found.pop(SEGMENTS)})
    (results,) = found.values()
    assert not [r for r in results if r.outcome is Outcome.ERROR]
    failed = {r.rule for r in results if r.outcome is Outcome.FAIL}
    assert rule in failed, failed


# -- every capability ------------------------------------------------------------------------------

OF_ANY = {"page_sizes": (1, 2, 32, 256), "head_dims": (1, 24, 64)}
"""Values of the sets that are not restricted."""
NOT_LESS = {"devices": "a run has one device", "needs_host_plan": "it plans on the host"}
"""Fields without a smaller declaration that is right for the suite's own backend."""


def _narrowed(can: Capabilities) -> Iterator[tuple[str, Any]]:
    """Yield each field with each smaller value."""
    for field in fields(can):
        name, value = field.name, getattr(can, field.name)
        if name in NOT_LESS:
            continue
        if isinstance(value, bool):
            smaller: list[Any] = [False][: value is True]
        elif isinstance(value, GraphSupport):
            smaller = [level for level in GraphSupport if level is not value]
        elif isinstance(value, int):
            smaller = [1, 17, 80]
        elif value is None:
            smaller = [frozenset({v}) for v in OF_ANY[name]]
        else:
            smaller = [frozenset({v}) for v in sorted(value, key=str)]
        for less in smaller:
            yield name, less


NARROWED = [pytest.param(name, less, id=f"{name}-{less}") for name, less in _narrowed(RIGHT)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "less"), NARROWED)
def test_a_right_backend_that_declares_less_is_conformant(name: str, less: Any) -> None:
    """With any field of the capabilities narrowed, everything passes or is unsupported."""
    declared = {"modes": frozenset({ForwardMode.DECODE}), name: less}
    require_right(checked(declaring(**declared)))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "less"), {case.values[0]: case for case in NARROWED}.values())
def test_a_right_backend_that_declares_less_keeps_every_rule(name: str, less: Any) -> None:
    """The same with all experiments, for decode, and one value of each field."""
    declared = {"modes": frozenset({ForwardMode.DECODE}), name: less}
    require_right(checked(declaring(**declared), full=True))


def test_every_capability_is_narrowed() -> None:
    """Every field of the capabilities is narrowed, or listed with the reason."""
    assert {name for name, _ in _narrowed(RIGHT)} | {*NOT_LESS} == {f.name for f in fields(RIGHT)}


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"modes": frozenset({ForwardMode.DECODE})}, "the mode"),
        ({"devices": frozenset({"cuda"})}, "device cpu"),
        ({"page_sizes": frozenset()}, "page sizes"),
        ({"head_layouts": frozenset()}, "head layouts"),
    ],
)
def test_a_kind_of_step_without_a_lane_names_what_is_not_declared(
    declared: dict[str, Any], says: str
) -> None:
    """A backend without a lane for a kind of step has an unsupported result with the reason."""
    catalog = ListedCatalog(mine=declaring(**declared))
    target = Target("attention_backend", "mine")
    plans = suite.lanes_of(target, FULL, catalog)
    told = {r.lane: r for r in unsupported(target, catalog, plans, "cpu")}
    assert told["extend"].outcome is Outcome.UNSUPPORTED
    assert says in str(told["extend"].reason)


# -- runners ---------------------------------------------------------------------------------------


def capturing(mode: ForwardMode, shapes: Callable[[Any], Sequence[tuple[int, int]]]) -> type[GraphRunner]:
    """Return a runner of the core that captures shapes of these requests and tokens, given the limits."""
    body = {
        "modes": frozenset({mode}),
        "needs": GraphSupport.ALWAYS if mode.is_ragged else GraphSupport.UNIFORM_DECODE,
        "shapes": lambda self: [GraphShape(mode, *size) for size in shapes(self.context.limits.max_bs)],
        "__module__": GraphRunner.__module__,
    }
    return type("Captures", (GraphRunner,), body)


DECODES: dict[str, Callable[[int], Sequence[tuple[int, int]]]] = {
    "one request": lambda _: [(1, 1)],
    "the largest": lambda most: [(most, most)],
    "both": lambda most: sorted({(1, 1), (most, most)}),
    "one in between": lambda most: [(min(3, most),) * 2],
}
EXTENDS: dict[str, Callable[[int], Sequence[tuple[int, int]]]] = {
    "one bucket": lambda _: [(4, 24)],
    "one request": lambda _: [(1, 16)],
    "one token": lambda _: [(1, 1)],
    "no room for prompts": lambda _: [(4, 4)],
    "two axes": lambda _: [(1, 8), (1, 24), (4, 8), (4, 24)],
    "one count of tokens": lambda most: [(n, 24) for n in sorted({1, 2, most})],
    "neither contains the other": lambda _: [(1, 24), (4, 8)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mode", "shapes"),
    [
        *(pytest.param(ForwardMode.DECODE, f, id=f"decode, {name}") for name, f in DECODES.items()),
        *(pytest.param(ForwardMode.EXTEND, f, id=f"extend, {name}") for name, f in EXTENDS.items()),
    ],
)
def test_a_right_runner_of_any_shapes_is_conformant(
    mode: ForwardMode, shapes: Callable[[int], Sequence[tuple[int, int]]]
) -> None:
    """A runner that captures few shapes, or shapes of two axes, has no failure and no error."""
    found = checked(runner=capturing(mode, shapes))
    require_right(found)
    assert {r.outcome for results in found.values() for r in results} == {Outcome.PASS}


def test_a_runner_that_needs_no_graph_support_is_checked_for_what_it_captures() -> None:
    """``needs = NEVER`` does not excuse a runner from the rules: what it captures is examined."""
    runner = capturing(ForwardMode.DECODE, DECODES["the largest"])
    runner.needs = GraphSupport.NEVER
    found = checked(runner=runner)
    require_right(found)
    assert {r.outcome for results in found.values() for r in results} == {Outcome.PASS}


def test_a_pair_that_an_engine_refuses_is_no_target() -> None:
    """A runner that needs more graph support than a backend has makes no pair with it."""
    extends = capturing(ForwardMode.EXTEND, EXTENDS["one bucket"])
    uniform = declaring(graph_support=GraphSupport.UNIFORM)
    catalog = ListedCatalog(always=declaring(), uniform=uniform, extends=extends)
    found = suite.targets(["always", "uniform", "extends"], catalog)
    assert [str(target) for target in found if target.partner] == ["always + extends"]


# -- eager steps beside replays --------------------------------------------------------------------


class FollowsTheLastLane(ReferenceBackend):
    """A backend with one scale for all its lanes, which a graph reads and an eager prefill changes."""

    scale = torch.ones(())

    def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
        """Write the scale for this batch, and the usual one for all other modes."""
        self.scale.fill_(2.0 if batch.forward_mode is ForwardMode.EXTEND else 1.0)
        return super().init_metadata_eager(batch, **more)

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, and scale; an eager prefill divides by its own."""
        out = super().forward(*args) * self.scale
        return out / 2 if args[-1].staging is None and self._is_prefill else out

    @property
    def _is_prefill(self) -> bool:
        return self.context.mode is ForwardMode.EXTEND


@pytest.mark.sweep
def test_an_eager_step_of_another_mode_between_replays_changes_nothing() -> None:
    """State that lanes of one backend share, and that an eager prefill writes, is GP14 of the decode lane."""
    modes = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
    for base, expected in ((ReferenceBackend, Outcome.PASS), (FollowsTheLastLane, Outcome.FAIL)):
        backend = declaring(base, modes=modes, graph_support=GraphSupport.UNIFORM_DECODE)
        options = replace(FULL, only=frozenset({"GP14"}))
        found = checked(backend, full=True, options=options)
        outcomes = {r.rule: r.outcome for r in found[Case(ForwardMode.DECODE)]}
        assert outcomes["GP14"] is expected
        assert {r.outcome for r in found[Case(ForwardMode.EXTEND)]} == {Outcome.UNSUPPORTED}
