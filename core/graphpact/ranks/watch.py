"""`RankWatch`: if a collective fails, says which rank is missing, and what each rank was doing.

A rank that is killed, stopped, or raises leaves the others in a collective. The transport ends their wait:
at once if a process ended, after its timeout otherwise. Its message names no rank. So each rank that fails
leaves a note in the store by which the processes met, then reads the notes of the others. A rank without a
note gave no sign: it was killed or stopped.

Does not: interrupt a rank that computes, or end a process. The timeout of the process groups ends every wait.
"""

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from graphpact.errors import CollectiveError, GraphpactError, RankError
from graphpact.parallel import ranks_named
from graphpact.ranks.exchange import said_by

_POLL = 0.02  # seconds between two looks for notes
_TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_TRANSPORTS = ("gloo", "NCCL", "ProcessGroup")  # in messages of errors that ``Work.wait`` raises


class RankWatch:
    """The notes of one group of ranks that step together.

    Args:
        store: The store of torch by which the processes met. It must outlive a rank that ends.
        rank: This process among all processes.
        ranks: The ranks of the group.
        grace: Seconds to wait for the notes of other ranks. All ranks of a group notice the failure of one
            within about this time.

    Attributes:
        step: The number of this rank's step.
        doing: What this rank is doing, for its note.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], *, grace: float = 2.0) -> None:
        self.step = 0
        self.doing = "starting"
        self._store = dist.PrefixStore("graphpact notes", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._ranks = list(ranks)
        self._grace = grace
        self._has_noted = False

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into an error that names the rank that is missing.

        Another error leaves a note for the other ranks, and passes; one of graphpact gets the rank's name.

        Raises:
            RankError: A collective failed.
        """
        try:
            yield
        except RankError:
            self._note("found that the ranks differ")
            raise
        except Exception as error:
            if not _is_communication(error):
                self._note(f"raised {type(error).__name__}: {_one_line(error)}")
                if isinstance(error, GraphpactError):
                    error.message = f"rank {self._rank}: {error.message}"
                raise
            raise self.explained(error) from error
        except BaseException as error:
            self._note(f"ended with {type(error).__name__}")
            raise

    def require_no_failure(self, ranks: Sequence[int]) -> None:
        """Raise `RankError` if one of ``ranks``, which may be those of another group, has left a note."""
        for rank in ranks:
            if self._store.check([str(rank)]):
                note = json.loads(self._store.get(str(rank)))
                raise RankError(
                    f"rank {rank} has failed in step {note['step']}, {note['doing']}: {note['text']}",
                    hint="look at the error of that rank",
                    rule="GP17",
                )

    def explained(self, error: Exception) -> RankError:
        """Return the error of a failed collective: what this rank waited for, and what the others did."""
        waits = f"waited in {_collective_of(error)}"
        self._note(waits)
        notes = self._notes()
        mine = notes.pop(self._rank, None)
        waited = (
            f"rank {self._rank}, step {self.step}, {self.doing}: {waits if mine is None else mine['text']}"
        )
        told = [waited]
        if mine is None:
            told.append("what the other ranks did is unknown: the store of their notes has ended")
        elif missing := [rank for rank in self._ranks if rank != self._rank and rank not in notes]:
            told.append(f"{ranks_named(missing)} gave no sign: killed, stopped, or still computing")
        if others := sorted(notes):
            texts = [f"step {n['step']}, {n['doing']}: {n['text']}" for n in map(notes.__getitem__, others)]
            told.append(said_by(others, texts))
        return RankError(
            f"{'; '.join(told)} (the transport says: {_one_line(error)})",
            hint="look at the first rank named here: a rank that ends, waits, or takes another graph leaves"
            " the others without a peer",
            rule="GP17",
        )

    def _note(self, text: str) -> None:
        """Leave the note of this rank; the first one stays."""
        if self._has_noted:
            return
        self._has_noted = True
        note = {"step": self.step, "doing": self.doing, "text": text}
        with contextlib.suppress(RuntimeError):  # the store may have ended with its process
            self._store.set_timeout(timedelta(seconds=max(1.0, self._grace)))
            self._store.set(str(self._rank), json.dumps(note))

    def _notes(self) -> dict[int, dict[str, Any]]:
        """Wait for the notes of the other ranks, for at most the grace, and return all notes."""
        begun = time.monotonic()
        notes: dict[int, dict[str, Any]] = {}
        with _termination_deferred() as terminated, contextlib.suppress(RuntimeError):
            while len(notes) < len(self._ranks):
                for rank in self._ranks:
                    if rank not in notes and self._store.check([str(rank)]):
                        notes[rank] = json.loads(self._store.get(str(rank)))
                # A launcher that ends this rank waits for it, but not for long.
                if time.monotonic() - begun > self._grace / (2 if terminated else 1):
                    break
                time.sleep(_POLL)
        return notes


@contextlib.contextmanager
def _termination_deferred() -> Iterator[list[int]]:
    """Collect SIGTERM inside instead of ending: a launcher sends it to all others when one rank ends."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:  # None: a handler that Python did not set, and cannot set again
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _is_communication(error: BaseException) -> bool:
    """Return whether the transport raised ``error``."""
    if isinstance(error, CollectiveError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(name in str(error) for name in _TRANSPORTS):
        return True
    return any(_TORCH_DISTRIBUTED in f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__))


def _collective_of(error: BaseException) -> str:
    """Return the collective that failed, as text: that of a replay, or the line that called it."""
    if isinstance(error, CollectiveError):
        return error.message.partition(" failed")[0].rstrip(",")
    frames = traceback.extract_tb(error.__traceback__)
    at = next((i for i, frame in enumerate(frames) if _TORCH_DISTRIBUTED in frame.filename), None)
    if at is None:  # the wait for a collective that was called without one
        at = len(frames)
    if not at:
        return "a collective"
    inside = [f.name for f in frames[at:] if _TORCH_DISTRIBUTED in f.filename]
    called = [name for name in inside if not name.startswith(("wrapper", "_"))]
    caller = frames[at - 1]
    return f"{called[0] if called else 'a collective'}, called at {caller.filename}:{caller.lineno}"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
