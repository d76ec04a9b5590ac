"""`DriverRequirement`: one requirement on a graph driver; its subject is a function that makes a driver.

The promises of the driver contract and the acts of strict drivers are requirements.

Does not: define requirements (see `promises` and `acts`), or run them for a plugin.
"""

from collections.abc import Callable
from typing import TypeAlias

from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import Requirement

Make: TypeAlias = Callable[[], GraphDriver]
"""Returns a new driver."""

DriverRequirement: TypeAlias = Requirement[Make]
