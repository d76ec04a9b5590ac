"""Tests of the table of vLLM's builders that need no wheel."""

import pytest

from peers import vllm_builders


def test_a_builder_that_cannot_be_constructed_says_why() -> None:
    """Each row without a factory raises an error with its class and reason; so does an unknown name."""
    absent = {name: row for name, row in vllm_builders.BUILDERS.items() if row.absent}
    assert absent
    for name, row in absent.items():
        with pytest.raises(AttributeError, match=row.path) as caught:
            getattr(vllm_builders, name)
        assert row.absent in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'paged'"):
        vllm_builders.paged  # noqa: B018  it is read


def test_each_class_has_one_row() -> None:
    """No builder class is in the table twice, or in both tables."""
    paths = [row.path for row in vllm_builders.BUILDERS.values()] + [*vllm_builders.NOT_BUILDERS]
    assert len(set(paths)) == len(paths)
