"""A long run: decode steps while requests come and go, how their times vary, and what the slowest 1% are.

A request arrives with a fixed probability before each step. Only decode steps are recorded: the prefill steps
between them are part of the load. The time of a step is divided by the median of its captured shape, so that
steps of every shape are compared. A cause is what a step had, not what is proven to have made it slow: its
share of all steps stands beside its share of the slowest. On a machine that does other work, the slowest wait
for it; the ratios of processor time say what is left.

A step waited for the processor if more than half of its time over the median is no processor time of its
thread. With several threads that includes the wait of this thread for the others. What a hypervisor takes
from the machine may count as processor time.

Does not: run on a GPU, or compare with other ways; see `graphpact_bench.decode`.
"""

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from graphpact.lane import Lane
from graphpact_bench.models import BYTES, ModelShape
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.report import Chart, Column, Table, Value
from graphpact_bench.step import QUICK as QUICK_STEP
from graphpact_bench.step import graphs_of
from graphpact_bench.timing import Spread, UnavailableWayError
from graphpact_bench.ways.engines import make_engine
from graphpact_engine import Engine, SamplingParams

COLLECTED = "a garbage collection ran"
OTHERS = "other requests than in the decode before"
PAGE = "a request entered a page"
FIRST_FILL = "the first fill of its counts"
EAGER = "an eager run"
WAITED = "waited for the processor"
NONE = "none of these"
SEEN = (COLLECTED, OTHERS, PAGE, FIRST_FILL, EAGER)
"""The causes that are seen while a step runs; `WAITED` follows from all times."""
_MOST, _ARRIVE, _PROMPT, _NEW = 8, 0.1, (4, 64), (8, 80)  # requests, probability, tokens


class DecodeRecord(NamedTuple):
    """One decode step.

    Args:
        size: The captured size that it replayed; `EAGER` if it replayed none.
        seconds: Its wall time.
        processor: Its processor time, of the thread that ran it.
        seen: Which of `SEEN` it had.
    """

    size: str
    seconds: float
    processor: float
    seen: frozenset[str]


class CauseRatios(NamedTuple):
    """The ratios to the median of their size, of the steps that had a cause.

    Args:
        slowest: Those of the slowest 1%.
        all: Those of all steps.
    """

    slowest: list[float]
    all: list[float]


class LongRun(NamedTuple):
    """What one engine did.

    Args:
        records: Its decode steps.
        memory: What a note says about memory.
    """

    records: list[DecodeRecord]
    memory: str


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the times by shape, and what the slowest steps are, for each shape of a model.

    Raises:
        UnavailableWayError: The device is not a CPU.
    """
    if options.device.type != "cpu":
        raise UnavailableWayError("it compares a step with the time of a processor; a GPU computes beside it")
    graphs, skipped = graphs_of(options)
    default, steps = (QUICK_STEP.shape, 60) if options.quick else (BYTES, 2000)
    for shape in options.shapes or (default,):
        runs = {}
        with saved_model(shape, max_position_embeddings=_PROMPT[1] + _NEW[1]) as path:
            for name, overrides in graphs.items():
                options.say(f"long-run: {name}")
                runs[name] = run_engine(path, shape, options, overrides, steps)
        title = f"{steps} decode steps of up to {_MOST} requests, Llama {shape}, {options.setting}"
        yield describe_times(title, runs).model_copy(update={"skipped": skipped})
        yield describe_slowest(title, runs)


def run_engine(
    path: Path, shape: ModelShape, options: BenchOptions, overrides: Sequence[str], steps: int
) -> LongRun:
    """Return what an engine of its own did."""
    dtype = f'model.dtype="{options.dtype}"'
    with make_engine(path, options.device, _MOST, dtype, *overrides) as engine:
        resident, tensors = [resident_mib()], [num_tensors()]
        run = serve(engine, shape.vocab, steps)
        records = list(itertools.islice(run, steps // 2))
        resident.append(resident_mib())
        records += run
        while engine.scheduler.has_work:
            engine.step()
        resident.append(resident_mib())
        tensors.append(num_tensors())
    mib = ", ".join("unknown" if each is None else f"{each:.1f}" for each in resident)
    memory = f"resident MiB before, after half and after all: {mib}; live tensors before and after: {tensors}"
    return LongRun(records, memory)


def serve(engine: Engine, vocab: int, steps: int) -> Iterator[DecodeRecord]:
    """Yield ``steps`` decode steps of an engine to which requests come; the last ones stay alive.

    Args:
        engine: The engine; its first lane decodes.
        vocab: The number of tokens to draw prompts from.
        steps: The number of decode steps.
    """
    lane, page = engine.lanes[0], engine.memory.pages.page_size
    draw = random.Random(0)  # noqa: S311  no secret
    decoded: list[str] = []
    with counting_collections() as collections:
        while steps:
            if draw.random() < _ARRIVE or not engine.scheduler.has_work:
                prompt = [draw.randrange(vocab) for _ in range(draw.randint(*_PROMPT))]
                engine.add(prompt, SamplingParams(max_new_tokens=draw.randint(*_NEW), ignore_eos=True))
            runs, plans, collected = _runs(lane), _num_plans(lane), len(collections)
            start, used = time.perf_counter(), time.thread_time()
            requests = engine.step()
            processor, seconds = time.thread_time() - used, time.perf_counter() - start
            ran = [size for size, count in _runs(lane).items() if count > runs[size]]
            if not ran:
                continue  # a prefill step
            before, decoded = decoded, [request.request_id for request in requests]
            had = {
                COLLECTED: len(collections) > collected,
                OTHERS: decoded != before,
                PAGE: any((request.num_computed - 1) % page == 0 for request in requests),
                FIRST_FILL: _num_plans(lane) > plans,
                EAGER: ran[0] == EAGER,
            }
            steps -= 1
            yield DecodeRecord(ran[0], seconds, processor, frozenset(cause for cause in had if had[cause]))


def attribute(records: Sequence[DecodeRecord]) -> dict[str, CauseRatios]:
    """Return which steps had each cause.

    The slowest 1%, at least one, have the largest ratios to the median of their size.
    """
    medians = {
        size: statistics.median(each.seconds for each in own) for size, own in _by_size(records).items()
    }
    ratios = [record.seconds / medians[record.size] for record in records]
    order = sorted(range(len(records)), key=ratios.__getitem__, reverse=True)
    slowest = {*order[: num_slowest(records)]}
    found = {cause: CauseRatios([], []) for cause in (*SEEN, WAITED, NONE)}
    for at, (record, ratio) in enumerate(zip(records, ratios, strict=True)):
        over = record.seconds - medians[record.size]
        waited = over > 0 and record.seconds - record.processor > over / 2
        for cause in ({*record.seen} | ({WAITED} if waited else set())) or {NONE}:
            found[cause].all.append(ratio)
            if at in slowest:
                found[cause].slowest.append(ratio)
    return found


def num_slowest(records: Sequence[DecodeRecord]) -> int:
    """Return how many steps are the slowest 1%."""
    return max(len(records) // 100, 1)


def describe_times(title: str, runs: Mapping[str, LongRun]) -> Table:
    """Return the table of times by captured size."""
    factors = {"low": "25%", "high": "75%", "best": "best", "p99": "99%", "worst": "worst"}
    of_processor = {"processor_p99": "99%, processor", "processor_worst": "worst, processor"}
    table = Table(
        name="long-run",
        title=f"{title}: times by captured size, and as ratios to their median",
        columns=[
            Column(key="graphs", heading="graphs"),
            Column(key="size", heading="size"),
            Column(key="steps", heading="steps", format="d"),
            Column(key="median_ms", heading="median ms", format=".3f"),
            *(
                Column(key=f"x_{key}", heading=f"x {text}", format=".2f")
                for key, text in (factors | of_processor).items()
            ),
        ],
        notes=[
            *(f"{name}: {run.memory}" for name, run in runs.items()),
            "processor: the processor time of the steps, divided by its own median",
        ],
        chart=Chart(value="x_p99", label=["graphs", "size"]),
    )
    for name, run in runs.items():
        for size, records in _by_size(run.records).items():
            seconds = [record.seconds for record in records]
            median, *others = Spread.of(seconds)
            ratios = [each / median for each in (*others, *_tail(seconds))]
            used = [record.processor for record in records]
            ratios += [each / statistics.median(used) for each in _tail(used)]
            table.add(
                graphs=name,
                size=size,
                steps=len(records),
                median_ms=median * 1e3,
                **{f"x_{key}": x for key, x in zip((*factors, *of_processor), ratios, strict=True)},
            )
    return table


def describe_slowest(title: str, runs: Mapping[str, LongRun]) -> Table:
    """Return the table of the causes."""
    table = Table(
        name="long-run: the slowest 1%",
        title=f"{title}: what the slowest 1% had, beside all steps",
        columns=[Column(key="graphs", heading="graphs"), Column(key="cause", heading="cause")],
        notes=[
            "a step may have several causes; x median: the median ratio of the steps that had it",
            f"{WAITED}: that is more than half of the time over the median",
        ],
    )
    for key, heading in (("slowest", "of the slowest"), ("all", "of all")):
        table.columns += [
            Column(key=key, heading=heading, format="d"),
            Column(key=f"{key}_share", heading="share", format=".0%"),
            Column(key=f"{key}_x", heading="x median", format=".2f"),
        ]
    for name, run in runs.items():
        for cause, found in attribute(run.records).items():
            values: dict[str, Value] = {}
            numbers = num_slowest(run.records), len(run.records)
            for key, ratios, number in zip(("slowest", "all"), found, numbers, strict=True):
                median = statistics.median(ratios) if ratios else None
                values |= {key: len(ratios), f"{key}_share": len(ratios) / number, f"{key}_x": median}
            table.add(graphs=name, cause=cause, **values)
    return table


def resident_mib() -> float | None:
    """Return the resident memory of this process in MiB; None where the system does not say it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmRSS:")), None)


def num_tensors() -> int:
    """Return the number of live tensors, after a garbage collection."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@contextlib.contextmanager
def counting_collections() -> Iterator[list[int]]:
    """Return a context with a list that gets the generation of each garbage collection in it."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


def _by_size(records: Sequence[DecodeRecord]) -> dict[str, list[DecodeRecord]]:
    """Return the steps of each size, the smallest first, eager ones last."""
    found: dict[str, list[DecodeRecord]] = {}
    for record in sorted(records, key=lambda record: (record.size == EAGER, len(record.size), record.size)):
        found.setdefault(record.size, []).append(record)
    return found


def _tail(times: Sequence[float]) -> tuple[float, float]:
    """Return the 99th percentile and the largest."""
    return torch.tensor(times, dtype=torch.float64).quantile(0.99).item(), max(times)


def _runs(lane: Lane) -> dict[str, int]:
    """Return how often a lane replayed each captured size, and ran eagerly."""
    replays = {str(shape.batch_size): each.replays for shape, each in lane.stats.shapes.items()}
    return {**replays, EAGER: lane.stats.eager.total()}


def _num_plans(lane: Lane) -> int:
    """Return how many compiled fills the registry keeps."""
    return 0 if lane.registry is None else len(lane.registry._plans)  # noqa: SLF001  no public name
