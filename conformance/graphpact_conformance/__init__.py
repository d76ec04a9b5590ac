"""The conformance suite: checks plugins against the contract, also without a GPU.

Does not: import pytest or hypothesis before `conformance` is called.
"""

from typing import Any

from graphpact.errors import UsageError

__all__ = ["conformance"]


def conformance(*names: str, **options: Any) -> Any:
    """Return a decorator that runs the suite as tests; see `testing.conformance_decorator`.

    Raises:
        UsageError: A package that the suite needs is not installed.
    """
    try:
        from graphpact_conformance import testing  # noqa: PLC0415  pytest and hypothesis
    except ModuleNotFoundError as error:
        if error.name not in ("hypothesis", "pytest"):
            raise
        raise UsageError(
            f"this needs {error.name}, which is not installed",
            hint='pip install "graphpact[conformance]"',
        ) from error
    return testing.conformance_decorator(*names, **options)
