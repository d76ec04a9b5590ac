"""Count the device operations before a replay; docs/explanation/attention.md has the table."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact import ForwardMode
from graphpact.attention import AttentionBackend
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact_conformance.draws.cases import CASES, Case
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.lane.rig import Rig
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_trtllm_mla import TRTLLMMLABackend
from support import leaves

PAGE = Path(__file__).parents[2] / "docs/explanation/attention.md"
BACKENDS: dict[str, type[AttentionBackend]] = {
    "flashinfer": FlashInferBackend,
    "fa3": FA3Backend,
    "trtllm_mla": TRTLLMMLABackend,
}


class Launches(TorchDispatchMode):
    """A counter of operations on device memory; in a CPU lane, given storages count as such."""

    def __init__(self, device_memory: list[torch.Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._device = {t.untyped_storage().data_ptr() for t in device_memory}
        self._kept: list[torch.Tensor] = []  # keeps addresses in use: host memory cannot reuse them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; count it if it touches device memory and is neither a view nor an allocation."""
        out = func(*args, **(kwargs or {}))
        given = leaves((args, kwargs))
        touched = any(t.untyped_storage().data_ptr() in self._device for t in given)
        if touched:
            made = leaves(out)
            self._kept += made
            self._device.update(t.untyped_storage().data_ptr() for t in made)
            storages = {t.untyped_storage().data_ptr() for t in given}
            is_view = func.is_view or (
                not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in storages for t in made)
            )
            self.count += not is_view and "empty" not in func.name()
        return out


def _count(backend: type[AttentionBackend], case: Case, *, in_graph: bool) -> str:
    """Return the number of launches of the replay hook without windows, or a dash for an undeclared mode."""
    found = next((c for c in configs_of(backend.capabilities) if c.case == case), None)
    if found is None:
        return "-"
    config = dataclasses.replace(found, sliding_window=False, softcap=False, sinks=False)
    with torch.inference_mode():
        rig = Rig(config, backend=backend, in_graph=in_graph)
        registry, shape = rig.lane.registry, config.shapes[-1]
        assert registry is not None
        step = rig.lane.captured[shape].context
        rig.lane.prepare(rig.lane.runner.dummy(shape))
        with Launches([*_device_memory(registry), rig.table]) as launches:
            rig.lane.backend.init_metadata_replay(step.view, shape, step.metadata)
    return str(launches.count)


def _device_memory(registry: CudaGraphBufferRegistry) -> list[torch.Tensor]:
    host = torch.device("cpu")  # a slot that declares host memory is on the host with a GPU too
    return [s.buffer for s in registry if s.buffer is not None and s.device != host]


def test_the_page_says_how_many_launches_a_replay_hook_makes() -> None:
    """The page has the counts; if the graph fills the metadata, hooks only copy plans."""
    columns = [(name, in_graph) for name in BACKENDS for in_graph in (True, False)]
    rows = [
        "| mode | " + " | ".join(f"{n}, {'in the graph' if g else 'by the hook'}" for n, g in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for case in CASES:
        if case.mode is ForwardMode.IDLE:
            continue
        counts = [_count(BACKENDS[name], case, in_graph=g) for name, g in columns]
        rows.append(f"| {case} | " + " | ".join(counts) + " |")
        for (name, in_graph), count in zip(columns, counts, strict=True):
            plans = case.num_steps if name == "flashinfer" else 0
            assert not in_graph or count in ("-", str(plans)), (name, str(case))
    table = "\n".join(rows)
    assert f"<!-- launches -->\n{table}\n<!-- /launches -->" in PAGE.read_text(), table
