"""A fixture with small checkpoints, which are written to disk once per session; hypothesis's profile.

The option ``--program`` runs one random program again; see `random_programs`.

The compiled kernels are built before the first test: no test then waits for it, or sees what it says.

Garbage collection leaves out the imported modules: it would look through them again and again.

Does not: limit the time of an example: the machines that run the tests are shared.
"""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from checkpoints import save_random_checkpoint
from graphpact_kernels.compiled import load

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs one random program again."""
    parser.addoption("--program", type=int, help="the seed of the only random program to run")


@pytest.fixture
def program_seeds(request: pytest.FixtureRequest) -> Callable[[int, int], Sequence[int]]:
    """Return a function of a first seed and a number that returns the seeds of random programs to run."""
    seed: int | None = request.config.getoption("--program")
    return lambda first, count: range(first, first + count) if seed is None else [seed]


def pytest_configure(config: pytest.Config) -> None:
    """Build the compiled kernels before any test, and any worker, needs them; tests say it if that fails."""
    if not hasattr(config, "workerinput"):
        load()


def pytest_collection_finish() -> None:
    """Freeze what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a maker of checkpoint directories; equal requests share one."""
    made: dict[tuple[str, str], Path] = {}

    def make(architecture: str, **overrides: Any) -> Path:
        key = (architecture, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = save_random_checkpoint(
                tmp_path_factory.mktemp(architecture), architecture, **overrides
            )
        return made[key]

    return make
