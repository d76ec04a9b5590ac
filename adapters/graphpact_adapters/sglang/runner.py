"""The model runner's part: its persistent buffers, how it pads them, and the batch that a backend gets.

    capture   every row is padding: request row 0, KV slot 0, and as its length the backend's fill value
    replay    live rows are copied, and the rest is padded in the same way. Each step has a new batch object,
              whose ``out_cache_loc`` is the live batch's tensor, at another address in each step
    eager     new tensors, without padding

In a draft extend the batch shows the whole buffers, longer than the batch. A draft decode has the slots of
all steps.

Does not: call a backend; see `graphpact_adapters.sglang.backend`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.batch import ForwardMode as Mode
from graphpact.shapes import GraphShape
from graphpact_adapters.backend import Phase
from graphpact_adapters.sglang.batch import (
    DraftExtendInput,
    DraftInput,
    EngineTypes,
    SglangForwardMode,
    Speculation,
    VerifyInput,
)
from graphpact_adapters.sglang.plain_values import Given, ModelRunnerSizes

MODES = {
    Mode.DECODE: SglangForwardMode.DECODE,
    Mode.EXTEND: SglangForwardMode.EXTEND,
    Mode.MIXED: SglangForwardMode.MIXED,
    Mode.IDLE: SglangForwardMode.IDLE,
    Mode.TARGET_VERIFY: SglangForwardMode.TARGET_VERIFY,
    Mode.DRAFT_DECODE: SglangForwardMode.DECODE,
    Mode.DRAFT_EXTEND: SglangForwardMode.DRAFT_EXTEND_V2,
}
"""SGLang's mode for each kind of step. A draft decode is a decode of the draft model."""
ABSENT = ("_original_forward_mode", "kv_loc_plan", "out_cache_loc_dsv4")
"""Attributes of a batch that only some runners set."""


@dataclass(frozen=True)
class LentBatch:
    """One step as the runner sees it.

    Args:
        view: The batch, padded to the shape.
        shape: The captured shape; None for an eager step.
        mode: The kind of step; for an idle batch, that of its graph.
        live: The number of live requests.
        rows: The step's tensors, padded, by the name of the buffer.
    """

    view: ForwardBatch
    shape: GraphShape | None
    mode: Mode
    live: int
    rows: dict[str, torch.Tensor]

    @property
    def batch_size(self) -> int:
        """Requests, padding rows included."""
        return len(self.rows["seq_lens"])


class GraphRunnerBuffers:
    """The persistent buffers of a runner. It makes batches whose tensors are views of them.

    Args:
        sizes: The sizes of the lane.
        fill: The length of a padding row, as the backend requires it.
        engine: Makes modes and inputs of speculation.
        device: Device of the buffers.
    """

    def __init__(self, sizes: ModelRunnerSizes, fill: int, engine: EngineTypes, device: torch.device) -> None:
        self._sizes, self._fill, self._engine, self._device = sizes, fill, engine, device
        bs, tokens = sizes.max_requests, sizes.max_requests * sizes.width

        def full(size: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self._tensors = {
            "input_ids": full(tokens),
            "positions": full(tokens),
            "out_cache_loc": full(tokens * sizes.slots_per_token),
            "req_pool_indices": full(bs),
            "seq_lens": full(bs, fill),
            "seq_lens_cpu": full(bs, fill).cpu(),
            "extend_seq_lens": full(bs, sizes.width, torch.int32),
            "num_correct_drafts": full(bs, sizes.width, torch.int32),
            "custom_mask": full((bs * fill + tokens) * sizes.width, 1, torch.bool),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        return self._tensors

    def lend(self, view: ForwardBatch, shape: GraphShape | None) -> LentBatch:
        """Write the buffers for a batch.

        Args:
            view: The batch, padded to ``shape``; one whose rows are all padding rows is a dummy.
            shape: The captured shape; None for an eager step, which has no padding and no buffers.
        """
        live = view.batch_size if shape is None else int((view.req_pool_indices != 0).sum())
        bs = view.batch_size if shape is None else shape.batch_size
        mode = view.forward_mode if shape is None else shape.mode
        tokens = view.num_tokens if shape is None else shape.num_tokens
        width = tokens // bs if bs else 1
        first = live * width if view.extend_seq_lens is None else tokens
        slots = view.out_cache_loc
        if mode is Mode.DRAFT_DECODE:  # the last draft step of SGLang does not attend
            slots = torch.nn.functional.pad(slots, (0, 1)).flatten()
        drafts = view.num_correct_drafts
        rows = {
            "input_ids": view.input_ids.clone(),
            "positions": _padded(view.positions, first, tokens),
            "out_cache_loc": _padded(slots, first * self._sizes.slots_per_token, len(slots)),
            "req_pool_indices": _padded(view.req_pool_indices, live, bs),
            "seq_lens": _padded(view.seq_lens, live, bs, self._fill),
            "seq_lens_cpu": _padded(view.seq_lens_cpu, live, bs, self._fill),
            "extend_seq_lens": torch.full((bs,), width, dtype=torch.int32, device=self._device)
            if view.extend_seq_lens is None
            else view.extend_seq_lens.int(),
            "num_correct_drafts": _padded(
                view.seq_lens.new_zeros(bs) if drafts is None else drafts, live, bs, width
            ).int(),
        }
        if shape is not None:
            for name, value in rows.items():
                self._tensors[name][: len(value)].copy_(value)
        return LentBatch(view, shape, mode, live, rows)

    def batch(self, lent: LentBatch, phase: Phase) -> Given:
        """Return the batch of a step, as a backend gets it."""
        eager, bs = phase == "eager", lent.batch_size
        rows = lent.rows
        if not eager:
            rows = {name: self._tensors[name][: len(value)] for name, value in rows.items()}
        slots = rows["out_cache_loc"]
        if phase == "replay" and lent.mode is not Mode.DRAFT_DECODE:
            slots = slots[: lent.live * self._sizes.width].clone()
        by_request = {name: rows[name] for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu")}
        if phase == "replay" and lent.mode is Mode.DRAFT_EXTEND:
            by_request = {name: self._tensors[name] for name in by_request}
        idle = phase == "replay" and not lent.live
        mode = self._engine.forward_mode(MODES[lent.mode])
        extends = eager and (lent.mode.is_ragged or lent.mode is Mode.DRAFT_EXTEND)
        counts = rows["extend_seq_lens"]
        prefixes = (rows["seq_lens"] - counts).clamp(min=0).int()
        return Given(
            "forward_batch",
            absent=ABSENT,
            **by_request,
            batch_size=bs,
            forward_mode=mode,
            actual_forward_mode=self._engine.forward_mode(SglangForwardMode.IDLE) if idle else mode,
            input_ids=rows["input_ids"],
            positions=rows["positions"],
            out_cache_loc=slots,
            seq_lens_sum=int(rows["seq_lens_cpu"].sum()),
            num_padding=bs - lent.live if phase == "replay" else 0,
            spec_info=self._speculation(lent, rows, phase),
            extend_seq_lens=counts,
            extend_seq_lens_cpu=counts.tolist(),
            extend_prefix_lens=prefixes if extends else None,
            extend_prefix_lens_cpu=prefixes.tolist() if extends else None,
            extend_no_prefix=not bool(prefixes.any()) if extends else None,
            extend_num_tokens=int(counts.sum()) if extends else None,
            extend_start_loc=(counts.cumsum(0) - counts).int() if extends else None,
            **dict.fromkeys(_NONE),
            can_run_decode_cuda_graph=not eager,
        )

    def _speculation(self, lent: LentBatch, rows: dict[str, torch.Tensor], phase: Phase) -> Any:
        width = self._sizes.width
        found: Speculation
        if lent.mode is Mode.TARGET_VERIFY:
            mask = self._tensors["custom_mask"] if phase == "capture" else self._mask(lent, phase)
            found = VerifyInput(mask, width, self._sizes.num_steps)
        elif lent.mode is Mode.DRAFT_EXTEND:
            drafts = rows["num_correct_drafts"]
            found = DraftExtendInput(width, drafts, drafts + 1)
            if phase != "capture":
                found.extend_seq_lens_tensor = rows["extend_seq_lens"]
                found.extend_seq_lens_cpu = [width] * lent.batch_size
        elif lent.mode is Mode.DRAFT_DECODE:
            found = DraftInput(self._sizes.topk)
        else:
            return None
        return self._engine.spec_info(found)

    def _mask(self, lent: LentBatch, phase: Phase) -> torch.Tensor:
        """Return the keys that each draft sees: all before them, and the chain up to itself."""
        width = self._sizes.width
        chain = torch.ones(width, width, dtype=torch.bool).tril()
        lens = lent.rows["seq_lens_cpu"].tolist()
        if phase == "replay":
            lens = lens[: lent.live]  # padding rows have no drafts
        rows = [torch.cat([torch.ones(width, n, dtype=torch.bool), chain], dim=1).flatten() for n in lens]
        empty = torch.zeros(0, dtype=torch.bool)
        return torch.cat([*rows, empty]).to(self._device)


_NONE = (
    "encoder_lens",
    "encoder_lens_cpu",
    "encoder_out_cache_loc",
    "global_num_tokens_cpu",
    "kv_loc_cols",
    "lora_ids",
    "mamba_track_indices",
    "max_seq_len_host",
    "max_seq_len_override",
    "mrope_positions",
    "origin_out_cache_loc",
    "out_cache_loc_virtual",
    "cross_attention_custom_mask",
    "dp_padding_mode",
    "encoder_swa_compress_rows",
    "encoder_swa_replay",
    "encoder_swa_row_floor",
    "attn_cp_metadata",
    "global_num_token_non_padded",
    "global_num_token_non_padded_cpu",
)
"""Attributes of a batch for features that no lane of the suite covers."""


def _padded(rows: torch.Tensor, live: int, size: int, value: int = 0) -> torch.Tensor:
    """Return a copy of the live rows, and ``value`` after them."""
    out = rows.new_full((size, *rows.shape[1:]), value)
    out[:live] = rows[:live]
    return out
