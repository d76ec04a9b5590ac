"""Exhibits of tasks, whose host arguments are updated before each replay: GP21.

Does not: contain the correct backend; see `graphpact_museum.variants.tasks`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from graphpact.attention import LayerSpec
from graphpact.graphs import TaskKey
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.variants.tasks import TaskBackend, TaskMetadata


class _MissesLayers(TaskBackend):
    """Updates the first layer alone."""

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Update one task."""
        self.update(metadata, self.context.layers[0])


class _OneStepLate(TaskBackend):
    """Updates with the lengths of the replay before: the update was meant to follow its replay."""

    late: dict[Any, list[int]]

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Update with the lengths of the step before of this shape, and keep those of this one."""
        now = metadata.lens
        late = vars(self).setdefault("late", {})
        metadata.lens = late.get(metadata.shape, now)
        super().update_tasks(metadata)
        metadata.lens, late[metadata.shape] = now, now


class _FullLengths(TaskBackend):
    """Passes the whole sequence to layers with a window, in replays only."""

    def update(self, metadata: TaskMetadata, layer: LayerSpec) -> None:
        """Start at the first key."""
        assert self.driver is not None  # noqa: S101  it has a lane
        spans = dict(self.spans(metadata, layer))
        if "starts" in spans:
            spans["starts"] = [0] * len(metadata.lens)
        self.driver.update_task(TaskKey(metadata.shape, layer.layer_id), spans)


class _KeepsTheTail(TaskBackend):
    """Clears the padding rows of a list, and copies a longer list over them."""

    longest: list[int]

    def spans(self, metadata: TaskMetadata, layer: LayerSpec) -> Mapping[str, list[int]]:
        """End padding rows where the longest list of an earlier batch has them."""
        spans = dict(super().spans(metadata, layer))
        live = [n for n in metadata.lens if n > 1]
        before = vars(self).setdefault("longest", [])
        spans["ends"] = [*live, *before[len(live) : len(metadata.lens)], *metadata.lens[len(before) :]]
        spans["ends"] = spans["ends"][: len(metadata.lens)]
        self.longest = max(before, live, key=len)
        return spans


class _Twice(TaskBackend):
    """Updates the first layer twice: for the target model, and again for a draft model."""

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Update the first layer, and then all."""
        self.update(metadata, self.context.layers[0])
        super().update_tasks(metadata)


class _ByKind(TaskBackend):
    """Updates layers with a window first, and then the others."""

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Sort the layers by their kind."""
        for layer in sorted(self.context.layers, key=lambda layer: layer.sliding_window is None):
            self.update(metadata, layer)


class _OneList(TaskBackend):
    """Has one list of arguments for two kinds of attention, in another order than the tasks."""

    def update_tasks(self, metadata: TaskMetadata) -> None:
        """Pair tasks and arguments by their places."""
        assert self.driver is not None  # noqa: S101  it has a lane
        layers = self.context.layers
        by_kind = sorted(layers, key=lambda layer: layer.sliding_window is None)
        for layer, other in zip(layers, by_kind, strict=True):
            key = TaskKey(metadata.shape, layer.layer_id)
            self.driver.update_task(key, self.spans(metadata, other))


class _LargestKey(TaskBackend):
    """Updates the graph that was captured first, the largest, whichever is replayed."""

    first: TaskMetadata | None = None

    def init_metadata_capture(self, view: Any, shape: Any) -> Any:
        """Keep the metadata of the first capture."""
        made = super().init_metadata_capture(view, shape)
        self.first = self.first or made
        return made

    def update(self, metadata: TaskMetadata, layer: LayerSpec) -> None:
        """Update under the key of the first capture, with a list as long as its own."""
        assert self.driver is not None  # noqa: S101  it has a lane
        assert self.first is not None  # noqa: S101  it was captured
        spans = self.spans(metadata, layer)
        most = self.first.shape.batch_size
        longer = {name: (list(part) + [1] * most)[:most] for name, part in spans.items()}
        self.driver.update_task(TaskKey(self.first.shape, layer.layer_id), longer)


class _OtherName(TaskBackend):
    """Updates under the name of a layer; the capture took its number."""

    def update(self, metadata: TaskMetadata, layer: LayerSpec) -> None:
        """Update by name."""
        assert self.driver is not None  # noqa: S101  it has a lane
        key = TaskKey(metadata.shape, f"layers.{layer.layer_id}.attn")
        self.driver.update_task(key, self.spans(metadata, layer))


def _on_a_stream(*, forks: bool, joins: bool) -> type[TaskBackend]:
    """Return a backend that updates its tasks on a stream of its own, without one of the two waits."""

    class OnAStream(TaskBackend):
        """Tasks are updated beside the stream that replays."""

        side: Any = None

        def update_tasks(self, metadata: TaskMetadata) -> None:
            """Update on the side."""
            assert self.driver is not None  # noqa: S101  it has a lane
            main = self.driver.current_stream()
            self.side = self.side or self.driver.stream()
            if forks:
                self.side.wait_stream(main)
            with self.side:
                super().update_tasks(metadata)
            if joins:
                main.wait_stream(self.side)

    return OnAStream


def _as(cls: type[TaskBackend]) -> Callable[[type[Any]], type[Any]]:
    return lambda _: cls


def _exhibit(name: str, thread: str, planted: str, cls: type[TaskBackend]) -> Exhibit:
    return Exhibit(
        name=name,
        rule="GP21",
        thread=thread,
        planted=planted,
        base="reference",
        lanes=("decode",),
        make=_as(cls),
    )


EXHIBITS: list[Exhibit] = [
    _exhibit(
        "tasks-missed",
        "vllm-project/vllm-ascend#11408",
        "The replay hook updates the task of the first layer, and of no other.",
        _MissesLayers,
    ),
    _exhibit(
        "tasks-one-step-late",
        "vllm-project/vllm-ascend#8317",
        "Tasks are updated with the lengths of the step before of their shape.",
        _OneStepLate,
    ),
    _exhibit(
        "task-length-not-refreshed",
        "vllm-project/vllm-ascend#10895",
        "Layers that read a part of the keys are updated with the whole length of the sequence.",
        _FullLengths,
    ),
    _exhibit(
        "task-tail-overwritten",
        "vllm-project/vllm-ascend#12040",
        "Padding rows of the list are cleared, and a longer list of an earlier batch is copied over them.",
        _KeepsTheTail,
    ),
    _exhibit(
        "task-updated-twice",
        "vllm-project/vllm-ascend#13600",
        "The task of the first layer is updated twice before a replay.",
        _Twice,
    ),
    _exhibit(
        "tasks-out-of-order",
        "vllm-project/vllm-ascend#8210",
        "Tasks are updated by kind of attention, and not in the order of the capture.",
        _ByKind,
    ),
    _exhibit(
        "task-of-another-layer",
        "vllm-project/vllm-ascend#8370",
        "One list of arguments serves two kinds of attention: a task gets those of another layer.",
        _OneList,
    ),
    _exhibit(
        "task-of-another-graph",
        "vllm-project/vllm-ascend#8737",
        "Tasks are updated under the key of the largest graph, whichever is replayed.",
        _LargestKey,
    ),
    _exhibit(
        "task-of-an-unknown-key",
        "sgl-project/sglang#27371",
        "Tasks are updated under names that no capture gave to a task.",
        _OtherName,
    ),
    _exhibit(
        "tasks-updated-during-the-replay",
        "vllm-project/vllm-ascend#4233",
        "Tasks are updated on a stream that does not wait for the replay before.",
        _on_a_stream(forks=False, joins=True),
    ),
    _exhibit(
        "task-update-not-awaited",
        "vllm-project/vllm-ascend#16798",
        "Tasks are updated on a stream that the replay does not wait for.",
        _on_a_stream(forks=True, joins=False),
    ),
]
