"""`RankWatch`: if a rank fails, the others end soon, with an error that names it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from graphpact.errors import CollectiveError, PactBreach, RankError
from graphpact.ranks import RankWatch

GRACE = 1.0
SLACK = 4.0
"""Seconds that a busy machine may add."""
TIMEOUTS = {"raise": 30.0, "kill": 30.0, "stop": 3.0}
"""The timeout of the process group, by how rank 1 fails. Only a rank that stops is noticed by it."""
COLLECTIVE = "rank 0, step 4, lane 'decode', an eager step: waited in "
NO_SIGN = "; rank 1 gave no sign: killed, stopped, or still computing "


@pytest.fixture(scope="module")
def failed(start_ranks: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return what rank 0 printed, by how rank 1 failed."""
    ranks = start_ranks("watch_rank.py", *(f"{how}={timeout}" for how, timeout in TIMEOUTS.items()))
    return {each["how"]: each for each in ranks.printed_by(0)}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "raise",
            "; rank 1: step 4, lane 'decode', an eager step: raised ValueError: no such expert: 12 ",
        ),
        ("kill", NO_SIGN),
        ("stop", NO_SIGN),
    ],
    ids=[*TIMEOUTS],
)
def test_a_rank_that_fails_is_named(how: str, says: str, failed: dict[str, dict[str, Any]]) -> None:
    """The other rank's error names it, with its own error if it raised one, and what it waited for itself."""
    error = failed[how]["error"]
    assert error.startswith(COLLECTIVE)
    assert says in error
    assert "watch_rank.py:" in error.partition(";")[0]
    assert "(the transport says: " in error


@pytest.mark.parametrize("how", TIMEOUTS)
def test_the_others_end_soon(how: str, failed: dict[str, dict[str, Any]]) -> None:
    """A rank that ended is noticed at once, one that stopped at the timeout; then comes the grace."""
    noticed = TIMEOUTS[how] if how == "stop" else 0.0
    assert failed[how]["seconds"] < noticed + GRACE + SLACK


# -- notes in the store of one process ---------------------------------------------------------------


def _watches(count: int, grace: float = 0.1) -> list[RankWatch]:
    store = dist.HashStore()
    return [RankWatch(store, rank, range(count), grace=grace) for rank in range(count)]


def _transport_error() -> RuntimeError:
    return RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore")


def test_ranks_with_equal_notes_are_told_together() -> None:
    """The error lists the missing ranks, and then what the others did, each text once."""
    watches = _watches(5)
    for rank in (1, 3):
        watches[rank].step, watches[rank].doing = 7, "a capture"
        with pytest.raises(KeyboardInterrupt), watches[rank].explaining():
            raise KeyboardInterrupt
    text = watches[0].explained(_transport_error()).message
    assert "; ranks 2, 4 gave no sign: " in text
    assert "; ranks 1, 3: step 7, a capture: ended with KeyboardInterrupt " in text
    assert text.endswith("(the transport says: [gloo/transport/tcp/pair.cc:553] Connection closed by peer)")


def test_the_first_note_of_a_rank_stays() -> None:
    """What a rank raised first is the cause; errors that follow from it do not replace its note."""
    first, second = _watches(2)
    for error in (ValueError("the cause"), TypeError("what followed")):
        with pytest.raises(type(error)), second.explaining():
            raise error
    assert "rank 1: step 0, starting: raised ValueError: the cause " in str(
        first.explained(_transport_error())
    )


@pytest.mark.parametrize("comma", [",", ""])
def test_a_failed_replay_names_its_collective(comma: str) -> None:
    """The error of a collective in a graph is explained with the collective, once."""
    watch = _watches(1)[0]
    watch.doing = "replay decode[bs=2, tokens=2]"
    with pytest.raises(RankError) as error, watch.explaining():
        raise CollectiveError(
            f"collective 1, c10d.allreduce_ ([4] float32){comma} failed at a replay: closed"
        )
    waited, _, rest = error.value.message.partition(" (the transport says: ")
    doing = "rank 0, step 0, replay decode[bs=2, tokens=2]"
    assert waited == f"{doing}: waited in collective 1, c10d.allreduce_ ([4] float32)"
    assert rest.endswith("failed at a replay: closed)")


def test_errors_of_the_program_pass_unchanged() -> None:
    """An error that no transport raised passes as it is, as does one that compares ranks."""
    watch = _watches(1)[0]
    for error in (RuntimeError("the model's own"), RankError("they differ")):
        with pytest.raises(type(error)) as raised, watch.explaining():
            raise error
        assert raised.value is error


def test_errors_of_graphpact_name_their_rank() -> None:
    """Each rank prints its errors, so a breach on one rank says on which."""
    with pytest.raises(PactBreach, match=r"^rank 0: a tensor moved") as raised, _watches(1)[0].explaining():
        raise PactBreach("a tensor moved", hint="copy")
    assert raised.value.hint == "copy"


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """Return the SIGTERMs that reach the program while the test runs."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, note)
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_launcher_that_ends_this_rank_still_gets_its_error(terminated: list[int]) -> None:
    """SIGTERM while notes are collected shortens the wait by half, and the handler is put back after it."""
    watch = _watches(2, grace=3.0)[0]
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    begun = time.monotonic()
    error = watch.explained(_transport_error())
    assert 1.5 <= time.monotonic() - begun < 3.0
    timer.join()
    assert "rank 1 gave no sign" in error.message
    assert terminated == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminated == [signal.SIGTERM]


def test_a_store_that_has_ended_leaves_the_own_part() -> None:
    """If the store is gone, the error says what this rank waited for, and that nothing is known of others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = RankWatch(dist.TCPStore("127.0.0.1", store.port, is_master=False), 0, [0, 1], grace=0.1)
    watch.doing = "a capture"
    del store
    text = watch.explained(_transport_error()).message
    assert text.startswith(
        "rank 0, step 0, a capture: waited in a collective; what the other ranks did is unknown"
    )
    assert "gave no sign" not in text
