"""Tests of the engine around its lanes: prompts, completions, and refused configurations."""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError, PluginError
from graphpact.hookspecs import hookimpl
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import RequestError, UnsupportedModelError
from graphpact_engine.text import OutputText, TextStream
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from support import Catalog

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"


def configure(path: Path, *overrides: str) -> EngineConfig:
    """Return a configuration for a small engine on a CPU."""
    return EngineConfig.load(
        None,
        env={},
        overrides=[f'model.path="{path}"', 'engine.device="cpu"', *overrides],
    )


@pytest.fixture
def tiny() -> Iterator[Engine]:
    """Yield an engine on the shipped model."""
    with Engine(configure(TINY, "engine.max_num_seqs=4")) as engine:
        yield engine


def is_idle(engine: Engine) -> bool:
    """Return whether no request is alive and every page and row is free."""
    memory = engine.memory
    return (
        not engine.scheduler.has_work
        and memory.pages.num_free == memory.pages.num_pages
        and memory.requests.num_free == memory.requests.max_requests
    )


class CountsThreads:
    """An observer that keeps the number of torch's threads of every step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @hookimpl(wrapper=True)
    def run_step(self) -> Generator[None, Any, Any]:
        """Keep the number."""
        self.seen.append(torch.get_num_threads())
        return (yield)


def test_steps_run_on_the_configured_threads() -> None:
    """Captures and steps run on ``engine.num_threads``; the caller's number is the same before and after."""
    before = torch.get_num_threads()
    counts, captured = CountsThreads(), []
    with Engine(
        configure(TINY, f"engine.num_threads={before + 1}"),
        observers=[counts],
        on_capture=lambda *_: captured.append(torch.get_num_threads()),
    ) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3))
    assert {*counts.seen} == {*captured} == {before + 1}
    assert torch.get_num_threads() == before


def test_streaming_gives_what_generate_gives(tiny: Engine) -> None:
    """The deltas of each prompt add up to its completion, and the last one carries the reason."""
    prompts = ["Return a ", "The ", "If "]
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=1)
    done = tiny.generate(prompts, params)
    texts, reasons = [""] * 3, [None] * 3
    for delta in tiny.stream(prompts, params):
        assert reasons[delta.index] is None
        texts[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason
    assert texts == [c.text for c in done]
    assert reasons == [c.finish_reason for c in done]
    assert [c.prompt for c in done] == prompts
    assert all(c.text == bytes(t for t in c.token_ids if t < 256).decode() for c in done)
    assert is_idle(tiny)


def test_a_stream_nobody_reads_on_leaves_nothing_behind(tiny: Engine) -> None:
    """Closing a stream early ends its requests and frees their memory."""
    stream = tiny.stream(["Return a ", "The "], SamplingParams(max_new_tokens=50))
    next(stream)
    assert not is_idle(tiny)
    stream.close()
    assert is_idle(tiny)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "the prompt is empty"),
        ([], "empty prompt"),
        ([258], "token id 258; the vocabulary of the model is 0 to 257"),
        ([-1], "token id -1"),
        ("x" * 2000, "2000 tokens"),
    ],
)
def test_one_bad_prompt_starts_none(bad: Any, says: str, tiny: Engine) -> None:
    """An invalid prompt is an error with its position, and the other prompts are not started."""
    with pytest.raises(RequestError, match=f"prompt 2 of 3: .*{says}"):
        tiny.stream(["good", bad, "good"])
    assert is_idle(tiny)
    assert tiny.generate(["If "], SamplingParams(max_new_tokens=2))[0].token_ids


def test_equal_prompts_differ_and_runs_repeat() -> None:
    """Equal prompts without their own seed draw different tokens, which the engine's seed repeats."""
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    runs = []
    for seed in (5, 5, 6):
        with Engine(configure(TINY, f"engine.seed={seed}")) as engine:
            runs.append([c.token_ids for c in engine.generate(["If ", "If "], params)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_a_closed_engine_goes_on_eagerly(tiny: Engine) -> None:
    """After `close` the same tokens come from eager runs, with the reason not_captured."""
    params = SamplingParams(max_new_tokens=8)
    before = tiny.generate(["The "], params)[0].token_ids
    replays = tiny.lanes[0].stats.replays
    tiny.close()
    assert tiny.generate(["The "], params)[0].token_ids == before
    assert tiny.lanes[0].stats.replays == replays
    assert {reason.name for _, reason in tiny.lanes[0].stats.eager} == {"not_captured"}


def test_a_model_without_tokenizer_takes_token_ids(checkpoint: Callable[..., Path]) -> None:
    """Token ids need no tokenizer; their completions have ids and no text."""
    with Engine(configure(checkpoint("llama"))) as engine:
        (done,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert len(done.token_ids) == 4
        assert done.text == ""


def test_stop_tokens_end_a_request(tiny: Engine) -> None:
    """A stop token ends its request with reason stop, and is kept."""
    whole = tiny.generate(["The "], SamplingParams(max_new_tokens=12))[0].token_ids
    stop = whole[5]
    params = SamplingParams(max_new_tokens=12, stop_token_ids=frozenset({stop}))
    (done,) = tiny.generate(["The "], params)
    assert done.token_ids == whole[: whole.index(stop) + 1]
    assert done.finish_reason == "stop"


def test_the_context_is_a_limit(checkpoint: Callable[..., Path]) -> None:
    """A request ends with reason length when the model's positions are used up."""
    with Engine(configure(checkpoint("llama"), "engine.max_model_len=20")) as engine:
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        (done,) = engine.generate([[7] * 12], params)
        assert len(done.token_ids) == 8
        assert done.finish_reason == "length"


# -- text ----------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=60)
@given(text=st.text(max_size=12))
def test_text_comes_in_whole_characters(text: str) -> None:
    """Pieces of a stream of bytes add up to the text, and none ends inside a character."""
    stream = TextStream(transformers.AutoTokenizer.from_pretrained(TINY))
    tokens = [*text.encode(), 256]
    pieces = [stream.push(t, last=i == len(tokens) - 1) for i, t in enumerate(tokens)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def _spaced() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer as SentencePiece has them: it drops the space at the beginning of a text."""
    words = tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "c": 2})
    made = tokenizers.Tokenizer(words)
    made.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@settings(derandomize=True, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=2, max_size=24),
    at=st.integers(1, 23),
)
def test_the_text_of_a_prompt_and_its_output_is_the_text_of_all_tokens(tokens: list[int], at: int) -> None:
    """An output keeps the space that it begins with: it goes on where the prompt ends."""
    tokenizer, at = _spaced(), min(at, len(tokens) - 1)
    output = OutputText(tokenizer, prompt=tokens[:at])
    output.read(tokens[at:], finished=True)
    assert tokenizer.decode(tokens[:at]) + "".join(output.pieces) == tokenizer.decode(tokens)


def test_a_prompt_that_ends_inside_a_character_is_no_part_of_the_output() -> None:
    """The rest of a character that a prompt began is shown as what it is, and the text after it is whole."""
    begun, *rest = "é!".encode()
    output = OutputText(transformers.AutoTokenizer.from_pretrained(TINY), prompt=[begun])
    output.read(rest, finished=True)
    assert "".join(output.pieces) == "\ufffd!"


# -- refused configurations ------------------------------------------------------------------------


def test_a_runner_in_the_wrong_lane_is_refused() -> None:
    """A runner that does not serve the lane's mode is refused before the model is read."""
    config = configure(Path("nowhere"), "lanes.prefill.runner=cuda_graph")
    with pytest.raises(ConfigError, match="serves decode, target_verify, not extend"):
        Engine(config)


def test_a_backend_that_cannot_be_captured_is_refused() -> None:
    """A runner that captures refuses a backend that declares no graph support."""

    class Eager(FlashInferBackend):
        capabilities = replace(FlashInferBackend.capabilities, graph_support=GraphSupport.NEVER)

    config = configure(Path("nowhere"), "engine.attention_backend=eager_only")
    with pytest.raises(ConfigError, match=r"captures uniform_decode batches.* is never"):
        Engine(config, catalog=Catalog(eager_only=Eager))
    # The same backend serves a lane whose runner captures nothing.
    config = configure(TINY, "engine.attention_backend=eager_only", "lanes.decode.runner=eager")
    with Engine(config, catalog=Catalog(eager_only=Eager)) as engine:
        assert engine.generate(["If "], SamplingParams(max_new_tokens=3))[0].text
        assert {lane.stats.replays for lane in engine.lanes} == {0}


def test_a_backend_that_lacks_a_mode_is_refused() -> None:
    """A backend without the mode of its lane is refused; the error lists the modes that it has."""

    class DecodeOnly(FlashInferBackend):
        capabilities = replace(FlashInferBackend.capabilities, modes=frozenset({ForwardMode.DECODE}))

    config = configure(TINY, "engine.attention_backend=decode_only")
    with pytest.raises(UnsupportedModelError, match=r"mode extend \(has decode\)"):
        Engine(config, catalog=Catalog(decode_only=DecodeOnly))


@pytest.mark.parametrize("kind", ["attention_backend", "runner", "graph_driver"])
def test_a_plugin_that_raises_is_named(kind: str) -> None:
    """An error of a plugin while it is checked or built is reported with the plugin's kind and name."""

    class Backend(FlashInferBackend):
        def __init__(self, context: Any) -> None:
            raise OSError("libacme.so: cannot open shared object file")

    class Runner(CudaGraphRunner):
        def __init__(self, context: Any) -> None:
            raise OSError("libacme.so: cannot open shared object file")

    class Driver(TapeDriver):
        @classmethod
        def unavailable(cls, device: torch.device) -> str | None:
            raise OSError("libacme.so: cannot open shared object file")

    key, plugin = {
        "attention_backend": ("engine.attention_backend", Backend),
        "runner": ("lanes.decode.runner", Runner),
        "graph_driver": ("lanes.decode.graph_driver", Driver),
    }[kind]
    config = configure(TINY, f"{key}=acme")
    with pytest.raises(PluginError, match=rf"{kind} 'acme' .*OSError: libacme\.so"):
        Engine(config, catalog=Catalog(acme=plugin))


def test_a_driver_that_gives_no_line_of_text_is_refused_by_name() -> None:
    """The error for an `unavailable` that returns neither a text nor None names the driver and the value."""

    class Driver(TapeDriver):
        @classmethod
        def unavailable(cls, device: torch.device) -> Any:
            return False

    config = configure(TINY, "lanes.decode.graph_driver=acme")
    with pytest.raises(PluginError, match=r"'acme': unavailable\(\) returned False, not a line of text"):
        Engine(config, catalog=Catalog(acme=Driver))


def test_shapes_for_a_runner_that_captures_nothing_are_refused() -> None:
    """batch_sizes in an eager lane have no effect, so they are refused."""
    with pytest.raises(ConfigError, match="captures nothing"):
        Engine(configure(TINY, "lanes.prefill.batch_sizes=[1]"))


class Lenient(TapeDriver):
    """A driver without a strict mode."""

    name = "lenient"
    has_strict_mode = False


@pytest.mark.parametrize(
    ("lane", "overrides", "says"),
    [
        ("prefill", [], "runner 'eager' captures nothing"),
        (
            "decode",
            ["lanes.decode.graph_driver=lenient"],
            "graph driver 'lenient' has no strict mode",
        ),
    ],
)
def test_a_strict_lane_without_a_strict_driver_is_refused(lane: str, overrides: list[str], says: str) -> None:
    """``strict`` is refused for a lane without graphs, and for a driver without a strict mode."""
    config = configure(TINY, f"lanes.{lane}.strict=true", *overrides)
    with pytest.raises(ConfigError, match=rf"lanes\.{lane}\.strict = true, but .*{says}"):
        Engine(config, catalog=Catalog(lenient=Lenient))


def test_limits_that_do_not_fit_are_refused() -> None:
    """A `max_model_len` over the model's, and pages over the memory budget, are refused with the numbers."""
    with pytest.raises(ConfigError, match="max_model_len is 5000; the model has 1024"):
        Engine(configure(TINY, "engine.max_model_len=5000"))
    with pytest.raises(ConfigError, match="GiB are available"):
        Engine(configure(TINY, "engine.kv_cache_memory_gib=0.001", "engine.num_pages=1000"))


@pytest.mark.parametrize("told", [["SC_AVPHYS_PAGES"], ["SC_PHYS_PAGES"], []])
def test_memory_is_found_on_every_system(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is built even if the system does not report its free memory."""
    monkeypatch.setattr("os.sysconf_names", {name: os.sysconf_names[name] for name in told})
    with Engine(configure(TINY, "engine.max_num_seqs=2")) as engine:
        assert engine.memory.pages.num_pages == 2 * 1024 // 16


def test_a_generation_config_of_its_own_ends_text(tmp_path: Path) -> None:
    """The end tokens are those of the model's generation config, if there is one; it may have several."""
    path = Path(shutil.copytree(TINY, tmp_path / "model"))
    (path / "generation_config.json").write_text('{"eos_token_id": [32, 256]}')  # 32 is a space
    with Engine(configure(path)) as engine:
        assert engine.eos_token_ids == {32, 256}
        (done,) = engine.generate(["If the file does"], SamplingParams(max_new_tokens=60))
    assert done.finish_reason == "stop"
    assert [t in {32, 256} for t in done.token_ids].index(True) == len(done.token_ids) - 1
