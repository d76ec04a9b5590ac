"""Tests that replays draw the numbers of eager runs, and that other changes of generators are refused."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphpact.errors import CaptureError
from graphpact.graphs import GraphDriver
from support import RECORDING_DRIVERS

CPU = torch.device("cpu")
x = torch.arange(4.0)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


def draw() -> torch.Tensor:
    """Return new random numbers."""
    return torch.rand_like(x)


def restored() -> torch.Tensor:
    """Draw the same numbers twice."""
    state = torch.get_rng_state()
    first = draw()
    torch.set_rng_state(state)
    return first - draw()


def forked() -> torch.Tensor:
    """Draw in a fork of the generator, which restores the state."""
    with torch.random.fork_rng():
        return draw()


def seeded() -> torch.Tensor:
    """Draw after a seed."""
    torch.manual_seed(7)
    return draw()


def seeded_alone() -> torch.Tensor:
    """Seed, and draw nothing."""
    torch.default_generator.manual_seed(7)
    return x + 1


def seeded_as_it_was() -> torch.Tensor:
    """Set the same seed as the caller of the capture."""
    torch.manual_seed(0)
    return draw()


def restored_at_the_end() -> torch.Tensor:
    """Draw, then restore the state from before."""
    state = torch.default_generator.get_state()
    result = draw()
    torch.default_generator.set_state(state)
    return result


def seeded_anew() -> torch.Tensor:
    """Draw after a seed that torch chooses."""
    torch.seed()
    return draw()


def initialised() -> torch.Tensor:
    """Make a module whose weights are the same each time."""
    torch.manual_seed(0)
    result: torch.Tensor = torch.nn.LSTM(4, 4, device=CPU)(x.view(1, 4))[0]
    return result


def of_another() -> torch.Tensor:
    """Draw from a generator that the region makes."""
    return torch.rand(4, device=CPU, generator=torch.Generator().manual_seed(3))


CHANGES = [
    restored,
    forked,
    seeded,
    seeded_alone,
    seeded_as_it_was,
    restored_at_the_end,
    seeded_anew,
    initialised,
    of_another,
]


@pytest.mark.parametrize("make", RECORDING_DRIVERS.values(), ids=RECORDING_DRIVERS)
@pytest.mark.parametrize("region", CHANGES)
def test_what_changes_a_generator_is_refused(
    region: Callable[[], torch.Tensor], make: Callable[[], GraphDriver]
) -> None:
    """A region that seeds, restores, forks or makes a generator is refused, and no generator changes."""
    torch.manual_seed(0)
    driver, before = make(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"random generator|other than the default") as caught:
        driver.capture(region, warmup=0)
    assert caught.value.rule == "GP18"
    assert f"{__file__}:" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "draws": lambda: draw() + torch.randn_like(x) + torch.empty_like(x).exponential_(),
    "a state that is read": lambda: draw() + 0 * torch.get_rng_state().numel() + draw(),
    "a fork without a draw": lambda: _fork_of_nothing() + draw(),
    "a state that is set as it is": lambda: _set_as_it_is() + draw(),
    "the default generator by name": lambda: torch.rand(4, device=CPU, generator=torch.default_generator),
    "dropout": lambda: functional.dropout(x, 0.5, training=True),
    "attention": lambda: functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 1)] * 3, dropout_p=0.5),
    "checkpointing": lambda: checkpoint(draw, use_reentrant=False),
    "vmap": lambda: torch.vmap(lambda row: row + draw()[0], randomness="different")(x),
    "a draw of no numbers": lambda: torch.empty(0, device=CPU).uniform_() + draw()[:0],
}


def _fork_of_nothing() -> torch.Tensor:
    with torch.random.fork_rng():
        return x + 1


def _set_as_it_is() -> torch.Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return x + 1


@pytest.mark.parametrize("make", [*RECORDING_DRIVERS.values()][:2], ids=["tape", "strict"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_eager_execution(name: str, make: Callable[[], GraphDriver]) -> None:
    """From any seed, successive replays draw the same numbers as eager runs; the capture draws nothing."""
    region = DRAWS[name]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    graph = make().capture(region, warmup=0)
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (1, 2):
        torch.manual_seed(seed)
        replayed = []
        for _ in range(2):
            graph.replay()
            replayed.append(graph.outputs.clone())
        left = torch.get_rng_state()
        torch.manual_seed(seed)
        assert all(torch.equal(each, region()) for each in replayed)
        assert torch.equal(torch.get_rng_state(), left)


@pytest.mark.parametrize("make", [*RECORDING_DRIVERS.values()][:2], ids=["tape", "strict"])
def test_eager_calls_may_seed(make: Callable[[], GraphDriver]) -> None:
    """An eager call between segments may change the generator: a replay calls it again."""
    driver = make()

    def region() -> torch.Tensor:
        first = draw()
        driver.eager_call(lambda: torch.manual_seed(3) and None)
        return torch.cat([first, draw()])

    graph = driver.capture(region)
    for seed in (1, 2):
        torch.manual_seed(seed)
        graph.replay()
        torch.manual_seed(seed)
        assert torch.equal(graph.outputs, region())


_STEPS = st.lists(st.sampled_from(["draw", "read", "save", "restore", "seed", "work"]), max_size=8)


def _program(steps: list[str]) -> torch.Tensor:
    out, saved = x + 0, torch.get_rng_state()
    for step in steps:
        if step == "draw":
            out = out + draw()
        elif step == "read":
            torch.get_rng_state()
        elif step == "save":
            saved = torch.get_rng_state()
        elif step == "restore":
            torch.set_rng_state(saved)
        elif step == "seed":
            torch.manual_seed(11)
        else:
            out = out * 2
    return out


def _is_repeated(steps: list[str]) -> bool:
    """Return whether each draw continues where the last one ended, across repetitions of the program."""
    left = now = saved = ("start", 0)
    for step in steps:
        if step == "draw":
            if now != left:
                return False
            left = now = now[0], now[1] + 1
        elif step == "save":
            saved = now
        elif step == "restore":
            now = saved
        elif step == "seed":
            now = "seed", 0
    return now == left


@settings(derandomize=True, max_examples=200)
@given(steps=_STEPS, mode=st.sampled_from(["tape", "strict"]))
def test_random_programs_draw_as_eager_execution_or_are_refused(steps: list[str], mode: str) -> None:
    """Programs of draws, seeds and restored states are refused exactly if a replay could differ."""
    with torch.inference_mode():
        driver = RECORDING_DRIVERS[mode]()
        if not _is_repeated(steps):
            with pytest.raises(CaptureError, match="state of the random generator is changed"):
                driver.capture(lambda: _program(steps))
            return
        graph = driver.capture(lambda: _program(steps))
        for seed in (1, 2):
            torch.manual_seed(seed)
            graph.replay()
            left = torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(graph.outputs, _program(steps))
            assert torch.equal(torch.get_rng_state(), left)
