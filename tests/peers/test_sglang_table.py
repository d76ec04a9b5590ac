"""The table of SGLang's backends, as far as it can be read without SGLang's wheel."""

import importlib

import pytest

from graphpact_adapters.sglang import Backends
from graphpact_conformance.targets import Options
from peers import sglang_adapted, sglang_checks


def test_a_name_outside_the_table_is_unknown() -> None:
    """No wheel is asked for, and the name is in the error."""
    with pytest.raises(AttributeError, match="no attribute 'paged'"):
        sglang_checks.paged  # noqa: B018  it is read


def test_reasons_and_findings_are_of_backends_in_the_table() -> None:
    """What was looked into, and why a backend is not run, belong to a row; a backend has one of both."""
    assert sglang_checks.KNOWN.keys() <= sglang_adapted.ADAPTED.keys()
    assert sglang_checks.NOT_RUN.keys() <= sglang_adapted.ADAPTED.keys()
    assert not sglang_checks.KNOWN.keys() & sglang_checks.NOT_RUN.keys()


def test_lanes_that_take_long_are_left_out() -> None:
    """Tall ladders and long contexts are not checked; all other lanes of the adapter are."""
    make = importlib.import_module("sglang_backends").PagedBackend
    options = Options(size="normal")
    released = [str(plan) for plan in sglang_checks.Released(make).lanes(options)]
    every = [*Backends(make).lanes(options)]
    quick = [str(plan) for plan in every if not (plan.lane.config.tall or plan.lane.config.long)]
    assert released == quick
    assert 0 < len(quick) < len(every)
