"""`RankProcesses`: the processes of ranks, which ``torchrun`` starts, and their answers to tasks.

The processes start with the first task, and do one after the other. If a rank does not do its whole task, all
are ended, and others start with the next task. They are also ended when the object is gone.

Does not: judge the answers (see `graphpact_conformance.experiments.real_ranks.verdict`), or run on Windows.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from graphpact.errors import GraphpactError
from graphpact_cli.children import steady_frames
from graphpact_conformance.experiments.real_ranks.messages import LostRank, RankReport, RankTask
from graphpact_conformance.targets import TIMEOUT, TIMEOUT_VARIABLE

WORKER = "graphpact_conformance.experiments.real_ranks.worker"

_GRACE = 5.0  # seconds, beyond the time that ranks wait for each other, until a rank is lost
_LAUNCHER_LIMIT = 5.0  # seconds until the launcher has written how a process ended: all others end before
_END_LIMIT = 10.0  # seconds for the end of killed processes
_TICK = 0.5  # seconds between two looks at the clock
_SAMPLES, _SAMPLE_PAUSE = 5, 0.05  # stack samples of a lost rank, and seconds between two
_TAIL = 5  # lines of a lost rank's stderr in a report
_LAUNCHER_LOG = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.MULTILINE)
_LAUNCHER_SAYS = re.compile(r"\(exitcode: (-?\d+)\) local_rank: (\d+)")


class RankProcesses:
    """The processes of ranks, which start when they are needed.

    Args:
        size: Number of ranks.
        timeout: Seconds that ranks wait for each other. By default a twelfth of the limit of one piece of
            work, which is 10 seconds unless ``GRAPHPACT_CHECK_TIMEOUT`` sets it.
    """

    def __init__(self, size: int, timeout: float | None = None) -> None:
        limit = float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT))
        self.size = size
        self.timeout = limit / 12 if timeout is None else timeout
        self._start_limit, self._limit = limit / 2, 0.4 * limit
        self._running: _Running | None = None

    def run(self, task: RankTask) -> list[RankReport | LostRank]:
        """Do a task on all ranks, and return what each of them reports, in the order of ranks.

        Raises:
            GraphpactError: The processes cannot be started.
        """
        if self._running is not None and not self._running.is_alive:
            self.close()  # not because of a task
        if self._running is None:
            self._running = _Running(self.size, self.timeout, self._start_limit, self._limit)
        is_whole = False
        try:
            answers = self._running.ask(task)
            is_whole = all(isinstance(each, RankReport) and each.is_whole for each in answers)
        finally:
            if not is_whole:
                self.close()
        return answers

    def close(self) -> None:
        """End the processes, if any run."""
        if self._running is not None:
            self._running.end()
            self._running = None


class _Running:
    """The processes of one start.

    Args:
        size: Number of ranks.
        timeout: Seconds that they wait for each other.
        start_limit: Seconds for their imports.
        limit: Seconds for one task.
    """

    def __init__(self, size: int, timeout: float, start_limit: float, limit: float) -> None:
        self._size, self._timeout, self._limit = size, timeout, limit
        self._folder = Path(tempfile.mkdtemp(prefix="graphpact-ranks-"))
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, Connection] = {}
        server = socket.socket(socket.AF_UNIX)
        with server:
            address = str(self._folder / "socket")
            server.bind(address)
            server.listen(size)
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(size), "-m", WORKER),
                *(address, str(self._folder), str(timeout), str(limit)),
            ]
            with (self._folder / "launcher").open("wb") as output:
                launcher = subprocess.Popen(
                    command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self.end = weakref.finalize(self, _end, launcher, self._pids, self._pipes, self._folder)
            self._launcher = launcher
            try:
                self._meet(server, time.monotonic() + start_limit)
            except BaseException:
                self.end()
                raise

    def _meet(self, server: socket.socket, deadline: float) -> None:
        """Wait until every rank is here."""
        server.settimeout(0.1)
        while len(self._pipes) < self._size:
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                paths = [self._folder / "launcher", *sorted(self._folder.glob("stderr-*"))]
                said = [line for path in paths for line in _tail(path)]
                raise GraphpactError(
                    f"{len(self._pipes)} of {self._size} ranks started: {' / '.join(said) or 'no output'}",
                    hint=f"if the machine is only slow, set {TIMEOUT_VARIABLE}=SECONDS",
                )
            with suppress(TimeoutError):
                accepted, _ = server.accept()
                pipe = Connection(accepted.detach())
                rank, pid = pipe.recv()
                self._pipes[rank], self._pids[rank] = pipe, pid

    @property
    def is_alive(self) -> bool:
        """Whether no process has ended."""
        return self._launcher.poll() is None and not connection.wait([*self._pipes.values()], 0)

    def ask(self, task: RankTask) -> list[RankReport | LostRank]:
        """Return the answer of each rank to a task."""
        answers: dict[int, RankReport] = {}
        gone: set[int] = set()
        for pipe in self._pipes.values():
            with suppress(OSError):
                pipe.send(task)
        deadline = time.monotonic() + self._limit
        while time.monotonic() < deadline and len(answers) + len(gone) < self._size:
            waiting = {p: rank for rank, p in self._pipes.items() if rank not in answers and rank not in gone}
            ready = connection.wait([*waiting], _TICK)
            for rank in [rank for pipe, rank in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    gone.add(rank)
                if rank in gone or not answers[rank].is_whole:  # the others wait for it, and then report
                    deadline = min(deadline, time.monotonic() + self._timeout + _GRACE)
        silent = [rank for rank in self._pipes if rank not in answers and rank not in gone]
        stacks = {rank: self._stacks(rank) for rank in silent}
        codes = self._exit_codes(gone)
        return [
            answers[rank]
            if rank in answers
            else LostRank(
                rank,
                _in_words(codes.get(rank)) if rank in gone else "does not answer",
                (*stacks.get(rank, ()), *_said(self._folder / f"stderr-{rank}")),
            )
            for rank in sorted(self._pipes)
        ]

    def _stacks(self, rank: int) -> Sequence[str]:
        """Return the frames in which a rank that does not answer is, innermost last."""
        for _ in range(_SAMPLES):
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
            time.sleep(_SAMPLE_PAUSE)
        with suppress(OSError):
            return steady_frames((self._folder / f"stacks-{rank}").read_text(errors="replace"))
        return ()

    def _exit_codes(self, ranks: set[int]) -> Mapping[int, int]:
        """Return the exit codes of processes that have ended, from what the launcher writes."""
        deadline = time.monotonic() + _LAUNCHER_LIMIT
        found: dict[int, int] = {}
        while ranks - found.keys() and time.monotonic() < deadline:
            has_ended = self._launcher.poll() is not None
            text = (self._folder / "launcher").read_text(errors="replace")
            found = {int(rank): int(code) for code, rank in _LAUNCHER_SAYS.findall(text)}
            if has_ended:
                break
            time.sleep(_SAMPLE_PAUSE)
        return found


def _environment() -> dict[str, str]:
    """Return the environment of the launcher: one thread for each rank, and the modules of this process."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109  text to text
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


def _end(
    launcher: "subprocess.Popen[bytes]",
    pids: Mapping[int, int],
    pipes: Mapping[int, Connection],
    folder: Path,
) -> None:
    """Kill the launcher and the ranks with what they started, and remove the folder."""
    for pid in pids.values():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # each leads a session
    for pipe in pipes.values():
        pipe.close()
    launcher.kill()
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_END_LIMIT)
    shutil.rmtree(folder, ignore_errors=True)


def _in_words(code: int | None) -> str:
    if code is None:
        return "has ended"
    if code >= 0:
        return f"has ended with status {code}"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})"


def _said(path: Path) -> list[str]:
    lines = _tail(path)
    return ["on stderr:", *lines] if lines else []


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file before what the launcher says; none if there is no file."""
    with suppress(OSError):
        said = _LAUNCHER_LOG.split(path.read_text(errors="replace"))[0]
        return said.strip().splitlines()[-_TAIL:]
    return []
