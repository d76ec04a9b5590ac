"""Compiled graphs on disk: keys that cover everything that a graph depends on, and unusable entries."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact.errors import GraphpactError
from graphpact_cpu_graph import keys, shared_library
from graphpact_cpu_graph.fx_graph import SegmentGraph
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cpu_graph.pieces import outliving_of
from graphpact_kernels.compiled import cache, waiting
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.recorder import Recorder

CPU = torch.device("cpu")


def region(x: torch.Tensor) -> torch.Tensor:
    """Return a result that no other test computes."""
    return torch.tanh(x * 1.0625) + 17


@pytest.fixture
def entries(compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of entries of an empty cache; no program is loaded yet."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shared_library, "_loaded", {})
    return tmp_path / "inductor"


def replays(monkeypatch: pytest.MonkeyPatch) -> int:
    """Capture in a process that has loaded nothing, check a replay, and return how often it compiled."""
    builds = []
    build = shared_library._library

    def counted(*args: Any) -> Path | None:
        builds.append(args)
        return build(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shared_library, "_loaded", {})
        patch.setattr(shared_library, "_library", counted)
        x = torch.ones(5)
        graph = InductorDriver(CPU).capture(lambda: region(x))
        for value in (2.0, -0.5):
            x.fill_(value)
            graph.replay()
            torch.testing.assert_close(graph.outputs, region(x))
    return len(builds)


def test_a_kept_graph_is_not_compiled_again(entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process takes the library from the cache, and compiles nothing."""
    assert [replays(monkeypatch) for _ in range(3)] == [1, 0, 0]
    (entry,) = entries.iterdir()
    assert sorted(file.name for file in entry.iterdir()) == ["library.json", "library.so"]


def test_what_is_compiled_is_announced(
    entries: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compilation is announced on stderr, with the folder of the result; loading a stored graph is not."""
    said = []
    for _ in range(2):
        monkeypatch.setattr(waiting, "_written", {})
        replays(monkeypatch)
        said.append(capsys.readouterr().err)
    assert said[0].startswith("compiling graphs, each once for this machine; seconds to a minute each: ")
    assert str(entries) in said[0]
    assert said[1] == ""


def _change_one_bit(entry: Path) -> None:
    content = bytearray((entry / "library.so").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "library.so").write_bytes(content)


def _no_library(entry: Path) -> None:
    (entry / "library.so").write_bytes(b"no library")
    facts = {"key": entry.name, "sha256": hashlib.sha256(b"no library").hexdigest()}
    (entry / "library.json").write_text(json.dumps(facts))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (_change_one_bit, "library was changed"),
    "what cannot be loaded": (_no_library, "ImportError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_entry_is_compiled_again_with_a_warning(
    fault: str, entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged entry is never run: the graph is compiled again, the entry replaced, and the log says why."""
    break_it, reason = FAULTS[fault]
    replays(monkeypatch)
    # Python does not load a file twice, so the entry is damaged at another place.
    shutil.copytree(entries, entries.parent / "later" / entries.name)
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(entries.parent / "later"))
    (entry,) = (entries.parent / "later" / entries.name).iterdir()
    break_it(entry)
    with caplog.at_level(logging.WARNING):
        assert replays(monkeypatch) == 1
    (record,) = [r for r in caplog.records if r.name == cache.__name__]
    assert str(entry) in record.getMessage()
    assert reason in record.getMessage()
    assert replays(monkeypatch) == 0


def test_a_cache_that_cannot_be_written_is_done_without(
    entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the folder cannot be made, a graph is compiled and runs, and the log says that it is not stored."""
    entries.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert replays(monkeypatch) == 1
    assert "cannot store a compiled graph" in caplog.text


def test_an_entry_that_stays_in_the_way_is_not_run(
    entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an entry of another user cannot be removed, the graph is compiled; the log says what to do."""
    replays(monkeypatch)
    (entry,) = entries.iterdir()
    delete = cache._delete

    def refuse(name: str, folder: int) -> None:
        if name == entry.name:
            raise PermissionError(13, "Permission denied")
        delete(name, folder)

    monkeypatch.setattr(cache, "fault_of", lambda _: "belongs to another user, 54321")
    monkeypatch.setattr(cache, "_delete", refuse)
    with caplog.at_level(logging.WARNING):
        assert replays(monkeypatch) == 1
    (looked_up, kept) = [r.getMessage() for r in caplog.records if r.name == shared_library.__name__]
    assert "cannot look up a compiled graph" in looked_up
    assert f"remove {entry} as its owner or as root" in kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("whose", ["another's", "everybody's"])
def test_torch_does_not_compile_where_others_can_write(
    whose: str, entries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another user is refused, because torch would load a library that it finds there."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    if whose == "everybody's":
        scratch.chmod(0o777)
    else:
        os.chown(scratch, 54321, 54321)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch))
    monkeypatch.setattr(shared_library, "_library", None)  # this is not called
    with pytest.raises(GraphpactError, match=f"{scratch} (belongs to|can be written by)") as told:
        InductorDriver(CPU).capture(lambda: region(torch.ones(5)))
    assert "TORCHINDUCTOR_CACHE_DIR" in str(told.value.hint)
    assert not [*scratch.iterdir()]


# -- keys ------------------------------------------------------------------------------------------


def key(fn: Callable[..., Any], *inputs: torch.Tensor) -> str:
    """Return the key of a region."""
    guard = HostReadGuard(HostMemory([]), "while a test records", AssertionError)
    recording = InductorDriver(CPU).record(Recorder(guard), lambda: fn(*inputs))
    (segment,) = recording.segments
    (outliving,) = outliving_of([segment], recording.outputs)
    graph = SegmentGraph.of(segment, outliving)
    return keys.key_of_graph(graph.graph, graph.finish(), shared_library.OPTIONS)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    """Return ones."""
    return torch.ones(shape, **options)


def overlapping(begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of four rows in one memory; the second begins ``begin`` rows after the first."""
    memory = ones(6, 4)
    return memory[:4], memory[begin : begin + 4]


REGIONS: dict[str, Callable[[], str]] = {
    "plain": lambda: key(lambda a, b: a * 2 + b, ones(4, 4), ones(4, 4)),
    "another number": lambda: key(lambda a, b: a * 3 + b, ones(4, 4), ones(4, 4)),
    "a float number": lambda: key(lambda a, b: a * 2.0 + b, ones(4, 4), ones(4, 4)),
    "another operation": lambda: key(lambda a, b: a * 2 - b, ones(4, 4), ones(4, 4)),
    "other operands": lambda: key(lambda a, b: b * 2 + a * a, ones(4, 4), ones(4, 4)),
    "another shape": lambda: key(lambda a, b: a * 2 + b, ones(4, 5), ones(4, 5)),
    "broadcast": lambda: key(lambda a, b: a * 2 + b, ones(4, 4), ones(1, 4)),
    "another layout": lambda: key(lambda a, b: a * 2 + b, ones(4, 4).t(), ones(4, 4)),
    "another dtype": lambda: key(lambda a, b: a * 2 + b, ones(4, 4).double(), ones(4, 4)),
    "one memory": lambda: key(lambda a, b: a * 2 + b, *[ones(4, 4)] * 2),
    "overlapping": lambda: key(lambda a, b: a.mul_(2) + b, *overlapping(2)),
    "overlapping more": lambda: key(lambda a, b: a.mul_(2) + b, *overlapping(1)),
    "in place": lambda: key(lambda a, b: a.mul_(2) + b, ones(4, 4), ones(4, 4)),
    "into an input": lambda: key(lambda a, b: torch.add(a * 2, b, out=b), ones(4, 4), ones(4, 4)),
    "two outputs": lambda: key(lambda a, b: ((c := a * 2), c + b), ones(4, 4), ones(4, 4)),
}


def test_what_differs_has_another_key() -> None:
    """Regions that differ in a number, an operation, a layout or an alias have different keys."""
    found = {name: make() for name, make in REGIONS.items()}
    assert len(set(found.values())) == len(found)
    assert found == {name: make() for name, make in REGIONS.items()}


@pytest.mark.parametrize("change", ["threads", "inductor", "torch", "graphpact", "machine", "options"])
def test_another_world_has_another_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key depends on threads, versions, inductor's configuration, options, compiler and CPU."""
    from torch._inductor import config

    before = REGIONS["plain"]()
    if change == "threads":
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert REGIONS["plain"]() != before
        finally:
            torch.set_num_threads(threads)
        return
    if change == "inductor":
        with config.patch(max_autotune=True):
            assert REGIONS["plain"]() != before
        return
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    if change == "graphpact":
        monkeypatch.setattr(keys.graphpact, "__version__", "99")
    if change == "machine":
        monkeypatch.setattr(keys, "_machine", lambda: ("another CPU",))
    if change == "options":
        monkeypatch.setattr(shared_library, "OPTIONS", {**shared_library.OPTIONS, "fallback_random": False})
    assert REGIONS["plain"]() != before


@pytest.mark.parametrize("what", ["an error", "nothing to keep"])
def test_a_graph_without_a_cpp_program_runs_as_torch_compiles_it(
    what: str, entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a graph cannot become a library, inductor's Python program runs it, and the cache gets no entry."""

    def unable(*_: object) -> None:
        if what == "an error":
            raise NotImplementedError("an argument that C++ has no name for")

    monkeypatch.setattr(shared_library, "_library", unable)
    x = torch.ones(5)
    with caplog.at_level(logging.WARNING):
        graph = InductorDriver(CPU).capture(lambda: region(x))
    x.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(graph.outputs, region(x))
    assert not entries.exists()
    assert "no C++ program" in caplog.text
