"""The examination of plugins that hang, exit, crash, print, warn or raise.

The suite is a stand-in, so that a test defines what a plugin does in each piece of work. Plugins are
distributions on disk, and the processes are real.
"""

import signal
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from graphpact.errors import ConfigError, GraphpactError, RejectedPluginError, UnknownPluginError
from graphpact_cli import children
from graphpact_conformance.isolation import supervise
from graphpact_conformance.results import ExitCode, Outcome, PluginResults, Report, Result
from graphpact_conformance.targets import Options, Target

BOUND = 1.5
FULL = Options()

PLUGIN = """
    import atexit, ctypes, os, pathlib, signal, subprocess, sys, time, warnings

    LEADER = os.getpid()

    def sign(name, pid):
        pathlib.Path(os.environ["BENCH"], name).write_text(str(pid))

"""

BAD = {
    "good": "def work_1(): pass",
    "hangs": """
        def deeper():
            while True: time.sleep(0.01)

        def work_1(): sign("hangs", os.getpid())
        def work_2(): deeper()
        def work_3(): pass
    """,
    "leaves": "def work_1(): os._exit(0)\ndef work_2(): pass",
    "exits": "def work_1(): sys.exit(3)\ndef work_2(): pass",
    "crashes": """
        def work_1():
            print("last words", file=sys.stderr)
            ctypes.string_at(0)
    """,
    "stubborn": "\n".join(f"def work_{n}(): os._exit({n})" for n in range(1, 7)),
    "late": """
        def work_1(): atexit.register(os._exit, 5)
    """,
    "lingers": """
        def work_1():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            sign("lingers", child.pid)
    """,
    "helped": """
        def work_1():
            reader, writer = os.pipe()  # closed by the end of this process
            subprocess.Popen(["cat"], stdin=reader)
    """,
    "splits": """
        def work_1(): os.fork()
        def work_2(): pass
    """,
    "divides": """
        os.fork()  # before the first piece of work, as in a factory
        def work_1(): pass
    """,
    "busy": """
        def work_1():
            import threading
            threading.Thread(target=time.sleep, args=(600,), name="watcher").start()
    """,
    "deaf": """
        def work_1():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sign("deaf", os.getpid())
            while True: time.sleep(600)
    """,
    "parricide": """
        def work_1(): os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)
        def work_2(): pass
    """,
    "closes": """
        def work_1(): os.closerange(3, 64)
        def work_2(): pass
    """,
    "multiplies": """
        def work_1():
            for _ in range(3):
                os.fork()
            if os.getpid() != LEADER:
                while True: time.sleep(600)
    """,
    "moves": """
        import shutil, tempfile
        def work_1():
            os.chdir(tempfile.mkdtemp())
            os.rmdir(os.getcwd())
            tempfile.tempdir = "/nowhere"
            os.environ.clear()
        def work_2(): pass
    """,
    "starves": "def work_1(): bytearray(1 << 60)\ndef work_2(): pass",
    "prints": """
        def work_1(): pass
        def work_2(): print("hello")
        def work_3(): os.write(1, b"again")
    """,
    "writes": "def work_1(): os.write(1, b'raw bytes')",
    "mutters": """
        def work_1(): print("not of the failure", file=sys.stderr)
        def work_2():
            print("the cause, at 0x7f12ab", file=sys.stderr)
            raise ValueError("wrong")
        def work_3(): raise ValueError("elsewhere")
    """,
    "warns": """
        def work_1():
            for _ in range(3):
                warnings.warn("an old way", DeprecationWarning)
        def work_2():
            warnings.warn_explicit("of torch itself", UserWarning, "/lib/torch/_ops.py", 1)
    """,
    "misled": """
        def work_1():
            exec(compile("import warnings; warnings.warn('mind', stacklevel=2)", "/elsewhere.py", "exec"))
    """,
    "raises": "def work_1(): raise KeyError('who')\ndef work_2(): pass",
    "panics": "def work_1(): raise KeyboardInterrupt\ndef work_2(): pass",
    "unlucky": 'def work_1():\n    "breaks the suite"\ndef work_2(): pass',
    "empty": "",
}


class Bench:
    """A folder of plugins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site"
        self.site.mkdir()

    def add(self, name: str, body: str, source: str = PLUGIN) -> None:
        """Install distribution ``fake-<name>`` with the package ``fake_<name>`` and a runner."""
        package = self.site / f"fake_{name}"
        package.mkdir()
        (package / "__init__.py").write_text(textwrap.dedent(source) + textwrap.dedent(body))
        info = self.site / f"fake_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[graphpact.runners]\n{name} = fake_{name}:Runner\n"
            "[graphpact.contract]\n1 = graphpact.hookspecs:CONTRACT_VERSION\n"
        )

    def check(self, *names: str, options: Options = FULL, **kwargs: Any) -> Report:
        """Run `supervise.check_plugins` with the stand-in suite."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(__file__).parent))
            patch.syspath_prepend(str(self.site))
            patch.setenv("BENCH", str(self.root))
            kwargs = {"timeout": BOUND, **kwargs}
            return supervise.check_plugins(names, options, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    """Have child processes use the stand-in suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise.TargetTask, "work", "stand_in_suite:examine")
        patch.setattr(supervise._NameResolution, "work", "stand_in_suite:resolve")
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return a bench with every plugin of `BAD`."""
    made = Bench(tmp_path_factory.mktemp("bench"))
    for name, body in BAD.items():
        made.add(name, body)
    return made


@pytest.fixture(scope="module")
def told() -> list[tuple[str, Result]]:
    """Return the results that ``on_result`` received during the run of `report`."""
    return []


@pytest.fixture(scope="module")
def report(bench: Bench, told: list[tuple[str, Result]]) -> Report:
    """Return the report of one run over every plugin of `BAD`, with two workers."""
    return bench.check(*BAD, workers=2, on_result=lambda target, result: told.append((target.name, result)))


def of(report: Report, name: str) -> PluginResults:
    """Return the results of one plugin."""
    return next(plugin for plugin in report.plugins if plugin.name == name)


def outcomes(plugin: PluginResults) -> list[tuple[str, str, str]]:
    """Return check, lane and outcome of all results in order."""
    return [(r.check, r.lane, r.outcome.value) for r in plugin.results]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip()[:1] not in ("", "Z", "X")


def evidence(plugin: PluginResults, check: str) -> str:
    """Return the evidence of the first result of a check: its findings, else its reason."""
    result = next(r for r in plugin.results if r.check == check)
    return "\n".join(f.actual for f in result.findings) or result.reason or ""


ENDINGS = {
    "good": [("works", "work_1", "pass")],
    "hangs": [
        ("works", "work_1", "pass"),
        ("works", "work_3", "pass"),
        ("ends", "work_2", "fail"),
    ],
    "leaves": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "exits": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "crashes": [("ends", "work_1", "fail")],
    "stubborn": [
        *(("ends", f"work_{n}", "fail") for n in range(1, 5)),
        ("ends", "the rest", "not_run"),
    ],
    "late": [("works", "work_1", "pass"), ("ends", "end of the process", "fail")],
    "lingers": [("works", "work_1", "pass"), ("ends", "end of the process", "fail")],
    "helped": [("works", "work_1", "pass")],
    "splits": [*(("works", f"work_{n}", "pass") for n in (1, 2)), ("ends", "work_1", "fail")],
    "divides": [("works", "work_1", "pass"), ("ends", "start", "fail")],
    "busy": [("works", "work_1", "pass"), ("ends", "end of the process", "fail")],
    "deaf": [("ends", "work_1", "fail")],
    "parricide": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "closes": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "multiplies": [("works", "work_1", "pass"), ("ends", "end of the process", "fail")],
    "moves": [*(("works", f"work_{n}", "pass") for n in (1, 2))],
    "starves": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "prints": [*(("works", f"work_{n}", "pass") for n in (1, 2, 3)), ("quiet", "work_2", "fail")],
    "writes": [("works", "work_1", "pass"), ("quiet", "work_1", "fail")],
    "mutters": [("works", "work_1", "pass"), *(("works", f"work_{n}", "fail") for n in (2, 3))],
    "warns": [
        ("works", "work_1", "pass"),
        ("works", "work_2", "pass"),
        ("quiet", "work_1", "fail"),
    ],
    "misled": [("works", "work_1", "pass"), ("quiet", "work_1", "fail")],
    "raises": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "panics": [("works", "work_2", "pass"), ("ends", "work_1", "fail")],
    "unlucky": [("works", "work_1", "pass"), ("suite", "work_1", "error")],
    "empty": [],
}


@pytest.mark.parametrize("name", BAD)
def test_each_way_to_end_has_its_results(report: Report, name: str) -> None:
    """A fault is a failure of the current work; other work still runs, up to a limit of restarts."""
    assert outcomes(of(report, name)) == ENDINGS[name]


EVIDENCE = {
    ("hangs", "ends"): f"it did not finish within {BOUND:g} s",
    ("leaves", "ends"): "it ended the process: exit status 0",
    ("exits", "ends"): "it ended the process: exit status 3",
    ("crashes", "ends"): f"signal {signal.SIGSEGV.value} (SIGSEGV) ended the process",
    ("late", "ends"): "it ended the process: exit status 5",
    ("lingers", "ends"): "still running, and ended by the suite: ",
    ("splits", "ends"): "a child that it forked went on with the suite's work",
    ("divides", "ends"): "a child that it forked went on with the suite's work",
    ("busy", "ends"): "its threads still run: watcher",
    ("deaf", "ends"): f"it did not finish within {BOUND:g} s",
    ("parricide", "ends"): f"it did not finish within {BOUND:g} s",
    ("closes", "ends"): "the pipe to the parent is gone",
    ("starves", "ends"): "MemoryError",
    ("multiplies", "ends"): "still running",
    ("prints", "quiet"): "first: 'hello'",
    ("writes", "quiet"): "first: 'raw bytes'",
    ("warns", "quiet"): "DeprecationWarning: an old way",
    ("misled", "quiet"): "UserWarning: mind",
    ("raises", "ends"): "KeyError: 'who'",
    ("panics", "ends"): "KeyboardInterrupt",
    ("unlucky", "suite"): "ZeroDivisionError: of the suite's own",
}


@pytest.mark.parametrize(("name", "check"), EVIDENCE)
def test_the_evidence_names_what_happened(report: Report, name: str, check: str) -> None:
    """A failure names the exit status, the signal, the timeout, the line, the warning or the exception."""
    assert EVIDENCE[name, check] in evidence(of(report, name), check)


@pytest.mark.parametrize("name", ["prints", "writes", "warns", "misled"])
def test_output_of_a_plugin_is_a_should_that_counts_under_strict(report: Report, name: str) -> None:
    """A plugin that prints or warns is conformant, except under --strict."""
    found = of(report, name)
    (noise,) = [result for result in found.results if result.check == "quiet"]
    assert (noise.level, noise.outcome, noise.counts_against) == ("SHOULD", Outcome.FAIL, False)
    assert found.is_conformant
    alone = report.model_copy(update={"plugins": [found]})
    assert alone.exit_code is ExitCode.CONFORMANT
    strict = alone.model_copy(update={"options": {**alone.options, "strict": True}})
    assert strict.exit_code is ExitCode.NOT_CONFORMANT


def test_a_hang_shows_the_frames_that_do_not_move(report: Report) -> None:
    """The stack of a hang ends in the function that hangs; a crash has its stack and its stderr lines."""
    hang = evidence(of(report, "hangs"), "ends").splitlines()
    assert hang[-2].startswith("in work_2 (fake_hangs/__init__.py:")
    assert hang[-1].startswith("in deeper (fake_hangs/__init__.py:")
    crash = evidence(of(report, "crashes"), "ends")
    assert "in work_1 (fake_crashes/__init__.py:" in crash
    assert "on stderr:\nlast words" in crash


def test_stderr_goes_with_the_failure_of_its_work(report: Report) -> None:
    """A failure includes what its work wrote to stderr, without addresses, and not what other work wrote."""
    _, failed, elsewhere = of(report, "mutters").results
    assert failed.findings[0].actual == "wrong\non stderr:\nthe cause, at …"
    assert elsewhere.findings[0].actual == "elsewhere"


def test_what_a_plugin_started_is_gone(report: Report, bench: Bench) -> None:
    """A process that a plugin started is ended together with the worker process."""
    for name in ("lingers", "deaf"):
        assert not of(report, name).is_conformant
        assert not is_alive(int((bench.root / name).read_text()))


def test_a_plugin_that_shows_nothing_is_not_conformant(report: Report) -> None:
    """A target without results stays in the report and is not conformant."""
    assert not of(report, "empty").is_conformant


def test_every_result_is_reported_once(report: Report, told: list[tuple[str, Result]]) -> None:
    """``on_result`` receives each reported result once, despite restarts, and no other result."""
    for plugin in report.plugins:
        heard = [(r.check, r.lane, r.outcome.value) for name, r in told if name == plugin.name]
        assert sorted(heard) == sorted(outcomes(plugin))


@pytest.mark.sweep
def test_two_runs_differ_in_times_alone(report: Report, bench: Bench) -> None:
    """A run with one worker and a run with two have the same results, stacks and options."""
    names = ["prints", "crashes", "hangs", "warns"]
    again = bench.check(*names, workers=1).timeless()
    before = report.timeless()
    by_name = {plugin["name"]: plugin for plugin in before["plugins"]}
    assert again["plugins"] == [by_name[name] for name in names]
    assert again["environment"] == before["environment"]
    assert again["options"] == {**before["options"], "names": names}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["good"], ExitCode.CONFORMANT),
        (["leaves", "good"], ExitCode.NOT_CONFORMANT),
        (["stubborn", "good"], ExitCode.NOT_CONFORMANT),
        (["unlucky", "good"], ExitCode.SUITE_ERROR),
        (["leaves", "unlucky"], ExitCode.NOT_CONFORMANT),
        (["empty"], ExitCode.NOTHING_RAN),
        ([], ExitCode.NOTHING_RAN),
    ],
)
def test_the_exit_code(report: Report, names: list[str], code: ExitCode) -> None:
    """The exit status is 0 for a conformant plugin, 1 after a lost process, 5 if nothing ran.

    After a fault of the suite it is 3, unless a process was lost too.
    """
    part = report.model_copy(update={"plugins": [of(report, name) for name in names]})
    assert part.exit_code == code


def test_no_names_are_an_empty_report(bench: Bench) -> None:
    """Without names nothing runs, and the report contains the given options."""
    options = Options(seed=7, examples=3, only=frozenset({"GP02", "GP01"}), lanes=("decode*",))
    report = bench.check(options=options)
    assert report.exit_code == ExitCode.NOTHING_RAN
    assert (report.seed, report.examples) == (7, 3)
    assert report.options["only"] == ["GP01", "GP02"]
    assert report.options["lanes"] == ["decode*"]
    assert report.options["timeout"] == BOUND


AT_THE_DOOR: Mapping[str, tuple[str, str]] = {
    "leaves_early": (
        "import os; os._exit(0)",
        "looking for leaves_early: it ended the process",
    ),
    "hangs_early": (
        "import time; time.sleep(60)",
        "looking for hangs_early: it did not finish within",
    ),
}


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_what_cannot_be_imported_is_rejected(bench: Bench, name: str) -> None:
    """A named plugin that exits or hangs during import is a usage error that gives the reason."""
    source, says = AT_THE_DOOR[name]
    bench.add(name, "", source)
    with pytest.raises(RejectedPluginError) as refused:
        bench.check("good", name)
    assert says in str(refused.value)


def test_what_the_suite_refuses_is_raised_here(bench: Bench) -> None:
    """A usage error of the process that resolves names is raised here, with its type, message and hint."""
    with pytest.raises(UnknownPluginError) as refused:
        bench.check("nobody")
    assert (refused.value.message, refused.value.hint) == ("no runner is called 'nobody'", "look")


def test_a_fault_of_the_suite_at_the_door_is_no_usage_error(bench: Bench) -> None:
    """A fault of the suite during the resolution of names has exit status 3."""
    with pytest.raises(GraphpactError, match="of the suite's own") as refused:
        bench.check("broken suite")
    assert refused.value.code == ExitCode.SUITE_ERROR


def test_a_process_that_does_not_start_again_is_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the worker cannot start for an examination, the result is an error of the suite."""
    monkeypatch.setattr(supervise.TargetTask, "work", "not_here:examine")
    report = bench.check("good")
    assert outcomes(of(report, "good")) == [("suite", "start", "error")]
    assert "No module named 'not_here'" in evidence(of(report, "good"), "suite")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_bad_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The environment variable must be a positive, finite number of seconds."""
    monkeypatch.setenv(supervise.TIMEOUT_VARIABLE, value)
    with pytest.raises(ConfigError, match=supervise.TIMEOUT_VARIABLE):
        supervise.check_plugins([], Options())


def test_the_variable_bounds_the_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ``timeout`` argument the variable applies; a hang in a run of one rule fails that rule."""
    monkeypatch.setenv(supervise.TIMEOUT_VARIABLE, "0.75")
    report = bench.check("hangs", options=Options(only=frozenset({"GP07"})), timeout=None)
    (lost,) = [result for result in of(report, "hangs").results if result.check == "ends"]
    assert lost.rule == "GP07"
    assert "0.75 s" in lost.findings[0].actual
    assert "graphpact check runner:hangs --only GP07" in (lost.findings[0].reproduce or "")


def test_known_failures_are_applied(bench: Bench) -> None:
    """A listed failure is reported as an xfail at once; a listed pass is reported again as an xpass."""
    bench.add("known", "def work_1(): raise ValueError\ndef work_2(): pass")
    (bench.site / "fake_known" / "xfails.toml").write_text(
        "".join(f'[[xfail]]\nrule = "GP01"\nlane = "work_{n}"\nreason = "r{n}"\n' for n in (1, 2))
    )
    told: list[Outcome] = []
    report = bench.check("known", workers=1, on_result=lambda _, result: told.append(result.outcome))
    assert [r.outcome for r in report.plugins[0].results] == [Outcome.XFAIL, Outcome.XPASS]
    assert told == [Outcome.XFAIL, Outcome.PASS, Outcome.XPASS]
    assert report.exit_code == ExitCode.NOT_CONFORMANT


def test_a_flood_is_stopped_before_the_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that prints in a loop is stopped before its timeout and before it fills the disk."""
    monkeypatch.setattr(children, "_MOST_WRITTEN", 1 << 20)
    bench.add("floods", "def work_1():\n    while True: print('x' * 1000)")
    report = bench.check("floods", timeout=600)
    assert outcomes(of(report, "floods")) == [
        ("quiet", "work_1", "fail"),
        ("ends", "work_1", "fail"),
    ]
    assert "more than 1 MiB" in evidence(of(report, "floods"), "ends")


def test_torch_is_imported_once_for_all_processes(bench: Bench) -> None:
    """Workers are children of one process that has imported torch, and none sees what an earlier one did."""
    body = """
        def work_1():
            print("children", len(os.environ.get("SEEN", "")), file=sys.stderr)
            os.environ["SEEN"] = "seen"
            assert not [name for name in sys.modules if name.startswith("fake_") and name != __name__]
            raise ValueError(f"{os.getppid()}, {'torch' in sys.modules}")
    """
    for name in ("first", "second"):
        bench.add(name, body)
    report = bench.check("first", "second", workers=1)
    said = [evidence(of(report, name), "works").splitlines() for name in ("first", "second")]
    assert said[0] == said[1]
    assert said[0][0].endswith("True")
    assert "children 0" in said[0]


def test_a_plugin_that_kills_the_parent_of_its_process_fails_alone(bench: Bench) -> None:
    """The server of the workers is started again, and its remaining workers run to their end."""
    bench.add("orphan", "def work_1(): os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)")
    bench.add("slow", "def work_1(): time.sleep(1)\ndef work_2(): pass")
    report = bench.check("orphan", "slow", "good", workers=2)
    assert outcomes(of(report, "orphan")) == [("ends", "work_1", "fail")]
    assert outcomes(of(report, "slow")) == [("works", "work_1", "pass"), ("works", "work_2", "pass")]
    assert outcomes(of(report, "good")) == ENDINGS["good"]


def test_a_suite_that_cannot_be_imported_is_no_fault_of_a_plugin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first worker does not start, the exit status is 3, and the error has its stderr."""
    monkeypatch.setattr(supervise._NameResolution, "work", "not_here:resolve")
    says = r"exit status 1\n  on stderr:\n(.*\n)*.*No module named 'not_here'"
    with pytest.raises(GraphpactError, match=says) as lost:
        bench.check("good")
    assert lost.value.code == ExitCode.SUITE_ERROR


def test_an_interrupt_leaves_no_process_behind(bench: Bench) -> None:
    """Ctrl-C is raised to the caller, and the running worker is ended."""

    def interrupt(target: Target, work: str) -> None:
        if work == "work_2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.check("hangs", on_begin=interrupt, workers=1)
    assert not is_alive(int((bench.root / "hangs").read_text()))


def test_a_stopped_run_has_what_it_had_found(bench: Bench) -> None:
    """The report has the results before a signal, names the unexamined parts, and gives no verdict."""

    def interrupt(target: Target, work: str) -> None:
        if (target.name, work) == ("hangs", "work_2"):
            raise KeyboardInterrupt(signal.SIGTERM)

    with pytest.raises(supervise.StoppedError) as stopped:
        bench.check("good", "hangs", on_begin=interrupt, workers=1)
    assert stopped.value.number == signal.SIGTERM
    good, hangs = stopped.value.report.plugins
    assert {result.outcome for result in good.results} == {Outcome.PASS}
    assert [(r.lane, r.outcome, r.reason) for r in hangs.results if r.check == "suite"] == [
        ("the rest", Outcome.ERROR, "the run was stopped by SIGTERM")
    ]
    assert "work_1" in {result.lane for result in hangs.results}
    assert stopped.value.report.exit_code is ExitCode.SUITE_ERROR
