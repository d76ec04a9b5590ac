"""`start_ranks`: two processes of one script, which meet in a store of this process.

The store is here because it has to outlive the ranks.

Does not: know what the script does.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[3] / "tests"
TIMEOUT = 120.0
"""Seconds until a test gives up. Ranks that import torch on a busy machine take long."""


class StartedRanks:
    """Two running ranks.

    Args:
        script: The script.
        arguments: Its arguments after the rank and the port of the store.
        store: The store.
    """

    def __init__(self, script: Path, arguments: tuple[str, ...], store: dist.TCPStore) -> None:
        self._store = store
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            "PYTHONWARNINGS": "ignore",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(store.port), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def printed_by(self, rank: int) -> list[Any]:
        """Wait until a rank ends with status 0, and return the JSON of each line that it printed."""
        out, err = self.processes[rank].communicate(timeout=TIMEOUT)
        assert self.processes[rank].returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        """End both ranks and the processes that they started, also those that are stopped."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def start_ranks() -> Iterator[Callable[..., StartedRanks]]:
    """Return a function that starts two ranks of a script beside the tests, with some arguments."""
    started: list[StartedRanks] = []

    def start(script: str, *arguments: str) -> StartedRanks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started.append(StartedRanks(Path(__file__).parent / script, arguments, store))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()
