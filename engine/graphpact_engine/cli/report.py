"""The report after a run: a table of replays and eager runs, and a line of totals.

Does not: count anything; lanes, verifiers and the scheduler do.
"""

from collections.abc import Iterator

from rich.console import Console

from graphpact.lane import Lane
from graphpact_cli.console import note, print_table, warning
from graphpact_engine.engine import Engine
from graphpact_engine.speculation import SpeculationStats

_COLUMNS = ("lane", "shape", "runs", "tokens", "padding", "capture", "nodes", "")
_NUMBERS = ("runs", "tokens", "padding", "capture", "nodes")
_BAR = 10  # length of the bar for 100% padding, in characters
_MAX_SHAPES = 8  # if a lane has more shapes, those that were never replayed share a row


def print_run(
    console: Console,
    engine: Engine,
    *,
    tokens: int,
    seconds: float,
    quiet: bool = False,
    failed: bool = False,
) -> None:
    """Print the report of a run.

    Args:
        console: The console to print to.
        engine: The engine that ran.
        tokens: Number of generated tokens.
        seconds: Duration of the run, including prefill.
        quiet: Print only the warning that no replay was verified although verification is on.
        failed: Whether the run ended with an error, such as a failed verification; then there is no warning.
    """
    if not quiet:
        rows = [row for lane in engine.lanes for row in _rows(lane, bars=console.is_terminal)]
        if any(rows):
            console.print()
            print_table(console, _COLUMNS, rows, numbers=_NUMBERS)
        note(_totals(engine, tokens, seconds))
        if engine.speculation is not None:
            note(_drafts(engine.speculation.stats))
    if not failed:
        _warn_if_unverified(engine)


def _rows(lane: Lane, *, bars: bool) -> Iterator[tuple[object, ...]]:
    """Yield a row for each shape of a lane, smallest first, and for each eager reason."""
    stats = lane.stats
    shapes = sorted(stats.shapes, key=lambda s: (s.mode.value, s.num_tokens, s.variant))
    unused = [shape for shape in shapes if not stats.shapes[shape].replays]
    if len(shapes) <= _MAX_SHAPES or len(unused) == 1:
        unused = []
    for shape in shapes:
        if shape in unused:
            continue
        s = stats.shapes[shape]
        waste = s.padding_waste(shape)
        yield (
            lane.name,
            shape,
            s.replays,
            s.raw_tokens,
            f"{waste:.1%}" if s.replays else "",
            _milliseconds(s.capture_seconds),
            s.num_nodes if s.num_nodes >= 0 else "",
            "█" * round(waste * _BAR) if bars else "",
        )
    if unused:
        seconds = sum(stats.shapes[shape].capture_seconds for shape in unused)
        label = f"{len(unused)} more shapes"
        yield lane.name, label, 0, 0, "", _milliseconds(seconds), "", "never replayed"
    for (mode, reason), count in sorted(stats.eager.items(), key=str):
        yield lane.name, f"{mode.value}, eager", count, "", "", "", "", reason.text


def _totals(engine: Engine, tokens: int, seconds: float) -> str:
    lanes = engine.lanes
    shapes = [s for lane in lanes for s in lane.stats.shapes.values()]
    replays = sum(lane.stats.replays for lane in lanes)
    eager = sum(lane.stats.eager.total() for lane in lanes)
    parts = [
        _count(replays, "replay"),
        _count(eager, "eager run"),
        _count(sum(lane.stats.pact_checks for lane in lanes), "pact check"),
    ]
    if engine.config.verify.replay_against_eager:
        verified = sum(verifier.verified for verifier in engine.verifiers)
        part = f"{verified} of {replays} replays verified"
        if verified:
            equal = sum(verifier.equal_to_the_bit for verifier in engine.verifiers)
            worst = max(verifier.largest_difference for verifier in engine.verifiers)
            part += f", largest difference {worst:.2g} ({equal} equal to the bit with the same padding)"
        parts.append(part)
    if shapes:
        spent = sum(s.capture_seconds for s in shapes)
        parts.append(f"{_count(len(shapes), 'shape')} captured in {_milliseconds(spent)}")
    parts.append(_count(engine.scheduler.num_preemptions, "preemption"))
    rate = tokens / seconds if seconds else 0.0
    parts.append(f"{_count(tokens, 'token')} in {seconds:.2f} s ({rate:,.1f} a second)")
    return "; ".join(parts)


def _drafts(stats: SpeculationStats) -> str:
    """Return in words how many drafts were accepted, and the time in the lanes of each mode."""
    parts = [f"{_count(stats.verifications, 'verified draft')}"]
    if stats.verifications:
        shares = [
            stats.accepted[at] / stats.verifications for at in range(1, max(stats.accepted, default=0) + 1)
        ]
        parts[0] += f", {stats.tokens_per_verification:.2f} tokens each"
        parts.append("accepted by position " + (", ".join(f"{share:.0%}" for share in shares) or "none"))
    parts += [f"{mode} {_milliseconds(seconds)}" for mode, seconds in stats.seconds.items()]
    return "; ".join(parts)


def _warn_if_unverified(engine: Engine) -> None:
    share = engine.config.verify.replay_against_eager
    if not share or any(verifier.verified for verifier in engine.verifiers):
        return
    replays = sum(lane.stats.replays for lane in engine.lanes)
    if replays:
        warning(
            f"no replay was verified: a share of {share:g} selected none of {_count(replays, 'replay')}",
            "raise verify.replay_against_eager, or pass --verify",
        )
        return
    reasons = sorted({reason.text for lane in engine.lanes for _, reason in lane.stats.eager})
    why = f" (eager runs: {'; '.join(reasons)})" if reasons else ""
    warning(f"no replay was verified: no step was replayed{why}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
