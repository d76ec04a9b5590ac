"""Fills on a GPU: the same rows as on a CPU, in the expected number of launches."""

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphpact import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, build_decode_registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MAX_BS = 32


def _registry(device: str) -> CudaGraphBufferRegistry:
    return build_decode_registry(
        device=device,
        max_bs=MAX_BS,
        max_num_token=MAX_BS,
        seq_len_fill_value=1,
        register_global_num_tokens=False,
        enable_mrope=False,
        zero_input_ids=True,
        lane="decode",
    )


def _batch(device: str, size: int, lengths: torch.dtype = torch.int64) -> ForwardBatch:
    generator = torch.Generator().manual_seed(size)
    rows = [torch.randint(2, 99, (size,), generator=generator) for _ in range(5)]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=rows[0].to(device),
        positions=rows[1].to(device),
        out_cache_loc=rows[2].to(device),
        req_pool_indices=rows[3].to(device),
        seq_lens=rows[4].to(device, lengths),
        seq_lens_cpu=rows[4],
    )


def _fill(registry: CudaGraphBufferRegistry, batch: ForwardBatch, padded: int) -> None:
    registry.fill_from(
        batch,
        raw_bs=batch.batch_size,
        padded_bs=padded,
        raw_num_tokens=batch.num_tokens,
        padded_num_tokens=padded,
    )


def test_a_gpu_holds_what_a_cpu_holds() -> None:
    """After the same history of fills every slot holds the same rows on both devices."""
    cpu, gpu = _registry("cpu"), _registry("cuda")
    for size, padded in ((32, 32), (13, 16), (16, 16), (3, 8), (0, 4), (31, 32)):
        _fill(cpu, _batch("cpu", size), padded)
        _fill(gpu, _batch("cuda", size), padded)
        for name in cpu.slot_names():
            expected = cpu.get_slot(name).slice_for(MAX_BS, MAX_BS)
            got = gpu.get_slot(name).slice_for(MAX_BS, MAX_BS)
            assert got.tolist() == expected.tolist(), name


@pytest.mark.parametrize(
    ("size", "padded", "lengths", "launches"),
    [(13, 16, torch.int64, 2), (16, 16, torch.int64, 1), (13, 16, torch.int32, 3)],
    ids=["padded", "unpadded", "mixed dtypes"],
)
def test_a_decode_fill_is_a_few_launches(size: int, padded: int, lengths: torch.dtype, launches: int) -> None:
    """A fill is one launch for padding rows, if any, and one per pair of dtypes, without synchronization."""
    registry, batch = _registry("cuda"), _batch("cuda", size, lengths)
    _fill(registry, batch, padded)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
            _fill(registry, batch, padded)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    events = [e.name for e in profiled.events() if e.device_type.name == "CUDA"]
    assert len(events) == launches, events
