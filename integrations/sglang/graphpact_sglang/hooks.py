"""`register`: the counts, the tape and the guard in this process, by SGLang's own registries.

Does not: decide what is asked for; `graphpact_guard.settings` does.
"""

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from graphpact_guard import Settings
from graphpact_sglang.guard.guarding import SglangGuard
from graphpact_sglang.seams.hooking import register_hook
from graphpact_sglang.seams.steps import StepCounts

_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


class InProcess:
    """What graphpact has in this process; `register` fills it.

    Attributes:
        counts: The counts of steps.
        guard: The hooks of the guard; None if none was asked for.
    """

    counts = StepCounts()
    guard: SglangGuard | None = None


def register(settings: Settings) -> None:
    """Register what ``settings`` ask for."""
    InProcess.counts.register()
    register_hook(_STATE, _add_state, HookType.AFTER)
    if settings.guard:
        InProcess.guard = SglangGuard(settings, InProcess.counts)
        InProcess.guard.register()
    if settings.tape is not None:  # last, so that its hooks run outside of the guard's
        from graphpact_sglang.tape.taping import register_tape  # noqa: PLC0415  it needs the tape and the kernels

        register_tape()


def state() -> dict[str, Any]:
    """Return the state of graphpact in this process, ready for JSON."""
    guard = None if InProcess.guard is None else InProcess.guard.guard
    return {"steps": InProcess.counts.summary(), "guard": None if guard is None else guard.summary()}


def _add_state(result: Any, *args: Any) -> None:
    """Add our state to the internal state that a scheduler reports."""
    del args
    result.internal_state["graphpact"] = state()
