"""Engines whose decode attends in tasks: tokens equal eager ones, and bugs of updates are found."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_site import installed
from graphpact.errors import CaptureError, ContractError
from graphpact.plugins import PluginCatalog
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import VerificationError
from support import reference_tokens

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 7, 12], list(range(2, 40)), [3] * 17, [100, 101]]
COUNTS = [9, 5, 12, 3]


@pytest.fixture
def engine_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]
) -> Iterator[Callable[..., Engine]]:
    """Return a function that builds engines whose decode lane has the recipe's backend, or an edit of it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    engines = []
    with installed(tmp_path / "site", monkeypatch) as site:
        site.add(
            "npu",
            """
            from graphpact import TaskKey
            from recipes.host_lengths import HostLengthsBackend

            class FirstLayer(HostLengthsBackend):
                '''Updates only the first layer.'''

                def init_metadata_replay(self, view, shape, captured):
                    fresh = super(HostLengthsBackend, self).init_metadata_replay(view, shape, captured)
                    key = TaskKey(fresh.shape, self.context.layers[0].layer_id)
                    self.driver.update_task(key, {"actual_seq_lengths_kv": fresh.lengths})
                    return fresh
            """,
            offers={"host_lengths": "HostLengthsBackend", "first_layer": "FirstLayer"},
            group="graphpact.attention_backends",
        )
        catalog = PluginCatalog.scan()

        def build(backend: str, *overrides: str) -> Engine:
            options = [
                f'model.path="{checkpoint("llama")}"',
                'engine.device="cpu"',
                'engine.attention_backend="flashinfer"',
                f'lanes.decode.attention_backend="{backend}"',
                "engine.max_num_seqs=4",
                "engine.mixed=false",
                *overrides,
            ]
            engines.append(Engine(EngineConfig.load(None, env={}, overrides=options), catalog=catalog))
            return engines[-1]

        yield build
        for engine in engines:
            engine.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipes"]:
        del sys.modules[name]


def _tokens(engine: Engine) -> list[list[int]]:
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=count))
        for prompt, count in zip(PROMPTS, COUNTS, strict=True)
    ]
    while engine.scheduler.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("options", [(), ("lanes.decode.strict=true",)], ids=["fast", "strict"])
def test_decode_in_tasks_has_the_tokens_of_eager(
    options: tuple[str, ...], engine_of: Callable[..., Engine], checkpoint: Callable[..., Path]
) -> None:
    """Tokens are those of the same backend without graphs and of transformers; every replay is verified."""
    engine = engine_of("host_lengths", "verify.replay_against_eager=1.0", *options)
    found = _tokens(engine)
    assert found == _tokens(engine_of("host_lengths", "lanes.decode.capture=false"))
    path = checkpoint("llama")
    assert found == [reference_tokens(path, p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    decode = engine.lanes[0]
    assert decode.stats.replays == engine.verifiers[0].verified > 5
    assert not decode.stats.eager
    graph: Any = next(iter(decode.captured.values())).graph
    assert len(graph.tasks.tasks) == len(decode.backend.context.layers) > 1


def test_a_missed_update_is_found_in_an_engine(engine_of: Callable[..., Engine]) -> None:
    """A strict lane refuses it by GP21. The fast tape uses the old arguments, and verification sees it."""
    with pytest.raises(ContractError, match=r"task 1 of decode\[bs=4, .* was not updated") as refused:
        _tokens(engine_of("first_layer", "lanes.decode.strict=true"))
    assert refused.value.rule == "GP21"
    with pytest.raises(VerificationError, match="replay and an eager run") as seen:
        _tokens(engine_of("first_layer", "verify.replay_against_eager=1.0"))
    assert "every field agrees in its live rows" in str(seen.value)


def test_a_driver_without_tasks_is_refused_at_capture(engine_of: Callable[..., Engine]) -> None:
    """The inductor driver has no tasks: the engine does not start, and the error says what to do."""
    with pytest.raises(CaptureError, match="graph driver 'inductor' has no tasks") as refused:
        engine_of("host_lengths", 'lanes.decode.graph_driver="inductor"')
    assert refused.value.rule == "GP21"
    assert "tape" in str(refused.value.hint)
