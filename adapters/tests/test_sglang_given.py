"""The strict namespace that a backend of SGLang is given."""

import copy

import pytest

from graphpact_adapters.sglang.given import Given, NotGivenError


def test_a_value_is_read_and_may_be_set_later() -> None:
    """Values are attributes, and an engine may add to them."""
    runner = Given("model_runner", page_size=64)
    runner.dtype = "bfloat16"
    assert (runner.page_size, runner.dtype) == (64, "bfloat16")


def test_an_unknown_attribute_says_its_path_what_is_there_and_what_to_do() -> None:
    """The error of a new attribute names the object, the attribute, the values, and both ways out."""
    runner = Given("model_runner", config=Given("model_runner.config", heads=4, absent=("softcap",)))
    with pytest.raises(
        NotGivenError, match=r"model_runner\.config\.window was read.*given are heads"
    ) as error:
        _ = runner.config.window
    assert "'window'" in (error.value.hint or "")


def test_a_default_does_not_hide_an_unknown_attribute() -> None:
    """``getattr`` with a default and ``hasattr`` raise too."""
    runner = Given("model_runner", page_size=64)
    with pytest.raises(NotGivenError):
        getattr(runner, "window", None)
    with pytest.raises(NotGivenError):
        hasattr(runner, "window")


def test_an_absent_attribute_is_absent() -> None:
    """What the engine's own object may lack reads as in any object without it."""
    runner = Given("model_runner", absent=("window",))
    assert getattr(runner, "window", 7) == 7
    assert not hasattr(runner, "window")


def test_an_absent_attribute_that_is_set_is_there() -> None:
    """A value has precedence over the list of absent attributes."""
    runner = Given("model_runner", absent=("window",))
    runner.window = 128
    assert runner.window == 128


def test_python_may_copy_it_and_show_it() -> None:
    """Protocols of Python, which ask for dunder names, work; a copy is as strict."""
    twin = copy.copy(Given("model_runner", page_size=64))
    assert repr(twin) == "Given('model_runner')"
    assert twin.page_size == 64
    with pytest.raises(NotGivenError):
        _ = twin.window
