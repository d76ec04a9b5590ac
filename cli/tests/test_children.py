"""Child processes that hang, exit, crash, fork, print, or lose their parent; the processes are real."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from graphpact.errors import EngineError
from graphpact_cli import child, children
from graphpact_cli.children import END, START, Ending, Task

ENTERED = "graphpact_cli_test_children"


class Work(Task):
    """A task that runs some lines of Python."""

    limit = 2.0
    work = "graphpact_cli_test_work:run"

    def __init__(self, source: str, restarts: int = 0) -> None:
        self._source, self._restarts = textwrap.dedent(source), restarts
        self.works: list[str] = []
        self.messages: list[Any] = []
        self.endings: list[Ending] = []

    def arguments(self) -> Sequence[str]:
        """Return the lines."""
        return [self._source]

    def begins(self, work: str) -> None:
        """Keep the name of the work."""
        self.works.append(work)

    def hears(self, message: Any) -> None:
        """Keep the message."""
        self.messages.append(message)

    def ends(self, ending: Ending) -> bool:
        """Keep the ending."""
        self.endings.append(ending)
        return len(self.endings) <= self._restarts


MODULE = """
import ctypes, os, signal, subprocess, sys, threading, time

def deeper(*_):
    while True:
        time.sleep(0.01)

def run(parent, source):
    exec(compile(source, "source.py", "exec"), {**globals(), "parent": parent})
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the module with the work into a folder of the import path, and return the folder."""
    (tmp_path / "graphpact_cli_test_work.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ending(source: str) -> Ending:
    """Run lines of Python in a child process and return its end."""
    task = Work(source)
    children.run([task], 1)
    return task.endings[0]


FAULTS = {  # lines, how the process ended, and the work in which it did
    "returns": ("", "", END),
    "waits": ("parent.begins('w'); deeper()", "it did not finish within 2 s", "w"),
    "keeps the GIL": (
        "parent.begins('w')\nwhile True: ctypes.PyDLL(None).sleep(600)",
        "it did not finish within 2 s",
        "w",
    ),
    "leaves": ("os._exit(0)", "it ended the process: exit status 0", START),
    "exits": ("parent.begins('w'); sys.exit(3)", "it ended the process: exit status 3", "w"),
    "raises": ("raise ValueError", "it ended the process: exit status 1", START),
    "aborts": ("parent.begins('w'); os.abort()", "signal 6 (SIGABRT) ended the process", "w"),
    "crashes": ("ctypes.string_at(0)", "signal 11 (SIGSEGV) ended the process", START),
    "at exit": (
        "import atexit; atexit.register(os._exit, 5)",
        "it ended the process: exit status 5",
        END,
    ),
    "a thread": (
        "threading.Thread(target=deeper, name='deep').start()",
        "it did not finish within 2 s; its threads still run: deep",
        END,
    ),
    "is deaf": (
        "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)]; deeper()",
        "it did not finish within 2 s",
        START,
    ),
}


def test_each_way_to_end_is_said() -> None:
    """An ending has the fault and the work; other children are not affected; each is restarted separately."""
    tasks = {name: Work(source, restarts=int(name == "leaves")) for name, (source, _, _) in FAULTS.items()}
    children.run(tasks.values(), 4)
    for name, (_, fault, work) in FAULTS.items():
        found = tasks[name].endings[0]
        assert (found.fault, found.work, found.started) == (fault, work, True), name
        assert found.hung is ("did not finish" in fault)
        assert len(tasks[name].endings) == 1 + (name == "leaves")
    assert tasks["waits"].endings[0].frames[-1].startswith("in deeper (")
    assert tasks["crashes"].endings[0].frames[-1].startswith("in string_at (ctypes/__init__.py:")
    assert "ValueError" in tasks["raises"].endings[0].stderr


def test_idle_threads_of_an_executor_end_with_the_work() -> None:
    """A pool of threads that a plugin keeps ends as at the end of an interpreter, and is no fault."""
    ended = ending(
        """
        from concurrent.futures import ThreadPoolExecutor
        parent.kept = ThreadPoolExecutor(1)
        parent.kept.submit(int).result()
        """
    )
    assert (ended.fault, ended.hung) == ("", False)


def test_messages_and_output_are_passed_on() -> None:
    """Messages are any objects; the first line on stdout is reported with its work; output stays in files."""
    task = Work("""
        parent.begins("one")
        parent.send({"a": (1, None)})
        parent.begins("two")
        print("hello"); os.write(1, b"raw"); print("talk", file=sys.stderr)
        assert sys.stdin.read() == "" and os.read(0, 1) == b""
    """)
    children.run([task], 1)
    assert (task.works, task.messages) == (["one", "two"], [{"a": (1, None)}])
    (found,) = task.endings
    assert (found.fault, found.stdout, found.stderr) == ("", "hello\nraw", "talk\n")
    assert found.printed == ("two", "hello")


def test_what_a_child_starts_ends_with_it() -> None:
    """A process of its session is named and killed; a helper that ends soon after is not named."""
    left = ending("subprocess.Popen(['sleep', '600'], process_group=0)")
    assert left.left == ["sleep 600"]
    assert ending("subprocess.Popen(['cat'], stdin=os.pipe()[0])").left == []


def test_a_fork_that_goes_on_with_the_work_is_ended() -> None:
    """The work that forked is reported, and messages arrive once."""
    task = Work("parent.begins('w'); os.fork(); parent.begins('v'); parent.send(1)")
    children.run([task], 1)
    (found,) = task.endings
    assert (task.works, task.messages, found.fault, found.forked) == (["w", "v"], [1], "", ["w"])


def test_a_child_has_the_environment_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, folder and import path are those of now, whenever the server was started."""
    for value in ("one", "two"):
        monkeypatch.setenv(ENTERED, value)
        task = Work(f"parent.send([os.environ['{ENTERED}'], os.getcwd(), os.environ['OMP_NUM_THREADS']])")
        children.run([task], 1)
        assert task.messages == [[value, os.getcwd(), "1"]]  # noqa: PTH109


def test_work_that_cannot_be_imported_has_not_started() -> None:
    """The ending of a child whose work cannot be imported says so, and contains its stderr."""
    task = Work("")
    task.work = "not_here:run"
    children.run([task], 1)
    assert not task.endings[0].started
    assert "No module named 'not_here'" in task.endings[0].stderr


def test_a_server_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no child can be started, the error says why, and nothing is left."""

    def start(_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(EngineError, match=r"no child process can be started: .*unavailable"):
        children.run([Work("")], 1)


_ENDED, _RESET = EOFError("unexpected EOF"), ConnectionResetError(104, "reset by peer")
_REFUSED = ConnectionRefusedError(111, "refused")


@pytest.mark.parametrize("errors", [[_ENDED], [_RESET], [_REFUSED, _REFUSED, _ENDED]], ids=str)
def test_a_server_that_is_killed_at_a_start_is_started_again(
    errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is gone or ends when a child is started, the child is started again and runs."""
    faults = [*errors]
    right = ForkServerProcess.start

    def start(process: ForkServerProcess) -> None:
        if faults:
            raise faults.pop()
        right(process)

    monkeypatch.setattr(ForkServerProcess, "start", start)
    task = Work("parent.send('ran')")
    children.run([task], 1)
    assert task.messages == ["ran"]
    assert len(task.endings) == 1


def test_a_server_that_does_not_come_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server is gone at each start, the error says so after a limit."""

    def start(_: object) -> None:
        raise _REFUSED

    monkeypatch.setattr(ForkServerProcess, "start", start)
    monkeypatch.setattr(children, "_KILL_LIMIT", 0.1)
    with pytest.raises(EngineError, match=r"no child process can be started: .*refused"):
        children.run([Work("")], 1)


def test_an_error_here_ends_the_children() -> None:
    """What a task raises is raised by `run`, and its child does not outlive that."""
    task = Work("parent.send(os.getpid()); deeper()")

    def hears(message: int) -> None:
        task.messages.append(message)
        raise KeyboardInterrupt

    task.hears = hears  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        children.run([task], 1)
    with pytest.raises(ProcessLookupError):
        os.kill(task.messages[0], 0)


SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from graphpact_cli import children
sys.path[:0] = [{tests!r}, {folder!r}]
from test_children import Work

class Loud(Work):
    limit = 600.0

    def hears(self, message):
        print(message, flush=True)

nested = "subprocess.Popen(['sleep', '600']); parent.send(os.getpid()); deeper()"
children.run([Loud(nested), Loud(nested)], 2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_is_killed_leaves_no_process(number: signal.Signals, module: Path) -> None:
    """However the parent ends, no child and nothing that one started outlives it; its script has no guard."""
    script = module / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(module)))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(len(children._session(pid)) == 2 for pid in pids)
        parent.send_signal(number)
        assert parent.wait(60) == -number
    deadline = time.monotonic() + 30
    while any(children._session(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(children._session(pid) for pid in pids)


def test_frames_that_move_are_not_shown() -> None:
    """The common part of several stacks is shown, outermost frame first, without differing line numbers."""
    dump = f"""Stack (most recent call first):
  File "/a/lib/queue.py", line {{leaf}} in {{name}}
  File "/a/my/backend.py", line {{line}} in replay
  File "/a/graphpact/lane.py", line 7 in run
  File "{child.__file__}", line 7 in run
"""
    same = dump.format(leaf=1, name="get", line=3)
    frames = ["in run (graphpact/lane.py:7)", "in replay (my/backend.py:3)"]
    assert children.steady_frames(same * 2) == [*frames, "in get (lib/queue.py:1)"]
    moved = dump.format(leaf=2, name="put", line=4)
    assert children.steady_frames(same + moved) == [frames[0], "in replay (my/backend.py)"]
    assert children.steady_frames("") == []
