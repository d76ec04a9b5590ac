"""`BenchOptions`: the options of every measurement.

Does not: parse the command line; `graphpact_bench.cli` does.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from graphpact_bench.models import ModelShape, save_model

CPU = torch.device("cpu")
Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""torch's dtype of each."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of a run.

    Args:
        quick: Whether to run a smoke test: few tokens, one round.
        dtype: The dtype of weights and computation.
        device: The device of the models.
        shapes: The shapes of the models; empty for the measurement's default.
        batch_sizes: Requests at a time; empty for the measurement's default.
        ways: The names of the ways to compare; empty for the measurement's default.
        rounds: Timed rounds; None for the measurement's default.
        pythons: The Python of each way that runs in another environment, by its name.
        say: Prints one line about the current measurement.
    """

    quick: bool = False
    dtype: Dtype = "float32"
    device: torch.device = CPU
    shapes: tuple[ModelShape, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    ways: tuple[str, ...] = ()
    rounds: int | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype]

    @property
    def setting(self) -> str:
        """The dtype, the device and the number of threads, for titles."""
        return f"{self.dtype}, {self.machine_setting}"

    @property
    def machine_setting(self) -> str:
        """The device and the number of threads, for titles."""
        on = "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        return f"{on}, {torch.get_num_threads()} thread(s)"


@contextlib.contextmanager
def saved_model(shape: ModelShape, max_position_embeddings: int) -> Iterator[Path]:
    """Return a context with the folder of a checkpoint, which is deleted after it.

    Args:
        shape: The sizes of the model.
        max_position_embeddings: The longest sequence.
    """
    with tempfile.TemporaryDirectory(prefix="graphpact-bench-") as folder:
        save_model(Path(folder), shape, max_position_embeddings)
        yield Path(folder)
