"""FlashAttention's own kernels, from the first available library that supports the model.

No GPU has run them yet. Tests check the calls against the libraries' signatures, with fake modules. Three
things are known only from sources: that a library's schedule fits its kernel, that a graph can record both,
and which arguments ``get_scheduler_metadata`` of ``sgl_kernel`` takes.

Does not: import a library before a backend is built with it.
"""

import abc
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from graphpact import BackendContext, Capabilities, ForwardMode, LayerSpec
from graphpact.attention import GraphSupport, HeadLayout
from graphpact_fa3.kernels import FA3Kernels
from graphpact_fa3.metadata import FA3Metadata, KeyRows
from graphpact_kernels import PageTableCall

_HEAD_DIMS = frozenset(range(8, 257, 8))

_FLASH_ATTENTION = Capabilities(
    modes=frozenset(ForwardMode),
    graph_support=GraphSupport.ALWAYS,
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    devices=frozenset({"cuda"}),
    head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
    head_dims=_HEAD_DIMS,
    seq_len_fill_value=1,
    sliding_window=True,
    softcap=True,
    sinks=True,  # applied by the backend, with the log-sum-exp
    trees=True,
)


class LibraryKernels(FA3Kernels):
    """A provider with the kernels of one library: its module, and the devices that it needs."""

    name = "native"
    module: ClassVar[str]
    install: ClassVar[str]
    """The command that installs the library."""
    compute_capability: ClassVar[str]
    """The compute capabilities that it runs on, for messages."""

    @classmethod
    @abc.abstractmethod
    def runs_on(cls, major: int) -> bool:
        """Return whether its kernels are built for compute capability ``major``."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why it cannot run on ``device`` (no such device, no such library), or None."""
        if device.type != "cuda":
            return "FlashAttention's kernels need a CUDA device"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if not cls.runs_on(major):
            return f"it needs compute capability {cls.compute_capability}; this device has {major}.{minor}"
        if importlib.util.find_spec(cls.module.split(".", 1)[0]) is None:
            return f"{cls.module} is not installed; `{cls.install}`"
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why it cannot serve ``context``, or None; checks the undeclared ``v_head_dim`` too."""
        reason = super().refusal(context)
        if reason is not None:
            return reason
        for layer in context.layers:
            if not cls.has_widths(layer.head_dim, layer.v_head_dim):
                return f"they lack v_head_dim {layer.v_head_dim} with head_dim {layer.head_dim}"
        return None

    @classmethod
    def has_widths(cls, head_dim: int, v_head_dim: int) -> bool:
        """Return whether it has kernels for ``v_head_dim`` with ``head_dim``."""
        return head_dim == v_head_dim


class FlashAttention3(LibraryKernels):
    """FlashAttention-3: ``flash_attn_with_kvcache`` and ``get_scheduler_metadata``.

    The library makes a schedule for one head geometry, so layers of another one get none. Its kernel checks
    only the length of a schedule, which depends on ``causal``.
    """

    capabilities = _FLASH_ATTENTION
    module = "flash_attn_interface"
    install = (
        "pip install --no-build-isolation"
        " 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
    )
    compute_capability = "9.x"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        library = importlib.import_module(self.module)
        self._attend: Any = library.flash_attn_with_kvcache
        self._make_schedule: Any = getattr(library, "get_scheduler_metadata", None)
        full = [layer for layer in context.layers if layer.sliding_window is None]
        self._scheduled = _geometry(full[0]) if full else None

    @classmethod
    def runs_on(cls, major: int) -> bool:
        """Return whether ``major`` is Hopper's."""
        return major == 9

    @classmethod
    def has_widths(cls, head_dim: int, v_head_dim: int) -> bool:
        """Return whether both are equal, or a pair that the library is built with."""
        if head_dim == v_head_dim:
            return True
        if v_head_dim % 8:
            return False
        return (128 < head_dim <= 192 and 96 < v_head_dim <= 128) or (head_dim <= 64 and v_head_dim <= 512)

    def schedule(self, rows: FA3Metadata, *, causal: bool) -> int:
        """Copy the library's schedule into the head of the buffer."""
        out = rows.scheduler_metadata
        if self._make_schedule is None or self._scheduled is None:
            out.zero_()
            return 0
        num_q_heads, num_kv_heads, head_dim, v_head_dim, has_softcap = self._scheduled
        made = self._make_schedule(
            len(rows.cache_seqlens),
            rows.max_seqlen_q,
            rows.page_table.shape[1] * rows.page_size,  # the kernel computes it in the same way
            num_q_heads,
            num_kv_heads,
            head_dim,
            rows.cache_seqlens,
            qkv_dtype=self.context.dtype,
            headdim_v=v_head_dim,
            cu_seqlens_q=rows.cu_seqlens_q,
            page_size=rows.page_size,
            causal=causal,
            has_softcap=has_softcap,
        )
        size = len(made)
        out[:size].copy_(made)
        out[size:].zero_()
        return size

    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with ``flash_attn_with_kvcache``, whose log-sum-exp is ``[heads, T]``."""
        rows, options = call.rows, call.options
        result = self._attend(
            call.q,
            _paged(call.k_cache, rows.page_size),
            _paged(call.v_cache, rows.page_size),
            cache_seqlens=rows.cache_seqlens,
            page_table=rows.page_table,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_seqlen_q,
            softmax_scale=options.scaling,
            causal=options.is_causal,
            window_size=(options.sliding_window - 1, 0) if options.sliding_window else (-1, -1),
            softcap=options.softcap,
            scheduler_metadata=call.schedule if _geometry_of(call) == self._scheduled else None,
            return_softmax_lse=call.with_lse,
        )
        if not call.with_lse:
            return result, None
        return result[0], result[1].transpose(0, 1)


class SglKernel(FlashAttention3):
    """FlashAttention-3 from SGLang's kernel library: the same calls, with a schedule if it has one."""

    module = "sgl_kernel.flash_attn"
    install = "pip install sgl-kernel"


class TorchVarlen(LibraryKernels):
    """torch's own variable-length attention over a block table: FlashAttention-2, without a schedule.

    Page sizes are multiples of 256, so there are no trees, and there is no softcap. The layout of its
    log-sum-exp differs from the documented one, so it is not used, and there are no sinks. Keys are never
    split among blocks: with packed queries the merge of the parts is wrong (pytorch issue 194167).
    """

    capabilities = replace(
        _FLASH_ATTENTION,
        page_sizes=frozenset(range(256, 4097, 256)),
        softcap=False,
        sinks=False,
        trees=False,
    )
    module = "torch.nn.attention.varlen"
    install = "pip install 'torch>=2.13'"
    compute_capability = "8.0 or more"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._attend: Any = importlib.import_module(self.module).varlen_attn

    @classmethod
    def runs_on(cls, major: int) -> bool:
        """Return whether ``major`` is that of Ampere or later."""
        return major >= 8

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why it cannot run on ``device``; torch before 2.13 has no ``num_splits``."""
        reason = super().unavailable(device)
        if reason is None and torch.__version__ < "2.13":
            reason = f"varlen_attn of torch {torch.__version__} has no block table; `{cls.install}`"
        return reason

    def schedule(self, rows: FA3Metadata, *, causal: bool) -> int:
        """Write zeros: these kernels take no schedule."""
        del causal
        rows.scheduler_metadata.zero_()
        return 0

    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with ``varlen_attn``: causal and without log-sum-exp, since there are no trees or sinks."""
        rows, options = call.rows, call.options
        assert isinstance(rows, FA3Metadata)  # noqa: S101  one row for each request
        assert options.is_causal  # noqa: S101
        assert not call.with_lse  # noqa: S101
        out: torch.Tensor = self._attend(
            call.q,
            _paged(call.k_cache, rows.page_size),
            _paged(call.v_cache, rows.page_size),
            rows.cu_seqlens_q,
            rows.cu_seqlens_k,
            rows.max_seqlen_q,
            rows.max_seqlen_k,
            scale=options.scaling,
            window_size=(options.sliding_window - 1, 0),  # -1 for all
            enable_gqa=call.q.shape[1] != call.k_cache.shape[1],
            seqused_k=rows.cache_seqlens,
            block_table=rows.page_table,
            num_splits=1,
        )
        return out, None


class NativeKernels(FA3Kernels):
    """FlashAttention's own kernels, from the first library that can serve the model."""

    name = "native"
    sources: ClassVar[Sequence[type[LibraryKernels]]] = (FlashAttention3, SglKernel, TorchVarlen)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.source = next(s for s in self.sources if s.refusal(context) is None)(context)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why no library can run on ``device``, or None if one can."""
        return _unless_one([(s, s.unavailable(device)) for s in cls.sources])

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why no library can serve ``context``, or None if one can."""
        return _unless_one([(s, s.refusal(context)) for s in cls.sources])

    def schedule(self, rows: FA3Metadata, *, causal: bool) -> int:
        """Write the library's schedule, or zeros for an empty batch, which no library accepts."""
        if len(rows.cache_seqlens):
            return self.source.schedule(rows, causal=causal)
        rows.scheduler_metadata.zero_()
        return 0

    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the library's kernel, and clear its unwritten output: queries that belong to no row."""
        rows = call.rows
        if len(rows.cache_seqlens) == 0:
            return call.new_output().zero_(), call.new_lse().fill_(float("-inf")) if call.with_lse else None
        out, lse = self.source.attend(call)
        if rows.is_ragged:
            unowned = torch.arange(len(out), device=out.device) >= rows.cu_seqlens_q[-1]
            out = out.masked_fill(unowned[:, None, None], 0)
            lse = None if lse is None else lse.masked_fill(unowned[:, None], float("-inf"))
        return out, lse


def _unless_one(reasons: Sequence[tuple[type[LibraryKernels], str | None]]) -> str | None:
    """Return all reasons in one line, or None if a library has none."""
    if any(reason is None for _, reason in reasons):
        return None
    different = dict.fromkeys(reason for _, reason in reasons)
    if len(different) == 1:
        return next(iter(different))
    return "; ".join(f"{source.module}: {reason}" for source, reason in reasons)


def _geometry(layer: LayerSpec) -> tuple[int, int, int, int, bool]:
    """Return the head geometry that a schedule is made for."""
    heads = layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    return *heads, bool(layer.softcap)


def _geometry_of(call: PageTableCall[KeyRows]) -> tuple[int, int, int, int, bool]:
    """Return the head geometry of the layer of a call; see `_geometry`."""
    heads = call.q.shape[1], call.k_cache.shape[1], call.q.shape[2], call.v_cache.shape[2]
    return *heads, call.options.softcap > 0


def _paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return ``[pages, page_size, heads, width]``, a view of ``[num_slots, heads, width]``."""
    return cache.view(-1, page_size, *cache.shape[1:])
