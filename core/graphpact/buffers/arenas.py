"""`Arena`: slots as rows of one allocation, so that one strided copy resets their padding rows (tails).

    row 0   input_ids          | h h h h h . . . |     raw = 5 of padded = 8: the columns 5 to 8 of
    row 1   positions          | h h h h h . . . |     all rows are written at once, from the same
    row 2   out_cache_loc      | h h h h h . . . |     columns of a template that holds the pad value
    row 3   req_pool_indices   | h h h h h . . . |     of each row

Only slots whose tails are reset are in arenas. Other slots have their own allocations.

Does not: read policies at run time or know batches; `graphpact.buffers.fills` groups tails.
"""

import math
from collections.abc import Iterator

import torch

from graphpact.buffers.slots import FIX_CALLBACK, GraphSlot
from graphpact.errors import SlotError
from graphpact.plugin_calls import call
from graphpact.tensors import storage_id

_ROWS = 16  # of one allocation: enough for the slots of one width in every preset
_MAX_ROWS_OF_A_SLOT = 4  # such as the 3 rows of ``mrope_positions``
_MAX_BYTES_OF_A_ROW = 2**18  # 32768 tokens; for wider rows, 15 spare rows waste too much memory
_ALIGNMENT = 512  # bytes: alignment of device allocators, for which kernels are specialised

Place = tuple[int, int, int, int]
"""First row, end row, first column, end column."""


class Arenas:
    """An allocator of slots: rows of an arena if their tails are columns, otherwise separate allocations.

    With ``pins`` it pins host memory, for asynchronous copies to a GPU. ``nbytes`` is the number of bytes
    allocated so far, including unused rows of arenas.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self.nbytes = 0
        self._pins = pins
        self._arenas: list[Arena] = []

    def __iter__(self) -> Iterator["Arena"]:
        return iter(self._arenas)

    def allocate(self, slot: GraphSlot, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return a buffer of ``shape`` that holds the slot's initial value."""
        pin = self._pins and device.type == "cpu"
        if not _suits(slot, shape):
            own = new_buffer(slot, shape, device, slot.initial_value, pin=pin)
            self.nbytes += own.nbytes
            return own
        kind, rows = (slot.dtype, device, shape[-1]), math.prod(shape[:-1])
        arena = next((a for a in self._arenas if a.kind == kind and a.free >= rows), None)
        if arena is None:
            arena = Arena(*kind, pin=pin)
            self._arenas.append(arena)
            self.nbytes += arena.nbytes
        taken = arena.take(rows, slot.initial_value)
        return taken[0] if len(shape) == 1 else taken


def new_buffer(
    slot: GraphSlot, shape: tuple[int, ...], device: torch.device, fill: float, *, pin: bool = False
) -> torch.Tensor:
    """Return new memory for a slot, with its declared contents if it has any, otherwise filled with ``fill``.

    Raises `SlotError` if ``contents`` raises, or returns a tensor other than the buffer that it must write.
    """
    buffer = torch.full(shape, fill, dtype=slot.dtype, device=device, pin_memory=pin)
    if slot.contents is not None:
        made = call(f"{slot.label}: its contents", slot.contents, buffer, error=SlotError, hint=FIX_CALLBACK)
        if isinstance(made, torch.Tensor) and storage_id(made) != storage_id(buffer):
            hint = "write into the given buffer: lambda t: torch.arange(len(t), out=t)"
            raise SlotError(
                f"{slot.label}: its contents returned another tensor instead of writing the given one",
                hint=hint,
            )
    return buffer


class Arena:
    """Memory for up to 16 rows of ``width`` elements; each row begins at a multiple of 512 bytes.

    Attributes:
        memory: ``[16, aligned width]``, pinned if ``pin``.
        template: The same shape, filled with the pad value of each row.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, width: int, *, pin: bool = False) -> None:
        unit = max(1, _ALIGNMENT // dtype.itemsize)
        aligned = -(-max(width, 1) // unit) * unit
        self.kind = (dtype, device, width)
        self._width = width
        self.memory = torch.zeros(_ROWS, aligned, dtype=dtype, device=device, pin_memory=pin)
        self.template = torch.zeros_like(self.memory)
        self._pad_values: list[float] = []

    @property
    def free(self) -> int:
        """Unused rows."""
        return _ROWS - len(self._pad_values)

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated, including unused rows."""
        return self.memory.nbytes + self.template.nbytes

    def take(self, rows: int, pad_value: float) -> torch.Tensor:
        """Return the next ``rows`` rows as ``[rows, width]``, filled with ``pad_value``."""
        first = len(self._pad_values)
        self._pad_values += [pad_value] * rows
        self.template[first : first + rows] = pad_value
        return self.memory[first : first + rows, : self._width].fill_(pad_value)

    def place(self, view: torch.Tensor, pad_value: float) -> Place | None:
        """Return the place of ``view`` in this arena, or None if the template cannot reset it.

        The template can reset only whole columns of rows that were taken for this pad value.
        """
        if storage_id(view) != storage_id(self.memory):
            return None
        if view.dim() == 1:
            view = view[None]
        row, column = divmod(int(view.storage_offset()), self.memory.stride(0))
        end, right = row + view.shape[0], column + view.shape[-1]
        block = self.memory[row:end, column:right]
        if view.shape != block.shape or any(value != pad_value for value in self._pad_values[row:end]):
            return None
        same = view.stride(1) == 1 and (view.shape[0] == 1 or view.stride(0) == block.stride(0))
        return (row, end, column, right) if same else None

    def block(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory and the template at ``place``."""
        first, end, left, right = place
        return self.memory[first:end, left:right], self.template[first:end, left:right]


def _suits(slot: GraphSlot, shape: tuple[int, ...]) -> bool:
    """Return whether a slot's tails are columns of one row, or of a few rows as in ``[3, max_num_tokens]``.

    If there are a few rows, they must be contiguous in the arena, as they would be in a separate allocation.
    """
    if slot.axis == "none" or not slot.padding_policy.resets_tail or not shape:
        return False
    nbytes = shape[-1] * slot.dtype.itemsize
    if nbytes > _MAX_BYTES_OF_A_ROW:
        return False
    if len(shape) == 1:
        return True
    if len(shape) != 2 or shape[0] > _MAX_ROWS_OF_A_SLOT or slot.slice_fn is None or nbytes % _ALIGNMENT:
        return False
    return slot.slice_fn(torch.empty(shape, device="meta"), 0).shape[0] == shape[0]
