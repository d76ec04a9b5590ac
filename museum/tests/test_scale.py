"""Exhibits that need unusual values: each shows only in lanes that have them."""

from collections import Counter
from dataclasses import replace

import pytest

from graphpact_conformance.suite import examine_lane
from graphpact_museum.collection import EXHIBITS
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.gallery import OPTIONS, planted, right_class

ALONE = [exhibit for exhibit in EXHIBITS if exhibit.values]
"""Exhibits that need unusual values."""


def test_each_dimension_of_scale_has_two_exhibits_of_its_own() -> None:
    """Each unusual value exposes at least two exhibits, with three exceptions that expose one.

    These are pages of one slot (another exhibit has many padding rows), and drafts of one step or of many
    tokens (other exhibits have wide drafts).
    """
    count = Counter(value for exhibit in ALONE for value in exhibit.values)
    assert count.keys() == {"tall", "long", "mixed", "high", "wide", "broad", "fields", "page1", "single"}
    assert min(number for value, number in count.items() if value not in ("page1", "single", "broad")) >= 2


@pytest.mark.sweep
@pytest.mark.parametrize("exhibit", ALONE, ids=lambda exhibit: exhibit.name)
def test_a_bug_of_a_dimension_shows_in_its_lanes_alone(exhibit: Exhibit) -> None:
    """The bug breaks no rule in the same lanes without the unusual values.

    Lanes of another model, beside which they run, have unusual values of their own, such as mixed windows.
    """
    with planted(replace(exhibit, values=()), right_class(exhibit.base)) as plans:
        assert plans
        results = [result for plan in plans for result in examine_lane(plan, OPTIONS)]
    assert not [f for result in results for f in result.findings if f.experiment != "beside_other_lanes"]
