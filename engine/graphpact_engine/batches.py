"""`BatchBuilder`: builds the tensors of a step from the tokens and the memory of its requests.

The host writes all numbers of a batch to one staging tensor, which is copied to the device at once. The
staging tensor of a decode is kept. If the next decode has the same list of requests, each one token further,
the builder adds 1 to positions, lengths and slots, and writes the new tokens. It handles a request separately
only if its next slot is in another page.

Does not: choose requests, or allocate pages; the scheduler does both.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import EngineError
from graphpact_engine.pools import PagePool, RequestPool
from graphpact_engine.request import Request


class BatchBuilder:
    """Builds the batches of one scheduler, and writes the slots of their tokens to the table of request rows.

    Args:
        rows: The request rows.
        pages: The KV pages.
        device: Device of the batches and of ``rows``.
        num_reserved: KV slots that a decode step reserves for each request.
        prefill_mode: The mode of batches with prompt tokens: extend, or mixed.
    """

    def __init__(
        self,
        rows: RequestPool,
        pages: PagePool,
        device: torch.device,
        *,
        num_reserved: int,
        prefill_mode: ForwardMode,
    ) -> None:
        self._size = pages.page_size
        self._pages = pages
        self._device = device
        self._num_reserved = num_reserved
        self._prefill_mode = prefill_mode
        self._width = rows.max_context_len
        self._table = rows.req_to_token.view(-1)
        self._decodes: _DecodeStaging | None = None
        self._last: Sequence[Request] | None = None  # the requests of the last decode
        self._position = 0  # position of the newest token of the last request

    def entering_pages(self, requests: Sequence[Request], *, ahead: bool = False) -> Sequence[int]:
        """Return the indices of the requests that may not own the page of their next decode.

        If the next decode continues the last one, these are the requests whose next slot begins a page;
        otherwise all requests.

        Args:
            requests: The requests of the next decode.
            ahead: Whether the last decode is in flight: its tokens are not committed.
        """
        decodes = self._decodes
        if decodes is None or not self._continues(requests, ahead=ahead):
            return range(len(requests))
        return decodes.crossing[(decodes.age + 1) % self._size]

    def decode(
        self, requests: Sequence[Request], tokens: torch.Tensor | None = None
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Return the batch whose input is the newest token of each request, and its slots.

        The tensors on the device are valid until the next call. Those on the host are valid until the call
        after it, because a device may copy them late.

        Args:
            requests: The requests. Each owns the pages of its slots. The caller does not change the list
                later; a list of other requests is another object.
            tokens: ``[bs]`` int64, on the device: the tokens of the last decode, if it is in flight.

        Returns:
            The batch, and ``[bs, num_reserved]`` int64: the reserved slots of each request.
        """
        count, ahead = len(requests), tokens is not None
        continues, self._last = self._continues(requests, ahead=ahead), None
        decodes = self._decodes
        if decodes is None or decodes.count != count:
            decodes = self._decodes = _DecodeStaging(count, self._num_reserved, self._device)
        decodes.turn(advancing=continues)
        numbers = decodes.numbers
        if tokens is None:
            numbers[:count] = [request.output_token_ids[-1] for request in requests]
        if continues:
            decodes.age += 1
            size = self._size
            for at in decodes.crossing[decodes.age % size]:
                page = requests[at].pages[numbers[count + at] // size]
                numbers[decodes.first_slot + at] = page * size
        else:
            self._fill(decodes, requests, ahead=ahead)
        decodes.moved.copy_(decodes.host, non_blocking=True)
        if tokens is not None:
            decodes.batch.input_ids.copy_(tokens)
        decodes.narrow_slots.copy_(decodes.slots)
        self._table.put_(decodes.where, decodes.narrow_slots)
        self._last, self._position = requests, requests[-1].num_computed + ahead
        return decodes.batch, decodes.cache_loc

    def prefill(self, requests: Sequence[Request], lengths: Sequence[int]) -> tuple[ForwardBatch, list[int]]:
        """Return the batch whose input is the next tokens of each request, in new memory.

        Args:
            requests: The requests. Each owns the pages of its tokens.
            lengths: The number of tokens of each request.

        Returns:
            The batch, and the number of computed tokens of each request after it.
        """
        count, size = len(requests), self._size
        tokens, pages = array("q"), array("q")
        rows = [_row_of(request) for request in requests]
        ends: list[int] = []
        ahead: list[int] = []  # how far the positions of each request are ahead of its tokens in the batch
        first_pages: list[int] = []  # where its pages begin
        for request, length in zip(requests, lengths, strict=True):
            start = request.num_computed
            ahead.append(start - len(tokens))
            first_pages.append(len(pages))
            ends.append(start + length)
            tokens.extend(request.token_ids(start, start + length))
            pages.extend(request.pages)
        each = int64_tensor([*rows, *lengths, *ends])
        of_request = int64_tensor([*ahead, *first_pages, *(row * self._width for row in rows)]).view(3, count)
        owners = torch.repeat_interleave(each[count : 2 * count])
        ahead_of, page_of, row_of = of_request.index_select(1, owners).unbind()
        position = torch.arange(len(tokens)).add_(ahead_of)
        page = torch.frombuffer(pages, dtype=torch.int64)[page_of + position // size]
        slot = (position % size).add_(page, alpha=size)
        token = torch.frombuffer(tokens, dtype=torch.int64)
        host = torch.cat([token, position, slot, row_of + position, each])
        if self._device.type == "cuda":
            host = host.pin_memory()
        moved = host.to(self._device, non_blocking=True, copy=True)
        sizes = [len(tokens)] * 4 + [count] * 3
        token, position, slot, where, row, new, total = moved.split_with_sizes(sizes)
        *_, new_cpu, total_cpu = host.split_with_sizes(sizes)
        self._table.put_(where, slot.to(torch.int32))
        batch = ForwardBatch(
            forward_mode=self._prefill_mode,
            batch_size=len(requests),
            input_ids=token,
            positions=position,
            out_cache_loc=slot,
            req_pool_indices=row,
            seq_lens=total,
            seq_lens_cpu=total_cpu,
            extend_seq_lens=new,
            extend_seq_lens_cpu=new_cpu,
        )
        return batch, ends

    def _continues(self, requests: Sequence[Request], *, ahead: bool) -> bool:
        """Return whether these are the requests of the last decode, each one token further.

        A commit visits the requests in batch order: if the last one is one token further, all are. With
        several reserved slots, a step may commit a different number of tokens for each request.
        """
        if requests is not self._last or self._num_reserved > 1:
            return False
        return requests[-1].num_computed + ahead == self._position + 1

    def _fill(self, decodes: "_DecodeStaging", requests: Sequence[Request], *, ahead: bool) -> None:
        """Write everything but the tokens, and note which request enters a page in which step."""
        count, reserved, size = len(requests), self._num_reserved, self._size
        starts = [request.num_computed + ahead for request in requests]
        rows = [request.row or _row_of(request) for request in requests]  # no request owns row 0
        where = [row * self._width + start for row, start in zip(rows, starts, strict=True)]
        numbers, first, after = decodes.numbers, decodes.first_slot, decodes.first_where
        numbers[count : 2 * count] = starts
        numbers[2 * count : 3 * count] = [start + 1 for start in starts]
        numbers[after + count * reserved :] = rows
        if reserved > 1:
            numbers[first:after] = [
                slot
                for request, start in zip(requests, starts, strict=True)
                for slot in _slots_of(request.pages, start, start + reserved, size)
            ]
            numbers[after : after + count * reserved] = [
                at for begin in where for at in range(begin, begin + reserved)
            ]
            return  # the next decode does not continue this one
        numbers[first:after] = [
            request.pages[start // size] * size + start % size
            for request, start in zip(requests, starts, strict=True)
        ]
        numbers[after : after + count] = where
        decodes.age = 0
        decodes.crossing = [[] for _ in range(size)]
        for index, start in enumerate(starts):
            decodes.crossing[-start % size].append(index)


class _DecodeStaging:
    """The memory of decode batches of one number of requests: on the host, on the device, and as a batch.

    Args:
        count: The number of requests.
        reserved: The number of slots of each.
        device: The device.

    Attributes:
        host: The numbers on the host: tokens, positions, lengths, slots, indices into the table, rows.
        numbers: The same memory, for writes of single numbers.
        batch: The batch.
        age: Steps since all numbers were written.
        crossing: The indices of the requests that enter a page at each age, modulo the size of a page.
    """

    def __init__(self, count: int, reserved: int, device: torch.device) -> None:
        self.count = count
        sizes = [count, count, count, count * reserved, count * reserved, count]
        self.first_slot = 3 * count
        self.first_where = self.first_slot + count * reserved
        self.age = 0
        self.crossing: list[list[int]] = []
        self._growth = torch.ones(sum(sizes), dtype=torch.int64)  # of each number from step to step
        self._growth[:count] = self._growth[-count:] = 0  # tokens and rows
        with torch.inference_mode(mode=False):  # other steps may write it outside of the caller's mode
            self.moved = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            self.narrow_slots = torch.zeros(count * reserved, dtype=torch.int32, device=device)
            tokens, positions, lengths, self.slots, self.where, rows = self.moved.split_with_sizes(sizes)
            self.cache_loc = self.slots.view(count, reserved)
            sides = []
            for _ in range(2):
                on_gpu = device.type == "cuda"
                host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=on_gpu)
                numbers: Any = (ctypes.c_int64 * sum(sizes)).from_address(host.data_ptr())
                batch = ForwardBatch(
                    forward_mode=ForwardMode.DECODE,
                    batch_size=count,
                    input_ids=tokens,
                    positions=positions,
                    out_cache_loc=self.cache_loc[:, 0],
                    req_pool_indices=rows,
                    seq_lens=lengths,
                    seq_lens_cpu=host[2 * count : 3 * count],
                )
                sides.append((host, numbers, batch))
        self._other, side = sides
        self.host, self.numbers, self.batch = side

    def turn(self, *, advancing: bool) -> None:
        """Switch to the other host memory, as a device may still copy this one.

        Args:
            advancing: Whether to write the numbers of the next token of every request, all but the tokens.
        """
        before = self.host, self.numbers, self.batch
        self.host, self.numbers, self.batch = self._other
        self._other = before
        if advancing:
            torch.add(before[0], self._growth, out=self.host)


def int64_tensor(numbers: Sequence[int]) -> torch.Tensor:
    """Return the numbers as an int64 tensor on the host; twice as fast as torch.tensor."""
    if not numbers:  # torch refuses an empty buffer
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _slots_of(pages: Sequence[int], start: int, end: int, size: int) -> list[int]:
    """Return the slots of the positions ``start`` to ``end - 1`` of a request that owns ``pages``."""
    slots: list[int] = []
    while start < end:
        offset = start % size
        slot, count = pages[start // size] * size + offset, min(size - offset, end - start)
        slots += range(slot, slot + count)
        start += count
    return slots


def _row_of(request: Request) -> int:
    """Return the row of an admitted request."""
    if request.row is None:
        raise EngineError(f"request {request.request_id!r} is in a batch but owns no row")
    return request.row
