"""Plugins that try to look right to `graphpact check`: each ends as a failure, with status 1.

Does not: examine plugins that end, hang or flood their process; `conformance/tests/test_supervise.py` does.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphpact_conformance.experiments.base
from fake_site import Site, installed
from graphpact.lane import Lane
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.isolation import blind_wire, supervise
from graphpact_conformance.isolation.blind import Judge, judge
from graphpact_conformance.isolation.integrity import Originals
from graphpact_conformance.isolation.processes import Ending
from graphpact_conformance.lane.reference import ReferenceBackend
from graphpact_conformance.results import ExitCode, Outcome, PluginResults
from graphpact_conformance.rules import RULES
from graphpact_conformance.targets import Options, Target

QUICK = Options(size="quick", examples=1, shrink=False)
BACKEND = """
import importlib.util, os, sys
from dataclasses import replace
import torch
from graphpact import ForwardMode
from graphpact.attention import HeadLayout
from graphpact_flashinfer import FlashInferBackend

{before}

class Odd(FlashInferBackend):
    capabilities = replace(
        FlashInferBackend.capabilities,
        modes=frozenset({{ForwardMode.DECODE}}),
        page_sizes=frozenset({{16}}),
        head_layouts=frozenset({{HeadLayout.MHA}}),
        dtypes=frozenset({{torch.float32}}),
    )

    def forward(self, *args):
        out = super().forward(*args)
        return out if {is_right} else out + 1
"""
SIGNS = """
NAME = "graphpact_conformance"

def sees_the_suite():
    frame, files = sys._getframe(), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    try:
        __import__(NAME)
        can_import = True
    except ImportError:
        can_import = False
    return (
        can_import
        or any(name.partition(".")[0] == NAME for name in sys.modules)
        or importlib.util.find_spec(NAME) is not None
        or any(NAME in text for text in [*files, *sys.argv, *sys.orig_argv])
    )

for name, module in [*sys.modules.items()]:
    if name.startswith(NAME) and hasattr(module, "differences"):
        module.differences = lambda *args: []
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield an empty folder of installed distributions."""
    with installed(tmp_path / "site", monkeypatch) as site:
        yield site


@pytest.mark.sweep
def test_a_plugin_that_is_right_only_for_the_suite_fails(site: Site) -> None:
    """A backend that is right only below the suite, and replaces its comparisons, fails for both.

    In the blind run no sign of the suite is there. The worker finds nothing but the replaced functions.
    """
    source = BACKEND.format(before=SIGNS, is_right="sees_the_suite()")
    site.add("odd", source, offers={"odd": "Odd"}, group="graphpact.attention_backends")
    report = supervise.check(["odd"], QUICK, workers=1)
    assert report.exit_code is ExitCode.NOT_CONFORMANT
    (plugin,) = report.plugins
    failed = {r.check: r.findings[0] for r in plugin.results if r.outcome is Outcome.FAIL}
    assert [*failed] == ["ends", "blind"]
    assert failed["ends"].actual.startswith("it replaced ")
    assert "graphpact_conformance.experiments.base.differences" in failed["ends"].actual
    assert "also where the suite is not imported" in failed["blind"].expected
    assert failed["blind"].batch is not None


# -- parts, in this process ------------------------------------------------------------------------


def test_each_kind_of_replacement_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module, a method, code in place, defaults and functions of torch are found, once."""

    def kept(a: int, b: int = 1) -> int:
        return a + b

    monkeypatch.setattr(graphpact_conformance.experiments.base, "tolerance_of", kept)
    originals = Originals()
    assert originals.replaced() == []
    monkeypatch.setattr(graphpact_conformance.experiments.base, "excess", lambda *_: torch.zeros(1))
    monkeypatch.setattr(Lane, "run", lambda *_: None)
    monkeypatch.setattr(kept, "__defaults__", (2,))
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "all", lambda *_: torch.tensor(data=True))
    monkeypatch.setattr(Judge.result, "__code__", kept.__code__)
    assert originals.replaced() == [
        "graphpact.lane.Lane.run",
        "graphpact_conformance.experiments.base.excess",
        "graphpact_conformance.experiments.base.tolerance_of",
        "graphpact_conformance.isolation.blind.Judge.result",
        "torch.Tensor.all",
        "torch.equal",
    ]
    assert originals.replaced() == []


def test_changed_tables_and_constants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tolerance in a table, a constant, and an experiment that finds nothing are named, once each."""
    base = graphpact_conformance.experiments.base
    originals = Originals()
    assert originals.replaced() == []
    monkeypatch.setitem(base._TOLERANCE, torch.float32, 1e9)
    monkeypatch.setattr(base, "_DEFAULT_TOLERANCE", 1e9)
    monkeypatch.delitem(RULES, "GP03")
    run = EXPERIMENTS[2].run
    object.__setattr__(EXPERIMENTS[2], "run", lambda *_: [])
    try:
        assert originals.replaced() == [
            "graphpact_conformance.experiments.EXPERIMENTS",
            "graphpact_conformance.experiments.base._DEFAULT_TOLERANCE",
            "graphpact_conformance.experiments.base._TOLERANCE",
            "graphpact_conformance.rules.RULES",
        ]
    finally:
        object.__setattr__(EXPERIMENTS[2], "run", run)


def test_what_unusual_plugins_do_is_no_replacement() -> None:
    """Operators of a library, subclasses, new attributes and fake caches of torch are not accused."""
    originals = Originals()
    library = torch.library.Library("fake_unusual", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    assert torch.ops.fake_unusual.twice(torch.ones(1)).item() == 2

    class Odd(ReferenceBackend):
        """A subclass."""

        def forward(self, *args: object) -> torch.Tensor:
            """Attend."""
            return super().forward(*args)  # type: ignore[arg-type]

    with torch.overrides.BaseTorchFunctionMode():
        torch.ones(1)
    assert originals.replaced() == []


FORK = """
import os
from graphpact_conformance.isolation.blind_program import Events
(events, written), (key, secret) = os.pipe(), os.pipe()
os.write(secret, b"key")
told = Events({"events": written, "key": key})
child = os.fork()
told.say("stepped")
assert os.waitpid(child, 0)[1] == os.EX_SOFTWARE << 8
print(os.read(events, 1000).decode(), end="")
"""


def test_a_child_that_a_plugin_forks_tells_nothing_in_the_blind_run() -> None:
    """Where the suite is not imported, a child that returns from the plugin ends, and tells no step again."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout == 'key {"event": "stepped"}\n'


def test_values_and_declarations_survive_the_pipe() -> None:
    """Tensors of every dtype and shape, shapes and capabilities are equal after writing and reading."""
    can = ReferenceBackend.capabilities
    assert blind_wire.capabilities_from_json(blind_wire.capabilities_to_json(can)) == can
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int32):
        for shape in ((0, 3), (2, 3), ()):
            given = {"x": (torch.arange(6)[: max(1, len(shape) * 3)].sum() * torch.ones(shape)).to(dtype)}
            read = blind_wire.tensors_from_json(blind_wire.tensors_to_json(given))["x"]
            assert (read.dtype, read.shape) == (dtype, given["x"].shape)
            assert torch.equal(read, given["x"])


@pytest.mark.parametrize(
    "event",
    [
        {"event": "declares", "capabilities": {}, "lanes": []},
        {"event": "stepped", "lane": "decode", "rows": {}, "axes": {}, "caches": {}},
        {"event": "failed", "lane": None, "text": ""},
    ],
)
def test_what_cannot_be_judged_is_a_failure(event: dict[str, object]) -> None:
    """Events that the blind run cannot have made are a failure of the plugin, and the judge goes on."""
    lost = {"event": "lost", "work": "decode", "text": "it ended the process: exit status 0"}
    result = judge(Target("attention_backend", "x"), QUICK, [event, lost])
    assert result is not None
    assert result.outcome is Outcome.FAIL
    first, last = (finding.actual for finding in result.findings)
    assert "cannot be judged" in first
    assert last == lost["text"]


def test_a_plugin_is_not_accused_twice() -> None:
    """If the worker found a failure in a lane, wrong results of the blind run agree; else they fail.

    A blind run without events is not judged.
    """
    empty = PluginResults(kind="attention_backend", name="x", distribution="d", version="1", contract="1")
    blind = supervise._BlindRun(Target("attention_backend", "x"), QUICK)
    assert not blind.ends(ending())
    assert blind.result(empty) is None
    blind = supervise._BlindRun(Target("attention_backend", "x"), QUICK)
    assert blind.ends(ending("it ended the process: exit status 0"))
    judged = judge(Target("attention_backend", "x"), QUICK, blind.job()["heard"])
    assert judged is not None
    blind.hear({"event": "done", "answer": judged.model_dump(mode="json")})
    assert not blind.ends(ending())
    result = blind.result(empty)
    assert result is not None
    assert result.outcome is Outcome.FAIL
    elsewhere = result.model_copy(update={"check": "captures"})
    agreeing = blind.result(empty.model_copy(update={"results": [elsewhere]}))
    assert agreeing is not None
    assert agreeing.outcome is Outcome.PASS


def test_a_judge_without_an_answer_is_an_error_of_the_suite() -> None:
    """No plugin is in the process of the judge: its end is an error, and there is no verdict."""
    empty = PluginResults(kind="attention_backend", name="x", distribution="d", version="1", contract="1")
    blind = supervise._BlindRun(Target("attention_backend", "x"), QUICK)
    blind.hear({"event": "failed", "lane": "decode", "text": "ValueError"})
    assert blind.ends(ending())
    assert not blind.ends(ending("signal 9 (SIGKILL) ended the process"))
    result = blind.result(empty)
    assert result is not None
    assert result.outcome is Outcome.ERROR
    assert "SIGKILL" in (result.reason or "")


def ending(fault: str = "") -> Ending:
    """Return the end of a process."""
    return Ending(
        fault=fault, work="decode", evidence=[], ready=True, hung=False, printed=None, left=[], seconds=0.0
    )
