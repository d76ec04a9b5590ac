"""Many requests with too few pages for all of them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig


def run(path: Path, *overrides: str) -> tuple[Engine, list[list[int]]]:
    """Run 1,000 requests of random lengths and return the engine and their tokens."""
    config = EngineConfig.load(
        None,
        env={},
        overrides=[
            f'model.path="{path}"',
            'model.dtype="float64"',  # so that no tie between logits decides a token
            'engine.device="cpu"',
            "engine.max_num_seqs=16",
            "engine.max_num_batched_tokens=48",
            "engine.page_size=4",
            *overrides,
        ],
    )
    engine = Engine(config)
    draw = random.Random(0)
    requests = [
        engine.add(
            [draw.randrange(2, 199) for _ in range(draw.randrange(1, 40))],
            SamplingParams(max_new_tokens=draw.randrange(1, 24)),
        )
        for _ in range(1000)
    ]
    pages, rows = set(), set()
    step = 0
    while engine.scheduler.has_work:
        engine.step()
        pages |= engine.memory.pages.in_use
        rows |= engine.memory.requests.in_use
        step += 1
        if step % 50 == 0:
            engine.scheduler.check_invariants()
    engine.scheduler.check_invariants()
    assert engine.memory.pages.num_free == engine.memory.pages.num_pages
    assert engine.memory.requests.num_free == engine.memory.requests.max_requests
    assert 0 not in pages
    assert 0 not in rows
    assert not engine.memory.requests.req_to_token[0].any()
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    return engine, [request.output_token_ids for request in requests]


@pytest.mark.sweep
@pytest.mark.parametrize("pool", [24])
def test_pressure_changes_no_token(pool: int, checkpoint: Callable[..., Path]) -> None:
    """With too few pages, 1,000 requests are preempted and finish with the tokens of a run with enough."""
    path = checkpoint("llama", num_hidden_layers=1)
    roomy, expected = run(path)
    tight, got = run(path, f"engine.num_pages={pool}")
    assert roomy.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 20
    assert tight.lanes[0].stats.replays > 100
    assert got == expected
