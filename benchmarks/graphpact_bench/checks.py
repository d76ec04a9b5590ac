"""What checks cost a decode step: the pact, verification against eager runs, observers, a strict lane.

Every row is a separate lane; all replay the same step, in turns. The pact and observers are host work of
microseconds: for them the replay does nothing, so that its own variation does not hide them.

Does not: check anything itself.
"""

import contextlib
import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from graphpact.hookspecs import hookimpl
from graphpact.plugins import PluginCatalog
from graphpact_bench.models import random_prompts
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.repeated_step import LIVE, SIZE, RepeatedStep, doing_nothing
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.step import CUDA, FULL, QUICK, TAPE, StepScale, graphs_of
from graphpact_bench.timing import Spread, take_turns

PLAIN = "pact off"


class NullObserver:
    """An observer that wraps every hook and does nothing, to measure the cost of observing a hook."""

    @hookimpl(wrapper=True)
    def populate(self) -> Generator[None, Any, Any]:
        """Pass the call on."""
        return (yield)

    @hookimpl(wrapper=True)
    def prepare_replay(self) -> Generator[None, Any, Any]:
        """Pass the call on."""
        return (yield)

    @hookimpl(wrapper=True)
    def init_metadata_replay(self) -> Generator[None, Any, Any]:
        """Pass the call on."""
        return (yield)

    @hookimpl(wrapper=True)
    def run_step(self) -> Generator[None, Any, Any]:
        """Pass the call on."""
        return (yield)


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table of whole steps and one of host work, for each shape of a model."""
    scale = QUICK if options.quick else FULL
    for shape in options.shapes or (scale.shape,):
        with saved_model(shape, max_position_embeddings=128) as path:
            yield from _measure_shape(path, options, scale._replace(shape=shape))


@torch.inference_mode()
def _measure_shape(path: Path, options: BenchOptions, scale: StepScale) -> Iterator[Table]:
    """Yield the tables of one model."""
    graphs, _ = graphs_of(options)
    graph = graphs[TAPE if TAPE in graphs else CUDA]
    off = 'verify.pact="off"'
    observers = [info.name for info in PluginCatalog.scan().infos("observer")]
    settings: dict[str, tuple[str, ...]] = {
        PLAIN: (off,),
        "pact sampled, 1 of 100": ('verify.pact="sampled"',),
        "pact always": ('verify.pact="always"',),
        "a null observer": (off,),
        **{f"observer {name}": (off, f'engine.observers=["{name}"]') for name in observers},
    }
    slow: dict[str, tuple[str, ...]] = {
        PLAIN: (off,),
        "pact always": ('verify.pact="always"',),
        "verify 1 of 100": (off, "verify.replay_against_eager=0.01"),
        "verify all": (off, "verify.replay_against_eager=1.0"),
        "strict lane": (off, "lanes.decode.strict=true"),
    }
    skipped = []
    if TAPE not in graphs:
        del slow["strict lane"]
        skipped.append(Skipped(what="strict lane", reason="the driver has no strict mode"))
    prompts = random_prompts(LIVE, scale.prompt, scale.shape.vocab)
    title = f"of a decode step of {LIVE} requests at size {SIZE}, Llama {scale.shape}, {options.setting}"
    with ExitStack() as stack, contextlib.redirect_stderr(io.StringIO()):  # observers may print

        def make(name: str, overrides: tuple[str, ...]) -> RepeatedStep:
            own = [NullObserver()] if name == "a null observer" else []
            step = RepeatedStep(path, prompts, options, *graph, *overrides, observers=own)
            stack.callback(step.engine.close)
            return step

        options.say("checks: host work")
        steps = {name: make(name, overrides) for name, overrides in settings.items()}
        with doing_nothing([step.graph for step in steps.values()]):
            taken = take_turns(
                {name: step.replay for name, step in steps.items()}, turns=scale.turns, calls=scale.calls
            )
        yield _table("checks: host work", f"host work {title}, the replay left out", taken, 1e6, "us", [])
        options.say("checks: whole steps")
        steps = {name: make(name, overrides) for name, overrides in slow.items()}
        taken = take_turns({name: step.replay for name, step in steps.items()}, turns=scale.turns)
        yield _table("checks", f"Lane.run {title}, with its replay", taken, 1e3, "ms", skipped)


def _table(
    name: str,
    title: str,
    taken: Mapping[str, list[float]],
    factor: float,
    unit: str,
    skipped: list[Skipped],
) -> Table:
    """Return a table with a row for each lane, relative to the first."""
    form = {"us": ".1f", "ms": ".3f"}[unit]
    table = Table(
        name=name,
        title=f"{title}: {len(taken[PLAIN])} turns",
        columns=[
            Column(key="lane", heading="lane"),
            *spread_columns(unit, unit, form),
            Column(key=f"more_{unit}", heading=f"more {unit}", format=form),
            Column(key=f"more_{unit}_best", heading="of the best", format=form),
            Column(key="x_plain", heading=f"best x {PLAIN}", format=".2f"),
        ],
        skipped=skipped,
        notes=["more: the difference from the first row, the median of all turns, and best from best"],
        chart=Chart(value=unit, label=["lane"]),
    )
    plain = taken[PLAIN]
    for lane, times in taken.items():
        more = Spread.of_differences(times, plain).times(factor)
        table.add(
            lane=lane,
            **spread_values(unit, Spread.of(times).times(factor)),
            **{f"more_{unit}": more.median, f"more_{unit}_best": more.best},
            x_plain=min(times) / min(plain),
        )
    return table
