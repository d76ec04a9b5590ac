"""One rank of ``test_observer.py``: captures and runs lanes with collectives, and prints its errors.

    python observer_rank.py RANK PORT

PORT is that of the store where both ranks meet. In each case rank 1 does something else than rank 0.

Does not: compare.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from graphpact import ForwardBatch, StepOutputs
from graphpact.errors import RankError
from graphpact.ranks import Collective, RankExchange, RankObserver, RankWatch, RecordedCollectives
from graphpact.ranks.collectives import all_gather
from graphpact.step import Attend
from rigs.lane import SHAPE_OF, LaneRig

RANK, PORT = map(int, sys.argv[1:])
TIMEOUT = timedelta(seconds=60)


class Groups:
    """The process groups of both ranks."""

    def __init__(self) -> None:
        self.step, self.tensor, self.attention = (
            dist.new_group([0, 1], backend="gloo", timeout=TIMEOUT, group_desc=name)
            for name in ("step", "tensor", "attention")
        )


class CommunicatingRig(LaneRig):
    """A lane whose model adds what all ranks have, and gathers it, before it returns its logits.

    Args:
        calls: The collectives that the model calls: ``reduce``, ``gather``, or ``gather elsewhere``.
        strict: Whether every step is compared.
    """

    def __init__(self, groups: Groups, calls: Sequence[str], *, strict: bool) -> None:
        self.groups, self.calls = groups, calls
        self.watch = RankWatch(store, RANK, [0, 1])
        observer = RankObserver(RankExchange(groups.step), self.watch, strict=strict)
        super().__init__(capture=False, observers=[observer])

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the logits of all ranks, added."""
        logits = super().model(batch, metadata, attend).logits * 1
        gathered = logits.new_empty(2 * logits.shape[0], logits.shape[1])
        for call in self.calls:
            if call == "reduce":
                dist.all_reduce(logits, group=self.groups.tensor)
            else:
                elsewhere = call == "gather elsewhere"
                all_gather(gathered, logits, group=self.groups.attention if elsewhere else self.groups.tensor)
        return StepOutputs(logits=(logits + gathered[: logits.shape[0]], "bs"))


class CountingExchange(RankExchange):
    """An exchange that counts."""

    count = 0

    def tell(self, *args: Any, **kwargs: Any) -> Any:
        """Exchange, and count it."""
        self.count += 1
        return super().tell(*args, **kwargs)


def exchanges(groups: Groups) -> list[tuple[int, int]]:
    """Return the numbers of exchanges of steps and of captures: after a capture, and after a strict step."""
    of_steps, of_captures = CountingExchange(groups.step), CountingExchange(groups.attention)
    watch = RankWatch(store, RANK, [0, 1])
    rig = LaneRig(capture=False, observers=[RankObserver(of_steps, watch, strict=True, captures=of_captures)])
    found = []
    for act in (lambda: rig.lane.capture(SHAPE_OF[2]), lambda: rig.lane.run(rig.batch(1, 2))):
        act()
        found.append((of_steps.count, of_captures.count))
    return found


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the `RankError` that a call raises."""
    try:
        call()
    except RankError as error:
        return str(error)
    return "no error"


def different(first: Any, second: Any) -> Any:
    """Return what this rank does, of two things."""
    return second if RANK else first


BOTH = ("reduce", "gather")
CASES = {
    "swapped": ("gather", "reduce"),
    "skipped": ("gather",),
    "another group": ("reduce", "gather elsewhere"),
    "one more": ("reduce", "gather", "gather"),
}
"""The collectives of rank 1; those of rank 0 are `BOTH`."""


def recorded(groups: Groups) -> list[str]:
    """Return what is recorded of collectives of several kinds, and of a transfer between two ranks."""
    x = torch.ones(2)
    calls: list[Collective] = []
    with RecordedCollectives(calls.append):
        dist.all_reduce(x, group=groups.attention, async_op=True).wait()
        dist.all_gather([torch.empty(2), torch.empty(2)], x)
        (functional.all_reduce(x, "max", groups.tensor) + 1).tolist()
        dist.send(x, 1) if RANK == 0 else dist.recv(x, 0)
        x.add_(1)
        dist.broadcast(x[:1], 1)
    return [*map(str, calls)]


def main() -> dict[str, Any]:
    """Return the errors of this rank, by case. Each comes before a collective, so ranks stay together."""
    groups = Groups()
    found: dict[str, Any] = {
        "capture": {},
        "eager": {},
        "recorded": recorded(groups),
        "exchanges": exchanges(groups),
    }
    for case, calls in CASES.items():
        rig = CommunicatingRig(groups, different(BOTH, calls), strict=False)
        found["capture"][case] = error_of(lambda rig=rig: rig.lane.capture(SHAPE_OF[2]))
        rig = CommunicatingRig(groups, different(BOTH, calls), strict=True)
        found["eager"][case] = error_of(lambda rig=rig: rig.lane.run(rig.batch(2, 3)))
        found["doing"] = rig.watch.doing
    rig = CommunicatingRig(groups, BOTH, strict=True)
    found["another shape"] = error_of(lambda: rig.lane.capture(SHAPE_OF[different(2, 4)]))
    with torch.inference_mode():
        rig.lane.capture(SHAPE_OF[2])
        rig.lane.capture(SHAPE_OF[4])
        found["equal"] = [rig.agrees(*lengths) for lengths in ([3, 2], [4, 1, 5], [1, 1, 1, 1, 1])]
        found["steps"] = [rig.lane.stats.replays, rig.lane.stats.eager.total()]
        found["another graph"] = error_of(lambda: rig.lane.run(rig.batch(*[1] * different(2, 3))))
        found["no graph"] = error_of(lambda: rig.lane.run(rig.batch(*[1] * different(2, 5))))
    return found


store = dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=TIMEOUT)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=TIMEOUT)
print(json.dumps(main()))  # noqa: T201  read by the test
sys.stdout.flush()
dist.barrier()  # a rank that leaves while the other one waits would end it
os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
