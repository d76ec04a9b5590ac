"""FlashInfer's own kernels: one paged wrapper for each set of indices and captured shape.

``BatchPrefillWithPagedKVCacheWrapper`` serves every mode; decode is an append of one query, as FlashInfer
itself runs it on tensor cores. The wrapper is given this backend's tensors as its graph buffers, so that what
it reads is what `fill_metadata` writes, and is planned from host tensors, for which it waits for nothing.

Written against flashinfer-python 0.7.2; tests hold its calls to that signature, and no GPU has run them.

Does not: import FlashInfer before a backend is built on it.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphpact import (
    BackendContext,
    Capabilities,
    ForwardMode,
    GraphSlot,
    LayerSpec,
    Limits,
    PaddingPolicy,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout
from graphpact.graphs import Event, GraphDriver
from graphpact_flashinfer.kernels import FlashInferKernels
from graphpact_flashinfer.metadata import FlashInferMetadata, PagedIndices, Plan, PlanArguments
from graphpact_flashinfer.rows import Rows

_FLOAT_WORKSPACE = "flashinfer.float_workspace"
_FLOAT_BYTES, _INT_BYTES = (
    128 * 2**20,
    8 * 2**20,
)  # what FlashInfer recommends, and allocates itself


@dataclass(slots=True)
class NativePlan(Plan):
    """A plan of FlashInfer's.

    Args:
        wrapper: What was planned, and runs.
        info: FlashInfer's ``plan_info``: offsets and sizes that its launches take as host numbers.
    """

    wrapper: Any
    info: tuple[int, ...] | None = None


class NativeKernels(FlashInferKernels):
    """FlashInfer's paged kernels, on a CUDA device of compute capability 7.5 and up."""

    name = "native"
    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        head_dims=frozenset({64, 128, 256}),
        seq_len_fill_value=1,
        sliding_window=True,
        softcap=True,
        sinks=False,  # they need a kernel variant compiled for them
        trees=True,
        needs_host_plan=True,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        flashinfer: Any = importlib.import_module("flashinfer")
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._copied: WeakKeyDictionary[Any, Event] = WeakKeyDictionary()
        """Tells when a wrapper's last copy to the device is done."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why FlashInfer cannot run on ``device``: no CUDA device, too old a one, not installed."""
        if device.type != "cuda":
            return "FlashInfer's kernels need a CUDA device"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed: pip install flashinfer-python"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (7, 5):
            return (
                f"FlashInfer needs compute capability 7.5 or more, this device has {major}.{minor}"
            )
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return besides why layers of one set of indices cannot be served by one plan."""
        reason = super().refusal(context)
        plans: dict[int | None, set[tuple[Any, ...]]] = {}
        for layer in context.layers:
            shape = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
            asked = (*shape, layer.scaling, layer.softcap)
            plans.setdefault(layer.sliding_window, set()).add(asked)
        if reason is None and any(layer.v_head_dim != layer.head_dim for layer in context.layers):
            return "they lack values of another width than keys"
        if reason is None and any(len(asked) > 1 for asked in plans.values()):
            return "one plan serves all layers, and they differ in heads, widths, scaling or cap"
        return reason

    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return an int workspace for each set of indices, and one workspace for partial results."""
        del limits  # FlashInfer sizes its workspaces by itself

        def slot(name: str, size: int, policy: PaddingPolicy, **more: Any) -> GraphSlot:
            return GraphSlot(
                name=name,
                shape_fn=lambda *_: (size,),
                dtype=torch.uint8,
                owner="flashinfer",
                axis="none",
                padding_policy=policy,
                copy_from_fb=False,
                **more,
            )

        planned = slot(
            prefix + "int_workspace",
            _INT_BYTES,
            PaddingPolicy.KEEP_PAD,
            reason="kernels read what the plan of this step wrote",
        )
        if prefix != "flashinfer.":
            return [planned]
        return [planned, slot(_FLOAT_WORKSPACE, _FLOAT_BYTES, PaddingPolicy.FILL_ONCE, pad_value=0)]

    def make_plan(
        self,
        prefix: str,
        arguments: PlanArguments,
        buffers: Buffers,
        tensors: Mapping[str, torch.Tensor],
    ) -> NativePlan:
        """Return a wrapper on these tensors, in graph mode: it never puts others in their place."""
        workspace = buffers(_FLOAT_WORKSPACE)
        wrapper = self._wrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=tensors["qo_indptr"],
            paged_kv_indptr_buf=tensors["kv_indptr"],
            paged_kv_indices_buf=tensors["kv_indices"],
            paged_kv_last_page_len_buf=tensors["kv_last_page_len"],
            custom_mask_buf=tensors.get("mask"),
            mask_indptr_buf=tensors.get("mask_indptr"),
        )
        wrapper.reset_workspace_buffer(workspace, buffers(prefix + "int_workspace"))
        return NativePlan(arguments, wrapper)

    def plan(self, plan: Plan, rows: Rows, driver: GraphDriver | None) -> None:
        """Plan from host tensors. The wrapper copies them over what the metadata says, which is the same."""
        assert isinstance(plan, NativePlan)  # noqa: S101  make_plan returned it
        copied = self._copied.get(plan.wrapper)
        if copied is not None:
            copied.synchronize()  # the last step's copy may still read the wrapper's host memory
        arguments, size = plan.arguments, plan.arguments.page_size
        pages = [-(-keys // size) for keys in rows.num_kv]

        def host(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32)

        dtype = self.context.dtype
        plan.wrapper.plan(
            host([*itertools.accumulate(rows.num_q, initial=0)]),
            host([*itertools.accumulate(pages, initial=0)]),
            torch.empty(
                0, dtype=torch.int32, device=self.context.device
            ),  # they lie in their buffer
            host([(keys - 1) % size + 1 for keys in rows.num_kv]),
            arguments.num_qo_heads,
            arguments.num_kv_heads,
            arguments.head_dim,
            size,
            causal=not arguments.is_masked,
            sm_scale=arguments.scaling,
            window_left=arguments.window_left,
            logits_soft_cap=arguments.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=True,
        )
        plan.info = tuple(int(number) for number in plan.wrapper._plan_info)  # noqa: SLF001  frozen into a graph
        if driver is not None:
            copied = copied or driver.event()
            copied.record()
            self._copied[plan.wrapper] = copied

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: LayerSpec,
        metadata: FlashInferMetadata,
        indices: PagedIndices,
    ) -> torch.Tensor:
        """Run the wrapper of this set of indices on the cache in pages."""
        del layer  # planned for
        plan, size = indices.plan, metadata.page_size
        assert isinstance(plan, NativePlan)  # noqa: S101  make_plan returned it
        pages = (
            k_cache.view(-1, size, *k_cache.shape[1:]),
            v_cache.view(-1, size, *v_cache.shape[1:]),
        )
        out: torch.Tensor = plan.wrapper.run(q, pages)
        return out
