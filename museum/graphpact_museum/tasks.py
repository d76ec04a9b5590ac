"""Exhibits of tasks, whose host arguments are updated before each replay: GP21.

Does not: contain the correct backend; see `graphpact_museum.variants.tasks`.
"""

from typing import Any

from graphpact.attention import LayerSpec
from graphpact.graphs import TaskKey
from graphpact.step import StepOutputs
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit
from graphpact_museum.variants.tasks import TaskBackend, TaskMetadata, UpdatesLate


@exhibit("GP21", "vllm-project/vllm-ascend#11408", on="reference", lanes="decode")
@overrides("update_tasks", of=TaskBackend)
def tasks_missed(self: Any, _: Any, metadata: TaskMetadata) -> None:
    """The replay hook updates only the task of the first layer."""
    self.update(metadata, self.context.layers[0])


@exhibit("GP21", "vllm-project/vllm-ascend#8317", on="reference", lanes="decode")
@overrides("update_tasks", of=TaskBackend)
def tasks_one_step_late(self: Any, right: Any, metadata: TaskMetadata) -> None:
    """Tasks are updated with the lengths of the previous step of their shape."""
    now = metadata.lens
    late = vars(self).setdefault("late", {})
    metadata.lens = late.get(metadata.shape, now)
    right(metadata)
    metadata.lens, late[metadata.shape] = now, now


@exhibit("GP21", "vllm-project/vllm-ascend#10895", on="reference", lanes="decode")
@overrides("update", of=TaskBackend)
def task_length_not_refreshed(self: Any, _: Any, metadata: TaskMetadata, layer: LayerSpec) -> None:
    """Layers that read a part of the keys are updated with the whole length of the sequence."""
    spans = dict(self.spans(metadata, layer))
    if "starts" in spans:
        spans["starts"] = [0] * len(metadata.lens)
    self.driver.update_task(TaskKey(metadata.shape, layer.layer_id), spans)


@exhibit("GP21", "vllm-project/vllm-ascend#12040", on="reference", lanes="decode")
@overrides("spans", of=TaskBackend)
def task_tail_overwritten(self: Any, right: Any, metadata: TaskMetadata, layer: LayerSpec) -> Any:
    """Padding rows of the list are cleared, and a longer list of an earlier batch is copied over them."""
    spans = dict(right(metadata, layer))
    live = [n for n in metadata.lens if n > 1]
    before = vars(self).setdefault("longest", [])
    spans["ends"] = [*live, *before[len(live) : len(metadata.lens)], *metadata.lens[len(before) :]]
    spans["ends"] = spans["ends"][: len(metadata.lens)]
    self.longest = max(before, live, key=len)
    return spans


@exhibit("GP21", "vllm-project/vllm-ascend#13600", on="reference", lanes="decode")
@overrides("update_tasks", of=TaskBackend)
def task_updated_twice(self: Any, right: Any, metadata: TaskMetadata) -> None:
    """The task of the first layer is updated twice before a replay."""
    self.update(metadata, self.context.layers[0])
    right(metadata)


@exhibit("GP21", "vllm-project/vllm-ascend#8210", on="reference", lanes="decode")
@overrides("update_tasks", of=TaskBackend)
def tasks_out_of_order(self: Any, _: Any, metadata: TaskMetadata) -> None:
    """Tasks are updated by kind of attention, not in the order of the capture."""
    for layer in sorted(self.context.layers, key=lambda layer: layer.sliding_window is None):
        self.update(metadata, layer)


@exhibit("GP21", "vllm-project/vllm-ascend#8370", on="reference", lanes="decode")
@overrides("update_tasks", of=TaskBackend)
def task_of_another_layer(self: Any, _: Any, metadata: TaskMetadata) -> None:
    """One list of arguments serves two kinds of attention: a task gets the arguments of another layer."""
    layers = self.context.layers
    by_kind = sorted(layers, key=lambda layer: layer.sliding_window is None)
    for layer, other in zip(layers, by_kind, strict=True):
        key = TaskKey(metadata.shape, layer.layer_id)
        self.driver.update_task(key, self.spans(metadata, other))


@exhibit("GP21", "vllm-project/vllm-ascend#8737", on="reference", lanes="decode")
def task_of_another_graph(_: type[Any]) -> type[Any]:
    """Tasks are updated under the key of the largest graph, whichever is replayed."""

    def init_metadata_capture(self: Any, right: Any, view: Any, shape: Any) -> Any:
        made = right(view, shape)
        self.first = self.first or made
        return made

    def update(self: Any, _: Any, metadata: TaskMetadata, layer: LayerSpec) -> None:
        spans = self.spans(metadata, layer)
        most = self.first.shape.batch_size
        longer = {name: (list(part) + [1] * most)[:most] for name, part in spans.items()}
        self.driver.update_task(TaskKey(self.first.shape, layer.layer_id), longer)

    return override(TaskBackend, init_metadata_capture, update, first=None)


@exhibit("GP21", "sgl-project/sglang#27371", on="reference", lanes="decode")
@overrides("update", of=TaskBackend)
def task_of_an_unknown_key(self: Any, _: Any, metadata: TaskMetadata, layer: LayerSpec) -> None:
    """Tasks are updated under names that no capture gave to a task."""
    key = TaskKey(metadata.shape, f"layers.{layer.layer_id}.attn")
    self.driver.update_task(key, self.spans(metadata, layer))


def _on_a_stream(*, forks: bool, joins: bool) -> type[Any]:
    """Return a backend that updates its tasks on a side stream, without one of the two waits."""

    def update_tasks(self: Any, right: Any, metadata: TaskMetadata) -> None:
        main = self.driver.current_stream()
        self.side = self.side or self.driver.stream()
        if forks:
            self.side.wait_stream(main)
        with self.side:
            right(metadata)
        if joins:
            main.wait_stream(self.side)

    return override(TaskBackend, update_tasks, side=None)


@exhibit("GP21", "vllm-project/vllm-ascend#4233", on="reference", lanes="decode")
def tasks_updated_during_the_replay(_: type[Any]) -> type[Any]:
    """Tasks are updated on a stream that does not wait for the previous replay."""
    return _on_a_stream(forks=False, joins=True)


@exhibit("GP21", "vllm-project/vllm-ascend#16798", on="reference", lanes="decode")
def task_update_not_awaited(_: type[Any]) -> type[Any]:
    """Tasks are updated on a stream that the replay does not wait for."""
    return _on_a_stream(forks=True, joins=False)


@exhibit("GP21", "vllm-project/vllm-ascend#8354", on="reference", lanes="decode")
@overrides("after_launch", of=UpdatesLate)
def tasks_updated_after_a_read_of_outputs(
    self: Any, right: Any, metadata: TaskMetadata, outputs: StepOutputs
) -> None:
    """The host looks for NaN in the outputs of a launched replay, which waits for updates that come after."""
    self.has_nan = any(bool(each.isnan().any()) for each in outputs.values())
    right(metadata, outputs)


@exhibit("GP21", "vllm-project/vllm-ascend#8316", on="reference", lanes="decode")
def tasks_updated_with_lengths_of_the_device(_: type[Any]) -> type[Any]:
    """After the launch the host reads lengths from the device, for the updates for which the replay waits."""

    def fill_metadata(self: Any, right: Any, view: Any, metadata: TaskMetadata) -> None:
        right(view, metadata)
        self.on_device = view.seq_lens

    def after_launch(self: Any, right: Any, metadata: TaskMetadata, outputs: StepOutputs) -> None:
        metadata.lens = self.on_device.tolist()
        right(metadata, outputs)

    return override(UpdatesLate, fill_metadata, after_launch, on_device=None)
