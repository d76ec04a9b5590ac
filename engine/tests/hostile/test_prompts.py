"""Prompts and sampling parameters of every type: served correctly, or refused with a description of prompts.

Does not: run the command; `engine/tests/test_cli_generate.py` has its prompts.
"""

import array
import collections
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import RequestError

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
IDS = [84, 104, 101, 32]  # the bytes of "The "
SHORT = SamplingParams(max_new_tokens=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield an engine on the shipped model, whose tokens are bytes."""
    config = EngineConfig.load(None, env={}, overrides=[f'model.path="{TINY}"', 'engine.device="cpu"'])
    with Engine(config) as engine:
        yield engine


def refused(engine: Engine, prompts: Any, *words: str, sampling: Any = SHORT) -> None:
    """Assert that `generate` and `stream` refuse ``prompts`` in words, and start nothing."""
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError) as raised:
            call(prompts, sampling)
        said = str(raised.value)
        assert all(word in said for word in words), said
        assert len(said) < 600, said
        assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("Hello", ["got one str: 'Hello'", "['Hello']"]),
        ("", ["got one str"]),
        ("x" * 10**6, ["got one str: 'xxx"]),
        (IDS, ["the token ids of one", "[token_ids]"]),
        ([{"role": "user", "content": "Hello"}], ["the messages of one", "[messages]"]),
        (None, ["got NoneType"]),
        (5, ["got int"]),
        (True, ["got bool"]),
        (b"Hello", ["got bytes"]),
        (bytearray(b"Hello"), ["got bytearray"]),
        ({"prompt": "Hello"}, ["got dict"]),
        ({"The ", "If "}, ["got set"]),
        (np.array(IDS), ["got one ndarray of shape [4]"]),
        (np.array([IDS, IDS]), ["got one ndarray of shape [2, 4]", "without padding"]),
        (torch.tensor([IDS, IDS]), ["got one Tensor of shape [2, 4]", "without padding"]),
        (np.array(["The ", "If "]), ["got one ndarray"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_list_of_prompts_is_refused(prompts: Any, words: list[str], engine: Engine) -> None:
    """A single prompt or an unordered collection is refused; the error says how to give one prompt."""
    refused(engine, prompts, *words)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["the prompt is empty"]),
        ([], ["empty prompt"]),
        ((), ["empty prompt"]),
        (np.array([], dtype=np.int64), ["empty prompt"]),
        (None, ["of type NoneType"]),
        (7, ["of type int"]),
        (7.5, ["of type float"]),
        (True, ["of type bool"]),
        (object(), ["of type object"]),
        (b"Hello", ["of type bytes"]),
        (memoryview(b"Hello"), ["of type memoryview"]),
        ({"role": "user"}, ["of type dict"]),
        ({84, 104}, ["of type set"]),
        (iter(IDS), ["of type list_iterator"]),
        ([84, "h"], ["element of type str: 'h'"]),
        (["The ", "If "], ["element of type str: 'The '"]),
        ([84, 104.0], ["element of type float: 104.0"]),
        ([84, True], ["element of type bool: True"]),
        ([84, None], ["element of type NoneType"]),
        ([IDS, IDS], ["element of type list"]),
        ([[84]] * 10**5, ["element of type list: [84]"]),
        (np.array([IDS]), ["element of type list"]),
        (np.array(5), ["of type int"]),
        (np.array([84.0, 104.0]), ["element of type float"]),
        (np.array([True, False]), ["element of type bool"]),
        (np.array(["The "]), ["element of type str"]),
        (torch.tensor([IDS]), ["element of type list"]),
        (torch.tensor(5), ["of type int"]),
        (torch.tensor([84.0]), ["element of type float"]),
        (torch.tensor([True]), ["element of type bool"]),
        ([torch.ones((), dtype=torch.bool)], ["element of type Tensor"]),
        ([torch.tensor([84, 104])], ["element of type Tensor of shape [2]"]),
        ([84, {"role": "user"}], ["element of type dict"]),
        ([-1], ["token id -1; the vocabulary of the model is 0 to 257"]),
        ([258], ["token id 258"]),
        ([2**70], ["token id 1180591620717411303424"]),
        ("ab\ud800cd", ["not UTF-8 text: 'ab\\ud800cd'"]),
        ("x" * 10**6 + "\udcff", ["not UTF-8 text"]),
        ("x" * 10**6, ["1000000 tokens", "at most 1023 leave room"]),
        ([5] * 10**6, ["1000000 tokens"]),
        (range(10**6), ["token id 258"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_prompt_is_refused_with_its_place(prompt: Any, words: list[str], engine: Engine) -> None:
    """A prompt of another type or with another element is refused by its number; none was started."""
    refused(engine, ["The ", prompt, "If "], "prompt 2 of 3: ", *words)


@pytest.mark.parametrize(
    "same",
    [
        IDS,
        tuple(IDS),
        collections.deque(IDS),
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        list(np.array(IDS)),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        list(torch.tensor(IDS)),
        array.array("i", IDS),
        type("Text", (str,), {})("The "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_of_any_integer_type_are_served(same: Any, engine: Engine) -> None:
    """Sequences and one-dimensional arrays of integers give the same as their text, and are not changed."""
    before = repr(same)
    done = engine.generate(["The ", same], SHORT)
    assert done[0].token_ids == done[1].token_ids
    assert done[1].prompt is same
    assert repr(same) == before
    assert engine.generate([range(84, 88)], SHORT)[0].text == engine.generate(["TUVW"], SHORT)[0].text


@pytest.mark.parametrize("make", [list, tuple, iter, collections.deque, lambda x: (p for p in x)])
def test_any_ordered_collection_of_prompts_is_served(make: Any, engine: Engine) -> None:
    """Prompts may come from a generator too; no prompts give no completions."""
    prompts = ["The ", IDS, "If "]
    done = engine.generate(make(prompts), SHORT)
    assert [each.prompt for each in done] == prompts
    assert [each.token_ids for each in engine.stream(make([]), SHORT)] == []
    assert engine.generate(make([]), SHORT) == []


def test_a_generator_of_prompts_that_raises_starts_nothing(engine: Engine) -> None:
    """The error of a caller's own generator reaches the caller, and no prompt was started."""

    def prompts() -> Iterator[str]:
        yield "The "
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts(), SHORT)
    assert not engine.scheduler.has_work


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(prompts=ANYTHING)
def test_anything_is_served_or_refused(prompts: Any, engine: Engine) -> None:
    """Any JSON value is served as prompts or refused, and leaves nothing behind."""
    try:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=1))
    except RequestError:
        pass
    else:
        assert [each.prompt for each in done] == prompts
        assert all(isinstance(prompt, str | list) for prompt in prompts)
    assert not engine.scheduler.has_work


# -- sampling parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 1}, ["sampling must be SamplingParams; got dict"]),
        ("greedy", ["2 prompts and 6 sampling parameters"]),
        ([SHORT], ["2 prompts and 1 sampling parameters"]),
        ([SHORT] * 3, ["2 prompts and 3 sampling parameters"]),
        ([], ["2 prompts and 0 sampling parameters"]),
        ([SHORT, 5], ["prompt 2 of 2: sampling must be SamplingParams; got int"]),
        (SamplingParams, ["got type"]),
        (SamplingParams(suppress_tokens=[258]), ["suppress_tokens has token id 258"]),
        (SamplingParams(logit_bias={300: 1.0}), ["logit_bias has token id 300"]),
        (SamplingParams(stop_token_ids=[258]), ["stop_token_ids has token id 258"]),
        (SamplingParams(suppress_tokens=range(258)), ["suppress every token"]),
        (
            SamplingParams(suppress_tokens=range(256), stop_token_ids=[257], min_new_tokens=1),
            ["suppress every token"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sampling_that_fits_no_prompt_is_refused(sampling: Any, words: list[str], engine: Engine) -> None:
    """Sampling parameters of another type or number, or with tokens that do not exist, are refused."""
    refused(engine, ["The ", "If "], *words, sampling=sampling)


def test_each_prompt_may_have_its_own_parameters(engine: Engine) -> None:
    """A list of parameters gives each prompt its own; None is the default."""
    lengths = [3, 1, 7]
    done = engine.generate(["The "] * 4, [*(SamplingParams(max_new_tokens=n) for n in lengths), None])
    assert [len(each.token_ids) for each in done][:3] == lengths
    assert len(done[3].token_ids) > 7


@settings(derandomize=True, deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), value=ANYTHING)
def test_any_value_of_a_parameter_is_taken_or_refused(name: str, value: Any) -> None:
    """Any JSON value is a valid value of a sampling parameter, or refused by the parameter's name."""
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert f"sampling parameter {name} must be" in str(error)  # noqa: PT017  the other end is success
    else:
        assert SamplingParams(**{name: getattr(params, name)}) == params


# -- texts that are too long ---------------------------------------------------------------------


def test_a_long_prompt_is_no_warning_of_transformers(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a prompt beyond the tokenizer's own length, transformers logs nothing: the engine has a limit."""
    monkeypatch.setattr(engine.tokenizer, "model_max_length", 4)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content }}")
    with caplog.at_level(logging.INFO, logger="transformers"):
        for prompt in ("The whole of it", [{"role": "user", "content": "The whole of it"}]):
            engine.generate([prompt], SHORT)
    assert caplog.records == []
