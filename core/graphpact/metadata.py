"""`MetadataSource`: where the metadata of a lane's steps comes from. A lane has one of three kinds.

    MetadataSource    the replay hook of the backend refreshes the captured metadata
    GraphMetadata     the graph itself does that work, as its first nodes
    EagerMetadata     attention leaves the graph, and each step makes new metadata for its eager calls

`metadata_source` chooses the kind when the lane is built, so that a step has no branch for it.

Does not: compute metadata; backends do.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import ConfigError
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact.step import RegionContext


class MetadataSource:
    """Metadata that the backend's hooks bind at capture and refresh before each replay.

    Attributes:
        backend: The lane's backend.
        hooks: The object whose hooks `init_metadata_capture` and `init_metadata_replay` the lane calls.
        unpromised: Names of the pact's parts of which only types and fields are promised.
    """

    in_graph = False
    unpromised: Collection[str] = ()

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.hooks: object = backend

    def attach(self, registry: CudaGraphBufferRegistry, driver: GraphDriver) -> None:
        """Prepare the backend for captures in the lane of ``registry`` and ``driver``."""
        self.backend.attach(registry, driver)
        self.backend.records_metadata = self.in_graph

    def attended(self, view: ForwardBatch, live: ForwardBatch) -> ForwardBatch:
        """Return the batch that metadata is made from: the static inputs ``view`` of the batch ``live``."""
        del live
        return view

    def record(self, context: RegionContext) -> None:
        """Record the metadata work that the backend has for the graph; a recorded region begins with it."""
        self.backend.record_metadata(context.view, context.metadata)


class GraphMetadata(MetadataSource):
    """Metadata that the graph computes: its first nodes are `AttentionBackend.fill_metadata`."""

    in_graph = True


class EagerMetadata(MetadataSource):
    """Metadata of attention that leaves the graph: each capture and each replay makes it in new memory.

    No graph reads it, so a replay may have other tensors in it than the capture, of the same types.
    """

    unpromised = ("metadata",)

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend)
        self.hooks = self

    def attach(self, registry: CudaGraphBufferRegistry, driver: GraphDriver) -> None:
        """Give the backend its driver. It needs no slots, since no graph reads its metadata."""
        del registry
        self.backend.driver = driver

    def attended(self, view: ForwardBatch, live: ForwardBatch) -> ForwardBatch:
        """Return the rows that the backend declares by `Capabilities.eager_rows`.

        These are the rows of ``live``, or with ``"padded"`` those of ``view``. In a ragged batch the padding
        tokens then come after the tokens of the live requests and belong to none of them.
        """
        if self.backend.capabilities.eager_rows == "live":
            return live
        if not view.forward_mode.is_ragged:
            return view
        return replace(
            live,
            forward_mode=view.forward_mode,
            input_ids=view.input_ids,
            positions=view.positions,
            out_cache_loc=view.out_cache_loc,
        )

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Return the metadata of the eager calls in this capture."""
        del shape
        return self.backend.init_metadata_eager(view)

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return the metadata of the eager calls in this replay."""
        del shape, captured
        return self.backend.init_metadata_eager(view)


def metadata_source(backend: AttentionBackend, *, eager: bool, in_graph: bool | None) -> MetadataSource:
    """Return the source of a lane's metadata.

    Args:
        backend: The lane's backend.
        eager: Whether attention leaves the lane's graphs.
        in_graph: Whether the graphs record the metadata work; None leaves it to the backend's
            `fill_is_device_only`.

    Raises:
        ConfigError: ``in_graph`` is True, and no graph of this lane can record the work.
    """
    can_record = backend.fill_is_device_only and not eager
    if in_graph and not can_record:
        raise ConfigError(
            f"metadata_in_graph=True, but {type(backend).__name__} has no metadata work that a graph of this"
            " lane can record",
            hint="leave the argument out: the replay hook then computes the metadata",
        )
    if eager:
        return EagerMetadata(backend)
    return GraphMetadata(backend) if can_record and in_graph is not False else MetadataSource(backend)
