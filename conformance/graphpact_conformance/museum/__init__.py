"""The museum: real bugs of real engines, each planted in a plugin that is otherwise right.

    bindings   what is bound, refreshed and laid out: GP01, 02, 07
    recordings what is recorded, and with which numbers: GP08, 10
    plans      what is planned, staged and read on the host: GP09, 16, 20
    padding    what padded rows hold, and what they do: GP03 to 06
    memory     how large it is, how long it lives, who shares it: GP13 to 15, 18, 19
    runners    runners, the registry, capture sizes, batches, ranks: GP03 to 06, 11, 12, 17 and others
    variants   right plugins in other styles

`exhibit` says what an exhibit is, `edits` how several rooms make theirs, `gallery` shows them to the suite.

The suite has to catch every exhibit under its own rule, and to pass every variant. A rule without an exhibit
is not trusted.

Does not: belong to what a plugin is checked with; it checks the suite.
"""

from graphpact_conformance.museum import (
    bindings,
    memory,
    padding,
    plans,
    recordings,
    runners,
    variants,
)
from graphpact_conformance.museum.exhibit import Exhibit, Variant
from graphpact_conformance.museum.gallery import Visit, visit, visit_all

EXHIBITS: tuple[Exhibit, ...] = tuple(
    sorted(
        (
            exhibit
            for room in (bindings, recordings, plans, padding, memory, runners)
            for exhibit in room.EXHIBITS
        ),
        key=lambda exhibit: (exhibit.rule, exhibit.name),
    )
)
"""Every exhibit, by its rule."""
VARIANTS: tuple[Variant, ...] = tuple(variants.VARIANTS)
"""Every right plugin in another style."""

__all__ = ["EXHIBITS", "VARIANTS", "Exhibit", "Variant", "Visit", "visit", "visit_all"]
