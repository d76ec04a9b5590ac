"""Ranks as processes: ``graphpact check --ranks N``, what it finds, and what it says about lost ranks."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from graphpact import ForwardMode
from graphpact.errors import GraphpactError, UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_conformance import suite, vocabulary
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import configs_of, plainest
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.experiments.real_ranks import RankProcesses, RealRanks, launch
from graphpact_conformance.experiments.real_ranks.messages import (
    ClassSource,
    LostRank,
    Place,
    RankReport,
    RankTask,
    Stop,
    Symptom,
    Wrong,
)
from graphpact_conformance.experiments.real_ranks.scenes import PADDING_ID, scenes
from graphpact_conformance.experiments.real_ranks.verdict import EXAMINES, findings_of
from graphpact_conformance.isolation import supervise
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.report.files import save
from graphpact_conformance.results import Finding, Outcome, Report
from graphpact_conformance.suite.plan import in_parts
from graphpact_conformance.targets import Options, Target, reproduce_line

HERE = Path(__file__).parent
OPTIONS = Options(size="quick", examples=1, ranks=2)


def lane_of(mode: ForwardMode = ForwardMode.DECODE, ranks: int = 2) -> LaneUnderTest:
    """Return the lane of the suite's plugins in a mode, as for ranks."""
    (config,) = [c for c in plainest(configs_of(ReferenceBackend.capabilities)) if c.case == Case(mode)]
    return LaneUnderTest(replace(config, counts=True, extra_requests=1).divided(ranks), kind="runner")


# -- real processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plants() -> Iterator[None]:
    """Let this process and those of ranks import `rank_plants`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


@pytest.fixture(scope="module")
def processes(plants: None) -> Iterator[RankProcesses]:
    """Return two ranks."""
    made = RankProcesses(2)
    yield made
    made.close()


def found_in(processes: RankProcesses, name: str) -> list[Finding]:
    """Return the findings of a runner of `rank_plants` on real ranks, in decode."""
    import rank_plants

    lane = replace(lane_of(ranks=processes.size), runner=getattr(rank_plants, name))
    lane.listed = frozenset(EXAMINES)
    source = ClassSource("rank_plants:planted", (name,))
    return [*RealRanks(processes, source).real_ranks(lane, ())]


@pytest.mark.parametrize(
    ("name", "rules", "names"),
    [
        ("Right", [], ""),
        (
            "CountsPadding",
            ["GP06", "GP17"],
            "other padding tokens on rank 1 change token 0 of the batch of rank",
        ),
        ("CapturesOtherCount", ["GP11"], "rank 1: view.num_token_non_padded at the capture of decode["),
        pytest.param("Refuses", ["GP17"], "ranks 0, 1", marks=pytest.mark.sweep),
        pytest.param(
            "GathersItsOwn",
            ["GP17", "GP17"],
            "rank 1: view.global_num_tokens_gpu (uneven loads; ",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "MasksLiveTokens",
            ["GP17"],
            "rank 1: view.num_token_non_padded (equal loads ",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_wrong_rows_of_a_rank_are_found_with_its_name(
    name: str, rules: list[str], names: str, processes: RankProcesses
) -> None:
    """A rank that counts or gives wrong rows is named, with rule and batches; a right one passes.

    All ranks do their whole task, and so the same processes do the next one.
    """
    before = processes._running
    found = found_in(processes, name)
    assert processes._running is not None
    assert before in (None, processes._running)
    assert sorted(str(f.rule) for f in found) == rules
    assert not rules or any((f.field or "").startswith(names) for f in found)
    assert all(f.help and f.expected and f.actual for f in found)
    assert all(f.batch for f in found if ";" in (f.field or "") and "at the capture" not in (f.field or ""))


@pytest.mark.sweep
def test_a_killed_rank_is_named_and_the_next_lane_has_new_ranks(processes: RankProcesses) -> None:
    """The finding says which rank was killed, and where the other one waited; then others start."""
    (found,) = found_in(processes, "Dies")
    assert found.rule == "GP17"
    assert (found.field or "").startswith("rank 1, equal loads that fill the largest shape; ")
    assert found.actual.startswith("rank 1 was ended by signal 9 (SIGKILL)\n")
    assert "rank 0: rank 0, step 1, lane 'decode', replay decode[bs=4, tokens=4]: waited in" in found.actual
    assert processes._running is None


class Pretended(launch._Running):
    """Ranks without processes: the test has the other ends of their pipes.

    Args:
        folder: The folder for output.
    """

    def __init__(self, folder: Path) -> None:
        self._size, self._timeout, self._limit = 2, 0.1, 5.0
        self._folder = folder
        self._launcher = Mock()
        (folder / "launcher").write_text(
            "E1128 api.py] failed (exitcode: -11) local_rank: 1 (pid: 4) of binary"
        )
        (folder / "stderr-1").write_text("a warning\n" * 9 + "the last words\n")
        ends = [Pipe() for _ in range(2)]
        self._pipes = {rank: ours for rank, (ours, _) in enumerate(ends)}
        self._pids = dict.fromkeys(range(2), 2**22 + 1)  # no process has it
        self.ranks = [theirs for _, theirs in ends]


TASK = RankTask(lane_of().config, ClassSource("rank_plants:planted"), "runner", "auto", EXAMINES)


def test_a_silent_rank_is_lost_soon_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank stops, the others have the time that ranks wait for each other; then they are lost."""
    monkeypatch.setattr(launch, "_GRACE", 0.2)
    running = Pretended(tmp_path)
    report = RankReport(0, stop=stop("waited", is_waiting=True))
    running.ranks[0].send(report)
    begun = time.monotonic()
    assert running.ask(TASK) == [report, LostRank(1, "does not answer", ("on stderr:", *_LAST_WORDS))]
    assert time.monotonic() - begun < 3
    assert running.ranks[1].recv() == TASK


def test_no_rank_answers_after_the_limit_of_a_task(tmp_path: Path) -> None:
    """Ranks that all hang are lost when the time of the task is over."""
    running = Pretended(tmp_path)
    running._limit = 0.2
    assert [each.rank for each in running.ask(TASK) if isinstance(each, LostRank)] == [0, 1]


def test_a_rank_that_ended_has_what_the_launcher_says(tmp_path: Path) -> None:
    """A closed pipe is a lost rank, with the signal that the launcher wrote and the end of its stderr."""
    running = Pretended(tmp_path)
    running.ranks[0].send(RankReport(0))
    running.ranks[1].close()
    how = "was ended by signal 11 (SIGSEGV)"
    assert running.ask(TASK) == [RankReport(0), LostRank(1, how, ("on stderr:", *_LAST_WORDS))]


_LAST_WORDS = (*["a warning"] * 4, "the last words")


@pytest.mark.sweep
def test_a_rank_that_hangs_is_named_with_its_place(plants: None) -> None:
    """A rank that sleeps is a finding with its line, after the time that ranks wait for each other."""
    slow = RankProcesses(2, timeout=5.0)
    (found,) = found_in(slow, "Hangs")
    assert (found.rule, found.field and found.field.partition(",")[0]) == ("GP17", "rank 1")
    assert found.actual.startswith("rank 1 does not answer\n")
    assert "in fault (tests/rank_plants.py:" in found.actual
    assert "GRAPHPACT_CHECK_TIMEOUT" in (found.help or "")
    assert slow._running is None


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "rule", "ranks", "says"),
    [
        ("Raises", "GP17", "rank 1,", "no memory on this rank"),
        ("Leaves", "GP17", "rank 1,", "rank 1 has ended with status 7\n"),
        (
            "WaitsInFit",
            "GP17",
            "ranks 0, 1,",
            "rank 1: step 1, lane 'decode', preparing 4 requests: waited in",
        ),
        ("RaisesEverywhere", "GP17", "ranks 0, 1,", "ranks are not supported"),
        ("IsWrong", None, "rank", ""),
    ],
)
def test_an_error_of_a_rank_is_found_once(
    name: str, rule: str | None, ranks: str, says: str, plants: None
) -> None:
    """An error is one finding with the ranks that have it; without a rule if one process has it too."""
    (found,) = found_in(RankProcesses(2, timeout=5.0), name)
    assert found.rule == rule
    assert (found.field or "").startswith(ranks)
    assert says in found.actual


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("names", "ranks"),
    [(["flashinfer", "cuda_graph", "fa3"], 2), (["trtllm_mla", "breakable_cuda_graph"], 3)],
)
def test_shipped_plugins_pass_on_real_ranks(names: list[str], ranks: int, tmp_path: Path) -> None:
    """Our backends and runners, alone and in pairs, pass on real ranks, whose number is in the reports."""
    options = Options(size="quick", ranks=ranks, lanes=(f"*-ranks{ranks}",))
    found = supervise.check_plugins(names, options, workers=1)
    results = [result for plugin in found.plugins for result in plugin.results]
    assert {result.outcome for result in results if result.rule is not None} == {Outcome.PASS}
    assert {result.rule for result in results} >= {*EXAMINES}
    assert found.environment.ranks == found.options["ranks"] == ranks
    save(found, tmp_path)
    assert Report.model_validate_json((tmp_path / "results.json").read_text()) == found
    assert f"<dd>{ranks}</dd>" in (tmp_path / "report.html").read_text().replace("\n", "")


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_step_together(ranks: int, plants: None) -> None:
    """Four and eight ranks, in groups of several ranks too, have no finding for a right runner."""
    assert found_in(RankProcesses(ranks), "Right") == []


@pytest.mark.sweep
def test_ranks_end_with_a_suite_that_is_killed(tmp_path: Path) -> None:
    """If the suite is killed, its ranks end, also one that hangs, and their folder is removed."""
    code = f"""
import sys, threading
sys.path.insert(0, {str(HERE)!r})
from test_real_ranks import RankProcesses, found_in
processes = RankProcesses(2)
threading.Thread(target=found_in, args=(processes, "Hangs"), daemon=True).start()
while processes._running is None or len(processes._running._pids) < 2:
    threading.Event().wait(0.1)
print(*processes._running._pids.values(), processes._running._folder, flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        process.kill()
    deadline = time.monotonic() + 30
    left: list[str] = [*pids, folder]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [each for each in left if Path(each if each == folder else f"/proc/{each}").exists()]
    assert len(pids) == 2
    assert left == []


def test_ranks_that_do_not_start_are_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the processes end before they are here, the error has what they wrote, and nothing is left."""
    monkeypatch.setattr(launch, "WORKER", "graphpact_conformance.no_such_module")
    processes = RankProcesses(2)
    with pytest.raises(GraphpactError, match=r"^0 of 2 ranks started: .*no_such_module"):
        processes.run(TASK)
    assert processes._running is None


# -- reports as findings -----------------------------------------------------------------------------

PLACE = Place("each rank has its own requests", "uneven loads", "some batches", "decode[bs=4, tokens=4]")


def judged(*answers: RankReport | LostRank) -> list[tuple[str | None, str]]:
    """Return rule and field of the findings of answers."""
    return [(f.rule, f.field or "") for f in findings_of(lane_of(), answers)]


def wrong(symptom: Symptom, rank: int, actual: str = "1", place: Place = PLACE) -> Wrong:
    """Return a wrong value."""
    return Wrong(symptom, rank, "a field", "2", actual, place)


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        ([[wrong("count", 0)], []], ["GP17"]),
        ([[wrong("count", 0)], [wrong("count", 1)]], ["GP05", "GP05"]),
        ([[wrong("count", 0)], [wrong("count", 1, place=replace(PLACE, scene="idle"))]], ["GP17", "GP17"]),
        ([[wrong("gathered", 0)], [wrong("gathered", 1, "3")]], ["GP17", "GP17"]),
        ([[wrong("gathered", 0)], [wrong("gathered", 1)]], ["GP05", "GP05"]),
        ([[wrong("capture count", 0)], []], ["GP11"]),
        ([[wrong("padding", 1)], [wrong("padding", 1)]], ["GP06"]),
        ([[wrong("repeat", 0)], []], ["GP18"]),
        ([[wrong("shared rows", 0)], [wrong("shared rows", 1)]], ["GP17", "GP17"]),
        ([[wrong("shared rows", 0)], [wrong("count", 1)]], ["GP17"]),
        ([[wrong("rows", 0)], []], ["GP17"]),
    ],
)
def test_wrong_values_have_rules(values: Sequence[Sequence[Wrong]], rules: list[str]) -> None:
    """The rule of a wrong value depends on its kind, and of a count on whether all ranks have it."""
    found = judged(*(RankReport(rank, wrong=[*each]) for rank, each in enumerate(values)))
    assert [rule for rule, _ in found] == rules
    assert all("rank " in field and "; each rank has its own requests)" in field for _, field in found)


def stop(actual: str, *, rule: str | None = None, is_waiting: bool = False) -> Stop:
    """Return the error that ended a rank's work."""
    return Stop(
        Finding(rule=rule, hook=None, field=None, expected="", actual=actual),
        PLACE,
        is_waiting,
        in_capture=False,
    )


def test_ranks_that_only_waited_are_named_if_nothing_else_is_known() -> None:
    """If a rank raised or is lost, the others' waits are no findings; otherwise one finding names all."""
    waits = RankReport(0, stop=stop("waited in all_reduce", rule="GP17", is_waiting=True))
    raises = RankReport(1, stop=stop("no memory"))
    assert judged(waits, raises) == [("GP17", "rank 1, uneven loads; each rank has its own requests")]
    (lost,) = findings_of(lane_of(), [waits, LostRank(1, "does not answer", ("in fit (fa3.py:1)",))])
    assert lost.actual == "rank 1 does not answer\nin fit (fa3.py:1)\nrank 0: waited in all_reduce"
    assert (lost.batch, lost.shape) == (PLACE.batch, PLACE.shape)
    both = RankReport(1, stop=stop("waited in all_gather", rule="GP17", is_waiting=True))
    assert judged(waits, both) == [("GP17", "ranks 0, 1, uneven loads; each rank has its own requests")]


def test_an_error_that_all_ranks_raise_is_one_finding() -> None:
    """Errors with the same text are one finding with all ranks, under the rule that they name."""
    same = [RankReport(rank, stop=stop("the ranks differ", rule="GP17")) for rank in (0, 1)]
    assert judged(*same) == [("GP17", "ranks 0, 1, uneven loads; each rank has its own requests")]


def test_a_fault_of_the_suite_on_a_rank_is_an_error() -> None:
    """A fault of the suite's own code on a rank is no finding."""
    with pytest.raises(GraphpactError, match="rank 1: ValueError: of the suite"):
        judged(RankReport(0), RankReport(1, fault="ValueError: of the suite"))


# -- the batches of ranks ----------------------------------------------------------------------------


def _loads(config: Config, groups: int) -> list[tuple[int, ...]]:
    return [tuple(len(problem.tokens) for problem in scene.problems) for scene in scenes(config, groups)]


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_the_scenes_have_every_kind_of_load(mode: ForwardMode) -> None:
    """Loads are equal, uneven, idle, too large, and smaller after larger ones in one shape."""
    config = lane_of(mode).config
    sizes = [shape.num_tokens for shape in config.shapes]

    def shape_of(load: tuple[int, ...]) -> int | None:
        return next((size for size in sizes if size >= max(load)), None)

    loads = _loads(config, 2)
    assert (sizes[-1], sizes[-1]) in loads
    assert any(min(load) == 0 and load[0] for load in loads)
    assert any(load[0] == 0 for load in loads)
    assert [shape_of(load) for load in loads].count(None) == 1
    in_largest = [max(load) for load in loads if shape_of(load) == sizes[-1]]
    assert in_largest != sorted(in_largest)
    assert {shape_of(load) for load in loads} == {*sizes, None}
    assert max(scene.repeats for scene in scenes(config, 2)) == 3
    assert all(len(load) == 1 and load[0] for load in _loads(config, 1))
    assert {len(load) for load in _loads(config, 5)} == {5}


def test_no_live_request_has_the_token_of_padding() -> None:
    """Only padding rows read the huge weights of `PADDING_ID`."""
    problems = [p for scene in scenes(lane_of(ForwardMode.EXTEND).config, 8) for p in scene.problems]
    assert PADDING_ID not in {token.token_id for problem in problems for token in problem.tokens}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_ranks_can_divide_the_tokens_of_every_shape(ranks: int) -> None:
    """A configuration for ranks has shapes whose tokens they can divide, at least as large as before."""
    for config in plainest(configs_of(ReferenceBackend.capabilities)):
        divided = config.divided(ranks)
        assert all(shape.num_tokens % ranks == 0 for shape in divided.shapes)
        least = [min(s.num_tokens for s in c.shapes) for c in (config, divided)]
        assert least[0] <= least[1]
        assert divided.divided(ranks) == divided
        shapes = ReferenceRunner(LaneUnderTest(divided)._context).shapes()
        assert [s.num_tokens for s in shapes] == [s.num_tokens for s in divided.shapes]


# -- the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fa3", "--ranks", "1"], "--ranks"),
        (["fa3", "--ranks", "9"], "--ranks"),
        (["fa3", "--ranks", "two"], "--ranks"),
        (["fa3", "--ranks", "2", "--device", "cuda"], "--ranks and --device cuda contradict each other"),
        (["x:y", "--ranks", "2", "--adapter", "vllm"], "--ranks and --adapter contradict each other"),
        (["fa3", "--ranks", "2", "--scenario", "x"], "--ranks and --scenario contradict each other"),
        (["driver:tape", "--ranks", "2", "--list"], "driver:tape has no lanes with ranks"),
    ],
)
def test_what_ranks_cannot_do_is_a_usage_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks other than 2 to 8, on a GPU, of an adapter, a recording or a driver: status 2, nothing runs."""
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


@pytest.mark.parametrize(
    ("missing", "says"), [("is_available", "torch.distributed"), ("is_gloo_available", "gloo")]
)
def test_a_torch_without_processes_is_a_usage_error(
    missing: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of torch without distributed, or without gloo, cannot run ranks, and the error says so."""
    monkeypatch.setattr(torch.distributed, missing, lambda: False)
    targets = [Target("attention_backend", "fa3")]
    with pytest.raises(UsageError, match=f"^--ranks needs {says}, which this build of torch"):
        suite.require_lanes(targets, OPTIONS, PluginCatalog.scan())
    suite.require_lanes(targets, replace(OPTIONS, ranks=None), PluginCatalog.scan())


def test_lanes_of_ranks_are_added_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """``--ranks N`` adds lanes whose names end in it; they have one experiment, which the legend explains."""
    assert (
        main(["check", "fa3", "cuda_graph", "--ranks", "3", "--lane", "*-ranks3", "--quick", "--list"]) == 0
    )
    out = capsys.readouterr().out
    assert out.count("real_ranks") == out.count("-counts-ranks3 ") == 4  # two of fa3; cuda_graph; the pair
    options = replace(OPTIONS, ranks=3, lanes=())
    plain, added = [
        suite.checks_by_lane(Target("runner", "cuda_graph"), each, PluginCatalog.scan())
        for each in (replace(options, ranks=None), options)
    ]
    assert {**added, **plain} == added
    assert [name for name in added if name not in plain] == ["decode-page16-gqa-float32-counts-ranks3"]
    about = vocabulary.experiments()["real_ranks"]
    assert about == RealRanks.about == RealRanks(RankProcesses(2), ClassSource("")).experiment.about


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        ("quick", {"decode", "extend"}),
        ("normal", {"decode", "extend", "target_verify", "draft_decode", "draft_extend", "extend_segments"}),
    ],
)
def test_a_longer_run_has_ranks_in_more_kinds_of_step(size: Any, kinds: set[str]) -> None:
    """A quick run has ranks in two kinds of step, a normal one in each without trees; each kind once."""
    plans = suite.lanes_of(
        Target("attention_backend", "fa3"), replace(OPTIONS, size=size), PluginCatalog.scan()
    )
    cases = [str(plan.lane.config.case) for plan in plans if plan.ranks is not None]
    assert len(cases) == len(kinds)
    assert {*cases} == kinds


def test_lanes_of_ranks_stay_in_one_part() -> None:
    """Lanes that use the same processes are in one part of a run."""
    plans = suite.lanes_of(Target("attention_backend", "fa3"), OPTIONS, PluginCatalog.scan())
    parts = in_parts(plans, 3, OPTIONS)
    assert sorted(map(str, plans)) == sorted(str(plan) for part in parts for plan in part)
    assert sum(any(plan.ranks is not None for plan in part) for part in parts) == 1


def test_a_finding_of_ranks_is_reproduced_with_ranks() -> None:
    """The command that reproduces a finding has ``--ranks``."""
    line = reproduce_line("fa3", ["GP17"], "decode-ranks2", replace(OPTIONS, size="normal"))
    assert line == "graphpact check fa3 --only GP17 --ranks 2 --lane 'decode-ranks2' --seed 0 --examples 1"
