"""One rank of ``test_ranks.py``: runs engines one after another, and prints what they generated.

    torchrun --nproc-per-node 2 rank_engine.py CASES

CASES is a JSON file: a list of cases, each with ``sets`` (settings), ``prompts`` (lists of token ids) and
``lengths`` (new tokens of each prompt). Rank 0 prints a JSON line for each case. With ``fault`` in a case,
``[rank, lane, step, what]``, that rank raises, is killed or is stopped before that step of the lane. With
``padding``, that token is written into the padding rows of every view; with ``unmasked``, the count of real
tokens of that rank's views is that of all rows.

Does not: compare.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from graphpact import ForwardBatch, Lane, hookimpl
from graphpact_engine.config import EngineConfig
from graphpact_engine.engine import Engine
from graphpact_engine.request import SamplingParams

RANK = int(os.environ.get("RANK", "0"))


class Fault:
    """An observer with a fault on one rank.

    Args:
        rank: The rank.
        lane: The lane.
        step: The step of the lane, from 1.
        what: ``raise``, or the name of a signal.
    """

    def __init__(self, rank: int, lane: str, step: int, what: str) -> None:
        self.where = rank, lane
        self.left = step
        self.what = what

    @hookimpl(wrapper=True)
    def launch(self, lane: Lane) -> Generator[None, Any, Any]:
        """Fail before the step."""
        if (RANK, lane.name) == self.where:
            self.left -= 1
            if not self.left:
                if self.what == "raise":
                    raise ValueError("a planted fault")
                os.kill(os.getpid(), getattr(signal, self.what))
        return (yield)


class Padding:
    """An observer that changes what padding rows hold, between the fill and the replay.

    Args:
        token: Written into the padding rows of ``input_ids``.
        unmasked: The rank whose count of real tokens is wrong; None for none.
    """

    def __init__(self, token: int, unmasked: int | None) -> None:
        self.token = token
        self.unmasked = unmasked

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Change the view."""
        view = yield
        view.input_ids[batch.num_tokens :] = self.token
        if self.unmasked == RANK and view.num_token_non_padded is not None:
            view.num_token_non_padded.fill_(len(view.input_ids))
        return view


class Counts:
    """An observer that notes the requests of each step by lane, and a digest of the bits of all logits."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.bits = hashlib.sha256()

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Note."""
        self.steps.setdefault(lane.name, []).append(batch.batch_size)
        outputs = yield
        if "logits" in outputs:
            self.bits.update(outputs.logits.contiguous().numpy().tobytes())
        return outputs


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case and return what rank 0 knows."""
    counts = Counts()
    observers: list[object] = [counts, *([Fault(*case["fault"])] if "fault" in case else [])]
    if "padding" in case:
        observers.append(Padding(case["padding"], case.get("unmasked")))
    with Engine(EngineConfig.load(None, overrides=case["sets"]), observers=observers) as engine:
        sampling = [
            SamplingParams(max_new_tokens=n, ignore_eos=True, **case.get("sampling", {}))
            for n in case["lengths"]
        ]
        answers = engine.generate(case["prompts"], sampling)
        lanes = {
            lane.name: {
                "replays": lane.stats.replays,
                "eager": {reason.name: n for (_, reason), n in lane.stats.eager.items()},
            }
            for lane in engine.lanes
        }
        verified = sum(verifier.verified for verifier in engine.verifiers)
    return {
        "tokens": [answer.token_ids for answer in answers],
        "lanes": lanes,
        "verified": verified,
        "steps": counts.steps,
        "bits": counts.bits.hexdigest(),
    }


torch.set_num_threads(1)
for each in json.loads(Path(sys.argv[1]).read_text()):
    found = run(each)
    if int(each.get("told_by", 0)) == RANK:
        print(json.dumps(found), flush=True)  # noqa: T201  read by the test
