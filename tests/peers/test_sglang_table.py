"""Tests of the table of SGLang's backends that need no wheel."""

import importlib
import traceback

import pytest
import torch

from graphpact_adapters.sglang import Backends
from graphpact_conformance.targets import Options
from peers import sglang_adapted, sglang_backends, sglang_checks


def test_a_name_outside_the_table_is_unknown() -> None:
    """No wheel is asked for, and the name is in the error."""
    with pytest.raises(AttributeError, match="no attribute 'paged'"):
        sglang_checks.paged  # noqa: B018  it is read


def test_reasons_and_findings_are_of_backends_in_the_table() -> None:
    """Known findings and reasons not to run belong to rows; no backend has both."""
    assert sglang_checks.KNOWN.keys() <= sglang_adapted.ADAPTED.keys()
    assert sglang_checks.NOT_RUN.keys() <= sglang_adapted.ADAPTED.keys()
    assert not sglang_checks.KNOWN.keys() & sglang_checks.NOT_RUN.keys()


def test_lanes_that_take_long_are_left_out() -> None:
    """Lanes with many capture sizes or long contexts are not checked; all other lanes are."""
    make = importlib.import_module("sglang_backends").PagedBackend
    options = Options(size="normal")
    released = [str(plan) for plan in sglang_checks.Released(make).lanes(options)]
    every = [*Backends(make).lanes(options)]
    quick = [str(plan) for plan in every if not (plan.lane.config.is_tall or plan.lane.config.is_long)]
    assert released == quick
    assert 0 < len(quick) < len(every)


def test_a_raise_on_the_cpu_is_reported_at_the_line_of_the_engine() -> None:
    """The frames of the mode that makes tensors on the CPU are not in a traceback."""
    with pytest.raises(RuntimeError, match="must match") as caught, sglang_backends.on_cpu():
        torch.ones(2, device="cuda").copy_(torch.ones(3))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "__torch_function__" not in [frame.name for frame in frames]
    assert frames[0].name == "test_a_raise_on_the_cpu_is_reported_at_the_line_of_the_engine"
