"""Compare one architecture with transformers: the logits of an engine with those of one full forward pass.

The engine serves prompts of several lengths together, twice: with chunked prefill and decode steps captured
on the tape, and with prefill at once and no graphs. So tokens lie at many places of many batches, before
and after every window and threshold of the small model.

Does not: compare tokens, because equal logits give equal tokens.
"""

import re
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from graphpact.batch import ForwardBatch
from graphpact.errors import CaptureError
from graphpact.hookspecs import hookimpl
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from model_sweep.small_models import MAX_POSITIONS, VOCAB, save_small_model, small_config

PROMPT_LENGTHS = (3, 70, 1, 33)
NEW_TOKENS = 8
TOLERANCE = 1e-3
"""Tolerance for the logits, in standard deviations of the logits; float32 rounding differs by about 1e-5."""

_CHUNKS = ("engine.max_num_batched_tokens=16",)
_AT_ONCE = ("engine.max_num_batched_tokens=256",)
_EAGER = ("lanes.decode.runner=eager",)

Verdict = Literal["equal", "refused", "not built", "wrong", "crashed"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case.

    Attributes:
        case: One of `model_sweep.small_models.CASES`.
        verdict: ``not built``: transformers cannot make or run the small model.
        decode: Whether decode steps ran in graphs, ``captured``, or not, ``eager``; empty if not equal.
        reason: Why it was refused, not built or not captured, or what differs.
    """

    case: str
    verdict: Verdict
    decode: Literal["captured", "eager", ""] = ""
    reason: str = ""


def compare(case: str, *, runner: str = "cuda_graph", **changed: Any) -> Result:
    """Compare a small model with transformers.

    Args:
        case: One of `model_sweep.small_models.CASES`.
        runner: Captures the decode steps.
        changed: Settings of the model that differ.
    """
    graphs = (f"lanes.decode.runner={runner}", "lanes.decode.batch_sizes=[2,4]")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            save_small_model(path, small_config(case, **changed))
            reference = AutoModelForCausalLM.from_pretrained(
                path, attn_implementation="eager", dtype=torch.float32
            ).eval()
            _logits(reference, list(range(40)))
        except Exception as error:  # noqa: BLE001  any fault of a model that is not ours
            return Result(case, "not built", reason=_in_words(error, path))
        uncaptured = None
        try:
            try:
                steps = _serve(path, *_CHUNKS, *graphs)
            except CaptureError as error:
                uncaptured = _in_words(error, path)
                steps = _serve(path, *_CHUNKS, *_EAGER)
            steps += _serve(path, *_AT_ONCE, *_EAGER)
        except (CheckpointError, UnsupportedModelError) as error:
            return Result(case, "refused", reason=_in_words(error, path))
    difference = _largest_difference(reference, steps)
    if not difference < TOLERANCE:
        return Result(case, "wrong", reason=f"logits differ by {difference:.2g} standard deviations")
    return Result(case, "equal", "eager" if uncaptured else "captured", uncaptured or "")


class _Steps:
    """An observer that keeps the tokens of every sequence, and the logits of every step."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}  # by the request's row
        self.logits: list[tuple[int, int, torch.Tensor]] = []  # row, position, logits of that token
        self.replays = 0

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Generator[None, Any, Any]:
        """Keep the tokens and logits of one step."""
        outputs = yield
        lens = batch.extend_seq_lens_cpu
        counts = [1] * batch.batch_size if lens is None else lens.tolist()
        rows, logits = batch.req_pool_indices.tolist(), outputs.logits.float().clone()
        for row, new, of_row in zip(rows, batch.input_ids.split(counts), logits, strict=True):
            known = self.tokens.setdefault(row, [])
            known += new.tolist()
            self.logits.append((row, len(known) - 1, of_row))
        return outputs


def _serve(path: Path, *settings: str) -> list[tuple[list[int], int, torch.Tensor]]:
    """Return the tokens of a sequence, a position and the logits there, for each request of each step."""
    seen = _Steps()
    base = {
        "model.path": path,
        "engine.device": "cpu",
        "engine.max_num_seqs": len(PROMPT_LENGTHS),
        "engine.max_model_len": MAX_POSITIONS,
        "engine.page_size": 4,
    }
    overrides = [*(f"{key}={value}" for key, value in base.items()), *settings]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with Engine(EngineConfig.load(None, env={}, overrides=overrides), observers=[seen]) as engine:
        engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        replays = sum(lane.stats.replays for lane in engine.lanes)
    served = [tokens[:n] for tokens, n in zip(seen.tokens.values(), PROMPT_LENGTHS, strict=True)]
    if served != prompts or bool(replays) is (_EAGER[0] in settings):
        raise AssertionError("a request was preempted, or its steps did not run as asked")
    return [(seen.tokens[row], position, logits) for row, position, logits in seen.logits]


def _largest_difference(reference: Any, steps: list[tuple[list[int], int, torch.Tensor]]) -> float:
    """Return the largest difference to the logits of transformers, in standard deviations; inf for NaN."""
    largest = 0.0
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for tokens, position, logits in steps:
        if tuple(tokens) not in known:
            known[tuple(tokens)] = _logits(reference, tokens)
        expected = known[tuple(tokens)]
        off = (logits - expected[position]).abs().max() / expected.std()
        largest = max(largest, float(off.nan_to_num(torch.inf)))
    return largest


def _logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits ``[T, vocab]`` of one full forward pass of transformers."""
    with torch.inference_mode():
        given = reference(input_ids=torch.tensor([tokens]), use_cache=False)
    logits: torch.Tensor = given.logits[0].float()
    return logits


def _in_words(error: BaseException, path: Path) -> str:
    """Return the message of an error on one line, without local paths and the name of the model."""
    text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    text = re.sub(rf"\S+/site-packages/|{re.escape(str(path))}(: |/)", "", " ".join(text.split()))
    text = re.sub(r"^model type '\S+' (is not supported, because it has: )?", "", text)
    return text if len(text) <= 200 else f"{text[:200]} .."
