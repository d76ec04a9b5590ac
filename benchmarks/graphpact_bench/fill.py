"""The host time of one fill of the registry, against one fill and one copy per slot.

Both sides do the same work on equal registries, in turns. Torch operations are counted by a dispatch mode,
kernels on a GPU by the profiler.

Does not: measure the GPU time of kernels; the device is synchronized between rounds.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact import ForwardBatch, ForwardMode
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    build_decode_registry,
    build_prefill_registry,
)
from graphpact.errors import EngineError
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import Chart, Column, Table, spread_columns, spread_values
from graphpact_bench.timing import Spread

AIM = 0.20
"""The most time of a padded fill of the decode lane, relative to one fill and one copy per slot."""


@dataclass(frozen=True)
class FillCase:
    """A registry preset and the counts of one fill.

    Args:
        name: The name of the registry.
        build: Builds it.
        raw: Live requests.
        padded: Requests of the shape.
        tokens: Live tokens and those of the shape; None for the request counts.
    """

    name: str
    build: Callable[[torch.device], CudaGraphBufferRegistry]
    raw: int
    padded: int
    tokens: tuple[int, int] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The arguments of a fill."""
        raw_tokens, padded_tokens = self.tokens or (self.raw, self.padded)
        return {
            "raw_bs": self.raw,
            "padded_bs": self.padded,
            "raw_num_tokens": raw_tokens,
            "padded_num_tokens": padded_tokens,
        }


def decode_lane(device: torch.device) -> CudaGraphBufferRegistry:
    """Return the registry of the decode lane of a text model, ``seq_lens_cpu`` included."""
    return build_decode_registry(
        device=device,
        max_bs=256,
        max_num_token=256,
        seq_len_fill_value=1,
        register_global_num_tokens=False,
        enable_mrope=False,
        zero_input_ids=True,
        lane="decode",
    )


def decode_with_everything(device: torch.device) -> CudaGraphBufferRegistry:
    """Return a decode registry with multimodal positions, recurrent state and token counts."""
    return build_decode_registry(
        device=device,
        max_bs=256,
        max_num_token=256,
        seq_len_fill_value=1,
        enable_mamba_track=True,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        zero_input_ids=True,
    )


def prefill_lane(device: torch.device) -> CudaGraphBufferRegistry:
    """Return the registry of a prefill lane of a text model."""
    return build_prefill_registry(device=device, max_bs=8, max_num_token=8192, lane="prefill")


CASES = (
    FillCase("decode lane", decode_lane, 13, 16),
    FillCase("decode lane", decode_lane, 200, 256),
    FillCase("decode lane", decode_lane, 16, 16),
    FillCase("decode, every slot", decode_with_everything, 13, 16),
    FillCase("decode, every slot", decode_with_everything, 16, 16),
    FillCase("prefill lane", prefill_lane, 4, 4, (1000, 1024)),
    FillCase("prefill lane", prefill_lane, 4, 4, (1024, 1024)),
)


def make_batch(registry: CudaGraphBufferRegistry, case: FillCase) -> ForwardBatch:
    """Return a batch with a field for every copied slot."""
    fields: dict[str, Any] = {}
    for slot in registry:
        if slot.copy_from_fb:
            head = slot.slice_for(case.raw, case.counts["raw_num_tokens"])
            fields[slot.name] = torch.ones_like(head).contiguous()
    if registry.has_slot("num_token_non_padded"):
        fields["num_token_non_padded_cpu"] = case.counts["raw_num_tokens"]
    inputs = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    for name in (*inputs, "seq_lens_cpu"):
        fields.setdefault(name, torch.ones(1, dtype=torch.int64))
    return ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=case.raw, **fields)


def fill_slot_by_slot(registry: CudaGraphBufferRegistry, batch: ForwardBatch, context: FillContext) -> None:
    """Do the work of a fill slot by slot: one fill and one copy per slot, without checks."""
    for slot in registry:
        buffer, rows = slot.buffer, context.rows(slot.axis)
        if buffer is None:
            continue
        if rows is None:
            if slot.copy_from_fb:
                buffer.copy_(getattr(batch, slot.name))
        else:
            raw, padded = rows
            by_row = buffer if slot.slice_fn is None else buffer.T  # ``[3, tokens]``
            if raw < padded and slot.padding_policy.resets_tail:
                by_row[raw:padded].fill_(slot.initial_value)
            if slot.copy_from_fb:
                source = getattr(batch, slot.name)
                by_row[:raw].copy_(source if slot.slice_fn is None else source.T)
        if slot.post_fill is not None:
            slot.post_fill(buffer, batch, context)


class CountOps(TorchDispatchMode):
    """A dispatch mode that counts operations that write; views are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count the operation and run it."""
        self.count += func._schema.is_mutable  # noqa: SLF001  no public name
        return func(*args, **(kwargs or {}))


def count_ops(fill: Callable[[], None], device: torch.device) -> int:
    """Return the number of operations that write; on a GPU, the number of kernels and copies launched."""
    fill()
    if device.type == "cpu":
        with CountOps() as counted:
            fill()
        count: int = counted.count
        return count
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415  only on a GPU

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
        fill()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events())


def seconds_by_turn(
    fills: list[Callable[[], None]], device: torch.device, *, rounds: int, calls: int
) -> list[list[float]]:
    """Return the host seconds of one call of each fill, by round; in each round they alternate."""
    taken: list[list[float]] = [[] for _ in fills]
    for _ in range(rounds):
        for fill, its_own in zip(fills, taken, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fill()
            its_own.append((time.perf_counter() - start) / calls)
    return taken


@torch.inference_mode()
def add_row(table: Table, case: FillCase, device: torch.device, *, rounds: int, calls: int) -> None:
    """Measure a case and add its row.

    Raises:
        EngineError: The two sides write different rows.
    """
    registry, plain = case.build(device), case.build(device)
    batch, counts = make_batch(registry, case), case.counts
    context = FillContext(**counts)
    raw_bs, padded_bs = counts["raw_bs"], counts["padded_bs"]
    raw_tokens, padded_tokens = counts["raw_num_tokens"], counts["padded_num_tokens"]

    def fill() -> None:  # arguments spelled out, so that unpacking a dict is not measured
        registry.fill_from(
            batch,
            raw_bs=raw_bs,
            padded_bs=padded_bs,
            raw_num_tokens=raw_tokens,
            padded_num_tokens=padded_tokens,
        )

    def slot_by_slot() -> None:
        fill_slot_by_slot(plain, batch, context)

    ops = [count_ops(each, device) for each in (fill, slot_by_slot)]
    for ours, theirs in zip(registry, plain, strict=True):
        whole = (registry.max_bs, registry.max_num_tokens)
        if not torch.equal(ours.slice_for(*whole), theirs.slice_for(*whole)):
            raise EngineError(f"{case.name}: the two sides write different rows to {ours.name!r}")
    ours_s, plain_s = seconds_by_turn([fill, slot_by_slot], device, rounds=rounds, calls=calls)
    table.add(
        registry=case.name,
        slots=len(registry.slot_names()),
        raw=raw_bs if case.tokens is None else raw_tokens,
        padded=padded_bs if case.tokens is None else padded_tokens,
        **spread_values("fill_us", Spread.of(ours_s).times(1e6)),
        **spread_values("one_by_one_us", Spread.of(plain_s).times(1e6)),
        ratio=min(ours_s) / min(plain_s),
        fill_ops=ops[0],
        one_by_one_ops=ops[1],
    )


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of every case."""
    rounds, calls = (2, 10) if options.quick else (30, 500)
    device = options.device
    table = Table(
        name="fill",
        title=f"host time of one fill of the registry, {options.machine_setting}: {rounds} rounds of {calls}",
        columns=[
            Column(key="registry", heading="registry"),
            Column(key="slots", heading="slots", format="d"),
            Column(key="raw", heading="raw", format="d"),
            Column(key="padded", heading="padded", format="d"),
            *spread_columns("fill_us", "fill us", ".1f"),
            *spread_columns("one_by_one_us", "one by one us", ".1f"),
            Column(key="ratio", heading="ratio", format=".2f"),
            Column(key="fill_ops", heading="fill ops", format="d"),
            Column(key="one_by_one_ops", heading="one by one ops", format="d"),
        ],
        notes=[
            "ratio: the best round of a fill by the best of one by one, so that other load counts least",
            f"aim for the decode lane, padded: a ratio of at most {AIM:.2f}",
        ],
        chart=Chart(value="ratio", label=["registry", "raw", "padded"]),
    )
    for case in CASES:
        options.say(f"fill: {case.name}, {case.raw} of {case.padded}")
        add_row(table, case, device, rounds=rounds, calls=calls)
    yield table
