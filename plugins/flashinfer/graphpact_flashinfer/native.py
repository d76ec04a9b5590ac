"""FlashInfer's own kernels: one paged wrapper for each set of indices and captured shape.

``BatchPrefillWithPagedKVCacheWrapper`` serves every mode; decode is an append of one query, as FlashInfer
itself runs it on tensor cores. The backend's tensors are the wrapper's graph buffers, so the wrapper reads
exactly the tensors that `fill_metadata` writes. It is planned from host tensors, so it never waits for the
device.

Eager steps use wrappers that are not in graph mode. Each set of indices has one, which is planned again for
every step. A second one is built only while the metadata of two steps is alive at once.

Written against flashinfer-python 0.7.2. Tests check the calls against that signature; no GPU has run them.

Does not: import FlashInfer before a backend is built with it.
"""

import importlib
import importlib.util
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact import (
    BackendContext,
    Capabilities,
    ForwardMode,
    GraphSlot,
    Limits,
    metadata_slot,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout
from graphpact.graphs import Event, GraphDriver
from graphpact_flashinfer.kernels import FlashInferKernels
from graphpact_flashinfer.metadata import PagedIndices, Plan, PlanArguments
from graphpact_flashinfer.rows import Rows
from graphpact_kernels import AttendCall

_FLOAT_WORKSPACE = "flashinfer.float_workspace"
_FLOAT_BYTES, _INT_BYTES = 128 * 2**20, 8 * 2**20  # as FlashInfer recommends and allocates itself


@dataclass(slots=True)
class NativePlan(Plan):
    """A plan of a FlashInfer wrapper.

    Args:
        wrapper: The planned wrapper, which runs the kernel.
        info: FlashInfer's ``plan_info``: offsets and sizes that its launches take as host numbers.
    """

    wrapper: Any
    info: tuple[int, ...] | None = None


class _EagerWrapper:
    """A wrapper in use by one eager step; when this object is freed, another step may use the wrapper.

    Args:
        wrapper: FlashInfer's wrapper, not in graph mode.
        tensors: The tensors that the step's kernels read, by the names of the metadata's fields.
        free: The list of unused wrappers that the wrapper returns to.
    """

    def __init__(self, wrapper: Any, tensors: Mapping[str, torch.Tensor], free: list[Any]) -> None:
        self.wrapper = wrapper
        self._tensors = tensors
        weakref.finalize(self, free.append, wrapper)

    @property
    def _plan_info(self) -> Any:
        return self.wrapper._plan_info  # noqa: SLF001  no public name

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        _: torch.Tensor,
        last_page_len: torch.Tensor,
        *numbers: int,
        **more: Any,
    ) -> None:
        """Plan with the step's own indices, and its mask if it has one."""
        tensors, mask = self._tensors, self._tensors.get("mask")
        if mask is not None:
            size = numbers[-1]
            num_kv = (kv_indptr.diff() - 1) * size + last_page_len
            num_bytes = -(-(qo_indptr.diff() * num_kv) // 8)
            more["packed_custom_mask"] = mask[: int(num_bytes.sum())]
        self.wrapper.plan(qo_indptr, kv_indptr, tensors["kv_indices"], last_page_len, *numbers, **more)
        if mask is not None:
            # With a packed mask FlashInfer computes offsets in bits, but its kernel takes bytes.
            self.wrapper._mask_indptr_buf = tensors["mask_indptr"]  # noqa: SLF001

    def run(self, *args: Any) -> torch.Tensor:
        """Return the attention, as planned."""
        out: torch.Tensor = self.wrapper.run(*args)
        return out


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
        sinks=False,  # FlashInfer needs a kernel variant compiled for them
        trees=True,
        needs_host_plan=True,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        flashinfer: Any = importlib.import_module("flashinfer")
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._copied: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """For each wrapper, the event of its last copy to the device."""
        self._free: dict[tuple[str, bool], list[Any]] = {}
        """Wrappers that no eager step uses now, by slot name prefix and whether there is a mask."""
        self._eager_workspace: int | None = None
        """The address of the workspace of these wrappers, which changes when a lane attaches the backend."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why FlashInfer cannot run on ``device``: no CUDA device, too old, not installed; or None."""
        if device.type != "cuda":
            return "FlashInfer's kernels need a CUDA device"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed: pip install flashinfer-python"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (7, 5):
            return f"FlashInfer needs compute capability 7.5 or more, this device has {major}.{minor}"
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why it cannot serve ``context``; also where layers of one set of indices need two plans."""
        reason = super().refusal(context)
        plans: dict[int | None, set[tuple[Any, ...]]] = {}
        for layer in context.layers:
            shape = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
            asked = (*shape, layer.scaling, layer.softcap)
            plans.setdefault(layer.sliding_window, set()).add(asked)
        if reason is None and any(layer.v_head_dim != layer.head_dim for layer in context.layers):
            return "they lack v_head_dim other than head_dim"
        if reason is None and any(len(asked) > 1 for asked in plans.values()):
            return "one plan serves all layers, but the layers differ in heads, head_dim, scaling or softcap"
        return reason

    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return an int workspace for each set of indices, and one workspace for partial results."""
        del limits  # FlashInfer's workspaces have a fixed size

        planned = metadata_slot(prefix + "int_workspace", lambda *_: (_INT_BYTES,), torch.uint8, role="plan")
        if prefix != "flashinfer.":
            return [planned]
        partial = metadata_slot(_FLOAT_WORKSPACE, lambda *_: (_FLOAT_BYTES,), torch.uint8, role="workspace")
        return [planned, partial]

    def make_plan(
        self,
        prefix: str,
        arguments: PlanArguments,
        buffers: Buffers,
        tensors: Mapping[str, torch.Tensor],
    ) -> NativePlan:
        """Return a plan with a wrapper on these tensors; in a graph the wrapper keeps using them."""
        workspace = buffers(_FLOAT_WORKSPACE)
        if not buffers.in_graph:
            if self._eager_workspace != workspace.data_ptr():
                self._free = {}  # they would keep the old memory alive
                self._eager_workspace = workspace.data_ptr()
            free = self._free.setdefault((prefix, "mask" in tensors), [])
            wrapper = free.pop() if free else self._wrapper(workspace, "NHD")
            return NativePlan(arguments, _EagerWrapper(wrapper, tensors, free))
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
        """Plan from host tensors. The wrapper copies them over the metadata, which has the same contents."""
        assert isinstance(plan, NativePlan)  # noqa: S101  make_plan returned it
        wrapper = plan.wrapper.wrapper if isinstance(plan.wrapper, _EagerWrapper) else plan.wrapper
        copied = self._copied.get(wrapper)
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
            ),  # the page numbers are in their buffer already
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
        if copied is None:
            copied = self._copied[wrapper] = self._event(driver)
        copied.record()

    def _event(self, driver: GraphDriver | None) -> Any:
        """Return a new event of the driver, or in a lane without graphs of the device."""
        if driver is not None:
            return driver.event()
        return torch.cuda.Event() if self.context.device.type == "cuda" else Event()

    def attend(self, call: AttendCall[PagedIndices]) -> torch.Tensor:
        """Run the wrapper of this set of indices on the paged cache; the plan was made for the layer."""
        plan, size = call.rows.plan, call.rows.page_size
        assert isinstance(plan, NativePlan)  # noqa: S101  make_plan returned it
        caches = call.k_cache, call.v_cache
        out: torch.Tensor = plan.wrapper.run(
            call.q, tuple(cache.view(-1, size, *cache.shape[1:]) for cache in caches)
        )
        return out
