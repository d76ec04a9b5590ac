"""The conformance suite: does a backend or a runner keep the pact, on a laptop, without a GPU?

The package can be called: ``@graphpact.conformance("my_backend")`` is
`graphpact.conformance.testing.conformance`.

Does not: import pytest or hypothesis before it is called.
"""

import sys
from types import ModuleType
from typing import Any

from graphpact.errors import UsageError


class _Package(ModuleType):
    """The type of this package; `graphpact` tells type checkers what calling it does."""

    def __call__(self, *names: str, **options: Any) -> Any:
        try:
            from graphpact.conformance import testing  # noqa: PLC0415  pytest and hypothesis
        except ModuleNotFoundError as error:
            if error.name not in ("hypothesis", "pytest"):
                raise
            raise UsageError(
                f"this needs {error.name}, which is not installed",
                hint='pip install "graphpact[conformance]"',
            ) from error
        return testing.conformance(*names, **options)


sys.modules[__name__].__class__ = _Package
