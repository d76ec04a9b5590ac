"""The strict tape accepts legal programs and models, and replays them bit for bit."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import CaptureError
from graphpact.graphs import DeclaredMemory, Graph, GraphDriver
from graphpact_engine import models
from graphpact_tape.tape import TapeDriver
from support import PROGRAMS, leaves, run_program

CPU = torch.device("cpu")

# The ways to submit a step of a program to the device.
_WAYS = st.lists(st.sampled_from(["main", "main", "side", "event", "eager"]), min_size=9, max_size=9)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def _call(driver: GraphDriver, way: str, step: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Run a step on the main stream, on a side stream with fork and join, or as an eager call."""
    if way == "main":
        return step(*args)
    if way == "eager":
        return driver.eager_call(step, *args)
    main, side = driver.current_stream(), driver.stream()
    if way == "side":
        side.wait_stream(main)
        with side:
            result = step(*args)
        main.wait_stream(side)
        return result
    forked, done = driver.event(), driver.event()
    forked.record()
    side.wait_event(forked)
    with side:
        result = step(*args)
        done.record()
    main.wait_event(done)
    return result


class _Program:
    """A random program with its inputs, captured by a driver."""

    def __init__(self, driver: GraphDriver, steps: list[tuple[str, int, int]], ways: list[str]) -> None:
        self._driver, self._steps, self._ways = driver, steps, ways
        self.inputs = torch.zeros(4, 4, device=CPU), torch.zeros(4, 4, device=CPU)
        self.cache = torch.zeros(4, device=CPU)
        self.graph: Graph | None = None

    def run(self) -> list[torch.Tensor]:
        """Run the program, and write its last value to the cache."""
        way = itertools.cycle(self._ways)
        values = run_program(
            self._steps,
            *self.inputs,
            call=lambda *step_and_args: _call(self._driver, next(way), *step_and_args),
        )
        self.cache.copy_(values[-1].reshape(4, -1)[:, 0])
        return values

    def replays_like_eager(self, generator: torch.Generator) -> None:
        """Replay on new inputs, and compare outputs, cache and inputs with an eager run, bit for bit."""
        assert self.graph is not None
        for tensor in self.inputs:
            tensor.normal_(generator=generator)
        before = [t.clone() for t in self.inputs]
        self.cache.fill_(-1)
        self.graph.replay()
        got = [t.clone() for t in (*leaves(self.graph.outputs), self.cache, *self.inputs)]
        assert all(torch.equal(a, b) for a, b in zip(before, self.inputs, strict=True))
        for a, b in zip(got, [*self.run(), self.cache, *self.inputs], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@settings(derandomize=True, max_examples=150)
@given(
    programs=st.lists(st.tuples(PROGRAMS, _WAYS), min_size=1, max_size=2),
    seed=st.integers(0, 999),
)
def test_no_legal_program_is_refused(
    programs: list[tuple[list[tuple[str, int, int]], list[str]]], seed: int
) -> None:
    """Replays of legal programs with streams, eager calls and a cache equal eager runs, fast and strict."""
    for strict in (False, True):
        driver = TapeDriver(CPU, strict=strict)
        captured = [_Program(driver, *program) for program in programs]
        driver.declare(
            DeclaredMemory(
                refreshed=[t for program in captured for t in program.inputs],
                caches=[program.cache for program in captured],
            )
        )
        with torch.inference_mode():
            for program in captured:
                program.graph = driver.capture(program.run)
            generator = torch.Generator().manual_seed(seed)
            for program in [*captured, *captured[::-1], *captured]:
                program.replays_like_eager(generator)


def test_two_streams_may_share_a_buffer_in_parts() -> None:
    """Two streams may write different rows or columns of one tensor without a wait between them."""
    driver = TapeDriver(CPU, strict=True)
    x = torch.randn(4, 4)
    fused, stacked = torch.zeros(4, 8), torch.zeros(2, 4, 4)

    def region() -> torch.Tensor:
        side = driver.stream()
        side.wait_stream(driver.current_stream())
        with side:
            fused[:, :4].copy_(x)
            stacked[0].copy_(x)
        fused[:, 4:].copy_(x * 2)
        stacked[1].copy_(x * 3)
        driver.current_stream().wait_stream(side)
        return fused.sum() + stacked.sum()

    graph = driver.capture(region)
    for _ in range(2):
        x.normal_()
        graph.replay()
        got = graph.outputs.clone()
        assert torch.equal(got, region())


def test_temporaries_of_two_streams_are_not_one() -> None:
    """Memory that one stream freed and another stream allocated again is not a conflict."""
    driver = TapeDriver(CPU, strict=True)
    side = driver.stream()
    with driver.preparation():
        for _ in range(50):
            torch.zeros(4, device=CPU).add_(1)
            with side:
                torch.zeros(4, device=CPU).add_(1)


def test_a_default_device_places_what_names_none() -> None:
    """Inside ``with device:`` a tensor made without ``device=`` is a device tensor, as in torch."""
    x = torch.zeros(4)
    with CPU:
        graph = TapeDriver(CPU, strict=True).capture(lambda: x + torch.full((4,), 2.0))
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert graph.outputs.tolist() == [value + 2] * 4


# -- models ----------------------------------------------------------------------------------------

# The forward gets a mask with four dimensions: with two, or without a mask, transformers reads on the host.
_REFUSED = {
    "falcon": "takes a host tensor",  # fused_qkv[..., [-1], :]
    # Each forward chooses the frequencies: on the device, or by an if in older transformers.
    "longrope": "not declared as written|contents on the host",
    "dynamic_rope": "needs a tensor's contents on the host",  # if seq_len > max_seq_len_cached
}


def _record_forward(path: Path) -> tuple[Graph, Callable[[], torch.Tensor], torch.Tensor]:
    """Record a forward of a checkpoint on a strict tape; return graph, forward and token ids."""
    model = models.load_checkpoint(path, dtype=None, device=CPU, attention="eager").model
    ids = torch.randint(2, 199, (2, 12))
    positions = torch.arange(12).repeat(2, 1)
    mask = torch.full((2, 1, 12, 12), -1e9).triu(1)

    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        return logits

    driver = TapeDriver(CPU, strict=True)
    driver.declare(DeclaredMemory(refreshed=[ids, positions, mask]))
    return driver.capture(forward), forward, ids


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "phi3",
        "gemma2",
        "mixtral",
        "gpt_oss",
        "llama4",
        "lfm2",
    ],
)
def test_models_are_recorded_without_a_refusal(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """The strict tape records a forward pass of transformers; replays for other tokens equal eager runs."""
    graph, forward, ids = _record_forward(checkpoint(architecture))
    for seed in (1, 2):
        ids.copy_(torch.randint(2, 199, ids.shape, generator=torch.Generator().manual_seed(seed)))
        graph.outputs.fill_(0)
        graph.replay()
        got = graph.outputs.clone()
        assert torch.equal(got, forward())


@pytest.mark.parametrize(("architecture", "reason"), _REFUSED.items())
def test_models_that_no_graph_can_hold_are_refused(
    architecture: str, reason: str, checkpoint: Callable[..., Path]
) -> None:
    """Model work that a CUDA graph cannot record is refused; the error names the line in transformers."""
    with pytest.raises(CaptureError, match=reason) as caught:
        _record_forward(checkpoint(architecture))
    assert "/transformers/" in str(caught.value)
