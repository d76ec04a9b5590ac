"""SGLang under generated load: each value of a feature gives the plain tokens, and plants are reported."""

import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_child
import pytest
import torch
from engines import MODEL, SECONDS
from safetensors.torch import load_file, save_file

from graphpact.engines import (
    EngineStart,
    EngineStep,
    GraphFault,
    InjectedError,
    InjectedFault,
    NotDoneError,
    PromptRequest,
)
from graphpact.errors import ContractError
from graphpact_sglang.load import engine
from graphpact_sglang.load.offer import FEATURES, SglangLoadOffer
from graphpact_swarm.models import make_model

OFFER = SglangLoadOffer()
DRAFTS = {name: MODEL.with_name("tiny-llama-eagle") for name in OFFER.draft_models}
MOST = 300
Change = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run gave.

    Args:
        requests: The requests, with their results.
        steps: The batches.
        faults: What the guard found.
        leaks: What is still allocated.
        error: What the run raised.
    """

    requests: Sequence[PromptRequest]
    steps: list[EngineStep]
    faults: list[GraphFault]
    leaks: list[str]
    error: Exception | None

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [request.output_ids for request in self.requests]

    def require_right(self, expected: "Found") -> None:
        """Require the answers of ``expected``, and nothing amiss."""
        assert self.error is None
        assert self.tokens == expected.tokens
        assert [each.finish_reason for each in self.requests] == [
            each.finish_reason for each in expected.requests
        ]
        assert {each.num_ends for each in self.requests} == {1}
        assert self.faults == []
        assert self.leaks == []


def load() -> list[PromptRequest]:
    """Return requests next to sizes of graphs and pages, with a shared prefix and bursts."""
    draw = random.Random(0)
    shared = [draw.randrange(32, 120) for _ in range(40)]
    lengths, arrivals = (17, 33, 1, 40, 16, 65, 3, 41), (0, 0, 0, 2, 4, 4, 9, 9)
    given = []
    for length, arrives in zip(lengths, arrivals, strict=True):
        own = [draw.randrange(32, 120) for _ in range(length)]
        ids = (shared[: length - 1] + own)[:length] if length % 2 else own
        given.append(PromptRequest(token_ids=ids, max_new_tokens=4 + length % 7, arrives_in=arrives))
    given[1].stop_token_ids = list(range(97, 123))
    given[4].with_logprobs = True
    return given


def run(
    *,
    choice: dict[str, Any] | None = None,
    given: Sequence[PromptRequest] | None = None,
    plant: Change | None = None,
    faults: Sequence[InjectedFault] = (),
    most: int = MOST,
    rank: int = 0,
    port: int = 0,
    model: Path = MODEL,
    drafts: Mapping[str, Path] = DRAFTS,
    **how: Any,
) -> Found:
    """Start an engine in this process, and run ``given``."""
    engine.warm_up()
    given = load() if given is None else given
    start = EngineStart(choice=choice or {}, model=model, drafts=drafts, rank=rank, port=port, **how)
    started = OFFER.start(start)
    if plant is not None:
        plant(started)
    error = None
    try:
        started.run(given, most_passes=most, on_pass=lambda at: None, faults=faults)
    except (ContractError, InjectedError, NotDoneError) as raised:
        error = raised
    leaks = started.leaks() if error is None else []
    return Found(requests=given, steps=started.steps, faults=started.faults(), leaks=leaks, error=error)


def in_child(**options: Any) -> Found:
    """Return what `run` returns in a child."""
    found: Found = forked_child.in_child(lambda: run(**options), environment={}, seconds=SECONDS)
    return found


def on_ranks(choice: dict[str, Any], given: Sequence[Sequence[PromptRequest]], **options: Any) -> list[Found]:
    """Return what `run` returns on each rank, with the requests of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def on_rank(rank: int) -> Found:
        return run(choice=choice, given=given[rank], rank=rank, port=port, **options)

    results = forked_child.in_children(on_rank, [((rank,), {}) for rank in range(len(given))], SECONDS)
    assert [error for _, error in results] == [None] * len(given)
    return [found for found, _ in results]


@pytest.fixture(scope="module")
def plain() -> Found:
    """The eager run of the plainest configuration."""
    found = in_child(is_eager=True)
    assert found.error is None
    assert {step.graph for step in found.steps} == {None}
    return found


VALUES = [
    (
        {feature.name: value},
        feature.name in ("drafts", "overlap", "prefill_graph") and value is feature.values[1],
    )
    for feature in FEATURES
    for value in feature.values[1:]
    if feature.name != "parallel"
]


@pytest.mark.parametrize("is_strict", [False, True], ids=["fast", "strict"])
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(
            choice,
            id="-".join(map(str, *choice.items())),
            marks=() if is_usual else pytest.mark.sweep,
        )
        for choice, is_usual in VALUES
    ],
)
def test_every_value_gives_the_plain_tokens(plain: Found, choice: dict[str, Any], is_strict: bool) -> None:  # noqa: FBT001
    """One feature away from the plainest configuration the answers are the same, without a fault."""
    found = in_child(choice=choice, is_strict=is_strict)
    found.require_right(plain)
    assert any(step.graph for step in found.steps)


def test_a_run_gives_the_same_steps_again_whatever_is_mixed(plain: Found) -> None:
    """Chunks, mixed steps, hits of the prefix cache, drafts and the overlapped schedule: always the same."""
    choice = {
        "chunk": 16,
        "mixed_chunk": True,
        "prefix_cache": True,
        "overlap": True,
        "prefill_graph": [8, 24, 40],
        "page_size": 4,
        "drafts": "eagle",
    }

    def overlaps(started: Any) -> None:
        assert started.engine.scheduler.enable_overlap

    first, second = (in_child(choice=choice, is_strict=True, plant=overlaps) for _ in range(2))
    first.require_right(plain)
    assert first.steps == second.steps
    assert {step.kind for step in first.steps} == {"verify", "prefill", "mixed"}
    assert any(step.computed and max(step.computed) and step.kind == "prefill" for step in first.steps)


@pytest.mark.sweep
def test_two_ranks_run_the_same_steps(plain: Found) -> None:
    """Tensor parallelism: each rank is an engine, and both give the plain tokens."""
    first, second = on_ranks({"parallel": "tp2"}, [load(), load()])
    first.require_right(plain)
    second.require_right(plain)
    assert first.steps == second.steps


@pytest.mark.parametrize("is_strict", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_ranks_of_data_parallel_attention_run_their_own(tmp_path: Path, is_strict: bool) -> None:  # noqa: FBT001
    """The rank that has one request alone replays graphs with no live row while the other one decodes."""
    model = make_model("experts", tmp_path)
    plain = in_child(is_eager=True, model=model)
    own = [load(), load()[2:3]]
    own[1][0].arrives_in = 4
    first, second = on_ranks({"parallel": "dp2"}, own, model=model, is_strict=is_strict)
    first.require_right(plain)
    assert second.tokens == plain.tokens[2:3]
    assert (second.faults, second.leaks, second.error) == ([], [], None)
    assert any(step.kind == "idle" and step.graph for step in second.steps)
    assert {(step.kind, bool(step.graph)) for step in first.steps} >= {("decode", True), ("prefill", False)}


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Write a model with experts, and a draft head of the kind with which such models are released.

    The head is the model's last layer. Its first one changes little, so that many drafts are right.
    """
    target, head = make_model("experts", folder), folder / "head"
    head.mkdir()
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if "layers.0." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.002)
    last = "model.layers.1."
    mtp = {name.replace(last, "mtp.layers.0."): each for name, each in weights.items() if last in name}
    width = len(weights["model.norm.weight"])
    mtp["mtp.fc.weight"] = torch.eye(width, 2 * width)  # the embedding of the last token; no hidden state
    mtp["mtp.pre_fc_norm_embedding.weight"] = torch.full([width], 0.3)  # the spread of embeddings
    mtp["mtp.pre_fc_norm_hidden.weight"] = torch.ones(width)
    mtp["mtp.norm.weight"] = weights["model.norm.weight"]
    for path, tensors in ((target, weights), (head, mtp)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_text((target / "config.json").read_text())
    return target, head


@pytest.mark.parametrize(
    "choice",
    [
        {"drafts": "eagle", "decode_sizes": [4, 8]},
        pytest.param({"drafts": "eagle_tree", "decode_sizes": [4, 8]}, marks=pytest.mark.sweep),
        pytest.param({"drafts": "eagle", "backend": "fa3", "overlap": True}, marks=pytest.mark.sweep),
    ],
    ids=["chain", "tree", "fa3"],
)
def test_ranks_of_data_parallel_attention_verify_drafts(tmp_path: Path, choice: dict[str, Any]) -> None:
    """Every replay is run again eagerly, padded for the other rank; the batch stays as it was."""
    model, head = make_pair(tmp_path)
    plain = in_child(is_eager=True, model=model)
    own = [load(), load()[2:4]]
    ranks = on_ranks(
        {"parallel": "dp2", **choice}, own, model=model, drafts=dict.fromkeys(OFFER.draft_models, head)
    )
    ranks[0].require_right(plain)
    assert ranks[1].tokens == plain.tokens[2:4]
    assert (ranks[1].faults, ranks[1].leaks, ranks[1].error) == ([], [], None)
    verified = [step.requests for step in ranks[0].steps if step.kind == "verify" and step.graph]
    assert max(map(len, verified)) > 2
    assert sum(map(len, verified)) < sum(len(tokens) - 1 for tokens in plain.tokens), "no draft was right"


def test_a_starved_cache_retracts_and_loses_nothing() -> None:
    """Requests that outgrow the cache wait and begin again, and give the tokens of a cache with plenty."""

    def long() -> list[PromptRequest]:
        return [
            PromptRequest(token_ids=[65 + at] * 20, max_new_tokens=60, arrives_in=2 * at) for at in range(6)
        ]

    right = in_child(given=long())
    starved = {"cache_tokens": 192, "conservativeness": 0.1, "prefix_cache": True}
    found = in_child(given=long(), choice=starved, is_strict=True)
    found.require_right(right)
    prefilled = [at for step in found.steps if step.kind == "prefill" for at in step.requests]
    assert len(prefilled) > len(set(prefilled)) == 6  # some began again


def test_aborted_requests_end_once(plain: Found) -> None:
    """A waiting, a running and a finished request are aborted; the others are as before."""
    given = load()
    given[0].aborted_in, given[3].aborted_in, given[2].aborted_in = 5, 2, 200
    found = in_child(given=given, choice={"max_requests": 3})
    assert found.error is None
    assert [each.num_ends for each in found.requests] == [1] * len(given)
    assert [found.requests[at].finish_reason for at in (0, 3, 2)] == ["abort", "abort", "length"]
    for at, tokens in enumerate(plain.tokens):
        assert found.tokens[at] == tokens[: len(found.tokens[at])]
        assert at in (0, 3) or found.tokens[at] == tokens
    assert found.leaks == []


# -- faults ------------------------------------------------------------------------------------------------


def test_an_error_of_the_model_ends_the_run() -> None:
    """SGLang's scheduler ends by it; requests keep what they had."""
    found = in_child(faults=[InjectedFault(kind="raise", at=6)])
    assert isinstance(found.error, InjectedError)
    assert max(step.at for step in found.steps) >= 6
    assert any(found.tokens)


def test_a_full_cache_makes_requests_wait_and_loses_none(plain: Found) -> None:
    """While no page is free nothing is admitted and requests are retracted; then all end as before."""
    found = in_child(faults=[InjectedFault(kind="full", at=3, passes=8)], is_strict=True)
    found.require_right(plain)
    assert [step.at for step in found.steps] != [step.at for step in in_child().steps]


def test_a_run_without_an_end_is_stopped() -> None:
    """What was got is filled in."""
    found = in_child(most=7)
    assert isinstance(found.error, NotDoneError)
    assert any(found.tokens)


def lost_page(started: Any) -> None:
    """Forget a page that was free."""
    allocator = started.engine.scheduler.token_to_kv_pool_allocator
    allocator.free_pages = allocator.free_pages[:-1]


def row_of_another(started: Any) -> None:
    """Read the row of no request: the last one, which is free in this load."""
    backend = started.engine.model_runner.attn_backend
    prepare = backend.fill_graph_metadata

    def prepared(rows: Any) -> None:
        rows.index[0] = backend.req_to_token.shape[0] - 1
        prepare(rows)

    backend.fill_graph_metadata = prepared


def writes_of_padding(started: Any) -> None:
    """Let padding rows write where an earlier batch did."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import PaddingPolicy

    registry = started.engine.model_runner.decode_cuda_graph_runner.buffer_registry
    registry.get_slot("out_cache_loc").padding_policy = PaddingPolicy.KEEP_PAD


def test_a_lost_page_is_a_leak() -> None:
    """SGLang's own counts of memory are off, so this ends the start of a pass, or is told at the end."""
    with pytest.raises(AssertionError, match=r"Leak Detected|memory leak"):
        in_child(plant=lost_page)


def test_a_write_to_free_memory_is_named() -> None:
    """Padding rows that write a slot that nothing owns end the run, and the guard names the field."""
    found = in_child(plant=writes_of_padding, choice={"decode_sizes": [8]}, is_strict=True)
    assert isinstance(found.error, ContractError)
    assert found.error.rule == "GP04"
    assert ("GP03", "DecodeInputBuffers.out_cache_loc") in {(each.rule, each.field) for each in found.faults}


def test_a_read_of_a_free_row_shows_in_tokens(plain: Found) -> None:
    """A graph that reads the row of a request that ended gives other tokens, and is named."""
    found = in_child(plant=row_of_another, is_strict=True)
    assert found.tokens != plain.tokens
    assert found.faults
