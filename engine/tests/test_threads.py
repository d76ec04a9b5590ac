"""Tests of the number of CPU threads that an engine's steps run on."""

import contextlib

import pytest
import torch

from graphpact_engine.threads import SMALL_MODEL, choose_num_threads, running_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def own_number(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give torch a number of threads that no rule returns by chance, and an environment without one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    return 7


@pytest.mark.parametrize(
    ("setting", "device", "weights", "variables", "expected"),
    [
        (None, CPU, SMALL_MODEL, {}, 1),
        (None, CPU, SMALL_MODEL + 1, {}, 7),
        (None, CUDA, 1, {}, 7),
        (None, CPU, 1, {"OMP_NUM_THREADS": "7"}, 7),
        (None, CPU, 1, {"MKL_NUM_THREADS": "7"}, 7),
        (None, CPU, 1, {"OMP_NUM_THREADS": ""}, 1),
        (3, CPU, 1, {"OMP_NUM_THREADS": "7"}, 3),
        (3, CPU, SMALL_MODEL + 1, {}, 3),
    ],
)
def test_a_small_model_runs_on_one_thread_unless_somebody_says_how_many(
    setting: int | None,
    device: torch.device,
    weights: int,
    variables: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configuration decides first, then the environment, then the size of the model."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert choose_num_threads(setting, device, weights) == expected


def test_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is set inside the context, and torch has its own again after it, also after an error."""
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with running_on(7):
        assert given == []
    with contextlib.suppress(ZeroDivisionError), running_on(2):
        assert given == [2]
        _ = 1 / 0
    assert given == [2, 7]
