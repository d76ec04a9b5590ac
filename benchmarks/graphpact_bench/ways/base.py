"""`Way`: one way to continue prompts greedily, and the `WaySetting` that it is built for.

Does not: know a particular way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch

from graphpact_bench.models import ModelShape
from graphpact_bench.options import CPU, DTYPES, Dtype
from graphpact_bench.timing import Tokens, Written


@dataclass(frozen=True)
class WaySetting:
    """What a way is built for.

    Args:
        path: The checkpoint, in float32.
        shape: The sizes of its model.
        batch_sizes: Requests at a time.
        prompt: The most tokens of a prompt.
        new: The most tokens that are generated for a prompt.
        dtype: The dtype of weights and computation.
        device: The device.
        pythons: The Python of each way that runs in another environment, by its name.
    """

    path: Path
    shape: ModelShape
    batch_sizes: tuple[int, ...]
    prompt: int
    new: int
    dtype: Dtype = "float32"
    device: torch.device = CPU
    pythons: Mapping[str, str] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype]

    @property
    def max_tokens(self) -> int:
        """The longest sequence."""
        return self.prompt + self.new


class Way(ABC):
    """One way to continue prompts greedily; a `graphpact_bench.timing.TokenWriter`.

    Args:
        name: Its name in the table.

    Attributes:
        rounds: Maximum number of timed rounds; None for no limit.
        is_foreign: Whether it is other software, whose failure is a reason to skip it.
        versions: Versions of its packages that are not in this environment.
    """

    is_foreign: bool = False
    rounds: int | None = None
    versions: Mapping[str, str] = MappingProxyType({})

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def write(self, prompts: Tokens, count: int) -> Written:
        """Continue every prompt by ``count`` tokens."""

    def close(self) -> None:  # noqa: B027  most ways hold nothing
        """Release what the way holds; it is not used again."""


def intervals(times: list[float]) -> list[float]:
    """Return the seconds between moments that follow each other."""
    return [end - start for start, end in pairwise(times)]


def notes_of_versions(ways: Sequence[Way]) -> list[str]:
    """Return a note for each way with an environment of its own: the versions there."""
    return [
        f"{way.name}: in a process of its own, with {', '.join(map(' '.join, way.versions.items()))}"
        for way in ways
        if way.versions
    ]
