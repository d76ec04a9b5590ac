"""What tests of several files need: plugins by name without installing anything, slots and fills.

Does not: hold fixtures; those are in ``conftest.py``.
"""

from types import SimpleNamespace
from typing import Any

import torch

from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.graphs.tape import TapeDriver
from graphpact.plugins import PluginCatalog
from graphpact.runners import EagerRunner
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend


class Catalog(PluginCatalog):
    """Our own plugins, and those of a test, by name.

    Args:
        plugins: Classes by name; one of ours is replaced by another of its name.
    """

    def __init__(self, **plugins: type[Any]) -> None:
        super().__init__({})
        self._plugins = {
            "eager": EagerRunner,
            "cuda_graph": CudaGraphRunner,
            "flashinfer": FlashInferBackend,
            "tape": TapeDriver,
            **plugins,
        }

    def select(self, kind: str, name: str) -> type[Any]:  # type: ignore[override]
        """Return the class of that name."""
        return self._plugins[name]


def make_slot(name: str = "lengths", **changes: Any) -> GraphSlot:
    """Return a slot of ``[max_bs]`` int64 that is copied and zeroed, but for ``changes``."""
    declared: dict[str, Any] = {
        "shape_fn": lambda max_bs, _: (max_bs,),
        "dtype": torch.int64,
        "axis": "bs",
        "padding_policy": PaddingPolicy.ZERO,
        "owner": "somebody",
    }
    return GraphSlot(name, **(declared | changes))


def fill(registry: CudaGraphBufferRegistry, raw: int, padded: int, **fields: Any) -> None:
    """Fill from a batch of ``fields`` with as many tokens as requests."""
    registry.fill_from(
        SimpleNamespace(**fields),
        raw_bs=raw,
        padded_bs=padded,
        raw_num_tokens=raw,
        padded_num_tokens=padded,
    )
