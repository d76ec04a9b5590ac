"""The strict namespace that a backend of SGLang is given."""

import copy
import dataclasses

import pytest
import torch

from graphpact_adapters.sglang.plain_values import (
    Given,
    ModelRunnerSizes,
    NotInModelRunnerError,
    model_runner,
)


def test_a_value_is_read_and_may_be_set_later() -> None:
    """Values are attributes, and an engine may add to them."""
    runner = Given("model_runner", page_size=64)
    runner.dtype = "bfloat16"
    assert (runner.page_size, runner.dtype) == (64, "bfloat16")


def test_an_unknown_attribute_says_its_path_what_is_there_and_what_to_do() -> None:
    """The error of a new attribute names the object, the attribute, the values, and both ways out."""
    runner = Given("model_runner", config=Given("model_runner.config", heads=4, absent=("softcap",)))
    with pytest.raises(
        NotInModelRunnerError, match=r"model_runner\.config\.window was read.*given are heads"
    ) as error:
        _ = runner.config.window
    assert "'window'" in (error.value.hint or "")


def test_a_default_does_not_hide_an_unknown_attribute() -> None:
    """``getattr`` with a default and ``hasattr`` raise too."""
    runner = Given("model_runner", page_size=64)
    with pytest.raises(NotInModelRunnerError):
        getattr(runner, "window", None)
    with pytest.raises(NotInModelRunnerError):
        hasattr(runner, "window")


def test_an_absent_attribute_is_absent() -> None:
    """An attribute that the engine's object may lack behaves like any missing attribute."""
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
    with pytest.raises(NotInModelRunnerError):
        _ = twin.window


SIZES = ModelRunnerSizes(
    kind="mha",
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    kv_lora_rank=None,
    dtype=torch.float32,
    page_size=16,
    context_len=78,
    max_requests=4,
    width=4,
    num_draft_tokens=4,
    num_steps=3,
)


def test_a_model_runner_has_the_sizes_of_the_lane_and_its_table() -> None:
    """Drafts have room after the context in the table, which is the lane's own; unknown names raise."""
    table = torch.zeros(7, 81, dtype=torch.int32)
    runner = model_runner(SIZES, table)
    assert runner.req_to_token_pool.req_to_token is table
    assert runner.req_to_token_pool.size == 6
    assert runner.model_config.context_len < table.shape[1]
    assert runner.server_args.speculative_num_draft_tokens == 4
    assert runner.model_config.get_num_kv_heads(2) == 1
    with pytest.raises(NotInModelRunnerError, match=r"model_runner\.model_config\.hf_config was read"):
        _ = runner.model_config.hf_config


def test_a_lane_without_drafts_has_no_speculation() -> None:
    """The fields of speculation are None, as in a server that does not draft."""
    sizes = dataclasses.replace(SIZES, num_draft_tokens=None, num_steps=0, width=1)
    given = model_runner(sizes, torch.zeros(7, 81, dtype=torch.int32)).server_args
    assert given.speculative_algorithm is None
    assert given.speculative_num_draft_tokens is None
