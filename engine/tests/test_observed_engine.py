"""Tests of an engine's observers: their order around its lanes, and the steps that they see."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import Lane
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import PluginError
from graphpact.hookspecs import hookimpl
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import VerificationError
from graphpact_engine.trace import HookTrace
from graphpact_tape.poison import is_poison
from support import Catalog

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
Around = Generator[None, Any, Any]
CALLS: list[str] = []


class Notes:
    """An observer that records when a step begins and ends."""

    name = "given"

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane) -> Around:
        """Record the begin and the end."""
        CALLS.append(f"{self.name} before {lane.name}")
        outputs = yield
        CALLS.append(f"{self.name} after {lane.name}")
        return outputs


class First(Notes):
    """The first configured observer."""

    name = "first"
    built: list["First"] = []  # noqa: RUF012  emptied by the fixture

    def __init__(self) -> None:
        self.built.append(self)


class Second(Notes):
    """The second configured observer."""

    name = "second"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the records of earlier tests."""
    monkeypatch.delenv("GRAPHPACT_TRACE", raising=False)
    CALLS.clear()
    First.built.clear()


def run(*overrides: str, catalog: Catalog | None = None, observers: Any = ()) -> list[int]:
    """Return three tokens of an engine with one captured shape."""
    always = [f'model.path="{TINY}"', 'engine.device="cpu"', "engine.max_num_seqs=1"]
    config = EngineConfig.load(
        env={}, overrides=[*always, "engine.num_pages=8", "engine.max_model_len=64", *overrides]
    )
    catalog = catalog or Catalog(first=First, second=Second, trace=HookTrace)
    with Engine(config, catalog=catalog, observers=observers) as engine:
        return engine.generate(["If "], SamplingParams(max_new_tokens=3))[0].token_ids


def test_observers_given_are_outside_of_those_configured() -> None:
    """In each step, also eager, the given observer is outermost; the configured ones follow in order."""
    plain = run()
    assert run('engine.observers=["first", "second"]', observers=[Notes()]) == plain
    order = [
        "given before",
        "first before",
        "second before",
        "second after",
        "first after",
        "given after",
    ]
    assert [f"{call} {lane}" for lane in ("prefill", "decode", "decode") for call in order] == CALLS


def test_a_configured_observer_is_built_once_for_each_lane() -> None:
    """Each lane has its own instance of a configured observer."""
    run('engine.observers=["first"]')
    assert len(First.built) == 2
    rest = ['lanes.rest.mode="decode"', "lanes.rest.runner=eager", "lanes.decode.batch_sizes=[1]"]
    run('engine.observers=["first"]', *rest)
    assert len(First.built) == 2 + 3


def test_verification_is_outside_of_observers() -> None:
    """Verification finds an observer that changes the outputs of a replay."""

    class Damages:
        @hookimpl(wrapper=True)
        def run_step(self, lane: Lane) -> Around:
            outputs = yield
            if lane.name == "decode":
                outputs.logits.add_(1.0)
            return outputs

    with pytest.raises(VerificationError, match="logits of request 0"):
        run("verify.replay_against_eager=1.0", observers=[Damages()])


def test_the_guard_of_a_strict_lane_is_outside_of_observers() -> None:
    """An observer sees the slots as the guard leaves them: poisoned before the fill, written after it."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Looks:
        @hookimpl(wrapper=True)
        def populate(self, registry: CudaGraphBufferRegistry) -> Around:
            buffer = registry.get_slot("seq_lens").buffer
            assert buffer is not None
            before = buffer.clone()
            result = yield
            seen.append((before, buffer.clone()))
            return result

    run("lanes.decode.strict=true", observers=[Looks()])
    states = [(bool(is_poison(a).all()), bool(is_poison(b).any())) for a, b in seen]
    assert states[1:] == [(True, False), (True, False)]  # after that of the capture


def test_an_observer_that_cannot_be_built_is_named() -> None:
    """An error of the observer's class is reported with the plugin's kind and name."""

    class Raises(Notes):
        def __init__(self) -> None:
            raise OSError("no socket")

    with pytest.raises(PluginError, match="observer 'acme' cannot be used: it raised OSError: no socket"):
        run('engine.observers=["acme"]', catalog=Catalog(acme=Raises))


@pytest.mark.parametrize("selected", ["[]", '["trace"]'])
def test_a_trace_prints_each_hook_once(
    selected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable, with or without the plugin, gives one trace of captures, replays and eager steps."""
    monkeypatch.setenv("GRAPHPACT_TRACE", "1")
    run(f"engine.observers={selected}")
    lines = capsys.readouterr().err.splitlines()
    assert sum("init_metadata_capture" in line for line in lines) == 1
    assert sum("init_metadata_replay" in line for line in lines) == 2
    assert sum("step of lane 'prefill'" in line for line in lines) == 1
    assert sum("step of lane 'decode'" in line for line in lines) == 2
