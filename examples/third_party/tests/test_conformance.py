"""The conformance suite as tests of the backend, one for each rule of the contract."""

from collections.abc import Callable

import graphpact


@graphpact.conformance("my_attention")
def test_keeps_the_pact(check: Callable[[], None]) -> None:
    """The backend keeps one rule of the contract."""
    check()
