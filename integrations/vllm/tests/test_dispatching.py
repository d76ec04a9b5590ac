"""Every choice of a dispatcher, asked of stand-ins in the shape of vLLM's. No engine starts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import graphpact_vllm.runs.cli as command
from graphpact.engines import EngineJob, EngineResult
from graphpact_cli import main
from graphpact_vllm.guard.dispatching import choices, faults, rows
from graphpact_vllm.runs.offer import VllmDispatchers

MODEL = Path(__file__).parents[3] / "examples/models/tiny-llama"


class Mode(Enum):
    """vLLM's modes of a step."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True)
class Desc:
    """A ``BatchExecutionDescriptor`` of model runner V2."""

    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


@dataclass
class Manager:
    """A ``CudaGraphManager`` with full graphs of 1, 2 and 4 decodes, and pieces of 4 and 8 tokens."""

    decode_query_len: int = 1
    max_num_reqs: int = 4
    graphs: set[Desc] = field(default_factory=set)

    def __post_init__(self) -> None:
        full = [Desc(Mode.FULL, size, size, uniform_token_count=1) for size in (1, 2, 4)]
        self._capture_descs = {
            Mode.FULL: full,
            Mode.PIECEWISE: [Desc(Mode.PIECEWISE, size, None) for size in (4, 8)],
        }
        self.graphs.update(full)

    def dispatch(
        self,
        requests: int,
        tokens: int,
        uniform: int | None,
        num_active_loras: int,
        max_query_len: int | None,
    ) -> Desc:
        """Return the smallest graph that serves."""
        del num_active_loras, max_query_len
        for its in (self._capture_descs[Mode.FULL], self._capture_descs[Mode.PIECEWISE]):
            for desc in its:
                is_of_kind = desc.uniform_token_count in (None, uniform)
                if is_of_kind and desc.num_tokens >= tokens and (desc.num_reqs or requests) >= requests:
                    return desc
        return Desc(Mode.NONE, tokens, requests)


@dataclass
class Changed(Manager):
    """A manager whose choice for one batch is changed."""

    tokens: int = 0
    change: Callable[[Desc], Desc] = lambda desc: desc

    def dispatch(self, requests: int, tokens: int, *args: Any, **kwargs: Any) -> Desc:
        """Return the changed choice for ``tokens``."""
        desc = super().dispatch(requests, tokens, *args, **kwargs)
        return self.change(desc) if tokens == self.tokens else desc


def _texts(manager: Manager) -> list[str]:
    found = [*faults(choices(manager), "CudaGraphManager")]
    assert {(fault.rule, fault.owner, fault.field) for fault in found} <= {
        ("GP12", "CudaGraphManager", "dispatch")
    }
    return [fault.text for fault in found]


def test_all_batches_up_to_the_largest_graph_and_one_more_are_asked() -> None:
    """Decodes take full graphs, batches with a prefill pieces, and larger ones run eagerly; none is wrong."""
    found = choices(Manager())
    by_batch = {(each.batch.tokens, each.batch.requests, each.batch.query_len): each.graph for each in found}
    assert {tokens for tokens, *_ in by_batch} == set(range(1, 10))
    assert [by_batch[size, size, 1] for size in (1, 2, 3, 4)] == ["FULL[1]", "FULL[2]", "FULL[4]", "FULL[4]"]
    assert [by_batch[size, 1, 0] for size in (1, 4, 5, 9)] == [
        *("PIECEWISE[4]", "PIECEWISE[4]", "PIECEWISE[8]", "eager")
    ]
    assert (3, 3, 0) in by_batch
    assert (8, 4, 0) in by_batch
    assert _texts(Manager()) == []


@pytest.mark.parametrize(
    ("tokens", "change", "text"),
    [
        (7, lambda desc: replace(desc, num_tokens=4), "it holds 4 tokens, and the batch has 7"),
        (7, lambda desc: replace(desc, num_reqs=2), "it holds 2 requests, and the batch has 4"),
        (
            6,
            lambda _: Desc(Mode.FULL, 8, 8, uniform_token_count=1),
            "6 tokens, 1 requests, with a prefill; it was not captured",
        ),
        (
            2,
            lambda _: Desc(Mode.FULL, 2, 2, uniform_token_count=1),
            "it is for requests of 1 tokens each, and the batch is 2 tokens, 1 requests, with a prefill",
        ),
        (
            5,
            lambda desc: replace(desc, max_query_len=2),
            "it is for requests of at most 2 tokens, and the batch is 5 tokens, 1 requests, with a prefill",
        ),
    ],
    ids=["tokens", "requests", "captured", "kind", "length"],
)
def test_a_choice_that_does_not_serve_is_a_fault(
    tokens: int, change: Callable[[Desc], Desc], text: str
) -> None:
    """The fault names the graph, the batch, and what the graph lacks."""
    found = _texts(Changed(tokens=tokens, change=change))
    assert any(text in each for each in found), found
    assert all(f"{tokens} tokens, " in each for each in found)


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        (None, 0, "21 batches; 0 of their graphs are wrong; 2 ranks"),
        ({"wrong": "it holds 2 tokens, and the batch has 3"}, 1, "it holds 2 tokens, and the batch has 3"),
        ({"graph": "FULL[8]"}, 1, "; rank 1: FULL[8]"),
    ],
    ids=["right", "wrong", "rank"],
)
def test_the_command_writes_ranges_and_judges(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any] | None,
    status: int,
    message: str,
) -> None:
    """Neighbours of one graph are one row; a wrong choice or ranks that differ end with status 1."""
    found = rows(choices(Manager()))
    ranks = [{"CudaGraphManager": [dict(row) for row in found]} for _ in range(2)]
    if changed is not None:
        ranks[0 if "wrong" in changed else 1]["CudaGraphManager"][3] |= changed
    jobs: list[tuple[str, EngineJob]] = []

    def run(offer: VllmDispatchers, words: str, job: EngineJob) -> EngineResult:
        jobs.append((words, job))
        return EngineResult(answers=[], states=[*ranks])

    monkeypatch.setattr(command.VllmDispatchers, "unavailable", lambda offer: None)
    monkeypatch.setattr(command.VllmDispatchers, "run", run)
    arguments = ["vllm", "dispatch", "--model", str(MODEL), "--set", "tensor_parallel_size=2"]
    assert main(arguments) == status
    ((words, job),) = jobs
    assert (words, job.prompts, job.engine["tensor_parallel_size"]) == ("tape", [], 2)
    out, err = capsys.readouterr()
    assert message in err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "CudaGraphManager with a prefill 5 to 8 PIECEWISE[8]" in lines
    assert "CudaGraphManager with a prefill 9 eager" in lines
    assert "CudaGraphManager decode of 1 3 to 4 FULL[4]" in lines
    assert ("it holds 2 tokens" in out) is (changed is not None and "wrong" in changed)
