"""Lanes with `share_buffers` share the memory of their inputs, and give the same results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import ForwardBatch, ForwardMode
from graphpact.errors import ConfigError, SlotError
from graphpact.graphs import Graph, GraphDriver
from graphpact.runners import RunnerContext
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_tape.tape import TapeDriver
from support import Catalog

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
INPUTS = ["input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"]
BOTH = ["lanes.decode.share_buffers=true", "lanes.prefill.share_buffers=true"]


class DecodesAnywhere(CudaGraphRunner):
    """A runner that captures decode in a lane of any mode, so that two lanes have the same slots."""

    modes = frozenset(ForwardMode)

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(replace(context, mode=ForwardMode.DECODE))


class OtherLength(DecodesAnywhere):
    """A runner that pads with another length than the backend declares."""

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(replace(context, backend=replace(context.backend, seq_len_fill_value=7)))


def _engine(*overrides: str, prefill: str = "decodes_anywhere") -> Engine:
    always = [f'model.path="{TINY}"', 'engine.device="cpu"', f"lanes.prefill.runner={prefill}"]
    config = EngineConfig.load(None, env={}, overrides=[*always, *overrides])
    catalog = Catalog(decodes_anywhere=DecodesAnywhere, other_length=OtherLength)
    return Engine(config, catalog=catalog)


def _addresses(engine: Engine) -> list[dict[str, int]]:
    found = []
    for lane in engine.lanes:
        assert lane.registry is not None
        buffers = {slot.name: slot.buffer for slot in lane.registry}
        found.append({name: b.data_ptr() for name, b in buffers.items() if b is not None})
    return found


def _batch(engine: Engine, size: int, seed: int) -> ForwardBatch:
    """Return a batch of the request rows 1 to ``size``, each with one page and no cached token."""
    rows = torch.arange(1, size + 1)
    page = engine.memory.limits.page_size
    engine.memory.requests.req_to_token[rows, :page] = (rows[:, None] * page + torch.arange(page)).int()
    generator = torch.Generator().manual_seed(seed)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=torch.randint(32, 127, (size,), generator=generator),
        positions=torch.zeros(size, dtype=torch.int64),
        out_cache_loc=rows * page,
        req_pool_indices=rows,
        seq_lens=torch.ones(size, dtype=torch.int64),
        seq_lens_cpu=torch.ones(size, dtype=torch.int64),
    )


def test_lanes_that_say_so_have_their_inputs_in_one_place() -> None:
    """Input slots of sharing lanes have one address; other slots have one for each lane."""
    with _engine(*BOTH) as engine:
        decode, prefill = _addresses(engine)
    assert [decode[name] for name in INPUTS] == [prefill[name] for name in INPUTS]
    assert len(set(decode.values())) == len(decode)
    assert not {v for k, v in decode.items() if k not in INPUTS} & set(prefill.values())


@pytest.mark.parametrize("overrides", [[], BOTH[:1], BOTH[1:]], ids=["none", "first", "second"])
def test_others_have_memory_of_their_own(overrides: list[str]) -> None:
    """Unless both lanes have `share_buffers`, their slots have no address in common."""
    with _engine(*overrides) as engine:
        decode, prefill = _addresses(engine)
    assert not set(decode.values()) & set(prefill.values())


def test_lanes_that_share_take_turns_and_answer_as_alone() -> None:
    """Alternating replays of both lanes, with growing and shrinking batches, equal eager runs."""
    with _engine(*BOTH) as engine:
        for step, size in enumerate((3, 8, 1, 5, 5, 2)):
            lane = engine.lanes[step % 2]
            batch = _batch(engine, size, seed=step)
            replayed = lane.run(batch).clone().logits
            eager = lane.run_eager(batch).logits
            torch.testing.assert_close(replayed, eager, rtol=1e-5, atol=1e-4)
        assert [lane.stats.replays for lane in engine.lanes] == [3, 3]


def test_sharing_changes_no_answer() -> None:
    """The same prompts get the same tokens with shared buffers as without."""
    sampling = SamplingParams(max_new_tokens=8)
    prompts = ["Return the ", "A", "If the file is not found, "]
    texts = []
    for overrides in ([], BOTH):
        with _engine(*overrides) as engine:
            texts.append([done.token_ids for done in engine.generate(prompts, sampling)])
    assert texts[0] == texts[1]


def test_another_sentinel_is_refused_before_anything_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane that would pad a shared slot with another value is refused, and no lane captures anything."""
    captures: list[GraphDriver] = []
    real = TapeDriver.capture

    def capture(driver: TapeDriver, *args: Any, **more: Any) -> Graph:
        captures.append(driver)
        return real(driver, *args, **more)

    monkeypatch.setattr(TapeDriver, "capture", capture)
    with pytest.raises(SlotError, match=r"in lane 'prefill' holds 7 .* in lane 'decode'"):
        _engine(*BOTH, prefill="other_length")
    assert captures == []
    with _engine(*BOTH):
        assert captures


def test_a_runner_without_buffers_has_none_to_share() -> None:
    """`share_buffers` for a lane whose runner captures nothing is a configuration error."""
    with pytest.raises(ConfigError, match=r"lanes\.prefill\.share_buffers = true, but"):
        _engine(*BOTH, prefill="eager")
