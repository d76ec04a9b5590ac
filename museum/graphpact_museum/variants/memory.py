"""Correct backends with additional memory: workspaces, output buffers, constants.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from typing import Any

import torch

from graphpact.attention import LayerSpec, Limits
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact_museum.edits.override import override
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.slots import own_slot


@variant(on="flashinfer", lanes=("decode", "extend"))
def workspace_of_its_own(base: type[Any]) -> type[Any]:
    """Attention uses a workspace of the backend."""

    def declare_slots(self: Any, right: Any, limits: Limits) -> Any:
        heads = max(layer.num_q_heads for layer in self.context.layers)
        width = max(layer.head_dim for layer in self.context.layers)
        work = own_slot(
            "workspace",
            lambda _, tokens: (tokens, heads, width),
            self.context.dtype,
            axis="none",
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
            role="workspace",
        )
        return [*right(limits), work]

    def forward(self: Any, right: Any, q: torch.Tensor, *args: Any) -> Any:
        if self._registry is not None:
            whole = self._registry.get_slot("variant.workspace").slice_for(0, 0)
            if len(q) <= len(whole):  # an eager step may be larger than any graph
                work = whole[: len(q), : q.shape[1], : q.shape[2]]
                work.copy_(q)
                q = work.clone()
        return right(q, *args)

    return override(base, declare_slots, forward)


@variant(on="fa3", lanes="decode")
def scales_of_every_model(base: type[Any]) -> type[Any]:
    """The class keeps a factor of each layer in memory, by the values of the layer and not by its number."""

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: LayerSpec, metadata: Any) -> Any:
        factor = self.factors[layer.scaling]
        return right(q * (factor / layer.scaling).to(q.dtype), k, v, layer, metadata)

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        for layer in context.layers:
            self.factors.setdefault(layer.scaling, torch.tensor(layer.scaling, dtype=torch.float64))

    return override(base, forward, __init__=init, factors={})


@variant(on="reference", lanes="decode")
def workspace_in_groups_of_eight(base: type[Any]) -> type[Any]:
    """Results pass through a workspace whose rows are rounded up to a multiple of 8."""

    def declare_slots(self: Any, right: Any, limits: Limits) -> Any:
        layers = self.context.layers
        width = max(layer.num_q_heads * layer.v_head_dim for layer in layers)
        work = own_slot(
            "groups",
            lambda _, tokens: (-(-tokens // 8) * 8, width),
            self.context.dtype,
            axis="none",
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
            role="workspace",
        )
        return [*right(limits), work]

    def forward(self: Any, right: Any, *args: Any) -> Any:
        out: torch.Tensor = right(*args)
        if self._registry is None or not len(out):
            return out
        whole = self._registry.get_slot("variant.groups").slice_for(0, 0)
        if len(out) > len(whole):  # an eager step may be larger than any graph
            return out
        rows = whole[: len(out), : out[0].numel()]
        rows.copy_(out.flatten(1))
        return rows.clone().view_as(out)

    return override(base, declare_slots, forward)


@variant(on="fa3", lanes=("decode", "draft_extend"))
def outputs_of_padded_rows_unwritten(base: type[Any]) -> type[Any]:
    """A kernel writes only live rows, into an output buffer that was zeroed once."""

    def declare_slots(self: Any, right: Any, limits: Limits) -> Any:

        def out_of(layer: LayerSpec) -> GraphSlot:
            return own_slot(
                f"out{layer.layer_id}",
                lambda _, tokens: (tokens, layer.num_q_heads, layer.v_head_dim),
                self.context.dtype,
                axis="none",
                padding_policy=PaddingPolicy.FILL_ONCE,
                pad_value=0,
                role="workspace",
            )

        return [*right(limits), *map(out_of, self.context.layers)]

    def forward(
        self: Any,
        right: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: Any,
    ) -> Any:
        out: torch.Tensor = right(q, k, v, layer, metadata)
        if self._registry is None:
            return out
        whole = self._registry.get_slot(f"variant.out{layer.layer_id}").slice_for(0, 0)
        if len(q) > len(whole) or k is None:  # on a frozen cache live tokens have slot 0 too
            return out
        kept: torch.Tensor = whole[: len(q)]
        is_real = metadata.out_cache_loc >= self.context.limits.page_size
        kept.copy_(torch.where(is_real[:, None, None], out, kept))
        return kept.clone()

    return override(base, declare_slots, forward)


@variant(on="trtllm_mla", lanes="decode")
def constant_made_on_first_use(base: type[Any]) -> type[Any]:
    """A constant is made on the first use of metadata, outside any graph, and kept."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.ones = None

    def allocate_metadata(self: Any, right: Any, *args: Any) -> Any:
        if self.ones is None:
            self.ones = torch.ones((), device=self.context.device, dtype=self.context.dtype)
        return right(*args)

    def forward(self: Any, right: Any, *args: Any) -> Any:
        out: torch.Tensor = right(*args) * self.ones
        return out

    return override(base, allocate_metadata, forward, __init__=init)
