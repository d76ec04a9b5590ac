"""Stop strings: the text is cut before the first, and no part of one is ever shown."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import CheckpointError, RequestError
from graphpact_engine.text import OutputText

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
LETTERS = "abé\U0001f600"


def cut(text: str, stop: Sequence[str], begin: int = 0) -> tuple[str, bool]:
    """Return a text up to the stop string that ends first, of those the longest; and whether there is one.

    This is the oracle: it sees the whole text at once. The first ``begin`` characters are not searched.
    """
    ends = [
        (end, -len(each))
        for end in range(begin, len(text) + 1)
        for each in stop
        if end - len(each) >= begin and text[:end].endswith(each)
    ]
    if not ends:
        return text, False
    end, negative_length = min(ends)
    return text[: end + negative_length], True


class Pieces:
    """A tokenizer whose tokens are given pieces of bytes, so that tokens end anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens, with a replacement character for incomplete bytes."""
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


@st.composite
def tokenised_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Return a text of few letters and its bytes, cut into tokens at random places."""
    text = draw(st.text(LETTERS, max_size=14))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))))
    edges = [0, *cuts, len(data)]
    return text, [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(derandomize=True, deadline=None, max_examples=600)
@given(
    tokenised=tokenised_texts(),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 4),
)
def test_streamed_text_is_the_whole_text_cut(
    tokenised: tuple[str, list[bytes]], stop: list[str], least: int
) -> None:
    """However a text is cut into tokens, its pieces add up to the text before the first stop string.

    At each token the pieces so far are a prefix of that text: no part of a stop string is shown.
    """
    _, tokens = tokenised
    decoded = OutputText(Pieces(tokens), min_new_tokens=0)
    decoded.read(range(len(tokens)), finished=True)
    unsearched = "".join(decoded.pieces[: max(least - 1, 0)])
    whole = "".join(decoded.pieces)

    output = OutputText(Pieces(tokens), stop, min_new_tokens=least)
    seen = 0
    while seen < len(tokens) and not output.is_stopped:
        seen += 1
        output.read(range(seen), finished=seen == len(tokens))
        so_far = "".join(output.pieces)
        expected, _ = cut(whole, stop, len(unsearched))
        assert expected.startswith(so_far)
        assert len(output.pieces) == seen
    assert ("".join(output.pieces), output.is_stopped) == cut(whole, stop, len(unsearched))
    if output.is_stopped:  # at once: the text up to this token has the stop string
        before = "".join(decoded.pieces[:seen])
        assert cut(before, stop, len(unsearched))[1]
        shorter = "".join(decoded.pieces[: seen - 1])
        assert not cut(shorter, stop, len(unsearched))[1]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield an engine on the shipped model, whose tokens are bytes."""
    config = EngineConfig.load(None, env={}, overrides=[f'model.path="{TINY}"', 'engine.device="cpu"'])
    with Engine(config) as engine:
        yield engine


def params(**changes: Any) -> SamplingParams:
    """Return greedy parameters for 40 tokens."""
    return SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True, **changes})


@settings(derandomize=True, deadline=None, max_examples=12)
@given(at=st.integers(0, 30), length=st.integers(1, 6), least=st.sampled_from([0, 0, 20]))
def test_a_request_ends_with_the_token_that_completes_a_stop_string(
    at: int, length: int, least: int, engine: Engine
) -> None:
    """Text is that of a run without stop strings, cut; tokens are its tokens up to the completing one."""
    prompts = ["Return a ", "The "]
    whole = engine.generate(prompts, params())
    stop = whole[0].text[at : at + length]
    given_stop = params(stop=["\n\n\n", stop], min_new_tokens=least)
    for completion, reference in zip(engine.generate(prompts, given_stop), whole, strict=True):
        begin = max(least - 1, 0)  # a token is a byte and a character
        text, found = cut(reference.text, ["\n\n\n", stop], begin)
        assert completion.text == text
        assert completion.finish_reason == ("stop" if found else "length")
        count = len(completion.token_ids)
        assert completion.token_ids == reference.token_ids[:count]
        assert count >= least
        assert found == (count < 40 or reference.text.endswith(stop))
        if found:
            assert bytes(completion.token_ids).decode().endswith(stop)
    assert not engine.scheduler.has_work


def test_requests_stepped_by_hand_stop_too(engine: Engine) -> None:
    """Without any stream, `step` ends a request at its stop string, and `text_of` gives the cut text."""
    whole = engine.generate(["The "], params())[0].text
    request = engine.add("The ", params(stop=whole[10:13]))
    shown = []
    while not request.is_finished:
        engine.step()
        shown.append(engine.text_of(request))
    expected, _ = cut(whole, [whole[10:13]])
    assert (shown[-1], request.finish_reason) == (expected, "stop")
    assert all(expected.startswith(each) for each in shown)


def test_the_last_token_may_complete_a_stop_string(engine: Engine) -> None:
    """If limit and stop string come with one token, the text is cut and the reason is stop."""
    whole = engine.generate(["The "], params())[0].text
    (done,) = engine.generate(["The "], params(max_new_tokens=3, stop=whole[1:3]))
    assert (done.text, done.finish_reason, len(done.token_ids)) == (whole[:1], "stop", 3)


def test_held_text_is_given_with_the_last_token(engine: Engine) -> None:
    """Text that might have begun a stop string is shown when the request ends without one."""
    whole = engine.generate(["The "], params(max_new_tokens=5))[0].text
    deltas = list(engine.stream(["The "], params(max_new_tokens=5, stop=[whole + "?", whole[3:] + "!"])))
    assert [delta.text for delta in deltas] == ["", "", "", "", whole]
    assert deltas[-1].finish_reason == "length"


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    """Stop strings for a checkpoint without a tokenizer are refused; without them it serves token ids."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path)
    config = EngineConfig.load(None, env={}, overrides=[f'model.path="{tmp_path}"', 'engine.device="cpu"'])
    with Engine(config) as engine:
        with pytest.raises(CheckpointError, match="no tokenizer"):
            engine.generate([[84]], params(stop="x"))
        assert engine.generate([[84]], params(max_new_tokens=2))[0].token_ids


@pytest.mark.parametrize("stop", ["", [""], ["a", 5], 5, [None], b"x", ["a", b"b"]])
def test_odd_stop_strings_are_refused(stop: Any) -> None:
    """An empty or non-text stop string is refused by the name of the parameter."""
    with pytest.raises(RequestError, match="stop must be strings that are not empty"):
        SamplingParams(stop=stop)


def test_one_stop_string_may_be_given_alone() -> None:
    """A str is one stop string, not one for each character."""
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    """The search for a stop string of a million characters is fast: only its beginning can match."""
    output = OutputText(transformers.AutoTokenizer.from_pretrained(TINY), ["a" * 10**6, "b"])
    output.read([97] * 200 + [98], finished=True)
    assert "".join(output.pieces) == "a" * 200
    assert output.is_stopped
