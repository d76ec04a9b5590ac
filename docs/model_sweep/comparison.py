"""One architecture held against transformers: every logit that an engine computes, against one full forward pass.

The engine serves prompts of several lengths together, so that their tokens lie at many places of its batches,
beyond every window and threshold of the small models. It does so twice: prefill in chunks with captured decode
graphs on the tape, and prefill at once, eagerly.

Does not: compare tokens; equal logits give equal tokens.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from graphpact.batch import ForwardBatch
from graphpact.errors import CaptureError
from graphpact_engine.errors import UnsupportedModelError
from graphpact.hookspecs import hookimpl
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig

from model_sweep.small_models import MAX_POSITIONS, VOCAB, save_small_model

PROMPT_LENGTHS = (3, 70, 1, 33)
NEW_TOKENS = 8
TOLERANCE = 1e-3
"""Largest difference of two logits, in standard deviations of the logits."""

Verdict = Literal["equal", "refused", "not built", "wrong", "crashed"]


@dataclass(frozen=True, slots=True)
class Result:
    architecture: str
    verdict: Verdict
    captured: bool = False
    reason: str = ""


class _Logits:
    """An observer that keeps the logits of every step, by the request's row and the position of its token."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = {}
        self.logits: dict[int, dict[int, torch.Tensor]] = {}

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Keep the logits of one step."""
        outputs = yield
        lens = batch.extend_seq_lens_cpu
        counts = [1] * batch.batch_size if lens is None else lens.tolist()
        rows, ends = batch.req_pool_indices.tolist(), torch.tensor(counts).cumsum(0).tolist()
        ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
        for i, row in enumerate(rows):
            for at in range(ends[i] - counts[i], ends[i]):
                self.tokens.setdefault(row, {})[positions[at]] = ids[at]
            self.logits.setdefault(row, {})[positions[ends[i] - 1]] = outputs.logits[i].float().clone()
        return outputs


def compare(architecture: str, path: Path, catalog: Any = None) -> Result:
    """Hold one architecture against transformers, in a model that is written to ``path``."""
    try:
        save_small_model(path, architecture)
    except Exception as error:
        return Result(architecture, "not built", reason=one_line(error))
    try:
        _reference(path)(input_ids=torch.arange(40)[None])
    except Exception as error:
        return Result(architecture, "not built", reason="transformers: " + one_line(error))
    try:
        captured, difference = _captured(path, catalog)
        whole = _difference(path, catalog, "lanes.decode.runner='eager'", "engine.max_num_batched_tokens=256")
    except UnsupportedModelError as error:
        return Result(architecture, "refused", reason=one_line(error))
    worst = max(difference, whole)
    if not worst < TOLERANCE:
        return Result(architecture, "wrong", captured == "", f"{difference} {whole} {captured}")
    return Result(architecture, "equal", captured == "", captured)


def _captured(path: Path, catalog: Any) -> tuple[str, float]:
    try:
        return "", _difference(path, catalog, "engine.max_num_batched_tokens=16", "lanes.decode.batch_sizes=[2,4]", replays=True)
    except CaptureError as error:
        return one_line(error), _difference(
            path, catalog, "lanes.decode.runner='eager'", "engine.max_num_batched_tokens=16"
        )


def _difference(path: Path, catalog: Any, *settings: str, replays=False) -> float:
    seen = _Logits()
    config = EngineConfig.load(
        None,
        env={},
        overrides=[
            f"model.path={str(path)!r}",
            "engine.device='cpu'",
            f"engine.max_num_seqs={len(PROMPT_LENGTHS)}",
            f"engine.max_model_len={MAX_POSITIONS}",
            "engine.page_size=4",
            *settings,
        ],
    )
    with Engine(config, catalog=catalog, observers=[seen]) as engine:
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        if replays:
            assert engine.lanes[0].stats.replays or engine.lanes[1].stats.replays
    model = _reference(path)
    worst = 0.0
    assert len(seen.tokens) == len(prompts)
    for row, tokens in seen.tokens.items():
        ids = torch.tensor([[tokens[at] for at in sorted(tokens)]])
        with torch.inference_mode():
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
        for at, logits in seen.logits[row].items():
            d = (logits - expected[at]).abs().max() / expected.std()
            worst = max(worst, float(d)) if d == d else float("inf")
    return worst


def _reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
