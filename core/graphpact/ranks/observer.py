"""`RankObserver`: holds the captures of a lane, and in strict lanes its steps, to those of the other ranks.

    capture   every rank captures the same shape, and calls the same sequence of collectives
    launch    in strict lanes: every rank replays the same graph, or none does; an eager step calls the same
              sequence of collectives

Each collective is compared before it is issued, in warm-up runs too: different ones would wait for each
other until the timeout of their group, or mix their data. It also notes for `RankWatch` what this rank is
doing.

Does not: exchange sizes, or choose graphs; the engine does before the step. It compares no collectives of
replays, and none of eager steps in other lanes.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane, PreparedStep
from graphpact.ranks.collectives import Collective, RecordedCollectives
from graphpact.ranks.exchange import RankExchange
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
        captures: The exchanges of captures; by default those of steps. Their group may have a longer timeout,
            because one rank may compile a graph that another one finds in its cache.
    """

    def __init__(
        self,
        exchange: RankExchange,
        watch: RankWatch,
        *,
        strict: bool,
        captures: RankExchange | None = None,
    ) -> None:
        self._exchange = exchange
        self._captures = exchange if captures is None else captures
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
            RankError: Another rank does something else, or calls another collective.
        """
        what = f"capture {shape} in lane {lane.name!r}"
        with self._compared(self._captures, what, what, lambda: lane.driver.is_capturing):
            captured = yield
        self._watch.doing = f"after {what}"
        return captured

    @hookimpl(wrapper=True)
    def launch(self, lane: Lane, prepared: PreparedStep) -> Generator[None, Any, Any]:
        """Note the graph; in a strict lane compare it, or the collectives of an eager step.

        Raises:
            RankError: Another rank takes another graph, or calls another collective.
        """
        is_replay = isinstance(prepared.fit, GraphShape)
        what = f"replay {prepared.fit}" if is_replay else f"an eager {prepared.batch.forward_mode.value} step"
        self._watch.doing = f"lane {lane.name!r}, {what}"
        if not self._strict:
            return (yield)
        if is_replay:
            self._exchange.tell(f"lane {lane.name!r}, {what}")
            return (yield)
        # The mode may differ: a rank without requests has an idle batch.
        action = f"lane {lane.name!r}, an eager step"
        with self._compared(self._exchange, action, self._watch.doing):
            return (yield)

    @contextlib.contextmanager
    def _compared(
        self,
        exchange: RankExchange,
        action: str,
        doing: str,
        is_recorded: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Compare an ``action``, and each collective in it before it is issued.

        Args:
            exchange: The exchanges.
            action: What all ranks do.
            doing: What this rank does, for its note.
            is_recorded: Whether a graph is being recorded now. Recorded collectives are counted separately,
                because a capture calls the sequence in its warm-up too.
        """
        self._watch.doing = doing
        exchange.tell(action)
        counted = dict.fromkeys(("collective", "recorded collective"), 0)

        def compare(call: Collective) -> None:
            kind = "recorded collective" if is_recorded() else "collective"
            which = f"{kind} {counted[kind]}: {call}"
            counted[kind] += 1
            self._watch.doing = f"{doing}, {which}"
            exchange.tell(f"{action}, {which}", place=call.line, hint=_HELP)

        with RecordedCollectives(compare):
            yield
        self._watch.doing = f"{doing}, at its end"
        exchange.tell(f"{action}, no further collective", hint=_HELP)
