"""`run_scenario`: one run of a started engine in this process, in virtual time.

Does not: judge, or fork; `graphpact_swarm.verdicts` and `graphpact_swarm.runs.engine_process` do.
"""

import os
import signal
import time
import traceback
from collections.abc import Sequence

from graphpact.engines import GraphFault, InjectedError, LoadedEngine, NotDoneError
from graphpact.errors import ContractError, GraphpactError
from graphpact.plugin_calls import describe_error
from graphpact_swarm.outcome import RequestAnswer, RunError, RunOutcome
from graphpact_swarm.runs.clock import VirtualClock
from graphpact_swarm.scenario import Scenario

_SLOW = 0.02  # seconds before each pass of a slow rank
_LINES = 12  # of a traceback


def most_passes(scenario: Scenario, chunk: int) -> int:
    """Return the passes in which the requests of a scenario are done, whatever the scheduler does.

    Each pass computes a chunk or a token at least, and a request that was preempted begins again: in the
    worst case after each of its tokens.

    Args:
        scenario: The scenario.
        chunk: The most new tokens of a step.
    """
    last = max((each.arrives_in for each in scenario.arrivals), default=0)
    full = max((each.at + each.passes for each in scenario.faults if each.kind == "full"), default=0)
    work = sum(
        -(-(len(each.prompt) + each.max_new_tokens) // chunk) + 2 * each.max_new_tokens + 4
        for each in scenario.arrivals
    )
    return max(last, full) + 4 * work + 50


def run_scenario(
    engine: LoadedEngine, scenario: Scenario, own: Sequence[int], *, rank: int = 0
) -> RunOutcome:
    """Run the requests of a scenario, and return what came.

    Args:
        engine: The engine, which ran nothing before.
        scenario: The scenario.
        own: The places of the requests that this rank runs.
        rank: This rank.
    """
    requests = [scenario.arrivals[at].request() for at in own]
    mine = [each for each in scenario.process_faults if each.rank == rank]
    found: list[tuple[int, GraphFault]] = []
    passes, real_sleep, begun = 0, time.sleep, time.monotonic()
    clock = VirtualClock()

    def note_faults() -> None:
        found.extend((passes, fault) for fault in engine.faults()[len(found) :])

    def on_pass(number: int) -> None:
        nonlocal passes
        note_faults()
        passes = number
        clock.tick()
        for fault in mine:
            if fault.kind == "kill" and number == fault.at:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "slow" and number >= fault.at:
                real_sleep(_SLOW)

    error = None
    with clock:
        try:
            engine.run(
                requests,
                most_passes=most_passes(scenario, engine.landmarks.chunk),
                on_pass=on_pass,
                faults=scenario.faults,
            )
        except BaseException as raised:  # noqa: BLE001  whatever an engine raises is what is looked for
            error = _described(raised)
    note_faults()
    return RunOutcome(
        answers={
            place: RequestAnswer(
                tokens=tuple(request.output_ids),
                logprobs=tuple(request.output_logprobs),
                reason=request.finish_reason,
                num_ends=request.num_ends,
            )
            for place, request in zip(own, requests, strict=True)
        },
        steps=list(engine.steps),
        faults=found,
        leaks=engine.leaks() if error is None else [],
        passes=passes,
        seconds=time.monotonic() - begun,
        error=error,
    )


def _described(raised: BaseException) -> RunError:
    kind = {InjectedError: "injected", NotDoneError: "stuck"}.get(type(raised), "raised")
    cause: BaseException | None = raised
    while cause is not None and kind == "raised":  # an engine may wrap it
        if isinstance(cause, InjectedError):
            kind = "injected"
        cause = cause.__cause__ or cause.__context__
    rule = raised.rule or "" if isinstance(raised, ContractError) else ""
    text = str(raised) if isinstance(raised, GraphpactError) else describe_error(raised)
    lines = "".join(traceback.format_exception(raised)).splitlines()
    return RunError(kind=kind, rule=rule, text=text, trace="\n".join(lines[-_LINES:]))
