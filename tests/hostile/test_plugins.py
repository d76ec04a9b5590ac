"""Tests of plugins that end, hang or crash their process, raise anything, or return invalid values.

Does not: test the conformance suite on such plugins; `conformance/tests/test_supervise.py` does.
"""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_site import Site, installed
from graphpact import ForwardMode
from graphpact.errors import EngineError
from graphpact.hookspecs import hookimpl
from graphpact_cli import main, survey
from graphpact_engine import Engine
from graphpact_engine.config import EngineConfig
from graphpact_engine.memory import EngineMemory
from rigs.command import command

DEMO = Path(__file__).parents[2] / "examples/demo.toml"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield an empty folder of installed distributions."""
    with installed(tmp_path / "site", monkeypatch) as site:
        yield site


# -- importing -----------------------------------------------------------------------------------

IMPORTS = {  # the text of each module, and the reason that the list shows
    "leaves": ("os._exit(0)", "it ended the process: exit status 0"),
    "exits": ("sys.exit(0)", "raised SystemExit: 0"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 (SIGSEGV) ended the process"),
    "hangs": ("time.sleep(1000)", "it did not finish within 4 s"),
    "interrupts": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "panics": ("raise type('Panic', (BaseException,), {})('rust')", "raised Panic: rust"),
    "mute": ("class E(Exception):\n    def __str__(self): raise OSError\nraise E", "raised E"),
    "loops": ("def f(): f()\nf()", "raised RecursionError"),
    "syntax": ("def", "raised SyntaxError"),
    "closes": ("os.close(1); os.close(2); sys.stdout.close(); sys.stderr = None", None),
    "writes": ("print('{\"kind\": 1}'); os.write(1, b'noise')", None),
    "forks": ("os.fork() or time.sleep(1000)", None),
    "splits": ("os.fork()", None),
}


@pytest.mark.sweep
def test_a_plugin_that_takes_its_process_along_is_a_row(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``plugins`` lists every plugin, each bad one with its own reason, and ends with status 0."""
    for name, (body, _) in IMPORTS.items():
        source = f"import os, signal, sys, time\n{body}\ndef run(): pass\n"
        site.add(name, source, offers={f"fake_{name}": "run"}, group="graphpact.commands")
    monkeypatch.setattr(survey, "LIMIT", 4.0)
    assert main(["plugins", "--json", "--kind", "command"]) == 0
    out, err = capfd.readouterr()
    found = {each["name"]: each for each in json.loads(out)}
    assert {"generate", "plugins"} <= found.keys()
    for name, (_, reason) in IMPORTS.items():
        said = found[f"fake_{name}"]["reason"]
        assert said is None if reason is None else reason in said, (name, said)
        assert reason is None or f"GRAPHPACT_DISABLE_PLUGINS=command:fake_{name} disables it" in said
    assert "Traceback" not in err


@pytest.mark.sweep
def test_doctor_survives_the_plugin_that_is_selected(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the selected backend ends its importing process, ``doctor`` says so and ends with status 3."""
    site.add(
        "gone",
        "import os; os._exit(0)",
        offers={"fake_gone": "Backend"},
        group="graphpact.attention_backends",
    )
    monkeypatch.setenv("GRAPHPACT_ENGINE__ATTENTION_BACKEND", "fake_gone")
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "error: attention_backend fake_gone (fake-gone 1.0) was rejected" in out
    assert "it ended the process: exit status 0" in out
    assert "Text cannot be generated on this machine." in out


ODD = "error: command fake-odd (fake-odd 1.0) raised "


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("raise EOFError", 3, f"{ODD}EOFError (at site/fake_odd.py:3)"),
        ("raise BrokenPipeError(32, 'Broken pipe', 'other')", 3, f"{ODD}BrokenPipeError"),
        ("raise OSError(28, 'No space left', 'a.log')", 3, f"{ODD}OSError: [Errno 28]"),
        ("raise type('Panic', (BaseException,), {})('rust')", 3, f"{ODD}Panic: rust (at "),
        ("raise GeneratorExit", 3, f"{ODD}GeneratorExit (at "),
        ("import json; json.loads('{')", 3, "(char 1) (at site/fake_odd.py:3)"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit('no such tape')", 3, "error: no such tape"),
        ("raise SystemExit(7)", 7, ""),
        ("sys.stdout.close(); print('x')", 3, f"{ODD}ValueError: I/O operation on closed file."),
        ("sys.stdout = None; raise ValueError('x')", 3, f"{ODD}ValueError: x (at "),
    ],
)
def test_an_error_of_a_command_takes_one_line(body: str, status: int, says: str, site: Site) -> None:
    """An error in a command is one line with its name and place; the status is its own or 3, never 1."""
    source = f"import sys\ndef run() -> None:\n    {body}\n"
    site.add("odd", source, offers={"fake-odd": "run"}, group="graphpact.commands")
    done = command("fake-odd", folders=(site.root,))
    assert (done.status, done.out) == (status, "")
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.err.count("error: ") == (1 if says else 0)


def test_an_error_of_a_subcommand_names_the_command(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors in subcommands name the command, also errors that a library raises for it."""
    source = (
        "import typer\nimport fractions\nrun = typer.Typer()\n@run.callback()\ndef all(): pass\n"
        "@run.command()\ndef sub(): fractions.Fraction('x')\n"
    )
    site.add("odd", source, offers={"fake-odd": "run"}, group="graphpact.commands")
    assert main(["fake-odd", "sub"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"{ODD}ValueError: Invalid literal for Fraction: 'x' (at site/fake_odd.py:7)")
    assert main(["fake-odd", "sb"]) == 2  # a wrong command line is the user's error


@pytest.mark.parametrize("contract", ["1" * 5000, "0", "-1", "1.0", "", "\u0661"])
def test_an_odd_contract_version_is_a_reason(
    contract: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin whose contract version is not a small number is refused by name when it is selected."""
    site.add("odd", "raise SystemExit", offers={"fake_odd": "Runner"}, contract=contract)
    assert main(["generate", "--set", "lanes.decode.runner=fake_odd", "--config", str(DEMO), "x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert "fake_odd" in err
    assert len(err) < 2000


# -- in an engine --------------------------------------------------------------------------------

HEAD = """
import os, sys, torch
from graphpact import GraphShape, hookimpl
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver

"""
BASES = {
    "attention_backend": ("FlashInferBackend", "engine.attention_backend"),
    "runner": ("CudaGraphRunner", "lanes.decode.runner"),
    "graph_driver": ("TapeDriver", "lanes.decode.graph_driver"),
    "observer": ("object", "engine.observers"),
}
HOOKS = {
    "populate": "registry, batch, shape",
    "prepare_replay": "registry, batch, shape",
    "init_metadata_capture": "view, shape",
    "init_metadata_replay": "view, shape, captured",
    "run_step": "lane, batch",
}


def override(method: str, body: str) -> str:
    """Return the source of a method or a hook with this ``body``."""
    given = HOOKS.get(method, "*given")
    wraps = "(wrapper=True)" if method == "run_step" else ""
    mark = f"@hookimpl{wraps}\n" if method in HOOKS else ""
    return f"{mark}def {method}(self, {given}):\n{textwrap.indent(body, '    ')}\n"


def run(site: Site, kind: str, members: str) -> int:
    """Generate text with a plugin ``fake_odd`` whose class has these members; return the status."""
    base, key = BASES[kind]
    source = f"{HEAD}class Odd({base}):\n    name = 'fake_odd'\n{textwrap.indent(members, '    ')}"
    site.add("odd", source, offers={"fake_odd": "Odd"}, group=f"graphpact.{kind}s")
    value = "['fake_odd']" if kind == "observer" else "fake_odd"
    sets = (f"{key}={value}", "lanes.decode.batch_sizes=[1]")
    options = [each for one in sets for each in ("--set", one)]
    return main(["generate", "--config", str(DEMO), "-q", "-n", "3", *options, "Hello"])


def defect(site: Site, capsys: pytest.CaptureFixture[str], kind: str, members: str) -> str:
    """Generate text with such a plugin, check for status 3, and return the only error."""
    assert run(site, kind, members) == 3
    out, err = capsys.readouterr()
    (error,) = [line for line in err.splitlines() if "error: " in line]
    assert out == ""
    assert error.startswith("error: ")
    assert "Traceback" not in err
    return error


RAISES = [
    ("attention_backend", "forward", "raise NotImplementedError", "NotImplementedError"),
    ("attention_backend", "forward", "sys.exit(0)", "SystemExit: 0"),
    ("attention_backend", "fill_metadata", "raise KeyError('kv')", "KeyError: 'kv'"),
    ("attention_backend", "allocate_metadata", "raise GeneratorExit", "GeneratorExit"),
    ("attention_backend", "declare_slots", "raise OSError(28, 'full')", "OSError: [Errno 28] full"),
    ("runner", "shapes", "raise RuntimeError", "RuntimeError"),
    ("runner", "fit", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ("runner", "compose", "def go(): raise EOFError\nreturn go", "EOFError"),
    (
        "runner",
        "prepare_replay",
        "raise type('Panic', (BaseException,), {})('rust')",
        "Panic: rust",
    ),
    (
        "graph_driver",
        "capture",
        "raise BrokenPipeError(32, 'pipe')",
        "BrokenPipeError: [Errno 32] pipe",
    ),
    ("observer", "run_step", "yield\nreturn 1 / 0", "ZeroDivisionError: division by zero"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "method", "body", "said"), RAISES)
def test_an_error_that_a_plugin_raises_names_it(
    kind: str, method: str, body: str, said: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only error names kind, plugin, distribution, exception and line; the status is 3."""
    error = defect(site, capsys, kind, override(method, body))
    assert error.startswith(f"error: {kind} fake_odd (fake-odd 1.0): ")
    assert f" raised {said} (at site/fake_odd.py:" in error


RETURNS = [
    ("attention_backend", "forward", "return None", "forward() returned None, not Tensor"),
    ("attention_backend", "forward", "return given[:1]", "forward() returned (tensor"),
    (
        "attention_backend",
        "declare_slots",
        "return None",
        "declare_slots() returned None, not Iterable",
    ),
    (
        "attention_backend",
        "declare_slots",
        "return ['a']",
        "declare_slots() returned 'a', not GraphSlot",
    ),
    ("attention_backend", "init_metadata_capture", "return None", "attention_backend fake_odd"),
    ("runner", "shapes", "return None", "shapes() returned None, not Iterable"),
    ("runner", "shapes", "return [8]", "shapes() returned 8, not GraphShape"),
    ("runner", "slots", "return 'ab'", "slots() returned 'a', not GraphSlot"),
    ("runner", "fit", "return None", "fit() returned None, not "),
    ("runner", "fit", "return 3", "fit() returned 3, not "),
    ("runner", "dummy", "return {}", "dummy() returned {}, not ForwardBatch"),
    ("runner", "compose", "return 1", "compose() returned 1, not Callable"),
    ("runner", "populate", "return True", "populate() returned True, not NoneType"),
    ("runner", "prepare_replay", "return None", "prepare_replay() returned None, not ForwardBatch"),
    ("graph_driver", "capture", "return None", "capture() returned None, not Graph"),
    ("observer", "run_step", "yield", "run_step() returned None, not StepOutputs"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "method", "body", "said"), RETURNS)
def test_the_error_of_a_wrong_return_value_names_the_plugin(
    kind: str, method: str, body: str, said: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only error names class, method, returned and expected value; the status is 3."""
    error = defect(site, capsys, kind, override(method, body))
    assert said in error
    assert "odd" in error


WRAPS = [  # the hook, its body, and the fault in the message
    ("run_step", "outputs = yield\nyield\nreturn outputs", "has second yield"),
    ("run_step", "if lane is None: yield\nreturn 1", "did not yield"),
    ("populate", "yield\nyield", "has second yield"),
    ("init_metadata_capture", "metadata = yield\nyield", "has second yield"),
]


@pytest.mark.parametrize(("hook", "body", "did"), WRAPS)
def test_an_observer_that_does_not_yield_once_is_named(
    hook: str, body: str, did: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only error names observer, hook, fault and line; the status is 3."""
    members = override(hook, body).replace("@hookimpl\n", "@hookimpl(wrapper=True)\n")
    error = defect(site, capsys, "observer", members)
    assert error == f"error: observer fake_odd (fake-odd 1.0): Odd.{hook} {did} (at site/fake_odd.py:10)"


def test_an_observer_of_a_program_that_yields_twice_is_named_by_its_class() -> None:
    """An observer that is no plugin is named by its class and line, and the engine stays usable."""

    class Twice:
        @hookimpl(wrapper=True)
        def run_step(self) -> Iterator[None]:
            yield
            yield

    config = EngineConfig.load(DEMO, overrides=["lanes.decode.batch_sizes=[1]"], env={})
    said = r"^observer Twice: .*Twice.run_step has second yield \(at hostile/test_plugins.py:\d+\)"
    with Engine(config, observers=[Twice()]) as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=said):
                engine.generate(["Hello"])


GRAPH = """
from graphpact.graphs import Graph

RELEASED = []

class Bare(Graph):
    def __init__(self, graph):
        self.graph = graph
        self.outputs, self.num_nodes, self.pool_nbytes = graph.outputs, 1, 0
        {init}
    def replay(self):
        self.graph.replay()
    def release(self):
        {release}
        self.graph.release()
    def external_tensors(self):
        {external}

class Odd(TapeDriver):
    name = "fake_odd"
    def capture(self, fn, warmup=1):
        return Bare(super().capture(fn, warmup=warmup))
class Backend(FlashInferBackend):
    pass
"""


def graphs(site: Site, init: str = "pass", release: str = "pass", external: str = "return None") -> list[str]:
    """Install a driver with such graphs and a backend; return the settings that select both."""
    source = HEAD + GRAPH.format(init=init, release=release, external=external)
    site.add("odd", source, offers={"fake_odd": "Odd"}, group="graphpact.graph_drivers")
    return ["lanes.decode.graph_driver=fake_odd", "lanes.decode.batch_sizes=[1, 2]"]


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (
            {"release": "1 / 0"},
            "Bare.release raised ZeroDivisionError: division by zero (at site/fake_odd.py:",
        ),
        ({"init": "del self.outputs"}, "Bare lacks the attribute 'outputs'"),
        ({"init": "del self.num_nodes"}, "Bare lacks the attribute 'num_nodes'"),
        ({"external": "raise KeyError('x')"}, "Bare.external_tensors raised KeyError: 'x' (at site/"),
    ],
)
def test_the_error_of_a_failed_graph_names_its_driver(
    faults: dict[str, str], says: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a graph fails in any method, including its release, ``generate`` names the driver."""
    sets = [each for one in graphs(site, **faults) for each in ("--set", one)]
    assert main(["generate", "--config", str(DEMO), "-q", "-n", "3", *sets, "Hello"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"error: graph_driver fake_odd (fake-odd 1.0): {says}")
    assert "a defect of the plugin" in err


def test_closing_releases_every_graph_though_one_release_raises(site: Site) -> None:
    """`Engine.close` names the driver and releases all other graphs; the engine can continue eagerly."""
    first = "RELEASED.append(self)\n        if self is RELEASED[0]: 1 / 0"
    config = EngineConfig.load(DEMO, overrides=graphs(site, release=first), env={})
    engine = Engine(config)
    (decode,) = (lane for lane in engine.lanes if lane.name == "decode")
    taken = {captured.graph for captured in decode.captured.values()}
    with pytest.raises(EngineError, match="graph_driver fake_odd"):
        engine.close()
    assert len(taken) == 2
    assert set(sys.modules["fake_odd"].RELEASED) == taken
    before = decode.stats.eager.total()
    engine.generate(["Hello"])
    assert decode.stats.eager.total() > before
    assert all(not lane.captured for lane in engine.lanes if lane is not decode)


def test_the_error_of_a_graph_that_fails_after_its_capture_names_its_driver(site: Site) -> None:
    """If a graph cannot be described, the engine's memory report names its driver."""
    late = "if RELEASED: raise KeyError('late')\n        return None"
    config = EngineConfig.load(DEMO, overrides=graphs(site, external=late), env={})
    with Engine(config) as engine:
        sys.modules["fake_odd"].RELEASED.append(1)
        with pytest.raises(EngineError, match=r"^graph_driver fake_odd .*: Bare.external_tensors raised"):
            EngineMemory.of(engine)


def test_choosing_a_lane_names_the_runner_that_raises(site: Site) -> None:
    """`Engine.lane_of` names the runner whose `fit` raises, also outside of a step."""
    fit = "def fit(self, batch): raise LookupError('mine')"
    site.add("odd", f"{HEAD}class Odd(CudaGraphRunner):\n    {fit}\n", offers={"fake_odd": "Odd"})
    lanes = ["decode.runner=fake_odd", "decode.batch_sizes=[1]", "two.mode=decode", "two.batch_sizes=[2]"]
    config = EngineConfig.load(DEMO, overrides=[f"lanes.{key}" for key in lanes], env={})
    with Engine(config) as engine:
        engine.add("Hello")
        scheduled = engine.scheduler.schedule()
        assert scheduled is not None
        batch = dataclasses.replace(scheduled.batch, forward_mode=ForwardMode.DECODE)
        with pytest.raises(EngineError, match=r"^runner fake_odd .*: Odd.fit raised LookupError: mine"):
            engine.lane_of(batch)


def test_an_error_in_a_with_block_is_not_replaced_by_one_of_closing(site: Site) -> None:
    """If the block of ``with Engine`` raises and closing fails too, the block's error is raised."""
    config = EngineConfig.load(DEMO, overrides=graphs(site, release="1 / 0"), env={})
    with pytest.raises(LookupError, match="mine") as caught, Engine(config):
        raise LookupError("mine")
    assert "Bare.release raised" in caught.value.__notes__[0]


def test_a_program_gets_the_exception_as_the_cause(site: Site) -> None:
    """In the Python API too, the error names the plugin; its cause is the plugin's exception."""
    site.add(
        "odd",
        f"{HEAD}class Odd(CudaGraphRunner):\n    def fit(self, batch): raise LookupError('mine')\n",
        offers={"fake_odd": "Odd"},
    )
    config = EngineConfig.load(DEMO, overrides=["lanes.decode.runner=fake_odd"], env={})
    with Engine(config) as engine, pytest.raises(EngineError, match="runner fake_odd") as caught:
        engine.generate(["Hello"])
    assert isinstance(caught.value.__cause__, LookupError)


def test_an_error_of_graphpact_that_a_plugin_raises_is_its_own(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that a plugin raises on purpose keeps its message, hint and status."""
    body = "from graphpact.errors import ConfigError\nraise ConfigError('it is so', hint='do this')"
    assert run(site, "runner", override("shapes", body)) == 2
    assert capsys.readouterr().err.endswith("error: it is so\n  help: do this\n")
