"""The decorator `graphpact.conformance`: the tests that it generates, and the outcome of each.

The results of the suite are made up, so that every outcome occurs; `test_third_party` runs the real suite.
"""

import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from conformance_reports import finding, plugin, report, result
from graphpact.plugins import PluginCatalog
from graphpact_conformance import testing
from graphpact_conformance.cli.results import print_report
from graphpact_conformance.results import PluginResults
from graphpact_conformance.rules import RULES
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.xfails import Xfail, Xfails

pytest_plugins = ["pytester"]
for info in (catalog := PluginCatalog.scan()).infos():
    catalog.load(info)  # before the tests: pytester unloads modules that a test imports

RESULTS = [
    result("pass", None),
    result("pass", "GP01"),
    result("not_run", "GP01", lane="other", reason="no GPU"),
    *(
        result(
            "fail",
            "GP02",
            lane=f"lane {n}",
            reason="why",
            findings=[finding("GP02", actual=f"two\nlines {n}"), finding("GP02")],
        )
        for n in range(5)
    ),
    result("not_run", "GP03", reason="it takes a GPU"),
    result("fail", "GP04"),
    result("pass", "GP05"),
    result("unsupported", "GP07"),
]
"""Results of flashinfer; every other plugin gets `STUMBLED`."""
STUMBLED = result("error", "GP06", reason="the suite stumbled")
KNOWN = Xfail("attention_backend", "flashinfer", "GP04", "*", "known", None, "x, entry 1,")
MENDED = Xfail("attention_backend", "flashinfer", "GP05", "*", "mended", None, "x, entry 2,")

Examined = list[tuple[str, Options, int]]
Run = Callable[..., dict[str, pytest.TestReport]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    """Return the arguments of each run of the suite: the plugin, the options, and the number of threads."""
    given = []

    def examine(target: Target, options: Options, listener: Any) -> PluginResults:
        given.append((str(target), options, torch.get_num_threads()))
        for found in RESULTS if target.name == "flashinfer" else [STUMBLED]:
            listener.begins(found.lane)
            listener.found(found)
        return plugin(kind=target.kind, name=target.name, partner=target.partner)

    monkeypatch.setattr(testing, "examine", examine)
    monkeypatch.setattr(Xfails, "read", lambda *_: Xfails([KNOWN, MENDED]))
    testing._examination.cache_clear()
    return given


@pytest.fixture
def run(pytester: pytest.Pytester, examined: Examined) -> Run:
    """Return a function that runs one decorated test per argument and returns the reports by id."""

    def run(*arguments: str, options: tuple[str, ...] = ()) -> dict[str, pytest.TestReport]:
        lines = ["import graphpact"]
        for at, text in enumerate(arguments):
            lines += [f"@graphpact.conformance({text})", f"def test_{at}(check):", "    check()"]
        pytester.makepyfile("\n".join(lines))
        record = pytester.inline_run("-p", "no:cacheprovider", *options)
        reports = record.getreports("pytest_collectreport pytest_runtest_logreport")
        return {r.nodeid.partition("[")[2][:-1]: r for r in reports if r.failed or r.when == "call"}

    return run


def test_each_rule_is_a_test_that_comes_out_as_the_rule_does(run: Run, examined: Examined) -> None:
    """A rule's test passes, fails, skips or is an xfail as the rule does; an xpass fails."""
    reports = run('"flashinfer"')
    assert list(reports) == ["answers", *(f"{rule.id}-{rule.name}" for rule in RULES.values())]
    told = {name[:4]: (r.outcome, f"{r.longreprtext} xfail: {_why(r)}") for name, r in reports.items()}
    for rule, outcome, text in (
        ("answ", "passed", ""),
        ("GP01", "passed", ""),
        ("GP02", "failed", "GP02 missed-refresh: Every replay writes"),
        ("GP03", "skipped", "it takes a GPU"),
        ("GP04", "skipped", "xfail: known"),
        ("GP05", "failed", "x, entry 2, lists it as a failure (mended): remove the entry"),
        ("GP07", "skipped", "unsupported"),
        ("GP20", "skipped", "no lane that checks GP20 illegal-work-in-capture"),
    ):
        assert told[rule][0] == outcome
        assert text in told[rule][1]
    assert len(examined) == 1


def _why(report: pytest.TestReport) -> str | None:
    """Return the reason of an xfail, without the prefix that pytest adds before version 9."""
    reason: str | None = getattr(report, "wasxfail", None)
    return reason and reason.removeprefix("reason: ")


def test_a_failure_says_what_the_terminal_says(run: Run) -> None:
    """A failed test has exactly the lines that the report in the terminal has under the rule."""
    failure = run('"flashinfer"')["GP02-missed-refresh"].longreprtext
    told = [line[1:].strip() for line in failure.splitlines() if line.startswith("E ")]
    console = Console(file=io.StringIO(), width=200)
    print_report(console, report(plugin([r for r in RESULTS if r.rule == "GP02"])))
    assert isinstance(console.file, io.StringIO)
    drawn = [line.strip("│├└─ ") for line in console.file.getvalue().splitlines()]
    start = drawn.index(RULES["GP02"].requirement)
    assert told[0] == f"AssertionError: {RULES['GP02']}: {RULES['GP02'].requirement}"
    assert told[1:] == drawn[start + 1 : start + len(told)]
    assert drawn[start + len(told)].startswith("not conformant")


def test_equal_tests_share_an_examination_and_others_have_their_own(run: Run, examined: Examined) -> None:
    """The suite runs once for each plugin and set of options, with one thread, for all equal tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(
            '"flashinfer"',
            '"flashinfer", seed=0',
            '"flashinfer", seed=3, examples=5, size="thorough", lanes="decode*"',
            '"flashinfer", lanes=["decode*", "idle*"]',
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert examined == [
        ("flashinfer", Options(size="quick"), 1),
        ("flashinfer", Options(seed=3, examples=5, size="thorough", lanes=("decode*",)), 1),
        ("flashinfer", Options(size="quick", lanes=("decode*", "idle*")), 1),
    ]


def test_a_backend_and_a_runner_are_examined_alone_and_together(run: Run, examined: Examined) -> None:
    """Each plugin and their pair have their own tests; an error of the suite fails only where it occurred."""
    reports = run('"flashinfer", "cuda_graph"')
    assert [name for name, *_ in examined] == [
        "flashinfer",
        "cuda_graph",
        "flashinfer + cuda_graph",
    ]
    rules = 1 + len(RULES)
    assert len(reports) == 3 * rules
    assert list(reports)[rules * 2] == "flashinfer+cuda_graph-answers"
    stumbled = reports["cuda_graph-GP06-pad-leak"]
    assert stumbled.failed
    assert "the suite stumbled" in stumbled.longreprtext
    assert reports["flashinfer-GP06-pad-leak"].skipped


def test_with_runxfail_known_failures_fail(run: Run) -> None:
    """With ``--runxfail`` a known failure fails like any other failure."""
    known = run('"flashinfer"', options=("--runxfail",))["GP04-bad-pad-sentinel"]
    assert known.failed
    assert "view.req_pool_indices[3:4]" in known.longreprtext


def test_on_a_machine_without_the_device_all_is_skipped(
    run: Run, examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a CUDA device each test with ``device="cuda"`` is skipped with a reason, and nothing runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reports = run('"flashinfer", device="cuda"')
    assert len(reports) == 1 + len(RULES)
    assert all(
        r.skipped and "torch has no such device on this machine" in r.longreprtext for r in reports.values()
    )
    assert not examined


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            '"flashinfr"',
            "no attention backend, runner, graph driver, speculation algorithm or observer 'flashinfr'",
        ),
        ('"command:check"', "'command:check': plugins of kind 'command' cannot be checked"),
        ("", "there is nothing to check"),
        ('"flashinfer", size="fast"', "size is 'fast'"),
        ('"flashinfer", device="gpu"', "device is 'gpu'"),
        ('"flashinfer", lanes=["decod"]', "no lane of flashinfer matches 'decod'"),
    ],
)
def test_what_cannot_be_checked_is_an_error_of_collection(
    arguments: str, said: str, run: Run, examined: Examined
) -> None:
    """A wrong name or option is a collection error with a message and a hint, without a traceback."""
    (error,) = run(arguments).values()
    lines = error.longreprtext.splitlines()
    assert lines[0].startswith(said)
    assert lines[-1].startswith("  help: ")
    assert len(lines) == 2
    assert not examined


def test_nothing_that_the_tests_need_is_imported_before_they_are_there() -> None:
    """`import graphpact` imports neither pytest nor hypothesis; `conformance` says what to install."""
    code = """
        import sys, graphpact, graphpact_conformance.results
        assert graphpact_conformance is sys.modules["graphpact_conformance"]
        assert not {"pytest", "hypothesis"} & set(sys.modules)
        sys.modules["hypothesis"] = None
        try:
            graphpact.conformance("flashinfer")
        except graphpact.GraphpactError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        'this needs hypothesis, which is not installed\n  help: pip install "graphpact[conformance]"\n'
    )
