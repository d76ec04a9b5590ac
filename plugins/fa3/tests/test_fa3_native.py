"""Calls of the native kernels, on fakes with the libraries' signatures, and the choice of the library."""

# ruff: noqa: FBT001, FBT002  # signatures of the libraries

import dataclasses
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from compiled_kernels import COMPILED
from graphpact import BackendContext, ForwardMode, LayerSpec, Limits
from graphpact.attention import DraftLimits
from graphpact.errors import ConfigError
from graphpact_conformance.draws.cases import CASES, Case
from graphpact_conformance.draws.lanes import Config, Heads
from graphpact_conformance.draws.problems import Problem
from graphpact_fa3 import FA3Backend, NativeKernels
from graphpact_fa3.native import FlashAttention3, LibraryKernels, SglKernel, TorchVarlen
from graphpact_kernels import PageTableCall, PageTableRows, ScoreOptions, page_table_attention
from oracle_kit import hold_to_oracle

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAN = float("nan")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


# -- fakes -----------------------------------------------------------------------------------------


def _flat(cache: torch.Tensor) -> torch.Tensor:
    assert cache.dim() == 4
    return cache.flatten(0, 1)


def _unowned_rows(q: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows of ``q`` that belong to no request; a library leaves them unwritten."""
    return torch.arange(len(q), device=q.device) >= cu_seqlens_q[-1]


class FakeFlashAttention(ModuleType):
    """FlashAttention-3's two functions, with its argument names, defaults, checks and layouts.

    From hopper/flash_attn_interface.py and flash_api.cpp. The length of a schedule depends on ``causal``; a
    kernel refuses a schedule of another length.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.schedules: list[torch.Tensor] = []
        self.used: list[bool] = []

    @staticmethod
    def schedule_len(batch_size: int, max_seqlen_q: int, headdim: int, *, causal: bool) -> int:
        """Return the length of the schedule that both functions expect."""
        if max_seqlen_q == 1 and (headdim <= 64 or headdim > 128):
            causal = False
        return 1 + math.ceil(batch_size / 4) * 4 * (4 if causal else 3)

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        """Return a schedule that begins with the lengths of its step."""
        assert batch_size == len(cache_seqlens)
        assert cu_seqlens_q is not None
        assert len(cu_seqlens_q) == batch_size + 1
        assert page_size
        assert max_seqlen_k % page_size == 0
        size = self.schedule_len(batch_size, max_seqlen_q, headdim, causal=causal)
        made = cache_seqlens.new_full((size,), 5)
        made[:batch_size].copy_(cache_seqlens)
        self.schedules.append(made)
        return made

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Attend; the log-sum-exp is ``[heads, T]``, and rows that belong to no request are NaN."""
        assert k is None
        assert v is None
        assert cache_seqlens is not None
        assert page_table is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert softmax_scale is not None
        tensors = cache_seqlens, page_table, cu_seqlens_q
        assert all(t.dtype is torch.int32 and t.stride(-1) == 1 for t in tensors)
        if scheduler_metadata is not None:
            size = self.schedule_len(len(page_table), max_seqlen_q, q.shape[2], causal=causal)
            assert scheduler_metadata.shape == (size,)
        self.used.append(scheduler_metadata is not None)
        assert window_size == (-1, -1) or window_size[1] == 0
        rows = PageTableRows(
            cu_seqlens_q=cu_seqlens_q,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            page_size=k_cache.shape[1],
            max_seqlen_q=max_seqlen_q,
        )
        options = ScoreOptions(softmax_scale, window_size[0] + 1, softcap, is_causal=causal)
        call = PageTableCall(q, _flat(k_cache), _flat(v_cache), rows, options, with_lse=True)
        out, lse = page_table_attention(call)
        assert lse is not None
        unowned = _unowned_rows(q, cu_seqlens_q)
        out.masked_fill_(unowned[:, None, None], NAN)
        lse.masked_fill_(unowned[:, None], NAN)
        return (out, lse.t().contiguous(), None, None) if return_softmax_lse else out


def fake_varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attend as torch's ``varlen_attn``; the call is bound to its signature."""
    a = SimpleNamespace(**inspect.signature(varlen_attn).bind(*args, **kwargs).arguments)
    assert a.num_splits == 1
    assert a.window_size[1] == 0
    assert a.enable_gqa == (a.query.shape[1] != a.key.shape[2])
    assert len(a.cu_seq_k) == len(a.cu_seq_q)
    assert a.max_k >= a.block_table.shape[1]
    rows = PageTableRows(
        cu_seqlens_q=a.cu_seq_q,
        cache_seqlens=a.seqused_k,
        page_table=a.block_table,
        page_size=a.key.shape[1],
        max_seqlen_q=a.max_q,
    )
    options = ScoreOptions(a.scale, a.window_size[0] + 1)
    out, _ = page_table_attention(PageTableCall(a.query, _flat(a.key), _flat(a.value), rows, options))
    return out.masked_fill_(_unowned_rows(a.query, a.cu_seq_q)[:, None, None], NAN)


def on_cpu(library: type[LibraryKernels]) -> type[LibraryKernels]:
    """Return the library's kernels without the checks of device, model and installation."""
    name = f"fake_{library.__name__}"
    kinds = {"capabilities": None, "module": name, "unavailable": classmethod(lambda *_: None)}
    return type(name, (library,), kinds)


def backend_on(library: type[LibraryKernels]) -> type[FA3Backend]:
    """Return the backend with the library's kernels as its only provider."""

    class Native(NativeKernels):
        sources: ClassVar = (on_cpu(library),)

    class Backend(FA3Backend):
        providers = (Native,)

    return Backend


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    """Return a fake library, installed as FlashAttention-3 and as SGLang's kernels."""
    fake = FakeFlashAttention("fake")
    for library in (FlashAttention3, SglKernel):
        monkeypatch.setitem(sys.modules, f"fake_{library.__name__}", fake)
    return fake


def make_config(case: Case, page_size: int = 16, **features: bool) -> Config:
    """Return a lane of two layers; the second has ``features`` and, by default, a window."""
    chosen = {"sliding_window": True, "softcap": False, "sinks": False} | features
    return Config(case, page_size, Heads("gqa", 4, 2, 8), torch.float32, **chosen)


# -- the calls -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_of_flash_attention_answer_as_the_oracle(
    case: Case, flash_attention: FakeFlashAttention, *, window: bool
) -> None:
    """In every mode, FlashAttention's calls equal the oracle, in graphs and eagerly, with caps and sinks."""
    config = make_config(case, sliding_window=window, softcap=True, sinks=True)
    hold_to_oracle(backend_on(FlashAttention3), config, max_examples=1)
    assert any(flash_attention.used)


@pytest.mark.few(2)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="varlen_attn takes block tables from torch 2.13 on")
@pytest.mark.parametrize("case", [c for c in CASES if c.branches == 1], ids=str)
def test_calls_of_torch_answer_as_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every mode without branches, calls bound to torch's signature equal the oracle, with windows."""
    fake = SimpleNamespace(varlen_attn=fake_varlen_attn)
    monkeypatch.setitem(sys.modules, "fake_TorchVarlen", fake)  # type: ignore[arg-type]
    hold_to_oracle(backend_on(TorchVarlen), make_config(case), max_examples=1)


def make_backend(
    library: type[LibraryKernels] = FlashAttention3, **changes: Any
) -> tuple[FA3Backend, list[LayerSpec]]:
    """Return a backend and its layers: two equal ones, one with a window, one with other heads."""
    plain: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "scaling": 0.3}
    layers = [
        LayerSpec(0, 4, **plain),
        LayerSpec(1, 4, **plain),
        LayerSpec(2, 4, **plain, sliding_window=3),
        LayerSpec(3, 2, **plain),
    ]
    cache = [torch.randn(64, 2, 8) for _ in layers]
    table = torch.arange(3 * 16, dtype=torch.int32).view(3, 16)
    context = BackendContext(
        CPU,
        torch.float32,
        layers,
        Limits(2, 8, 16, 4, DraftLimits(1, 2, 2)),
        table,
        SimpleNamespace(k=cache, v=[t.clone() for t in cache]),
    )
    return (backend_on(library) if library else FA3Backend)(context), layers


def _decode(lengths: list[int]) -> Any:
    bs = len(lengths)
    batch = Problem(Case(ForwardMode.IDLE), [], 0).batch()
    batch.forward_mode, batch.batch_size = ForwardMode.DECODE, bs
    batch.input_ids = batch.positions = torch.zeros(bs, dtype=torch.int64)
    batch.req_pool_indices = torch.arange(1, bs + 1)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.out_cache_loc = torch.arange(1, bs + 1) * 16 + batch.seq_lens - 1
    return batch


@pytest.mark.parametrize("library", [FlashAttention3, None])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_tokens_of_no_request_yield_zeros(
    library: type[LibraryKernels] | None,
    sinks: torch.Tensor | None,
    flash_attention: FakeFlashAttention,
) -> None:
    """In a ragged batch the output past the last offset is zero, although a library leaves it unwritten."""
    backend, layers = make_backend() if library else make_backend(None)
    batch = _decode([9, 5])
    batch.forward_mode = ForwardMode.EXTEND
    batch.input_ids = torch.zeros(7, dtype=torch.int64)
    batch.out_cache_loc = torch.tensor([22, 23, 24, 35, 36, 0, 0])
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = torch.tensor([3, 2])
    metadata = backend.init_metadata_eager(batch)
    layer = dataclasses.replace(layers[0], sinks=sinks)
    q = torch.randn(7, 4, 8)
    out = backend.forward(q, *[torch.randn(7, 2, 8)] * 2, layer, metadata)
    assert torch.equal(backend.forward(q, None, None, layer, metadata), out)
    assert bool(out[:5].any(dim=-1).all())
    assert not out.isnan().any()
    assert not out[5:].any()
    assert bool(flash_attention.used) == (library is not None)


def test_the_library_schedules_once_a_step_for_its_own_layers(
    flash_attention: FakeFlashAttention,
) -> None:
    """A step has one schedule, followed by zeros; layers with a window or other heads get none."""
    backend, layers = make_backend()
    metadata = backend.init_metadata_eager(_decode([9, 5]), fill=77)
    (made,) = flash_attention.schedules
    found = metadata.scheduler_metadata
    assert metadata.schedule_len == len(made) == 13
    assert found[: len(made)].tolist() == made.tolist()
    assert len(found) > len(made)
    assert not found[len(made) :].any()
    for layer in layers:
        q, k = torch.randn(2, layer.num_q_heads, 8), torch.randn(2, 2, 8)
        backend.forward(q, k, k, layer, metadata)
    assert flash_attention.used == [True, True, False, False]
    assert len(flash_attention.schedules) == 1


def test_a_library_without_schedules_is_given_none(flash_attention: FakeFlashAttention) -> None:
    """Without ``get_scheduler_metadata`` the buffer is zero and kernels get no schedule."""
    older = SimpleNamespace(flash_attn_with_kvcache=flash_attention.flash_attn_with_kvcache)
    sys.modules["fake_SglKernel"] = older  # type: ignore[assignment]
    backend, layers = make_backend(SglKernel)
    metadata = backend.init_metadata_eager(_decode([9, 5]), fill=77)
    assert metadata.schedule_len == 0
    assert not metadata.scheduler_metadata.any()
    backend.forward(torch.randn(2, 4, 8), *[torch.randn(2, 2, 8)] * 2, layers[0], metadata)
    assert flash_attention.used == [False]


def test_no_library_is_called_for_no_request(flash_attention: FakeFlashAttention) -> None:
    """An idle batch makes no schedule and no library call; its output has no rows."""
    backend, layers = make_backend()
    metadata = backend.init_metadata_eager(_decode([]))
    out = backend.forward(torch.ones(0, 4, 8), *[torch.ones(0, 2, 8)] * 2, layers[0], metadata)
    assert out.shape == (0, 4, 8)
    assert not flash_attention.schedules
    assert not flash_attention.used


# -- the choice of the library -----------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a settable machine: compute capability, installed libraries, CUDA."""
    here = SimpleNamespace(capability=(9, 0), installed={"torch"}, has_cuda=True)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0+cu130"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here.has_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: here.capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in here.installed else None)
    return here


def _context(**changes: Any) -> BackendContext:
    limits = Limits(4, 16, 512, changes.pop("page_size", 16), DraftLimits(topk=changes.pop("topk", 1)))
    dtype = changes.pop("dtype", torch.bfloat16)
    spec = {"num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scaling": 1.0} | changes
    layers = [LayerSpec(0, 4, **spec)]  # type: ignore[arg-type]
    return BackendContext(CUDA, dtype, layers, limits, torch.zeros(1), SimpleNamespace(k=[], v=[]))


def _taken(context: BackendContext) -> str | None:
    fits = [s for s in NativeKernels.sources if s.refusal(context) is None]
    return fits[0].module if fits else None


def test_native_kernels_are_refused_with_the_reason(machine: SimpleNamespace) -> None:
    """A missing CUDA device, an old GPU and a missing library give reasons; the last names the command."""
    assert NativeKernels.unavailable(CPU) == "FlashAttention's kernels need a CUDA device"
    machine.capability = (7, 5)
    reason = NativeKernels.unavailable(CUDA)
    assert reason is not None
    assert "flash_attn_interface: it needs compute capability 9.x; this device has 7.5" in reason
    assert "torch.nn.attention.varlen: it needs compute capability 8.0 or more" in reason
    machine.capability = (9, 0)
    for library in (FlashAttention3, SglKernel):
        reason = library.unavailable(CUDA)
        assert reason == f"{library.module} is not installed; `{library.install}`"
        assert "pip install" in reason
    assert NativeKernels.unavailable(CUDA) is None  # torch has its own kernels
    machine.has_cuda = False
    assert NativeKernels.unavailable(CUDA) == "torch sees no CUDA device"


def test_an_older_torch_is_refused(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of torch before 2.13 are not used."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.1"))
    assert "torch 2.12.1 has no block table" in (TorchVarlen.unavailable(CUDA) or "")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0+cu130"))
    assert TorchVarlen.unavailable(CUDA) is None


def test_the_first_library_that_has_it_all_is_taken(machine: SimpleNamespace) -> None:
    """The first library in order that supports device and model is used; torch's kernels need large pages."""
    large, small = {"page_size": 256}, {"page_size": 16}
    assert _taken(_context(**large)) == "torch.nn.attention.varlen"
    assert _taken(_context(**small)) is None
    for lacks in ({"softcap": 2.0}, {"sinks": torch.ones(4)}, {"topk": 2}, {"v_head_dim": 32}):
        assert _taken(_context(**large, **lacks)) is None
    machine.installed.add("sgl_kernel")
    assert _taken(_context(**small, softcap=2.0, sinks=torch.ones(4), topk=2)) == "sgl_kernel.flash_attn"
    machine.installed.add("flash_attn_interface")
    assert _taken(_context(**small)) == "flash_attn_interface"
    machine.capability = (10, 0)
    assert _taken(_context(**large)) == "torch.nn.attention.varlen"


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"dtype": torch.float32}, "they lack dtype torch.float32 "),
        ({"dtype": torch.float64}, "they lack dtype torch.float64 "),
        ({"head_dim": 20, "v_head_dim": 20}, "they lack head_dim 20 "),
        ({"head_dim": 264, "v_head_dim": 264}, "they lack head_dim 264 "),
        ({"head_dim": 128, "v_head_dim": 64}, "they lack v_head_dim 64 with head_dim 128"),
    ],
)
def test_what_no_library_has_is_refused(machine: SimpleNamespace, lacks: dict[str, Any], says: str) -> None:
    """Float32, float64 and head_dims that no library is built for are refused; the reason names them."""
    machine.installed |= {"sgl_kernel", "flash_attn_interface"}
    reason = NativeKernels.refusal(_context(page_size=256, **lacks))
    assert reason is not None
    assert says in reason
    if "dtype" not in lacks:
        assert NativeKernels.refusal(_context(head_dim=192, v_head_dim=128)) is None


def test_a_cpu_runs_our_kernels_and_says_why() -> None:
    """On a CPU ``auto`` uses compiled kernels, or portable ones without a compiler; ``native`` is refused."""
    context = BackendContext(
        CPU,
        torch.float32,
        [LayerSpec(0, 1, 1, 8, 8, scaling=1.0)],
        Limits(1, 1, 4, 1),
        torch.zeros(2, 4, dtype=torch.int32),
        SimpleNamespace(k=[], v=[]),
    )
    backend = FA3Backend(context)
    assert backend.kernels.name == ("compiled" if COMPILED else "portable")
    assert backend.passed_over["native"] == "FlashAttention's kernels need a CUDA device"
    with pytest.raises(ConfigError, match="need a CUDA device"):
        FA3Backend(dataclasses.replace(context, provider="native"))
