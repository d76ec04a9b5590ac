"""`RunnerBuffers`: the persistent buffers of vLLM's model runner V2, and what builders get from them.

    persistent   ``query_start_loc``, ``seq_lens``, ``positions``, and for each KV-cache group a block table
                 and a slot mapping: allocated once, for the largest step; builders get the first rows
    windows      blocks that no query sees are block 0 in the table of a group with a window
    a replay     live requests come first; padding rows have no query (equal offsets), no key and blocks of
                 zeros; padding tokens have the slot -1
    a dummy      all requests share the tokens evenly, and their keys are those tokens; blocks are zeros,
                 slots are -1, ``max_seq_len`` is the longest sequence, ``max_query_len`` is what the graph
                 must support. Captures use dummies, and so do replays of an idle rank
    states       a block table of recurrent layers has a column for each token of a step: the state rows of
                 the request. Accepted tokens are kept by request row, and gathered for each step

From ``vllm/v1/worker/gpu`` of vLLM 0.33: ``input_batch.py``, ``model_runner.py``, ``model_states``.

Does not: copy token ids or sample; the lane's runner does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.shapes import GraphShape
from graphpact_adapters.vllm.common import CommonAttentionMetadata
from graphpact_adapters.vllm.plain_values import Sizes

PAD_SLOT = -1
MOST_SLOTS = 2**16
"""The most slots of a cache in which each group has other blocks; larger caches have unbacked holes."""


@dataclass(frozen=True)
class Lent:
    """What builders get in one step.

    Args:
        common: One entry for each KV-cache group.
        num_accepted_tokens: ``[num_reqs]`` int32: accepted tokens of the last step of each request, 1 in
            padding rows. None in dummies, and without recurrent states or speculation.
        num_decode_draft_tokens_cpu: ``[num_reqs]`` int32 on the host: drafts of each decode, -1 for other
            rows; None as above.
    """

    common: tuple[CommonAttentionMetadata, ...]
    num_accepted_tokens: torch.Tensor | None = None
    num_decode_draft_tokens_cpu: torch.Tensor | None = None

    def unpadded(self) -> "Lent":
        """Return views of the same memory without padding rows and padding tokens."""
        (first, *_) = self.common
        num_reqs = int((first.query_start_loc_cpu.diff() > 0).sum())  # live requests come first
        num_tokens = int(first.query_start_loc_cpu[-1])
        return Lent(
            tuple(common.unpadded(num_tokens, num_reqs) for common in self.common),
            None if self.num_accepted_tokens is None else self.num_accepted_tokens[:num_reqs],
            None if self.num_decode_draft_tokens_cpu is None else self.num_decode_draft_tokens_cpu[:num_reqs],
        )


class States(Protocol):
    """What an engine stores for recurrent layers; see `graphpact_adapters.recurrent_states.StateMemory`."""

    state_blocks: torch.Tensor
    num_accepted: torch.Tensor


def is_all_padding(view: ForwardBatch) -> bool:
    """Return whether a batch has no live request, like a dummy or a batch of an idle rank."""
    return not bool((view.req_pool_indices != 0).any())  # row 0 is scratch


class RunnerBuffers:
    """The persistent buffers of a runner, which writes them in each step.

    Args:
        sizes: The sizes of the lane.
        num_groups: KV-cache groups; each has its block table and slot mapping.
        table: ``[rows, positions]`` int32: KV slots of the suite's requests, by request row.
        num_slots: Slots of the KV cache.
        device: Device of the buffers.
        num_steps: Steps of a draft; 1 in lanes that do not draft.
        varlen: The most tokens of a request in graphs of decodes of different lengths. The host then knows
            only the number of tokens of a batch, so its offsets share them evenly.
        states: The state rows and accepted tokens of the suite's requests; None without recurrent states.
        by_shape: Whether the runner chooses graphs of decodes and drafts by the shape of a batch alone, as V1
            does. Then they get prompts of this shape too.
        windows: For each group, the number of keys that a query sees, its own included; None for all.
        common: The dataclass of a batch.
    """

    def __init__(
        self,
        sizes: Sizes,
        num_groups: int,
        table: torch.Tensor,
        num_slots: int,
        device: torch.device,
        *,
        num_steps: int = 1,
        varlen: int | None = None,
        states: States | None = None,
        by_shape: bool = False,
        windows: Sequence[int | None] = (),
        common: type[Any] = CommonAttentionMetadata,
    ) -> None:
        self._common, self._fields = common, {each.name for each in fields(common)}
        self._windows = windows or [None] * num_groups
        self._varlen, self._by_shape = varlen, by_shape
        self._sizes, self._table, self._states = sizes, table, states
        requests, tokens = sizes.max_num_seqs, sizes.max_num_tokens
        blocks = -(-sizes.max_model_len // sizes.block_size)
        if states is not None:
            blocks = 1 + sizes.num_speculative_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.query_start_loc = zeros(requests + 1)
        self.seq_lens = zeros(requests)
        self.positions = zeros(tokens, dtype=torch.int64)
        self.block_tables = [zeros(requests, blocks) for _ in range(num_groups)]
        self.slot_mappings = zeros(num_groups, tokens, dtype=torch.int64)
        self.slots = [self._slots(group, num_slots, device) for group in range(num_groups)]
        # Only for the runner: builders never see it.
        self._draft_slots = zeros(num_groups, tokens, num_steps, dtype=torch.int64)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        tables = {f"block_tables[{at}]": table for at, table in enumerate(self.block_tables)}
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "positions": self.positions,
            **tables,
            "slot_mappings": self.slot_mappings,
        }

    def _slots(self, group: int, num_slots: int, device: torch.device) -> torch.Tensor | None:
        """Return ``[slots]`` int64: for each slot of the suite the slot in a group, or None if equal.

        Block 0 is block 0 in all groups. Each group has the other blocks shifted by one more than the group
        before.
        """
        if group == 0 or num_slots > MOST_SLOTS or self._states is not None:
            return None
        slots = torch.arange(num_slots, device=device).view(-1, self._sizes.block_size)
        return torch.cat([slots[:1], slots[1:].roll(group, 0)]).flatten()

    def in_group(self, group: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots in a group for slots of the suite."""
        own = self.slots[group]
        return slots if own is None else own[slots.long()]

    def lend(self, view: ForwardBatch, shape: GraphShape | None, *, has_exact_bounds: bool = False) -> Lent:
        """Write the buffers for a batch, and return what builders get from them.

        Args:
            view: The batch, padded to ``shape``; one whose rows are all padding rows is a dummy.
            shape: The captured shape; None for an eager step, which has no padding.
            has_exact_bounds: Whether ``seq_lens_cpu_upper_bound`` is exact when drafts are verified too.
        """
        if shape is not None and is_all_padding(view):
            return self._lend_dummy(shape)
        live = view.req_pool_indices != 0
        width = None if view.extend_seq_lens is not None else view.tokens_per_request
        counts = (
            view.extend_seq_lens
            if view.extend_seq_lens is not None
            else torch.full_like(view.seq_lens, width or 1)
        )
        lens = view.seq_lens + (1 if view.out_cache_loc.dim() > 1 else view.uncounted_keys)
        return self._lend(
            counts=torch.where(live, counts, 0).tolist(),
            lens=torch.where(live, lens, 0).tolist(),
            view=view,
            num_reqs=view.batch_size if shape is None else shape.batch_size,
            num_tokens=view.num_tokens if shape is None else shape.num_tokens,
            has_exact_bounds=has_exact_bounds,
        )

    def _lend(
        self,
        *,
        counts: Sequence[int],
        lens: Sequence[int],
        view: ForwardBatch,
        num_reqs: int,
        num_tokens: int,
        has_exact_bounds: bool,
    ) -> Lent:
        total = sum(counts)
        drafts = view.forward_mode is ForwardMode.TARGET_VERIFY
        starts = _offsets(counts, self.query_start_loc)
        self.seq_lens.zero_()
        self.seq_lens[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        self.positions[: len(view.positions)] = view.positions
        self._draft_slots.fill_(PAD_SLOT)
        slots = view.out_cache_loc[:total].reshape(total, self._draft_slots.shape[2])
        block = self._sizes.block_size
        for group, table in enumerate(self.block_tables):
            self._draft_slots[group, :total] = self.in_group(group, slots)
            table.zero_()
            if self._states is not None:  # zeros in padding rows
                table[: len(lens)] = self._states.state_blocks[view.req_pool_indices, group]
                continue
            for row, (request, length) in enumerate(zip(view.req_pool_indices.tolist(), lens, strict=True)):
                # The blocks of a draft are allocated before it begins.
                ahead = self._draft_slots.shape[2] - 1 if length else 0
                blocks = self.in_group(group, self._table[request, : length + ahead : block]) // block
                table[row, : len(blocks)] = blocks
                if (window := self._windows[group]) is not None:  # earlier blocks were freed
                    table[row, : max(0, length - counts[row] - window + 1) // block] = 0
        self.slot_mappings.copy_(self._draft_slots[:, :, 0])
        # After asynchronous speculation the host knows only that at most all drafts were accepted.
        most = max(counts, default=0)
        more = most if drafts and not has_exact_bounds else 1
        upper = [length + at % more if length else 0 for at, length in enumerate(lens)]
        if self._varlen is not None and most <= self._varlen:  # such batches have no prefill
            requests = sum(count > 0 for count in counts)
            starts = _even(total, requests) if requests else starts
            most, prefills, is_known = self._varlen, False, False
        else:
            prefills, is_known = view.forward_mode.is_ragged, more == 1
        bound = torch.tensor(upper, dtype=torch.int32).clamp_(max=self._sizes.max_model_len)
        is_extend = view.forward_mode is ForwardMode.EXTEND
        prefilling = [
            # A request without computed tokens is a prompt, whatever the shape of the batch.
            n > 0 and ((prefills and (is_extend or n > 1 or length == n)) or (self._by_shape and length == n))
            for length, n in zip(lens, counts, strict=True)
        ]
        lent = self._slices(
            num_reqs,
            num_tokens,
            starts,
            max_query_len=most,
            max_seq_len=int(bound.max()) if lens else 0,
            bound=bound,
            lens=torch.tensor(lens, dtype=torch.int32) if is_known else None,
            is_prefilling=torch.tensor(prefilling, dtype=torch.bool),
        )
        if not drafts or self._states is None:
            return Lent(lent)
        accepted = torch.ones(num_reqs, dtype=torch.int32, device=self.seq_lens.device)
        live = view.req_pool_indices != 0
        accepted[: len(lens)][live] = self._states.num_accepted[view.req_pool_indices[live]]
        tokens = torch.tensor([count - 1 for count in counts], dtype=torch.int32)
        return Lent(lent, accepted, tokens)

    def _lend_dummy(self, shape: GraphShape) -> Lent:
        requests, tokens = shape.batch_size, shape.num_tokens
        each, more = divmod(tokens, requests)
        counts = [each] * (requests - more) + [each + 1] * more
        starts = _offsets(counts, self.query_start_loc)
        self.seq_lens.zero_()
        self.seq_lens[:requests] = torch.tensor(counts, dtype=torch.int32)
        self.positions[:tokens] = 0
        for table in self.block_tables:
            table[:requests] = 0
        self.slot_mappings.fill_(PAD_SLOT)
        self._draft_slots.fill_(PAD_SLOT)
        is_uniform = shape.mode not in (ForwardMode.EXTEND, ForwardMode.MIXED)
        return Lent(
            self._slices(
                requests,
                tokens,
                starts,
                # A graph of a ragged mode must support one request that has all tokens.
                max_query_len=max(counts) if is_uniform else self._varlen or tokens,
                max_seq_len=self._sizes.max_model_len,
                bound=torch.tensor(counts, dtype=torch.int32),
                lens=torch.tensor(counts, dtype=torch.int32),
                is_prefilling=torch.zeros(requests, dtype=torch.bool),
            )
        )

    def advance(self, step: int, num_reqs: int) -> None:
        """Advance the buffers to a step of a draft, with device work only; step 0 is lent already.

        Like V2, it advances padding rows too, up to the longest sequence.
        """
        self.slot_mappings[:, :num_reqs] = self._draft_slots[:, :num_reqs, step]
        if step:
            most = self._sizes.max_model_len
            self.seq_lens[:num_reqs].add_(1).clamp_(max=most)
            self.positions[:num_reqs].add_(1).clamp_(max=most - 1)

    def lend_step(self, step: int, num_reqs: int) -> Lent:
        """Advance the buffers to a step of an eager draft, and return what builders get from them."""
        self.advance(step, num_reqs)
        bound = self.seq_lens[:num_reqs].clone()
        return Lent(
            self._slices(
                num_reqs,
                num_reqs,
                list(range(num_reqs + 1)),
                max_query_len=1,
                max_seq_len=int(bound.max()) if num_reqs else 0,
                bound=bound,
                lens=None,
                is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
            )
        )

    def _slices(
        self,
        num_reqs: int,
        num_tokens: int,
        starts: list[int],
        *,
        max_query_len: int,
        max_seq_len: int,
        bound: torch.Tensor,
        lens: torch.Tensor | None,
        is_prefilling: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, ...]:
        on_host = torch.tensor([*starts, *[starts[-1]] * (num_reqs + 1 - len(starts))], dtype=torch.int32)
        return tuple(
            self._batch(
                query_start_loc=self.query_start_loc[: num_reqs + 1],
                query_start_loc_cpu=on_host,
                seq_lens=self.seq_lens[:num_reqs],
                num_reqs=num_reqs,
                num_actual_tokens=num_tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_table_tensor=table[:num_reqs],
                slot_mapping=self.slot_mappings[group, :num_tokens],
                positions=self.positions[:num_tokens],
                is_prefilling=is_prefilling,
                seq_lens_cpu_upper_bound=bound,
                _seq_lens_cpu=lens,
                _num_computed_tokens_cpu=None if lens is None else lens - on_host.diff(),
            )
            for group, table in enumerate(self.block_tables)
        )

    def _batch(self, **values: Any) -> Any:
        """Return a batch with those values that its class has; releases differ."""
        return self._common(**{name: value for name, value in values.items() if name in self._fields})


def _even(total: int, requests: int) -> list[int]:
    """Return where each request's queries begin if all queries are shared evenly."""
    return [total * at // requests for at in range(requests + 1)]


def _offsets(counts: Sequence[int], into: torch.Tensor) -> list[int]:
    """Write where each request's queries begin; the entries after them repeat the last offset."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    into[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    into[len(starts) :] = starts[-1]
    return starts
