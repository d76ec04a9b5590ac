"""The pact: what a capture promised, and the check that every replay keeps it.

    walk.py        the leaves of static inputs and metadata, with their paths
    promises.py    what is promised about each leaf, the field marks `bounded` and `updated`, and `Terms`
    compiled.py    the comparisons of one pact as a generated function
    checks.py      `Pact`, which finds breaches

Does not: compare contents of tensors; the conformance suite and verification do.
"""

from graphpact.pact.checks import Pact
from graphpact.pact.promises import (
    ANY,
    Promise,
    TensorFacts,
    Terms,
    bounded,
    is_readable,
    type_name,
    updated,
)
from graphpact.pact.walk import walk

__all__ = [
    "ANY",
    "Pact",
    "Promise",
    "TensorFacts",
    "Terms",
    "bounded",
    "is_readable",
    "type_name",
    "updated",
    "walk",
]
