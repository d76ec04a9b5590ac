"""`StrictObserver`: poisons memory that a replay must not read, so that every read of it is detected.

A stale row usually contains a valid address or a plausible value. A kernel that reads it by mistake raises no
error and often computes the same output. In a strict lane such a row contains poison instead. Before a replay
is prepared, the observer poisons all slots that the preparation has to write. Rows that are still poison
afterwards were not written in this step. Unowned memory (see `Ownership`) always contains poison.

It observes captures, the hooks that prepare a replay, and the whole step. The checks of the driver itself are
in `graphpact_tape.strict`.

Does not: know the correct contents of a tensor; verification compares contents.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.errors import CaptureError, ContractError, GraphpactError, PoisonError, ReplayError
from graphpact.graphs import Graph, GraphDriver, Ownership
from graphpact.hookspecs import hookimpl
from graphpact.lane import CapturedShape, Lane
from graphpact.memory_map import MemoryMap
from graphpact.pact import walk
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact.tensors import equal, storage_id
from graphpact_tape.poison import is_poison, poison
from graphpact_tape.trees import tensors_of

_Around = Generator[None, Any, Any]
_ROWS = {"bs": "request", "tokens": "token", "none": "row"}


class StrictObserver:
    """The observer of a strict lane: ``Lane(..., driver=driver, observers=[driver.strict_observer()])``.

    Args:
        driver: The lane's driver, in strict mode.
        ownership: Knows which memory outside the lane is unowned; None if that is unknown.
        step: Makes the context of each step, from its preparation to the last update that follows its launch.
    """

    def __init__(
        self,
        driver: GraphDriver,
        ownership: Ownership | None = None,
        step: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._driver, self._step = driver, step
        self._ownership = ownership
        self._prepared: tuple[CudaGraphBufferRegistry, GraphShape, ForwardBatch] | None = None

    # -- the capture -----------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def capture(self, lane: Lane, shape: GraphShape) -> _Around:
        """Refuse a capture that wrote a constant, or a graph that reads metadata outside of slots."""
        fixed = [slot for slot in lane.registry or () if slot.role == "constant"]
        before = [None if slot.buffer is None else slot.buffer.clone() for slot in fixed]
        captured: CapturedShape = yield
        _require_slots(lane, shape, captured)
        for slot, contents in zip(fixed, before, strict=True):
            if slot.buffer is not None and contents is not None and not equal(slot.buffer, contents):
                raise CaptureError(
                    f"lane {lane.name!r}: the capture of {shape} wrote {slot.label}, a constant",
                    hint=(
                        "only `contents` may write it; a value that depends on the shape must be a host "
                        "number of the metadata, or an element of a constant index"
                    ),
                    rule="GP19",
                )
        return captured

    # -- the preparation -------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> _Around:
        """Poison the slots, and refuse host reads while they are filled."""
        self._prepared = registry, shape, batch
        _check_host_lengths(batch)
        for slot in registry:
            if slot.buffer is not None and is_due(slot):
                poison(slot.buffer)
        return (yield from self._guarded("populate", batch, [*batch.tensors().values()]))

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch) -> _Around:
        """Refuse host reads while the static inputs are made."""
        return (yield from self._guarded("prepare_replay", batch, [*batch.tensors().values()]))

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, view: ForwardBatch) -> _Around:
        """Refuse host reads while metadata is refreshed."""
        return (yield from self._guarded("init_metadata_replay", view))

    def _guarded(self, hook: str, batch: ForwardBatch, read_only: Sequence[torch.Tensor] = ()) -> _Around:
        try:
            with self._driver.preparation(batch.host_tensors(), read_only):
                return (yield)
        except Exception as error:
            if isinstance(error, ContractError) or (
                isinstance(error, GraphpactError) and error.__cause__ is None
            ):
                raise  # an error of graphpact that no other error caused
            raise PoisonError(
                f"{hook} fails on poisoned slots: {error}{self._unwritten()}",
                hint="a strict lane poisons slots before each step: write a row before reading it",
                rule=self._rule(),
            ) from error

    # -- the step --------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> _Around:
        """Poison unowned memory, and check after the step that it was not written."""
        if self._ownership is not None:
            self._ownership.poison_free()
        before, self._prepared = lane.stats.replays, None
        try:
            with self._step():
                outputs: StepOutputs = yield
        except PoisonError as error:
            unwritten = self._unwritten()
            if not unwritten or unwritten in error.message:
                raise
            raise PoisonError(error.message + unwritten, hint=error.hint, rule=self._rule()) from error
        self._check_copies(lane, batch)
        if lane.stats.replays > before:
            for name, output in outputs.items():
                self._check_output(lane, name, output, _ROWS[outputs.axes[name]])
        if self._ownership is not None:
            self._ownership.check_free()
        return outputs

    def _check_copies(self, lane: Lane, batch: ForwardBatch) -> None:
        """Refuse a copy from a host tensor of the batch that is still in flight at the end of the step."""
        for name, tensor in batch.tensors().items():
            line = self._driver.copy_in_flight(tensor)
            if line is not None:
                raise ReplayError(
                    f"lane {lane.name!r}: a copy from {name} of the batch is in flight at the end of the"
                    f" step; it began at {line}",
                    hint="host tensors of a batch may be rewritten once the step has returned: copy them into"
                    " your own pinned memory first, or synchronize() an event recorded after the copy",
                    rule="GP16",
                )

    def _check_output(self, lane: Lane, name: str, output: torch.Tensor, row: str) -> None:
        if not output.is_floating_point() or not output.isnan().any():
            return
        for shape, captured in lane.captured.items():
            graph = captured.graph
            if not graph.outputs_stand and _are_outputs(graph, output):
                raise ReplayError(
                    f"lane {lane.name!r}: the {name} are outputs of the graph of {shape}, read after the"
                    " driver replayed another graph",
                    hint="copy the outputs before the next replay",
                    rule="GP15",
                )
        first = int(output.isnan().reshape(output.shape[0], -1).any(dim=1).nonzero()[0])
        raise PoisonError(
            f"lane {lane.name!r}: the {name} of {row} {first} are NaN after a replay{self._unwritten()}",
            hint="in a strict lane, memory that the step does not own or did not write is NaN: look for a"
            " read of it, such as KV slots beyond those of a request, rows that no hook wrote, or output that"
            " no kernel wrote",
            rule=self._rule(),
        )

    def _unwritten(self) -> str:
        """Return the part of a message that names the slot rows that are still poison, possibly empty."""
        rows = ", ".join(rows.text for rows in self._poisoned())
        return f"; not written in this step: {rows}" if rows else ""

    def _rule(self) -> str | None:
        """Return the rule that unwritten rows break: GP02 for live rows, GP03 for only padding rows, or None.

        Slots that were partly written take precedence, because a failed step may not have reached the others.
        """
        found = self._poisoned()
        parts = [rows for rows in found if rows.is_part] or found
        if not parts:
            return None
        return "GP02" if any(rows.has_live for rows in parts) else "GP03"

    def _poisoned(self) -> list["_Unwritten"]:
        """Return the rows that are still poison, slot by slot."""
        if self._prepared is None:
            return []
        registry, shape, batch = self._prepared
        found = (_unwritten_of(slot, shape, batch) for slot in registry)
        return [rows for rows in found if rows is not None]


class _Unwritten(NamedTuple):
    """The rows of one slot that a step did not write.

    Args:
        text: Description of the rows, for messages.
        is_part: Whether the step wrote other rows of the slot.
        has_live: Whether some of the rows are live rows.
    """

    text: str
    is_part: bool
    has_live: bool


def _require_slots(lane: Lane, shape: GraphShape, captured: CapturedShape) -> None:
    """Raise `CaptureError` if the graph reads a metadata tensor that is not in the memory of a slot."""
    memory = MemoryMap(lane.registry, lane.backend)
    used = {storage_id(tensor) for tensor in captured.graph.external_tensors() or ()}
    for path, leaf in walk({"metadata": captured.metadata}):
        if isinstance(leaf, torch.Tensor) and storage_id(leaf) in used and not memory.is_declared(leaf):
            raise CaptureError(
                f"lane {lane.name!r}: {shape}: the graph reads {path}, which is not in the memory of a slot",
                hint=(
                    "declare it in declare_slots(), with role='constant' if it is a constant, and take it "
                    "from buffers(name): only slots are reported, and poisoned in strict lanes"
                ),
                rule="GP01",
            )


def _check_host_lengths(batch: ForwardBatch) -> None:
    """Refuse a batch whose host lengths differ from its device lengths.

    Raises:
        ReplayError: They differ; the message names the field and gives both values.
    """
    tensors = batch.tensors()
    for name, on_host in tensors.items():
        other = tensors.get(name.removesuffix("_cpu"))
        if other is None or other is on_host:
            continue
        if other.shape != on_host.shape or not torch.equal(other.cpu(), on_host):
            raise ReplayError(
                f"{name} of the batch is {on_host.tolist()}, {name.removesuffix('_cpu')} is {other.tolist()}",
                hint=(
                    "kernels read one of them, and plans are made from the other: set both to the same "
                    "lengths"
                ),
                rule="GP09",
            )


def _are_outputs(graph: Graph, tensor: torch.Tensor) -> bool:
    return storage_id(tensor) in map(storage_id, tensors_of(graph.outputs))


def is_due(slot: GraphSlot) -> bool:
    """Return whether every step has to write ``slot``, which excludes workspaces, constants and staging.

    A copy from staging memory may be in flight, so the observer must not write it. Its owner waits before
    writing.
    """
    return slot.padding_policy is not PaddingPolicy.FILL_ONCE and slot.role != "staging"


def _unwritten_of(slot: BoundSlot, shape: GraphShape, batch: ForwardBatch) -> _Unwritten | None:
    if slot.buffer is None or not is_due(slot):
        return None
    if slot.dtype.itemsize == 1 and not slot.dtype.is_floating_point:
        return None  # in a dtype of one byte, poison is also a valid value
    poisoned = is_poison(slot.slice_for(shape.batch_size, shape.num_tokens))
    is_whole = bool(poisoned.all())
    # Each step writes only a part of a slot without an axis, and reads only that part.
    if not (is_whole if slot.axis == "none" else bool(poisoned.any())):
        return None
    text = slot.label
    if poisoned.dim() == 1:
        at = poisoned.nonzero().flatten()
        kept = f" (kept: {slot.reason})" if slot.reason and slot.copy_from_fb else ""
        text = f"rows {int(at[0])}:{int(at[-1]) + 1} of {text}{kept}"
    raw = {"bs": batch.batch_size, "tokens": batch.num_tokens}.get(slot.axis, 1)
    has_live = bool(is_poison(slot.slice_for(raw, raw)).any())
    return _Unwritten(text, is_part=not is_whole, has_live=has_live)
