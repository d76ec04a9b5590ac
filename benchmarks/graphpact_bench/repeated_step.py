"""`RepeatedStep`: one decode step that can be repeated, for the measurements of its parts.

A repetition writes the same keys and values to the same slots; the step is never committed.

Does not: time anything.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from graphpact import Lane, StepOutputs
from graphpact.errors import EngineError
from graphpact.graphs import Graph
from graphpact.plugins import Loaded, Plugin, PluginCatalog, PluginInfo
from graphpact_bench.options import BenchOptions
from graphpact_bench.ways.engines import make_engine
from graphpact_engine import SamplingParams

LIVE, SIZE = 7, 8
"""The requests of the step, and the capture size that they are padded to."""


class MetadataByHook(PluginCatalog):
    """The installed plugins, with attention backends whose metadata work is left out of the graph."""

    def load(self, info: PluginInfo) -> Plugin:
        """Return a plugin; a backend as a subclass whose replay hook does the metadata work."""
        plugin = super().load(info)
        if info.kind != "attention_backend" or not isinstance(plugin, Loaded):
            return plugin
        return replace(plugin, cls=type(plugin.cls.__name__, (plugin.cls,), {"fill_is_device_only": False}))


class RepeatedStep:
    """A decode step of `LIVE` requests at capture size `SIZE`, of a separate engine.

    Args:
        path: The checkpoint.
        prompts: `LIVE` prompts.
        options: The device and the dtype.
        *overrides: More settings of the engine, ``key=value``.
        observers: Hook wrappers of every lane.
        catalog: The plugins to select from; by default the installed ones.

    Attributes:
        lane: The decode lane.
        batch: The live batch.
        requests: Its requests.
        shape: The captured shape that it replays.
        graph: The graph of that shape.
        logits: The logits of the step.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[list[int]],
        options: BenchOptions,
        *overrides: str,
        observers: Sequence[object] = (),
        catalog: PluginCatalog | None = None,
    ) -> None:
        self.engine = make_engine(
            path,
            options.device,
            SIZE,
            f'model.dtype="{options.dtype}"',
            f"lanes.decode.batch_sizes=[{SIZE}]",
            *overrides,
            observers=observers,
            catalog=catalog,
        )
        sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
        for prompt in prompts:
            self.engine.add(prompt, sampling)
        for _ in range(2):
            self.engine.step()
        scheduled = self.engine.scheduler.schedule()
        if scheduled is None or not scheduled.batch.forward_mode.is_decode:
            raise EngineError(f"the third step of {len(prompts)} new requests is not a decode")
        self.requests, self.batch = scheduled.requests, scheduled.batch
        self.lane: Lane = self.engine.lanes[0]
        ((self.shape, self.captured),) = self.lane.captured.items()
        self.graph = self.captured.graph
        self.logits = self.replay().logits

    def replay(self) -> StepOutputs:
        """Run the step through the lane."""
        return self.lane.run(self.batch)

    def refresh(self) -> None:
        """Call the metadata hook of the backend."""
        step = self.captured.context
        self.lane.backend.init_metadata_replay(step.view, self.shape, step.metadata)

    def fill(self) -> None:
        """Call the hook of the runner that fills the registry."""
        if self.lane.registry is not None:
            self.lane.runner.populate(self.lane.registry, self.batch, self.shape)


@contextlib.contextmanager
def doing_nothing(graphs: Sequence[Graph]) -> Iterator[None]:
    """Make the replays of ``graphs`` do nothing inside the context.

    Parts of a few microseconds are measured with such graphs, because the time of a replay varies by more.
    """
    before = [graph.replay for graph in graphs]
    for graph in graphs:
        graph.replay = _nothing  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        for graph, replay in zip(graphs, before, strict=True):
            graph.replay = replay  # type: ignore[method-assign]  # restore


def _nothing() -> None:
    pass
