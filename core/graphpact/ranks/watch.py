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

from graphpact.errors import CollectiveError, RankError
from graphpact.ranks.collectives import Collective, first_difference
from graphpact.ranks.exchange import named, said_by

_POLL = 0.02  # seconds between two looks for notes
_TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


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
        calls: The collectives of this step so far, if they are recorded; see `RankObserver`.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], *, grace: float = 2.0) -> None:
        self.step = 0
        self.doing = "starting"
        self.calls: list[Collective] | None = None
        self._store = dist.PrefixStore("graphpact notes", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._ranks = list(ranks)
        self._grace = grace
        self._has_noted = False

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into an error that names the rank that is missing.

        Another error leaves a note for the other ranks, and passes.

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
                raise
            raise self.explained(error) from error
        except BaseException as error:
            self._note(f"ended with {type(error).__name__}")
            raise

    def explained(self, error: Exception) -> RankError:
        """Return the error of a failed collective: what this rank waited for, and what the others did."""
        self._note(f"waited in {_collective_of(error)}")
        notes = self._notes()
        if self._rank in notes:
            waited = f"rank {self._rank}, step {self.step}, {self.doing}: {notes[self._rank]['text']}"
        else:  # the store has ended too
            waited = f"rank {self._rank}, step {self.step}, {self.doing}: waited in {_collective_of(error)}"
        missing = [rank for rank in self._ranks if rank not in notes]
        others = [rank for rank in self._ranks if rank in notes and rank != self._rank]
        told = []
        if missing:
            told.append(f"{named(missing)} gave no sign: killed, stopped, or still computing")
        if others:
            texts = [f"step {n['step']}, {n['doing']}: {n['text']}" for n in map(notes.__getitem__, others)]
            told.append(said_by(others, texts))
        told += self._different_calls(notes)
        return RankError(
            f"{waited}; {'; '.join(told)} (the transport says: {_one_line(error)})",
            hint="look at the first rank named here: a rank that ends, waits, or takes another graph leaves"
            " the others without a peer",
            rule="GP17",
        )

    def _different_calls(self, notes: dict[int, dict[str, Any]]) -> list[str]:
        """Return the first difference of the collectives that ranks of the same step noted, as text."""
        same = [r for r in self._ranks if r in notes and notes[r]["step"] == self.step and notes[r]["calls"]]
        calls = [[Collective(*call) for call in notes[r]["calls"]] for r in same]
        shortest = min(map(len, calls), default=0)  # a rank that waits has called fewer
        found = first_difference(same, [each[:shortest] for each in calls]) if len(same) > 1 else None
        if found is None:
            return []
        rank, at, first, other = found
        return [f"collective {at} of the step: rank {same[0]} has {first}; rank {rank} has {other}"]

    def _note(self, text: str) -> None:
        """Leave the note of this rank; the first one stays."""
        if self._has_noted:
            return
        self._has_noted = True
        calls = [[c.op, c.tensors, c.group, c.line] for c in self.calls or ()]
        note = {"step": self.step, "doing": self.doing, "text": text, "calls": calls}
        with contextlib.suppress(RuntimeError):  # the store may have ended with its process
            self._store.set(str(self._rank), json.dumps(note))

    def _notes(self) -> dict[int, dict[str, Any]]:
        """Wait for the notes of the other ranks, for at most the grace, and return all notes."""
        begun = time.monotonic()
        notes: dict[int, dict[str, Any]] = {}
        with _termination_deferred() as terminated, contextlib.suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=max(1.0, self._grace)))
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
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_communication(error: BaseException) -> bool:
    """Return whether the transport raised ``error``."""
    if isinstance(error, CollectiveError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(_TORCH_DISTRIBUTED in f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__))


def _collective_of(error: BaseException) -> str:
    """Return the collective that failed, as text: that of a replay, or the line that called it."""
    if isinstance(error, CollectiveError):
        return error.message.partition(" failed")[0]
    frames = traceback.extract_tb(error.__traceback__)
    at = next((i for i, frame in enumerate(frames) if _TORCH_DISTRIBUTED in frame.filename), len(frames))
    if not 0 < at < len(frames):
        return "a collective"
    called = [f.name for f in frames[at:] if not f.name.startswith(("wrapper", "_"))]
    caller = frames[at - 1]
    return f"{called[-1] if called else 'a collective'}, called at {caller.filename}:{caller.lineno}"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
