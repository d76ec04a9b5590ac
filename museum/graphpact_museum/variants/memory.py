"""Correct plugins with memory of a backend's own: workspaces, output buffers, constants.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from typing import Any

import torch

from graphpact.attention import LayerSpec, Limits
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact_museum.exhibit import Variant
from graphpact_museum.variants.slots import own_slot


def _has_a_workspace(base: type[Any]) -> type[Any]:
    class HasAWorkspace(base):  # type: ignore[misc]
        """Puts queries into a workspace, and takes them from there."""

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the workspace."""
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
            return [*super().declare_slots(limits), work]

        def forward(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
            """Attend through the workspace."""
            if self._registry is not None:
                whole = self._registry.get_slot("variant.workspace").slice_for(0, 0)
                if len(q) <= len(whole):  # an eager step may be larger than any graph
                    work = whole[: len(q), : q.shape[1], : q.shape[2]]
                    work.copy_(q)
                    q = work.clone()
            out: torch.Tensor = super().forward(q, *args)
            return out

    return HasAWorkspace


def _skips_padded_outputs(base: type[Any]) -> type[Any]:
    class Skips(base):  # type: ignore[misc]
        """Writes no output of a padded row into its output buffer, which was zeroed once."""

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare an output buffer for each layer."""

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

            return [*super().declare_slots(limits), *map(out_of, self.context.layers)]

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, metadata: Any
        ) -> torch.Tensor:
            """Attend, and write what is real."""
            out: torch.Tensor = super().forward(q, k, v, layer, metadata)
            if self._registry is None:
                return out
            whole = self._registry.get_slot(f"variant.out{layer.layer_id}").slice_for(0, 0)
            if len(q) > len(whole):
                return out
            kept: torch.Tensor = whole[: len(q)]
            is_real = metadata.out_cache_loc >= self.context.limits.page_size
            kept.copy_(torch.where(is_real[:, None, None], out, kept))
            return kept.clone()

    return Skips


def _makes_constants_lazily(base: type[Any]) -> type[Any]:
    class Lazy(base):  # type: ignore[misc]
        """Makes a constant when metadata is first asked for, and holds it for good."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.ones: Any = None

        def allocate_metadata(self, *args: Any) -> Any:
            """Make the constant, outside any graph."""
            if self.ones is None:
                self.ones = torch.ones((), device=self.context.device, dtype=self.context.dtype)
            return super().allocate_metadata(*args)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend, times one."""
            out: torch.Tensor = super().forward(*args) * self.ones
            return out

    return Lazy


VARIANTS: list[Variant] = [
    Variant(
        name="workspace-of-its-own",
        style="Attention uses a workspace of the backend.",
        base="flashinfer",
        lanes=("decode", "extend"),
        make=_has_a_workspace,
    ),
    Variant(
        name="outputs-of-padded-rows-unwritten",
        style="A kernel writes only live rows, into an output buffer that was zeroed once.",
        base="fa3",
        lanes=("decode", "draft_extend"),
        make=_skips_padded_outputs,
    ),
    Variant(
        name="constant-made-on-first-use",
        style="A constant is made on the first use of metadata, outside any graph, and kept.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_makes_constants_lazily,
    ),
]
