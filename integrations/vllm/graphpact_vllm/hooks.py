"""`register`: the counts, the guard and the attention backend in this process.

Does not: decide what is asked for; `graphpact_guard.settings` does.
"""

from typing import Any

from vllm.platforms import current_platform

from graphpact_guard import Settings


class InProcess:
    """What graphpact has in this process; `register` fills it once.

    Attributes:
        builders: What the metadata builders made; None before `register`.
        counts: The counts of steps.
        guard: The hooks of the guard; None if none was asked for.
    """

    builders: Any = None
    counts: Any = None
    guard: Any = None


def register(settings: Settings) -> None:
    """Register what ``settings`` ask for; the second call in a process does nothing."""
    if InProcess.builders is not None:
        return
    if current_platform.is_cpu():
        # It replaces names of torch and of vLLM that modules below import by name.
        import vllm.v1.worker.cpu.shm  # noqa: F401, PLC0415  for that, and only on a CPU
    from graphpact_vllm.guard.guarding import VllmGuard  # noqa: PLC0415
    from graphpact_vllm.seams.builders import Builders  # noqa: PLC0415  after that
    from graphpact_vllm.seams.steps import StepCounts  # noqa: PLC0415

    InProcess.builders = builders = Builders()
    builders.register()
    InProcess.counts = counts = StepCounts(builders)
    if settings.tape is not None:  # only its worker says when vLLM serves, and gives the counts out
        counts.register()
    if settings.guard:
        from graphpact_vllm.guard.after_capture import AfterCapture  # noqa: PLC0415  after that
        from graphpact_vllm.guard.rank_steps import RankSteps  # noqa: PLC0415  after that

        InProcess.guard = hooked = VllmGuard(settings, builders, counts)
        hooked.register()
        steps = RankSteps(lambda: hooked.guard) if settings.ranks else None
        if steps is not None:
            steps.register()
        AfterCapture(hooked, steps).register()
        if settings.record is not None:
            from graphpact_vllm.guard.recording import StepRecorder  # noqa: PLC0415  after that

            StepRecorder(lambda: hooked.guard, builders).register()
    if settings.tape is not None:
        from graphpact_vllm.attention.registering import attention_backends  # noqa: PLC0415  only on the tape

        attention_backends()


def state() -> dict[str, Any]:
    """Return the state of graphpact in this process, ready for JSON."""
    guard = None if InProcess.guard is None else InProcess.guard.guard
    return {
        "steps": InProcess.counts.summary(),
        "guard": None if guard is None else guard.summary(),
    }
