"""`RankObserver`: holds the captures of a lane, and in strict lanes its steps, to those of the other ranks.

    capture   every rank captures the same shape, and records the same sequence of collectives
    launch    in strict lanes: every rank replays the same graph, or none does; an eager step calls the same
              sequence of collectives

It also notes for `RankWatch` what this rank is doing.

Does not: exchange sizes, or choose graphs; the engine does before the step.
"""

from collections.abc import Generator, Sequence
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.errors import RankError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane, PreparedStep
from graphpact.ranks.collectives import Collective, RecordedCollectives, first_difference
from graphpact.ranks.exchange import RankExchange, checksum
from graphpact.ranks.watch import RankWatch
from graphpact.shapes import GraphShape

_HELP = (
    "call the same collectives, in the same order and groups, on every rank; only contents of tensors may"
    " depend on the rank"
)


class RankObserver:
    """An observer of one lane.

    Args:
        exchange: Of the ranks that step together.
        watch: Their notes.
        strict: Whether every step is compared.
    """

    def __init__(self, exchange: RankExchange, watch: RankWatch, *, strict: bool) -> None:
        self._exchange = exchange
        self._watch = watch
        self._strict = strict

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Note the step."""
        self._watch.doing = f"lane {lane.name!r}, preparing {batch.batch_size} requests"
        return (yield)

    @hookimpl(wrapper=True)
    def capture(self, lane: Lane, shape: GraphShape) -> Generator[None, Any, Any]:
        """Compare the captured shape and its collectives.

        Raises:
            RankError: Another rank does something else, or calls another sequence of collectives.
        """
        what = f"capture {shape} in lane {lane.name!r}"
        self._watch.doing = what
        self._exchange.tell(what)
        # Warm-up runs are left out: they repeat the sequence.
        with RecordedCollectives(lambda: lane.driver.is_capturing) as recorded:
            self._watch.calls = recorded.calls
            captured = yield
        self._watch.doing = f"after {what}"
        self._compare(what, what, recorded.calls)
        return captured

    @hookimpl(wrapper=True)
    def launch(self, lane: Lane, prepared: PreparedStep) -> Generator[None, Any, Any]:
        """Note the graph; in a strict lane compare it, or the collectives of an eager step.

        Raises:
            RankError: Another rank takes another graph, or calls another sequence of collectives.
        """
        is_replay = isinstance(prepared.fit, GraphShape)
        what = f"replay {prepared.fit}" if is_replay else f"an eager {prepared.batch.forward_mode.value} step"
        self._watch.doing = f"lane {lane.name!r}, {what}"
        self._watch.calls = None
        if not self._strict:
            return (yield)
        self._exchange.tell(f"lane {lane.name!r}, {what if is_replay else 'an eager step'}")
        if is_replay:
            return (yield)
        with RecordedCollectives() as recorded:
            self._watch.calls = recorded.calls
            outputs = yield
        self._compare("an eager step", what, recorded.calls)
        return outputs

    def _compare(self, action: str, what: str, mine: Sequence[Collective]) -> None:
        """Compare the collectives that all ranks called in an ``action``, on this rank ``what``."""
        text = "; ".join(map(str, mine))
        steps = self._exchange.tell(f"compare {action}", tokens=len(mine), digest=checksum(text))
        if len({(step.tokens, step.digest) for step in steps}) == 1:
            return
        found = first_difference(self._exchange.ranks, self._exchange.objects(list(mine)))
        if found is None:  # equal texts have equal checksums
            return
        rank, at, first, other = found
        raise RankError(
            f"{what}: collective {at} differs: rank {self._exchange.ranks[0]} has {first}; rank {rank} has"
            f" {other}",
            hint=_HELP,
            rule="GP17",
        )
