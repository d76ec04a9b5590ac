"""`StepBatches`: vLLM's steps as graphpact's batches.

Requests of a step have the rows 1, 2, ... of a table of KV slots, which is written from vLLM's block table.
Padding requests have no tokens and come last; they are left out. Row 0 of the table belongs to nobody: its KV
slots are all 0, in vLLM's block 0, which no request owns.

Does not: read token ids, which no metadata needs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """The steps of one group of layers.

    Args:
        req_to_token: ``[max_bs + 1, max_model_len]`` int32, zeros: the KV slots of the positions of each row.
        page_size: KV slots of a block.
        width: Tokens of a request with all its drafts; 1 without drafts.
        mode_of_drafts: The kind of a step in which each request has its drafts.
    """

    req_to_token: torch.Tensor
    page_size: int
    width: int
    mode_of_drafts: ForwardMode = ForwardMode.TARGET_VERIFY

    def batch(self, common: Any, *, is_ragged: bool = False) -> ForwardBatch:
        """Return the live rows of a step, and write the table for them.

        Args:
            common: vLLM's ``CommonAttentionMetadata``.
            is_ragged: Whether every step is a mixed one.
        """
        counts = common.query_start_loc_cpu.diff().to(torch.int64)
        live, tokens = int((counts > 0).sum()), int(common.query_start_loc_cpu[-1])
        counts = counts[:live]
        mode = self._mode(counts, is_ragged=is_ragged)
        self._write_table(common, live)
        device = self.req_to_token.device
        seq_lens = common.seq_lens[:live].to(torch.int64)
        bound = common.seq_lens_cpu_upper_bound
        if bound is None or self.width > 1:  # after drafts it may be too large
            bound = common.seq_lens.to(_HOST)
        host_lens = bound[:live].to(torch.int64, copy=True)
        on_device = counts.to(device)
        starts = common.query_start_loc[:live].to(torch.int64)
        first = (seq_lens - on_device - starts).repeat_interleave(on_device, output_size=tokens)
        if mode is ForwardMode.TARGET_VERIFY:
            seq_lens, host_lens = seq_lens - self.width, host_lens - self.width
        ragged = mode.is_ragged
        return ForwardBatch(
            forward_mode=mode,
            batch_size=live,
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=first + torch.arange(tokens, device=device),
            out_cache_loc=common.slot_mapping[:tokens].to(torch.int64).clamp(min=0),
            req_pool_indices=torch.arange(1, live + 1, device=device),
            seq_lens=seq_lens,
            seq_lens_cpu=host_lens,
            extend_seq_lens=on_device if ragged else None,
            extend_seq_lens_cpu=counts if ragged else None,
        )

    def _mode(self, counts: torch.Tensor, *, is_ragged: bool) -> ForwardMode:
        if not is_ragged and bool((counts == 1).all()):
            return ForwardMode.DECODE
        if not is_ragged and self.width > 1 and bool((counts == self.width).all()):
            return self.mode_of_drafts
        return ForwardMode.MIXED

    def _write_table(self, common: Any, live: int) -> None:
        """Write the KV slots of the positions of each request, up to the longest one of the step."""
        most = min(common.max_seq_len, self.req_to_token.shape[1])
        pages = common.block_table_tensor[:live, : -(-most // self.page_size)]
        within = torch.arange(self.page_size, dtype=torch.int32, device=pages.device)
        slots = pages[:, :, None] * self.page_size + within
        self.req_to_token[1 : live + 1, :most] = slots.flatten(1)[:, :most]
