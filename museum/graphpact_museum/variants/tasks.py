"""Correct backends whose attention is a task: lengths are lists on the host, updated before each replay.

The attention of NPUs works in this way; see `graphpact.graphs.GraphDriver.task`.

Does not: contain bugs; see `graphpact_museum.tasks`.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.graphs import Stream, TaskKey, declare_kernel
from graphpact.hookspecs import hookimpl
from graphpact.lane import PreparedStep
from graphpact.pact import updated
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    KVBackend,
    attend,
    capabilities,
    table_slot,
)


@declare_kernel
@torch.library.custom_op("graphpact_museum::attend_spans", mutates_args=("out",))
def attend_spans(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    ends: list[int],
    starts: list[int] | None = None,
) -> None:
    """Attend with one query per request to its keys from position ``starts[i]``, or 0, to ``ends[i]``."""
    at = torch.arange(table.shape[1], device=table.device)
    first, last = (torch.tensor(n, device=table.device)[:, None] for n in (starts or [0] * len(ends), ends))
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    layer = LayerSpec(0, heads, kv_heads, q.shape[2], v_cache.shape[2], scaling)
    seen = (at >= first) & (at < last)
    out.copy_(attend(q, k_cache, v_cache, table, seen, layer))


@dataclass
class TaskMetadata:
    """The metadata of a step.

    Args:
        out_cache_loc: ``[bs]`` int64: the KV slot that each token writes.
        table: ``[bs, n]`` int64: KV slots of each request by position.
        shape: The captured shape; it identifies the graph in the keys of tasks.
        lens: ``[bs]``: the keys of each request, on the host.
    """

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    shape: GraphShape
    lens: list[int] = updated()  # noqa: RUF009  a field


class TaskBackend(KVBackend):
    """A backend that updates a task for each layer in its replay hook."""

    capabilities = capabilities(sliding_window=True)
    waits = False
    """Whether graphs wait for the updates."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the table."""
        return [table_slot(limits)]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> TaskMetadata:
        """Return the table; lengths are not known yet."""
        return TaskMetadata(view.out_cache_loc, buffers("variant.table"), shape, [])

    def fill_metadata(self, view: ForwardBatch, metadata: TaskMetadata) -> None:
        """Copy rows of the page table, and list the lengths, with those of padding rows."""
        self.fill_table(view, metadata.table)
        metadata.lens = view.seq_lens_cpu.tolist()

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: TaskMetadata
    ) -> TaskMetadata:
        """Refresh, and update the tasks of the graph in the order of the layers."""
        fresh: TaskMetadata = super().init_metadata_replay(view, shape, captured)
        self.update_tasks(fresh)
        return fresh

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Update the task of each layer."""
        for layer in self.context.layers:
            self.update(metadata, layer)

    def update(self, metadata: TaskMetadata, layer: LayerSpec) -> None:
        """Update the task of a layer."""
        assert self.driver is not None  # noqa: S101  it has a lane
        self.driver.update_task(TaskKey(metadata.shape, layer.layer_id), self.spans(metadata, layer))

    def spans(self, metadata: TaskMetadata, layer: LayerSpec) -> Mapping[str, list[int]]:
        """Return the ends of the keys that a layer reads, and in a layer with a window their starts."""
        window = layer.sliding_window
        starts = {} if window is None else {"starts": [max(0, n - window) for n in metadata.lens]}
        return {"ends": metadata.lens, **starts}

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: TaskMetadata,
    ) -> torch.Tensor:
        """Write, then attend in a task, or by a plain call without a lane."""
        self.write(k, v, layer, metadata.out_cache_loc)
        out = q.new_empty(len(q), layer.num_q_heads, layer.v_head_dim)
        args, spans = (
            (q, *self.caches(layer), metadata.table, out, layer.scaling),
            self.spans(metadata, layer),
        )
        if self.driver is None:
            attend_spans(*args, **spans)
        else:
            key = TaskKey(metadata.shape, layer.layer_id)
            self.driver.task(key, attend_spans, args, spans, waits=self.waits)
        return out


@variant(on="reference", lanes=("decode", "idle"))
def tasks_of_host_lists(_: type[Any]) -> type[Any]:
    """Attention is a task that takes lists on the host; the replay hook updates one task for each layer."""
    return TaskBackend


class _OnAStream(TaskBackend):
    """A backend that updates tasks on a side stream, as NPUs do; it waits for the previous replay."""

    side: Stream | None = None

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Fork, update, join."""
        assert self.driver is not None  # noqa: S101  it has a lane
        main = self.driver.current_stream()
        self.side = self.side or self.driver.stream()
        self.side.wait_stream(main)
        with self.side:
            super().update_tasks(metadata)
        main.wait_stream(self.side)


@variant(on="reference", lanes=("decode", "idle"))
def tasks_updated_on_a_stream(_: type[Any]) -> type[Any]:
    """Tasks are updated on a side stream, between two waits."""
    return _OnAStream


@declare_kernel
@torch.library.custom_op("graphpact_museum::attend_ends", mutates_args=("out",))
def attend_ends(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    window: int,
    ends: torch.Tensor,
) -> None:
    """Attend with one query per request to its last ``window`` keys before ``ends[i]``, a host tensor."""
    numbers = ends.tolist()
    attend_spans(q, k_cache, v_cache, table, out, scaling, numbers, [max(0, n - window) for n in numbers])


class _HostTensor(TaskBackend):
    """A backend that records its tasks with lengths of 1, and updates them with a host tensor."""

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> TaskMetadata:
        """Replace the lengths of the captured batch by 1."""
        made: TaskMetadata = super().init_metadata_capture(view, shape)
        made.lens = [1] * view.batch_size
        return made

    def update(self, metadata: TaskMetadata, layer: LayerSpec) -> None:
        """Update the task with a host tensor."""
        assert self.driver is not None  # noqa: S101  it has a lane
        self.driver.update_task(
            TaskKey(metadata.shape, layer.layer_id), {"ends": torch.tensor(metadata.lens)}
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: TaskMetadata,
    ) -> torch.Tensor:
        """Write, then attend; no replay uses the arguments of the capture."""
        self.write(k, v, layer, metadata.out_cache_loc)
        out = q.new_empty(len(q), layer.num_q_heads, layer.v_head_dim)
        window = layer.sliding_window or self.context.limits.max_context_len
        args = (q, *self.caches(layer), metadata.table, out, layer.scaling, window)
        ends = torch.tensor(metadata.lens)
        if self.driver is None:
            attend_ends(*args, ends=ends)
        else:
            self.driver.task(TaskKey(metadata.shape, layer.layer_id), attend_ends, args, {"ends": ends})
        return out


@variant(on="reference", lanes=("decode", "idle"))
def tasks_captured_with_other_arguments(_: type[Any]) -> type[Any]:
    """Tasks are captured with lengths of 1, and updated with host tensors."""
    return _HostTensor


@torch.library.custom_op("graphpact_museum::attend_table", mutates_args=("out",))
def attend_table(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    ends: list[int],
    table: torch.Tensor,
    starts: list[int] | None = None,
) -> None:
    """Do what `attend_spans` does, with a table that updates may rebind."""
    attend_spans(q, k_cache, v_cache, table, out, scaling, ends, starts)


@dataclass
class _ReboundMetadata:
    """`TaskMetadata` with a table in new memory in each step."""

    out_cache_loc: torch.Tensor
    shape: GraphShape
    table: torch.Tensor = updated()  # noqa: RUF009  a field
    lens: list[int] = updated()  # noqa: RUF009  a field


class _ReboundTable(TaskBackend):
    """A backend that makes a new table in each step, and gives its address to the tasks."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return no slots, because no graph keeps a table."""
        del limits
        return []

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Return metadata without a table."""
        del buffers
        return _ReboundMetadata(view.out_cache_loc, shape, torch.empty(0, device=view.device), [])

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Make the table, and list the lengths."""
        size = view.batch_size, self.context.limits.max_context_len
        metadata.table = torch.empty(size, dtype=torch.int64, device=view.device)
        super().fill_metadata(view, metadata)

    def update(self, metadata: Any, layer: LayerSpec) -> None:
        """Update the task with the lists and the table."""
        assert self.driver is not None  # noqa: S101  it has a lane
        key = TaskKey(metadata.shape, layer.layer_id)
        self.driver.update_task(key, self.spans(metadata, layer), rebound={"table": metadata.table})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Write, then attend in a task that reads the table of the last update."""
        self.write(k, v, layer, metadata.out_cache_loc)
        out = q.new_empty(len(q), layer.num_q_heads, layer.v_head_dim)
        args, spans = (q, *self.caches(layer), out, layer.scaling), self.spans(metadata, layer)
        rebound = {"table": metadata.table}
        if self.driver is None:
            attend_table(*args, **spans, **rebound)
        else:
            key = TaskKey(metadata.shape, layer.layer_id)
            self.driver.task(key, attend_table, args, spans, rebound=rebound)
        return out


@variant(on="reference", lanes=("decode", "idle"))
def tasks_with_a_rebound_table(_: type[Any]) -> type[Any]:
    """Each step makes a page table in new memory, and updates give its address to the tasks."""
    return _ReboundTable


class UpdatesLate(TaskBackend):
    """A backend whose graphs wait for the updates of their tasks, which come after the launch."""

    waits = True
    fresh: TaskMetadata | None = None

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Keep the metadata until the replay is launched."""
        self.fresh = metadata

    @hookimpl(wrapper=True)
    def launch(self, prepared: PreparedStep) -> Generator[None, StepOutputs, StepOutputs]:
        """Update the tasks of a launched replay."""
        outputs = yield
        metadata, self.fresh = self.fresh, None
        if metadata is not None and prepared.fit == metadata.shape:
            self.after_launch(metadata, outputs)
        return outputs

    def after_launch(self, metadata: TaskMetadata, outputs: StepOutputs) -> None:
        """Update the tasks."""
        del outputs
        super().update_tasks(metadata)


@variant(on="reference", lanes=("decode", "idle"))
def tasks_updated_after_the_launch(_: type[Any]) -> type[Any]:
    """Graphs wait for the updates of their tasks, which come after the launch of the replay."""
    return UpdatesLate
