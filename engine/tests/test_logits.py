"""Biases, penalties and suppressed tokens: equal to transformers' logits processors."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact_engine.logits import change_logits
from graphpact_engine.request import Request, SamplingParams
from graphpact_engine.sampler import Sampler

VOCAB = 23
END = frozenset({0, 7})
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Return a request in the middle of its output, with any of the parameters that change logits."""
    limit = 12
    sampling = SamplingParams(
        max_new_tokens=limit,
        min_new_tokens=draw(st.none() | st.integers(0, limit)),
        temperature=draw(st.sampled_from([0.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.3])),
        repetition_penalty=draw(st.none() | st.floats(0.5, 2.0)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4)),
        suppress_tokens=draw(st.none() | st.sets(TOKENS, max_size=4)),
        stop_token_ids=draw(st.sets(TOKENS, max_size=2)),
        ignore_eos=draw(st.booleans()),
    )
    request = Request("r", draw(st.lists(TOKENS, min_size=1, max_size=8)), sampling)
    request.output_token_ids += draw(st.lists(TOKENS, max_size=limit - 1))
    return request


def expected(row: torch.Tensor, request: Request) -> torch.Tensor:
    """Return ``[1, V]``: the logits ``[1, V]`` after transformers' processors, in their order."""
    sampling = request.sampling
    prompt, output = request.prompt_token_ids, request.output_token_ids
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else END)}
    processors: list[Any] = []
    if sampling.logit_bias:
        bias = [[[token], float(value)] for token, value in sampling.logit_bias.items()]
        processors.append(transformers.SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    ids = torch.tensor([prompt + output])
    scores = transformers.LogitsProcessorList(processors)(ids, row.float())
    for token in set(output):  # OpenAI's penalties: transformers has no processor for them
        scores[0, token] -= sampling.presence_penalty
        scores[0, token] -= sampling.frequency_penalty * output.count(token)
    processors = []
    if sampling.min_new_tokens and ends:
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, sorted(ends))
        )
    if sampling.suppress_tokens:
        processors.append(transformers.SuppressTokensLogitsProcessor(sorted(sampling.suppress_tokens)))
    return transformers.LogitsProcessorList(processors)(ids, scores)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(batch=st.lists(requests(), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_changed_logits_are_those_of_transformers(batch: list[Request], seed: int) -> None:
    """The logits of every request of a batch equal those of transformers' processors for that request."""
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 8
    before = logits.clone()
    changed = change_logits(logits, batch, END)
    assert torch.equal(logits, before)
    for at, request in enumerate(batch):
        alone = expected(logits[at : at + 1].clone(), request)
        torch.testing.assert_close(changed[at : at + 1], alone, rtol=1e-6, atol=1e-5)
        if not request.changes_logits:
            assert torch.equal(changed[at], logits[at])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(batch=st.lists(requests(), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_the_token_of_a_request_does_not_depend_on_the_others(batch: list[Request], seed: int) -> None:
    """In bfloat16 too, a request gets the same token by itself and among requests with changed logits."""
    source = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(batch), VOCAB, generator=source) * 4).bfloat16()
    again = [Request("r", r.prompt_token_ids, r.sampling) for r in batch]
    for request, copy in zip(batch, again, strict=True):
        copy.output_token_ids += request.output_token_ids
    sampler = Sampler(END)
    together = sampler.sample(logits, batch)
    alone = [sampler.sample(logits[at : at + 1], [one])[0] for at, one in enumerate(again)]
    assert together == alone


def test_counts_follow_the_output() -> None:
    """Penalties see each new token, at any number of tokens between two steps."""
    request = Request("r", [1, 2, 2], SamplingParams(frequency_penalty=1.0))
    assert request.output_counts() == {1: 0, 2: 0}
    request.output_token_ids += [2, 3]
    assert request.output_counts() == {1: 0, 2: 1, 3: 1}
    request.output_token_ids += [3]
    assert request.output_counts() == request.output_counts() == {1: 0, 2: 1, 3: 2}


def test_requests_without_such_parameters_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are changed for requests with such parameters only, and not at all without one."""
    seen: list[list[str]] = []

    def record(logits: Any, requests: Any, *more: Any) -> Any:
        seen.append([request.request_id for request in requests])
        return change_logits(logits, requests, *more)

    monkeypatch.setattr("graphpact_engine.sampler.change_logits", record)
    plain = Request("plain", [1], SamplingParams(temperature=1.0, top_p=0.5, stop="x"))
    biased = Request("biased", [1], SamplingParams(logit_bias={3: 100.0}))
    sampler = Sampler(END)
    sampler.sample(torch.zeros(1, VOCAB), [plain])
    assert seen == []
    assert sampler.sample(torch.zeros(2, VOCAB), [plain, biased])[1] == 3
    assert seen == [["biased"]]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 9]),
    top_p=st.sampled_from([0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_support_is_that_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """The tokens that can be drawn are those that transformers' temperature, top-k, top-p and min-p keep."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(transformers.MinPLogitsWarper(min_p))
    kept = transformers.LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits)
    probabilities = kept.softmax(-1)[0]
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    count = 300
    many = [Request(str(at), [1], sampling, default_seed=at) for at in range(count)]
    for at, request in enumerate(many):
        request.generator.manual_seed(at)
    drawn = set(Sampler().sample(logits.expand(count, -1), many))
    assert drawn <= set(probabilities.nonzero().flatten().tolist())
    likely = (probabilities > 0.1).nonzero().flatten().tolist()
    assert drawn >= set(likely)  # one in 10**13 is missed by chance


def test_every_token_suppressed_but_one_is_that_one() -> None:
    """Suppressed tokens are never chosen, however likely, greedily or drawn."""
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0) * 10
    for temperature in (0.0, 5.0):
        request = Request(
            "r",
            [1],
            SamplingParams(temperature=temperature, suppress_tokens=[t for t in range(VOCAB) if t != 4]),
        )
        assert Sampler().sample(logits, [request]) == [4]
    assert math.isinf(change_logits(logits, [request], END)[0, 5])
