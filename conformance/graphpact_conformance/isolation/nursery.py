"""A process that has imported torch and the suite, and no plugin: it forks a worker for each job, on Linux.

    python -m graphpact_conformance.isolation.nursery

The imports take longer than many jobs. It is the keeper of its workers, one after the other; see
`graphpact_conformance.isolation.keeper`. Its stdin is a socket. A message brings the descriptors of `GIVEN`;
the answer, four bytes, is how the worker ended, as in `subprocess.Popen.returncode`.

Does not: run a job itself, or know what is in it. A worker changes nothing here: its memory is a copy.
"""

import gc
import json
import os
import signal
import socket
from typing import Any

from graphpact_conformance.isolation import worker
from graphpact_conformance.isolation.job_wire import ANSWER, GIVEN, OF_JOB
from graphpact_conformance.isolation.keeper import Keeper


def _next_job(control: socket.socket) -> dict[str, Any] | None:
    """Return a job in each worker, and None in the nursery after the last one.

    Args:
        control: The socket of the supervisor.
    """
    keeper = Keeper()
    gc.freeze()
    while not keeper.is_stopped:
        message, received, *_ = socket.recv_fds(control, 1, len(GIVEN))
        if not message:
            break  # the supervisor needs no more workers
        child = os.fork()
        if not child:
            control.close()
            return _as_worker(dict(zip(GIVEN, received, strict=True)))
        status = keeper.keep(child)
        keeper.end_all(report=received[GIVEN.index("left")])
        for descriptor in received:
            os.close(descriptor)
        control.send(ANSWER.pack(os.waitstatus_to_exitcode(status)))
    return None


def _as_worker(given: dict[str, int]) -> dict[str, Any]:
    """Make this process a worker, and return its job."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in given.values():
        os.set_inheritable(descriptor, False)  # noqa: FBT003  positional only
    worker.close_stdin()
    os.dup2(given["out"], 1)
    os.dup2(given["err"], 2)
    with open(given["job"], encoding="utf-8") as file:  # noqa: PTH123  a descriptor
        job: dict[str, Any] = json.load(file)
    for name in ("left", "out", "err"):
        os.close(given[name])
    return job | {name: given[name] for name in OF_JOB}


def main() -> None:
    """Fork workers until the supervisor closes its end of the socket."""
    with socket.socket(fileno=os.dup(0)) as control:
        job = _next_job(control)
    if job is None:
        os._exit(0)  # torch takes a while to end, and the supervisor waits
    worker.main(job)


if __name__ == "__main__":
    main()
