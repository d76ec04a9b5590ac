"""What a capture costs: seconds, nodes, and the memory that a graph keeps, by shape.

Each lane captures its shapes twice in this process: the second capture may find in a cache what the first one
compiled.

Does not: measure replays, or the memory of a capture while it runs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact_bench.decode import LEFT_OUT
from graphpact_bench.models import BYTES, ModelShape
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.report import Chart, Column, Skipped, Table
from graphpact_bench.timing import UnavailableWayError
from graphpact_bench.ways.engines import make_engine, require_driver


class CaptureScale(NamedTuple):
    """The size of the measurement.

    Args:
        shape: The model.
        batch_sizes: Captured sizes of the decode lane.
        token_counts: Captured sizes of the prefill lane.
    """

    shape: ModelShape
    batch_sizes: tuple[int, ...]
    token_counts: tuple[int, ...]


FULL = CaptureScale(BYTES, batch_sizes=(1, 8, 32), token_counts=(16, 128, 1024))
QUICK = CaptureScale(
    ModelShape(width=64, layers=1, heads=2, kv_heads=2, intermediate=96),
    batch_sizes=(1, 2),
    token_counts=(4, 8),
)

LANES: Mapping[str, tuple[str, str, str, str]] = {
    "tape": ("decode", "cuda_graph", "tape", "false"),
    "tape-strict": ("decode", "cuda_graph", "tape", "true"),
    "cpu_graph": ("decode", "cpu_graph", "inductor", "false"),
    "cuda": ("decode", "cuda_graph", "cuda", "false"),
    "breakable-tape": ("prefill", "breakable_cuda_graph", "tape", "false"),
    "piecewise-tape": ("prefill", "piecewise_cuda_graph", "tape", "false"),
    "breakable-inductor": ("prefill", "breakable_cuda_graph", "inductor", "false"),
    "piecewise-inductor": ("prefill", "piecewise_cuda_graph", "inductor", "false"),
    "breakable-cuda": ("prefill", "breakable_cuda_graph", "cuda", "false"),
    "piecewise-cuda": ("prefill", "piecewise_cuda_graph", "cuda", "false"),
}
"""The lane, runner and driver of each row, and whether the lane is strict."""


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table for each shape of a model."""
    scale = QUICK if options.quick else FULL
    scale = scale._replace(batch_sizes=options.batch_sizes or scale.batch_sizes)
    for shape in options.shapes or (scale.shape,):
        yield _measure_shape(options, scale._replace(shape=shape))


def _measure_shape(options: BenchOptions, scale: CaptureScale) -> Table:
    """Return the table of one model."""
    table = Table(
        name="capture",
        title=f"captures, Llama {scale.shape}, {options.setting}: one after another, the largest shape first",
        columns=[
            Column(key="graphs", heading="graphs"),
            Column(key="shape", heading="shape"),
            Column(key="segments", heading="segments", format="d"),
            Column(key="nodes", heading="nodes", format="d"),
            Column(key="memory_kib", heading="memory KiB", format=".1f"),
            Column(key="capture_ms", heading="capture ms", format=".0f"),
            Column(key="again_ms", heading="again ms", format=".0f"),
        ],
        notes=["memory: what a graph keeps between replays; again: the same captures in the same process"],
        chart=Chart(value="capture_ms", label=["graphs", "shape"]),
    )
    largest = max(scale.token_counts)
    with saved_model(scale.shape, max(128, largest + 8)) as path:
        for name, (mode, runner, driver, strict) in LANES.items():
            if (driver == "cuda") != (options.device.type == "cuda"):
                continue
            try:
                require_driver(driver, options.device)
            except UnavailableWayError as error:
                table.skipped.append(Skipped(what=name, reason=error.message))
                continue
            if driver == "inductor" and options.quick and name not in options.ways:
                table.skipped.append(Skipped(what=name, reason=LEFT_OUT))
                continue
            options.say(f"capture: {name}")
            sizes = scale.batch_sizes if mode == "decode" else scale.token_counts
            key = "batch_sizes" if mode == "decode" else "token_counts"
            other = "prefill" if mode == "decode" else "decode"
            engine = make_engine(
                path,
                options.device,
                max(scale.batch_sizes),
                f'model.dtype="{options.dtype}"',
                f"engine.max_model_len={largest + 8}",
                f'lanes.{mode}.runner="{runner}"',
                f'lanes.{mode}.graph_driver="{driver}"',
                f"lanes.{mode}.{key}={list(sizes)}",
                f"lanes.{mode}.strict={strict}",
                f"lanes.{other}.capture=false",
            )
            with engine:
                _add_rows(table, name, next(lane for lane in engine.lanes if lane.name == mode))
    return table


def _add_rows(table: Table, name: str, lane: Lane) -> None:
    """Add a row for each captured shape of a lane; capture them again."""
    graphs: dict[GraphShape, tuple[int, int, int]] = {}
    seconds: dict[GraphShape, float] = {}
    for shape, each in lane.captured.items():
        graphs[shape] = each.graph.num_segments, each.graph.num_nodes, each.graph.pool_nbytes
        seconds[shape] = each.stats.capture_seconds
    lane.close()
    lane.capture_all()
    for shape, (segments, nodes, memory) in graphs.items():
        table.add(
            graphs=name,
            shape=str(shape),
            segments=segments,
            nodes=nodes,
            memory_kib=memory / 1024,
            capture_ms=seconds[shape] * 1e3,
            again_ms=lane.stats.shapes[shape].capture_seconds * 1e3,
        )
