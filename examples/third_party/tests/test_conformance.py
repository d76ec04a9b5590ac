"""Does the backend keep the pact? One test for each rule of the contract."""

from collections.abc import Callable

import graphpact


@graphpact.conformance("my_attention")
def test_keeps_the_pact(check: Callable[[], None]) -> None:
    """The backend keeps the rule."""
    check()
