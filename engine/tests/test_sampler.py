"""The sampler: support, frequencies, and independence of the batch."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import EngineError
from graphpact_engine.errors import RequestError
from graphpact_engine.request import Request, SamplingParams
from graphpact_engine.sampler import Sampler, _likeliest, _pick

VOCAB = 37


def request(name: str = "r", **sampling: Any) -> Request:
    """Return a request with a one-token prompt."""
    return Request(name, [1], SamplingParams(**sampling))


def draws(logits: list[float], count: int, **sampling: Any) -> Counter[int]:
    """Return how often each token is drawn from ``logits`` by one request."""
    one = request(**{"temperature": 1.0, "seed": 5, **sampling})
    row = torch.tensor([logits])
    sampler = Sampler()
    return Counter(sampler.sample(row, [one])[0] for _ in range(count))


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    """Return the chi-square statistic of ``counts``; tokens outside the support are infinite."""
    if set(counts) - set(probabilities):
        return math.inf
    total = sum(counts.values())
    return sum((counts[t] - total * p) ** 2 / (total * p) for t, p in probabilities.items())


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    """Temperature 0 takes the highest logit, of equal ones the lowest id, and draws nothing."""
    requests = [request("a"), request("b")]
    states = [one.generator.get_state() for one in requests]
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-1.0, -5.0, -2.0, -1.5]])
    assert Sampler().sample(logits, requests) == [1, 0]
    for one, state in zip(requests, states, strict=True):
        assert torch.equal(one.generator.get_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_of_any_float_type_are_sampled_and_left_alone(dtype: torch.dtype) -> None:
    """Greedy and drawn rows work in one batch of any float dtype, and logits are not written to."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    requests = [request(), request(temperature=1.0), request(temperature=0.5, top_k=3, top_p=0.9)]
    tokens = Sampler().sample(logits, requests)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] in logits[2].topk(3).indices
    assert torch.equal(logits, before)


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    seed=st.integers(0, 99),
)


@settings(derandomize=True, max_examples=60)
@given(params=st.lists(SAMPLING, min_size=1, max_size=7), rng=st.randoms(use_true_random=False))
def test_a_draw_does_not_depend_on_the_batch(params: list[SamplingParams], rng: Any) -> None:
    """Over five steps, a request draws the same tokens by itself and at any place of a batch."""
    source = torch.Generator().manual_seed(rng.randrange(1000))
    steps = torch.randn(5, len(params), VOCAB, generator=source) * 3
    sampler = Sampler()
    together = [Request(str(at), [1], one) for at, one in enumerate(params)]
    alone = [Request(str(at), [1], one) for at, one in enumerate(params)]
    for logits in steps:
        order = list(range(len(params)))
        rng.shuffle(order)
        tokens = sampler.sample(logits[order], [together[at] for at in order])
        singly = [sampler.sample(logits[at : at + 1], [alone[at]])[0] for at in order]
        assert tokens == singly


@settings(derandomize=True, max_examples=40)
@given(params=st.lists(SAMPLING, min_size=2, max_size=6), rng=st.randoms(use_true_random=False))
def test_what_a_sampler_keeps_of_a_batch_is_not_taken_for_another(
    params: list[SamplingParams], rng: Any
) -> None:
    """One sampler gives the tokens of new samplers for changing requests, orders and vocabularies."""
    kept = Sampler()
    mine, theirs = ([Request(str(at), [1], one) for at, one in enumerate(params)] for _ in range(2))
    rows: list[int] = []
    for step in range(12):
        if step % 3 == 0:
            rows = rng.sample(range(len(params)), rng.randrange(1, len(params) + 1))
        vocab = rng.choice([3, VOCAB])
        source = torch.Generator().manual_seed(step)
        logits = torch.randn(len(rows), vocab, generator=source) * 3
        tokens = kept.sample(logits, [mine[at] for at in rows])
        assert tokens == Sampler().sample(logits, [theirs[at] for at in rows])


@settings(derandomize=True, max_examples=100)
@given(
    shape=st.sampled_from([(1, 70_000), (40, 2000), (300, 256), (257, 255), (5, 13_107), (70, 1025)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_the_likeliest_token_is_the_first_of_the_largest_logits(
    shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """In blocks or not: maximum and first column of ties, of infinities and of NaN are those of torch."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3 + seed % 2, shape, generator=source).to(dtype)  # full of ties
    rare = torch.rand(shape, generator=source) < 0.5 / shape[1]
    odd = torch.tensor([math.nan, math.inf, -math.inf, 50.0])[torch.arange(shape[0]) % 4]
    logits = torch.where(rare, odd.unsqueeze(1).to(dtype), logits)
    logits[seed % shape[0]] = -math.inf
    padded = torch.full((shape[0], shape[1] + 7), 99.0, dtype=dtype)[:, : shape[1]].copy_(logits)
    for given_logits in (logits, padded):
        best, tokens = _likeliest(given_logits)
        assert torch.equal(tokens, logits.argmax(dim=-1))
        assert torch.equal(best.nan_to_num(nan=77.0), logits.amax(dim=-1).nan_to_num(nan=77.0))


def test_random_numbers_are_used_one_by_one_in_the_order_of_the_generator() -> None:
    """A request's random numbers equal those of single draws, in blocks of any size, ahead or not."""
    source = torch.Generator().manual_seed(5)
    expected = [torch.rand((), generator=source, dtype=torch.float64).item() for _ in range(200)]
    one, at = request(temperature=1.0, seed=5), 0
    for count in [1, 3, 30, 2, 40, 1] * 2:
        assert [one.uniform(ahead) for ahead in range(count)] == expected[at : at + count]
        one.use_uniforms(count)
        at += count


def test_seeds_decide_the_draws() -> None:
    """One seed gives one sequence of tokens, another seed another; None takes the engine's seed."""
    flat = torch.zeros(1, 1000)

    def sequence(one: Request) -> list[int]:
        return [Sampler().sample(flat, [one])[0] for _ in range(20)]

    first = sequence(request(temperature=1.0, seed=1))
    assert sequence(request(temperature=1.0, seed=1)) == first
    assert sequence(request(temperature=1.0, seed=2)) != first
    engines = Request("e", [1], SamplingParams(temperature=1.0), default_seed=1)
    assert sequence(engines) == first
    assert len(set(first)) > 10


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {3, 1}),  # .4 is short of .5
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.71}, {3, 1, 4}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 3, "top_p": 0.8}, {3, 1}),  # of the .85 that top-k leaves, .8 is .68
        ({"top_k": 3, "top_p": 0.85}, {3, 1, 4}),  # .7 is short of .7225
        ({"temperature": 0.25, "top_p": 0.7}, {3}),  # top-p judges the tempered probabilities
    ],
)
def test_the_support_is_exactly_the_top_k_and_top_p(sampling: dict[str, Any], support: set[int]) -> None:
    """Top-k, then top-p of the tempered probabilities, keep these tokens: no more, no fewer."""
    logits = [math.log(p) for p in (0.05, 0.3, 0.1, 0.4, 0.15)]
    assert set(draws(logits, 600, **sampling)) == support


def test_ties_at_the_border_go_to_the_lower_token() -> None:
    """Of equal logits, top-k and top-p keep those with the lower ids, as many as fit."""
    flat = [0.0] * 8
    assert set(draws(flat, 300, top_k=3)) == {0, 1, 2}
    assert set(draws(flat, 300, top_p=0.5)) == {0, 1, 2, 3}
    assert set(draws(flat, 300, top_p=0.51)) == {0, 1, 2, 3, 4}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.7}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.6, "top_k": 4}, [0, 1, 2, 4]),
        ({"temperature": 1.3, "top_p": 0.9}, [0, 1, 2, 4]),
    ],
)
def test_tokens_come_as_often_as_the_softmax_says(sampling: dict[str, Any], kept: list[int]) -> None:
    """4,000 draws agree with the renormalised tempered softmax (chi-square, p > 0.001)."""
    logits = [0.4, 1.9, 1.1, -1.5, 0.9, -2.0]
    tempered = torch.tensor(logits, dtype=torch.float64) / sampling.get("temperature", 1.0)
    weights = tempered.softmax(0)[kept]
    probabilities = dict(zip(kept, (weights / weights.sum()).tolist(), strict=True))
    limit = {3: 16.27, 5: 20.52}[len(kept) - 1]
    assert chi_square(draws(logits, 4000, **sampling), probabilities) < limit


def test_masked_tokens_are_never_drawn() -> None:
    """A logit of minus infinity is never drawn at any temperature; a tiny temperature is greedy."""
    assert set(draws([-math.inf, 0.0, -math.inf, 0.0], 200, temperature=1e6)) == {1, 3}
    assert set(draws([0.0, 1.0, 0.5], 50, temperature=1e-6)) == {1}
    assert set(draws([0.0, 1.0, 0.5], 50, temperature=5e-324)) == {1}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.499, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_weight_of_zero_is_never_picked(uniform: float, token: int) -> None:
    """Each token has its half-open share of [0, 1); one without weight has none, not even 0."""
    weights = torch.tensor([[0, 2**36, 0, 2**36, 0]])
    assert _pick(weights, torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [[token]]


def test_a_large_vocabulary_is_drawn_from_end_to_end() -> None:
    """With 200,000 equal logits the draws spread over the whole range: no sum overflows."""
    requests = [request(temperature=1.0, seed=seed) for seed in range(24)]
    tokens = Sampler().sample(torch.zeros(24, 200_000), requests)
    assert min(tokens) < 50_000
    assert max(tokens) > 150_000
    assert len(set(tokens)) == 24


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 9.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]])
def test_the_error_for_invalid_logits_names_the_request(sampling: dict[str, Any], bad: list[float]) -> None:
    """NaN, all minus infinity, or plus infinity raise EngineError naming that request only."""
    requests = [request("fine", **sampling), request("broken", **sampling)]
    with pytest.raises(EngineError, match="'broken'") as raised:
        Sampler().sample(torch.tensor([[0.0, 1.0, 2.0], bad]), requests)
    assert "fine" not in str(raised.value)


def test_rows_and_requests_must_agree() -> None:
    """More logits than requests is a defect and raises; no rows at all gives no tokens."""
    with pytest.raises(EngineError, match="for 1 requests"):
        Sampler().sample(torch.zeros(2, 3), [request()])
    assert Sampler().sample(torch.zeros(0, 3), []) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", frozenset({-3})),
    ],
)
def test_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    """A sampling parameter out of range raises RequestError naming the field and the value."""
    with pytest.raises(RequestError, match=f"{field} must be") as raised:
        SamplingParams(**{field: value})
    assert repr(value) in str(raised.value)


def test_parameters_at_the_edges_are_taken() -> None:
    """The ends of each range are valid, and the defaults are greedy with 128 tokens."""
    SamplingParams(max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    SamplingParams(temperature=5e-324, top_p=5e-324, top_k=10**9, seed=2**64 - 1)
    default = SamplingParams()
    assert (default.max_new_tokens, default.temperature, default.seed) == (128, 0, None)


def test_the_largest_seeds_reach_the_generator() -> None:
    """Every valid seed can seed a generator, and neighbours at the upper end differ."""
    states = {bytes(request(seed=seed).generator.get_state().numpy()) for seed in (2**64 - 1, 2**64 - 2)}
    assert len(states) == 2


def test_token_ids_cross_from_prompt_to_output() -> None:
    """Any range of known tokens equals that range of prompt and output joined."""
    one = Request("r", [1, 2, 3], SamplingParams())
    one.output_token_ids = [4, 5, 6]
    for start in range(7):
        for end in range(start, 7):
            assert one.token_ids(start, end) == [1, 2, 3, 4, 5, 6][start:end]
