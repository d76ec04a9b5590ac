"""Speculative decoding gives the tokens of decoding without it, whatever is drafted.

The target and the draft heads are random; a small vocabulary makes drafts correct often enough.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from checkpoints import needs_seam, save_random_draft
from graphpact import ForwardBatch, ForwardMode, SpeculationAlgorithm, StepOutputs
from graphpact.attention import GraphSupport
from graphpact.errors import GraphpactError, UsageError
from graphpact.plugins import PluginCatalog
from graphpact.speculation import DecodeStep, ExtendStep, LaneRole
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.request import Request
from graphpact_flashinfer import FlashInferBackend
from support import ROOT, pairwise

HEADS = {
    "eagle": ("eagle", "LlamaForCausalLMEagle"),
    "eagle3": ("eagle", "LlamaForCausalLMEagle3"),
    "mtp": ("frozen_kv_mtp", "LlamaForCausalLMFrozenKvMtp"),
}
TARGET: dict[str, Any] = {"vocab_size": 7, "hidden_size": 32, "num_attention_heads": 2}
TARGET |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
# Lengths from one token to several pages, in an order that makes batches grow and shrink.
PROMPT_LENGTHS = (1, 5, 16, 33, 3, 2)

DIMENSIONS: dict[str, Sequence[Any]] = {
    "head": ["eagle", "mtp", "eagle3"],
    "topk": [1, 4],
    "num_steps": [1, 2, 3, 4, 5],
    "width": ["fewest", "middle", "most"],
    "page_size": [1, 16],
    "backend": ["flashinfer", "fa3"],
    "graphs": ["strict", "fast", "none"],
    "pool": ["roomy", "starved"],
}


def prompts() -> list[list[int]]:
    """Return the prompts of every run."""
    draw = random.Random(3)
    return [[draw.randrange(2, 7) for _ in range(length)] for length in PROMPT_LENGTHS]


def build(target: Path, *overrides: str) -> Engine:
    """Return an engine with few seats, in float64, so that no tie between logits decides a token."""
    settings = [
        f'model.path="{target}"',
        'model.dtype="float64"',
        'engine.device="cpu"',
        "engine.max_num_seqs=3",
        "engine.max_num_batched_tokens=96",
        "engine.max_model_len=64",
        *overrides,
    ]
    return Engine(EngineConfig.load(None, env={}, overrides=settings))


def generate(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    """Return the tokens of every prompt; the scheduler's rules hold after every step."""
    pages, free = engine.memory.pages, engine.memory.pages.num_free
    requests = [engine.add(prompt, sampling) for prompt in prompts()]
    while engine.scheduler.has_work:
        engine.step()
        if free == pages.num_pages:  # otherwise a test has taken the others
            engine.scheduler.check_invariants()
    assert pages.num_free == free
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> Path:
    """Return a target with a vocabulary of seven tokens."""
    return checkpoint("llama", **TARGET)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a directory for each kind of head."""
    folder = tmp_path_factory.mktemp("heads")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {
        name: save_random_draft(folder / name, target, architecture, **heads)
        for name, (_, architecture) in HEADS.items()
    }


@pytest.fixture(scope="module")
def expected(target: Path) -> Callable[[SamplingParams], list[list[int]]]:
    """Return a function that gives the tokens without speculation and without graphs."""
    found: dict[str, list[list[int]]] = {}

    def of(sampling: SamplingParams) -> list[list[int]]:
        key = repr(sampling)
        if key not in found:
            found[key] = generate(build(target, "lanes.decode.runner=eager"), sampling)
        return found[key]

    return of


def num_draft_tokens(topk: int, num_steps: int, width: str) -> int:
    """Return the tokens of a verification: two, all candidates, or a number between that is not steps + 1."""
    most = min(1 + topk + (num_steps - 1) * topk**2, 24)
    middle = next((n for n in range(most - 1, 2, -1) if n != num_steps + 1), most)
    return {"fewest": 2, "middle": middle, "most": most}[width]


def starved_pages(case: dict[str, Any]) -> int:
    """Return the number of pages for the longest request, plus a few more."""
    width = num_draft_tokens(case["topk"], case["num_steps"], case["width"])
    reserved = max(width, case["topk"] * case["num_steps"])
    return -(-(63 + reserved) // case["page_size"]) + (4 if case["page_size"] == 1 else 0)


def overrides(case: dict[str, Any], heads: dict[str, Path]) -> list[str]:
    """Return the configuration of a case."""
    algorithm, _ = HEADS[case["head"]]
    width = num_draft_tokens(case["topk"], case["num_steps"], case["width"])
    lanes = ["draft", "verify", *["draft_extend"][: algorithm == "eagle"]]
    found = [
        f"speculative.algorithm={algorithm}",
        f'speculative.draft_model="{heads[case["head"]]}"',
        f"speculative.topk={case['topk']}",
        f"speculative.num_steps={case['num_steps']}",
        f"speculative.num_draft_tokens={width}",
        f"engine.page_size={case['page_size']}",
        f"engine.attention_backend={case['backend']}",
    ]
    for lane in lanes:
        if case["graphs"] == "none":
            found.append(f"lanes.{lane}.capture=false")
            continue
        rows = case["topk"] if (lane, algorithm) == ("draft", "frozen_kv_mtp") else 1
        found += [f"lanes.{lane}.batch_sizes=[{rows},{3 * rows}]"]
        found += [f"lanes.{lane}.strict=true"] * (case["graphs"] == "strict")
    if case["pool"] == "starved":
        found.append(f"engine.num_pages={starved_pages(case)}")
    return found


def name(case: dict[str, Any]) -> str:
    """Return the values of a case as its id."""
    return "-".join(str(value) for value in case.values())


def check(
    case: dict[str, Any],
    target: Path,
    heads: dict[str, Path],
    expected: Callable[[SamplingParams], list[list[int]]],
    sampling: SamplingParams,
) -> Engine:
    """Check that the tokens of a case are those without speculation; return the engine."""
    engine = build(target, *overrides(case, heads))
    tokens = generate(engine, sampling)
    assert tokens == expected(sampling)
    assert engine.speculation is not None
    assert engine.speculation.stats.accepted.total() > 0
    lanes = {lane.name: lane.stats for lane in engine.lanes}
    for lane in {"draft", "verify", "draft_extend"} & lanes.keys():
        replays, eager = lanes[lane].replays, lanes[lane].eager.total()
        ran, other = (eager, replays) if case["graphs"] == "none" else (replays, eager)
        assert ran > 5
        assert other == 0
    assert (engine.scheduler.num_preemptions > 0) is (case["pool"] == "starved")
    return engine


GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(
    max_new_tokens=24, temperature=1.3, top_k=6, top_p=0.95, frequency_penalty=0.3, ignore_eos=True
)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", pairwise(DIMENSIONS), ids=name)
def test_greedy_tokens_are_those_without_speculation(
    case: dict[str, Any],
    target: Path,
    heads: dict[str, Path],
    expected: Callable[[SamplingParams], list[list[int]]],
) -> None:
    """With every pair of settings, greedy output equals that of plain decoding, and graphs ran."""
    check(case, target, heads, expected, GREEDY)


DRAWN_CASES = pairwise({name: DIMENSIONS[name] for name in ("head", "topk", "page_size", "graphs", "pool")})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [{**case, "num_steps": 3, "width": "middle", "backend": "flashinfer"} for case in DRAWN_CASES],
    ids=name,
)
def test_drawn_tokens_are_those_without_speculation(
    case: dict[str, Any],
    target: Path,
    heads: dict[str, Path],
    expected: Callable[[SamplingParams], list[list[int]]],
) -> None:
    """With temperature, filters and penalties, a seed gives the tokens that it gives without speculation."""
    check(case, target, heads, expected, DRAWN)


OF_DRAFTS = [
    dict(zip(("head", "topk", "num_steps", "width"), values, strict=True))
    for values in itertools.product(
        ("eagle", "mtp"), *(DIMENSIONS[n] for n in ("topk", "num_steps", "width"))
    )
]
OF_ENGINES = [
    dict(zip(("page_size", "backend", "graphs"), values, strict=True))
    for values in itertools.product((1, 16), DIMENSIONS["backend"], ("strict", "fast"))
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [
        {**case, **OF_ENGINES[(at + more) % len(OF_ENGINES)]}
        for at, case in enumerate(OF_DRAFTS)
        for more in (0, 3)
    ],
    ids=name,
)
def test_greedy_tokens_are_those_without_speculation_in_every_case(
    case: dict[str, Any],
    target: Path,
    heads: dict[str, Path],
    expected: Callable[[SamplingParams], list[list[int]]],
) -> None:
    """Every combination of draft settings gives the greedy output of plain decoding, with many pages and few.

    Each is run with two settings of the engine, and all settings of the engine are run.
    """
    of_engine = {**case, "pool": "roomy"}
    engine = check(of_engine, target, heads, expected, GREEDY)
    pages = engine.memory.pages
    taken = pages.alloc(pages.num_free - starved_pages(of_engine))
    assert taken is not None
    assert generate(engine, GREEDY) == expected(GREEDY)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.few(1)
@needs_seam
@pytest.mark.parametrize("graphs", ["strict", "none"])
def test_a_target_with_latents_verifies_drafts_of_a_head_without(
    graphs: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A model with MLA verifies on trtllm_mla what a Llama head drafts on flashinfer, in one KV cache."""
    latents = checkpoint("deepseek_v3", vocab_size=7)
    head = save_random_draft(tmp_path / "head", latents, "LlamaForCausalLMEagle")
    mla = ["engine.attention_backend=trtllm_mla", "engine.page_size=32", 'model.dtype="float32"']
    plain = build(latents, *mla, "lanes.decode.runner=eager")
    case = {"head": "eagle", "topk": 1, "num_steps": 3, "width": "middle", "page_size": 32, "graphs": graphs}
    drafts = [
        f"lanes.{lane}.attention_backend=flashinfer" for lane in ("draft", "draft_extend", "draft_prefill")
    ]
    settings = overrides({**case, "backend": "trtllm_mla", "pool": "roomy"}, {"eagle": head})
    engine = build(latents, *settings, *mla, *drafts)
    assert generate(engine, GREEDY) == generate(plain, GREEDY)
    assert engine.speculation is not None
    assert engine.speculation.stats.accepted.total() > 0
    assert engine.model.layers[0].kv_lora_rank is not None


# -- what ends, fails or is refused --------------------------------------------------------------------

TINY = ROOT / "examples/models"


def tiny(*overrides: str, **more: Any) -> Engine:
    """Return an engine with the shipped target and its EAGLE head."""
    settings = [f'model.path="{TINY / "tiny-llama"}"', "engine.max_num_seqs=4", "engine.max_model_len=256"]
    return Engine(EngineConfig.load(None, env={}, overrides=[*settings, *overrides]), **more)


EAGLE = ("speculative.algorithm=eagle", f'speculative.draft_model="{TINY / "tiny-llama-eagle"}"')
EAGERLY = [f"lanes.{lane}.capture=false" for lane in ("draft", "verify", "draft_extend")]
TEXTS = ["Return a list of ", "Open a file ", "If the ", "Read the next line "]


@pytest.mark.parametrize(
    "stop", ["the s", "ing", *(pytest.param(s, marks=pytest.mark.sweep) for s in (" of", "\n"))]
)
def test_a_stop_string_ends_where_it_ends_without_speculation(stop: str) -> None:
    """A stop string among several accepted tokens cuts text and tokens at the same place."""
    sampling = SamplingParams(max_new_tokens=40, stop=stop)
    told = [
        [(c.text, c.token_ids, c.finish_reason) for c in engine.generate(TEXTS, sampling)]
        for engine in (tiny("lanes.decode.capture=false"), tiny(*EAGLE, *EAGERLY))
    ]
    assert told[0] == told[1]
    assert "stop" in {reason for _, _, reason in told[0]}


def test_limits_end_where_they_end_without_speculation() -> None:
    """Lengths, end tokens and the context end a request at the same token, whatever a step accepts."""
    short = "engine.max_model_len=48"
    engines = [tiny(short, "lanes.decode.capture=false"), tiny(short, *EAGLE, *EAGERLY)]
    for sampling in (
        *(SamplingParams(max_new_tokens=count) for count in range(1, 7)),
        SamplingParams(max_new_tokens=60, stop_token_ids=[ord("s")]),
        SamplingParams(max_new_tokens=60, min_new_tokens=20, stop_token_ids=[ord("e")]),
        SamplingParams(max_new_tokens=60),  # the context ends first
    ):
        told = [[(c.token_ids, c.finish_reason) for c in e.generate(TEXTS, sampling)] for e in engines]
        assert told[0] == told[1]


def test_tokens_come_as_a_stream_and_an_aborted_request_gives_its_memory_back() -> None:
    """A step gives several deltas of a request; a closed stream leaves no page and no row in use."""
    engine = tiny(*EAGLE, *EAGERLY)
    whole = engine.generate(TEXTS, SamplingParams(max_new_tokens=30))
    with engine.stream(TEXTS, SamplingParams(max_new_tokens=30)) as stream:
        deltas = list(stream)
    for index, completion in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == index]
        assert [delta.token_id for delta in mine] == completion.token_ids
        assert "".join(delta.text for delta in mine) == completion.text
    with engine.stream(TEXTS, SamplingParams(max_new_tokens=30)) as stream:
        next(stream)
    assert not engine.memory.pages.in_use
    assert not engine.memory.requests.in_use


class Planted(Exception):  # noqa: N818  no error of ours
    """A failure of a lane."""


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["prefill", "draft_prefill", "draft", "verify", "draft_extend"])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.sweep), 1.0])
def test_a_step_that_fails_is_repeated_with_the_same_tokens(
    lane: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that fails twice during a step changes no token, and uses up no random number."""
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=5)
    engine = tiny(*EAGLE, *EAGERLY, "engine.max_num_batched_tokens=16")
    expected = [c.token_ids for c in engine.generate(TEXTS, sampling)]
    assert engine.speculation is not None
    run, calls = engine.speculation._run, Counter[str]()

    def fails(mode: str, batch: ForwardBatch) -> StepOutputs:
        calls[mode] += 1
        outputs = run(mode, batch)  # it has written the KV cache
        if mode == lane and calls[mode] in (2, 3):
            raise Planted
        return outputs

    monkeypatch.setattr(engine.speculation, "_run", fails)
    requests = [engine.add(text, sampling) for text in TEXTS]
    failures = 0
    while engine.scheduler.has_work:
        try:
            engine.step()
        except Planted:
            failures += 1
    assert failures == 2
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["speculative.topk=4"], "speculative.topk has no effect: speculative.algorithm is not set"),
        (["speculative.algorithm=eagel"], "did you mean 'eagle'?"),
        ([EAGLE[0]], "needs a draft model; speculative.draft_model is not set"),
        (
            [*EAGLE, "lanes.decode.strict=true"],
            "lanes.decode, of mode decode, never runs: speculation drafts",
        ),
        (["lanes.verify.strict=true"], "lanes.verify, of mode verify, never runs: it needs [speculative]"),
        ([*EAGLE, "lanes.draft.runner=cuda_graph"], "'cuda_graph' serves decode, target_verify, not draft_d"),
        (
            [*EAGLE, "lanes.draft.runner=eager"],
            "runs the draft model once, without the work of 'eagle_draft'",
        ),
        (
            [*EAGLE, "lanes.draft_prefill.runner=breakable_cuda_graph"],
            "has no slot for the hidden states in the draft model's batches",
        ),
        (
            [*EAGLE, "lanes.draft.capture=false", "lanes.draft.strict=true"],
            "strict = true, but capture = fal",
        ),
        ([*EAGLE, "speculative.num_draft_tokens=9"], "asks for 8 drafts after the newest token"),
        (
            [*EAGLE, "engine.max_num_batched_tokens=8"],
            "a decode step has 4 tokens per request (speculative.n",
        ),
        ([*EAGLE, "engine.max_model_len=4"], "a draft takes 4 tokens of a context of 4"),
        ([*EAGLE, "engine.max_model_len=2000"], "the model has 1024 positions"),
        (
            [*EAGLE, "speculative.topk=2", "engine.attention_backend=chains"],
            "attention backend 'chains' cannot run this model's draft_decode: it lacks drafts with top-k 2",
        ),
        (
            [*EAGLE, "lanes.draft_extend.attention_backend=verifier"],
            "attention backend 'verifier' cannot run this model's draft_extend: it lacks mode draft_extend",
        ),
        ([*EAGLE, "lanes.verify.attention_backend=decoder"], "captures uniform batches; the graph support"),
    ],
)
def test_a_configuration_that_cannot_draft_is_refused_with_the_reason(settings: list[str], says: str) -> None:
    """A setting that no lane, backend, context or draft model can serve is refused before any capture."""
    catalog = Listed({"chains": Chains, "decoder": Decoder, "verifier": Verifier})
    with pytest.raises(UsageError) as refused:
        tiny(*settings, catalog=catalog, on_capture=lambda *_: pytest.fail("captured"))
    assert says in str(refused.value)


class Blind(SpeculationAlgorithm):
    """An algorithm that drafts zeros, without a model; a subclass has a fault."""

    lanes: ClassVar = {"verify": LaneRole(ForwardMode.TARGET_VERIFY, "target", "cuda_graph")}

    def state(self) -> Any:
        """Return no state."""
        return {}

    def extend(self, step: ExtendStep) -> None:
        """Do nothing."""

    def decode(self, step: DecodeStep) -> None:
        """Verify zeros."""
        step.verify(torch.zeros(len(step.token_ids), self.context.draft.num_draft_tokens - 1).long(), None)


class Unverified(Blind):
    """An algorithm without a lane that verifies."""

    lanes: ClassVar = {"draft": LaneRole(ForwardMode.DECODE, "target", "eager")}


class OddlyNamed(Blind):
    """An algorithm with a lane of an unknown name."""

    lanes: ClassVar = {**Blind.lanes, "rerank": LaneRole(ForwardMode.DECODE, "target", "eager")}


class Stateless(Blind):
    """An algorithm whose state has no dtype."""

    def state(self) -> Any:
        """Return only a shape."""
        return {"tokens": (4,)}


class Twice(Blind):
    """An algorithm that verifies twice in a step."""

    def decode(self, step: DecodeStep) -> None:
        """Verify zeros, and again."""
        super().decode(step)
        super().decode(step)


class Never(Blind):
    """An algorithm that does not verify."""

    def decode(self, step: DecodeStep) -> None:
        """Do nothing."""


class Narrow(Blind):
    """An algorithm that gives too few drafts."""

    def decode(self, step: DecodeStep) -> None:
        """Verify one draft."""
        step.verify(torch.zeros(len(step.token_ids), 1).long(), None)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (Unverified, "speculation 'acme' has the lanes draft; one has to be of mode target_verify"),
        (OddlyNamed, "speculation 'acme' has a lane 'rerank'; lanes are called draft_prefill, draft, verify"),
        (Stateless, "speculation 'acme': state() has 'tokens': (4,), not (shape, dtype)"),
        (Twice, "Twice verifies a second time"),
        (Never, "Never ended a decode step without a verification"),
        (Narrow, "Narrow verifies drafts and parents [[1, 1]]; expected [1, 3]"),
    ],
)
def test_the_error_of_a_faulty_algorithm_names_it(algorithm: type[Blind], says: str) -> None:
    """An algorithm that breaks its contract is refused or ends the step; the error names the fault."""
    settings = ["speculative.algorithm=acme", "lanes.verify.capture=false"][: 2 - (algorithm is Unverified)]
    with pytest.raises(GraphpactError) as refused:
        tiny(*settings, catalog=Listed({"acme": algorithm})).generate(
            ["If "], SamplingParams(max_new_tokens=4)
        )
    assert says in str(refused.value)


def test_blind_drafts_change_no_token() -> None:
    """Drafts that are never correct cost only time."""
    drafted = tiny(
        "speculative.algorithm=acme", "lanes.verify.capture=false", catalog=Listed({"acme": Blind})
    )
    sampling = SamplingParams(max_new_tokens=12)
    outputs = [[c.token_ids for c in e.generate(TEXTS, sampling)] for e in (drafted, tiny())]
    assert outputs[0] == outputs[1]
    assert drafted.speculation is not None
    assert drafted.speculation.stats.tokens_per_verification == 1.0


class Chains(FlashInferBackend):
    """A backend without draft trees."""

    capabilities = replace(FlashInferBackend.capabilities, trees=False)


class Decoder(FlashInferBackend):
    """A backend whose graphs hold one token of each request."""

    capabilities = replace(FlashInferBackend.capabilities, graph_support=GraphSupport.UNIFORM_DECODE)


class Verifier(FlashInferBackend):
    """A backend without draft extend."""

    capabilities = replace(
        FlashInferBackend.capabilities,
        modes=FlashInferBackend.capabilities.modes - {ForwardMode.DRAFT_EXTEND},
    )


class Listed(PluginCatalog):
    """The installed plugins, and those of a test."""

    def __init__(self, plugins: Mapping[str, type[Any]]) -> None:
        installed = PluginCatalog.scan(env={})
        super().__init__(installed._entry_points)
        self._more = plugins

    def select(self, kind: Any, name: str) -> Any:  # type: ignore[override]
        """Return a plugin."""
        return self._more.get(name) or super().select(kind, name)


# -- the distribution ----------------------------------------------------------------------------------

FEW, COUNT = 2_500, 10_000  # requests, each with two drafted tokens after its first
SAMPLING = SamplingParams(max_new_tokens=3, temperature=1.4, top_k=5, top_p=0.9, ignore_eos=True)


def probabilities(target: Path, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return the probability of each output of three tokens, from the target run by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for output, share in found.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            likely, order = torch.softmax(logits / SAMPLING.temperature, dim=0).sort(descending=True)
            likely = likely[: SAMPLING.top_k] / likely[: SAMPLING.top_k].sum()
            likely = likely[likely.cumsum(0) - likely < SAMPLING.top_p]
            for token, p in zip(order.tolist(), (likely / likely.sum()).tolist(), strict=False):
                longer[*output, token] = share * p
        found = longer
    return found


def p_value(outputs: Sequence[Sequence[int]], shares: dict[tuple[int, ...], float]) -> float:
    """Return the probability of a chi-square at least that of the outputs; 0 for an impossible output."""
    counts = Counter(map(tuple, outputs))
    if counts.keys() - shares.keys():
        return 0.0
    rare = [output for output, share in shares.items() if share * len(outputs) < 10]
    cells = [([output], share) for output, share in shares.items() if output not in rare]
    cells.append((rare, sum(shares[output] for output in rare)))
    expected = torch.tensor([share * len(outputs) for _, share in cells if share], dtype=torch.float64)
    seen = torch.tensor(
        [sum(counts[o] for o in group) for group, share in cells if share], dtype=torch.float64
    )
    chi_square = ((seen - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, chi_square / 2))


def draw_outputs(
    target: Path, heads: dict[str, Path], head: str, topk: int, graphs: str, count: int = FEW
) -> float:
    """Return the p-value of ``count`` outputs of one prompt."""
    case = {"head": head, "topk": topk, "num_steps": 2, "width": "most", "page_size": 16, "pool": "roomy"}
    settings = overrides({**case, "graphs": graphs, "backend": "flashinfer"}, heads)
    settings = [s for s in settings if "batch_sizes" not in s]
    more = ["speculative.num_draft_tokens=6"] if topk > 1 else []
    more += ["engine.max_num_seqs=128", "engine.max_num_batched_tokens=1024", "engine.seed=7"]
    engine = build(target, *settings, *more)
    prompt = [6, 6, 3, 4]
    outputs = [c.token_ids for c in engine.generate([prompt] * count, SAMPLING)]
    assert engine.speculation is not None
    assert 0.1 < engine.speculation.stats.accepted.total() / count < 1.9
    p = p_value(outputs, probabilities(target, prompt))
    sys.stdout.write(f"engine.seed 7, {head}, top-k {topk}, graphs {graphs}: p = {p:.3g}\n")
    return p


@pytest.mark.sweep
def test_drawn_tokens_have_the_distribution_of_the_target(target: Path, heads: dict[str, Path]) -> None:
    """Drafted and rejected tokens fit the target's own probabilities."""
    assert draw_outputs(target, heads, "eagle", 4, "fast") > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("graphs", ["fast", "none"])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("head", ["eagle", "mtp"])
def test_many_drawn_tokens_have_the_distribution_of_the_target(
    head: str, topk: int, graphs: str, target: Path, heads: dict[str, Path]
) -> None:
    """20,000 drafted or rejected tokens fit the target's own probabilities, with graphs and without."""
    assert draw_outputs(target, heads, head, topk, graphs, COUNT) > 1e-3


def _first_is_right(drafted: Any, parents: Any, chosen: Any) -> Any:
    """Accept the first draft always."""
    return [0, 1], [drafted[1], chosen[1]]


@pytest.mark.parametrize("planted", ["acceptance", "random numbers"])
def test_a_wrong_acceptance_rule_is_seen_in_the_distribution(
    planted: str, target: Path, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepting every draft, or one random number for a whole path, does not fit."""
    if planted == "acceptance":
        monkeypatch.setattr("graphpact_engine.speculation.accepted_path", _first_is_right)
    else:
        uniform = Request.uniform
        monkeypatch.setattr(Request, "uniform", lambda self, ahead=0: uniform(self, 0 * ahead))
    assert draw_outputs(target, heads, "eagle", 4, "none", 1000) < 1e-6


# -- outputs of lanes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["eagle", "mtp"])
def test_outputs_are_valid_until_the_next_step_of_their_lane(
    head: str,
    target: Path,
    heads: dict[str, Path],
    expected: Callable[[SamplingParams], list[list[int]]],
) -> None:
    """Outputs of a step outlive the steps of other lanes."""
    case = {"head": head, "topk": 4, "num_steps": 3, "width": "middle", "page_size": 16, "pool": "roomy"}
    settings = overrides({**case, "graphs": "strict", "backend": "fa3"}, heads)
    engine = build(target, *settings)
    assert engine.speculation is not None
    run, held = engine.speculation._run, dict[str, tuple[StepOutputs, StepOutputs]]()

    def hold(mode: str, batch: ForwardBatch) -> StepOutputs:
        held.pop(mode, None)  # it ends here
        outputs = run(mode, batch)
        held[mode] = outputs, outputs.clone()
        for one, copy in held.values():
            assert all(torch.equal(one[name], copy[name]) for name in copy)
        return outputs

    engine.speculation._run = hold
    assert generate(engine, GREEDY) == expected(GREEDY)
    assert held.keys() >= {"draft", "verify"}


# -- the shipped heads -----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ["eagle", "frozen_kv_mtp"])
def test_shipped_heads_give_two_tokens_a_verification_with_and_without_graphs(algorithm: str) -> None:
    """On the prompts of the examples, greedy, in three steps, both ways accept the same drafts."""
    draft = {"eagle": "tiny-llama-eagle", "frozen_kv_mtp": "tiny-llama-mtp"}[algorithm]
    asked = (ROOT / "examples/prompts.txt").read_text().splitlines()
    sampling, told = SamplingParams(max_new_tokens=64), []
    for capture in ("true", "false"):
        settings = [
            f"speculative.algorithm={algorithm}",
            f'speculative.draft_model="{TINY / draft}"',
            *(f"lanes.{lane}.capture={capture}" for lane in ("draft", "verify")),
        ]
        config = EngineConfig.load(ROOT / "examples/speculative.toml", env={}, overrides=settings)
        assert (config.speculative.num_steps, config.speculative.topk) == (3, 1)
        engine = Engine(config)
        tokens = [c.token_ids for c in engine.generate(filter(str.strip, asked), sampling)]
        assert engine.speculation is not None
        told.append((tokens, engine.speculation.stats.tokens_per_verification))
        verify = next(lane for lane in engine.lanes if lane.name == "verify")
        assert (verify.stats.replays > 0) is (capture == "true")
    assert told[0] == told[1]
    assert told[0][1] >= 2.0
