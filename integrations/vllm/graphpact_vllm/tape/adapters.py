"""`AdapterOperations`: the products of a step with LoRA adapters, in a form that can be recorded.

vLLM's own ones for CPUs take tokens in runs of one adapter, and read the lengths of the runs from the
device in each layer, so that no graph can hold them. Here each token has the number of its adapter, in memory
that stays, as in vLLM's kernels for GPUs.

Tokens without an adapter have the number -1. vLLM's own operations for CPUs take that for the last place of
an adapter, and are wrong for such tokens if an adapter is there.

Does not: change adapters of ``lm_head``, which vLLM applies outside of graphs.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_expand_slice, bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

NO_ADAPTER = -1


class AdapterOperations(PunicaWrapperCPU):
    """vLLM's operations for CPUs, each over the adapter of every token."""

    def update_metadata(self, mapping: LoRAMapping, *args: Any, **kwargs: Any) -> None:
        """Take the adapters of a step's tokens; rows behind them are padding and have none."""
        self._token_lora_indices.fill_(NO_ADAPTER)
        super().update_metadata(replace(mapping, is_prefill=False), *args, **kwargs)

    def _shrink_decode(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        bgmv_shrink(x, w_t_all, y, self._indices(x), scale)

    def _expand_decode(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        add_inputs: bool,  # noqa: FBT001  vLLM's own
    ) -> None:
        bgmv_expand(self._masked(x), w_t_all, y, self._indices(x), add_inputs)

    def _expand_slice_decode(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool,  # noqa: FBT001  vLLM's own
    ) -> None:
        bgmv_expand_slice(self._masked(x), w_t_all, y, self._indices(x), y_offset, y_slice_size, add_inputs)

    def _indices(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of the adapter of each row of ``x``."""
        indices: torch.Tensor = self._token_lora_indices[: len(x)]
        return indices

    def _masked(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with zeros in the rows without an adapter."""
        return x.masked_fill((self._indices(x) == NO_ADAPTER)[:, None], 0)
