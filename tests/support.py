"""What tests of several files need: plugins by name, without installing anything.

Does not: hold fixtures; those are in ``conftest.py``.
"""

from typing import Any

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
