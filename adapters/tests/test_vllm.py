"""Builders with vLLM's interface under the adapter: planted public bugs are found, right ones pass."""

from collections.abc import Callable
from typing import Any

import pytest
from adapter_checks import assert_found, assert_right, findings_of, results_of
from vllm_builders import (
    LANES,
    PLANTED,
    UNUSUAL,
    FreshLengths,
    PagedBuilder,
    Planted,
    SizedByRequests,
    TupleBuilder,
    under_test,
)

from graphpact.errors import ConfigError
from graphpact_adapters.vllm import Builders
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options

TWINS = [*dict.fromkeys((each.twin, each.read, each.kind, each.lane) for each in PLANTED)]
RIGHT = [*dict.fromkeys([*(each[:3] for each in TWINS), *((*each, "full") for each in UNUSUAL)])]


@pytest.mark.few(3)
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    """A public bug is found under its rule, with the author's field, both values and the batch."""
    findings = findings_of(planted.subject(), LANES[planted.lane])
    assert_found(findings, planted.rule, planted.field)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "read", "kind", "lane"),
    [pytest.param(*twin) for twin in TWINS],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_right_twin_passes(
    make: type[PagedBuilder], read: Callable[..., Any] | None, kind: str, lane: str
) -> None:
    """The builder without the bug passes in the lane in which the bug is found."""
    assert_right(under_test(make, read, kind), LANES[lane])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "read"),
    [pytest.param(*each) for each in UNUSUAL],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_right_builder_in_unusual_style_passes(
    make: type[PagedBuilder], read: Callable[..., Any] | None
) -> None:
    """Style is free: metadata of any kind, kept views and objects, pools, longer views, rows left stale."""
    assert_right(under_test(make, read), LANES["decode"])


def test_the_planted_bugs_are_public_and_of_many_kinds() -> None:
    """Each bug has a separate thread, and together they break most rules that a wrong replay can break."""
    threads = {planted.thread for planted in PLANTED}
    assert len(threads) == len(PLANTED) >= 12
    assert {planted.rule for planted in PLANTED} >= {
        *("GP01", "GP02", "GP03", "GP04", "GP08", "GP09", "GP10", "GP13", "GP14", "GP19")
    }


def test_a_finding_speaks_of_the_builder() -> None:
    """A finding has the names of the builder's methods and metadata, and one line for all KV-cache groups."""
    planted = next(each for each in PLANTED if each.make is FreshLengths)
    (finding, *_) = findings_of(planted.subject(), LANES["decode"])
    assert finding.hook == "build"
    assert str(finding.field).startswith("seq_lens[0:")
    freed = "the freed memory of the capture, which nothing keeps; build() returned another tensor"
    assert finding.actual == freed


def test_an_error_at_a_capture_has_the_builders_line() -> None:
    """A builder that raises at its capture is found with file and function."""
    planted = next(each for each in PLANTED if each.make is SizedByRequests)
    (finding,) = findings_of(planted.subject(), LANES[planted.lane])
    assert finding.hook == "build_for_cudagraph_capture"
    assert "vllm_builders.py" in str(finding.raised_at)
    assert "in ExpandedBuilder.decode_of" in str(finding.raised_at)


def test_metadata_that_no_reader_knows_breaks_no_rule() -> None:
    """Metadata for which there is no reader is a general failure; the error names the missing fields."""
    results = [*results_of(Builders(TupleBuilder), LANES["decode"])]
    assert {result.rule for result in results if result.outcome is Outcome.FAIL} == {None}
    (told, *_) = [finding for result in results for finding in result.findings]
    assert "no reader for vllm_builders.PlainTuple" in told.actual
    assert "flat needs block_table" not in told.actual  # it has one
    assert "Builders(make, read=...)" in str(told.help)


def test_the_error_of_a_factory_without_a_builder_has_its_line() -> None:
    """A constructor that raises, and an object without graph support, are refused; the hint has the call."""

    def raises(*_: Any) -> object:
        raise RuntimeError("no device")

    for make, said in ((raises, "RuntimeError: no device, at"), (lambda *_: 3, "get_cudagraph_support")):
        with pytest.raises(ConfigError, match=said) as told:
            next(iter(Builders(make).lanes(Options(size="quick"))))
        assert "(kv_cache_spec, layer_names, vllm_config, device)" in str(told.value.hint)


@pytest.mark.sweep
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_bug_is_found_in_a_quick_run(planted: Planted) -> None:
    """All quick lanes together find the bug under its rule, and no lane has a fault of the suite."""
    assert planted.rule in {finding.rule for finding in findings_of(planted.subject())}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "read", "kind"),
    RIGHT,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_right_builder_passes_a_quick_run(
    make: type[PagedBuilder], read: Callable[..., Any] | None, kind: str
) -> None:
    """A right builder passes in every quick lane that it supports."""
    assert_right(under_test(make, read, kind))
