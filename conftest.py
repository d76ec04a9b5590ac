"""A fixture with small checkpoints, which are written to disk once per session; hypothesis's profile.

The option ``--program`` runs one random program again; see `random_programs`. The option ``--share K/N``
leaves of each sweep only every N-th case, beginning with the K-th: N runs together have all cases.

The compiled kernels are built before the first test: no test then waits for it, or sees what it says.

Garbage collection leaves out the imported modules, also those that tests import, such as torch's compiler:
with them, a collection takes a second.

Does not: limit the time of an example: the machines that run the tests are shared.
"""

import gc
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from checkpoints import save_random_checkpoint
from graphpact_kernels.compiled import load

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

_FROZEN = pytest.StashKey[int]()  # the number of modules that were imported at the last freeze
_MANY_MODULES = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run one random program again, and a share of the sweeps."""
    parser.addoption("--program", type=int, help="the seed of the only random program to run")
    parser.addoption("--share", type=_share, help="K/N: every N-th case of each sweep, beginning with case K")


def _share(text: str) -> tuple[int, int]:
    """Return ``K`` and ``N``; K may be any number, and counts modulo N."""
    first, of = map(int, text.split("/"))
    return first % of, of


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what ``-m`` does not name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make sweeps of all but ``few`` cases of a test, and leave a share of the cases of each sweep.

    A sweep of fewer cases than shares has one in each.
    """
    for cases in _by_test(items, "few"):
        (count,) = cases[0].get_closest_marker("few").args  # type: ignore[union-attr]  they have it
        others = [case for case in cases if case.get_closest_marker("sweep") is None]
        kept = {at * len(others) // count for at in range(count)}
        for at, case in enumerate(others):
            if at not in kept:
                case.add_marker("sweep")
    share: tuple[int, int] | None = config.getoption("--share")
    if share is not None:
        _leave_share(config, items, *share)


def _leave_share(config: pytest.Config, items: list[pytest.Item], first: int, of: int) -> None:
    shuffled = random.Random(0)  # noqa: S311  so that a share has all values of every parameter
    sweeps = _by_test(items, "sweep")
    kept: set[pytest.Item] = set()
    for cases in sweeps:
        several = shuffled.sample(cases, len(cases))
        kept.update(several[first::of] or [several[first % len(cases)]])
    left_out = {item for cases in sweeps for item in cases if item not in kept}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def _by_test(items: list[pytest.Item], mark: str) -> list[list[pytest.Item]]:
    """Return the cases of each test that have a mark."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark) is not None:
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [*found.values()]


@pytest.fixture
def program_seeds(request: pytest.FixtureRequest) -> Callable[[int, int], Sequence[int]]:
    """Return a function of a first seed and a number that returns the seeds of random programs to run."""
    seed: int | None = request.config.getoption("--program")
    part, of = request.config.getoption("--share") or (0, 1)
    return lambda first, count: range(first + part, first + count, of) if seed is None else [seed]


def pytest_configure(config: pytest.Config) -> None:
    """Build the compiled kernels before any test, and any worker, needs them; tests say it if that fails."""
    if not hasattr(config, "workerinput"):
        load()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what was imported to collect the tests."""
    _freeze_imports(session.config)


@pytest.fixture(scope="module", autouse=True)
def _imports_frozen(request: pytest.FixtureRequest) -> None:
    """Freeze what the tests of earlier files imported."""
    _freeze_imports(request.config)


def _freeze_imports(config: pytest.Config) -> None:
    count = len(sys.modules)
    if count - config.stash.get(_FROZEN, 0) >= _MANY_MODULES:
        gc.collect()
        gc.freeze()
        config.stash[_FROZEN] = count


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
