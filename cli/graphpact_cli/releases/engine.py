"""`EngineReleases`: an engine whose releases are compared.

Does not: compare them; see `graphpact_cli.releases.comparison`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphpact_cli.releases.surface import Surface


@dataclass(frozen=True)
class EngineReleases:
    """An engine whose releases are compared.

    Args:
        name: Its name.
        package: Its package, such as ``vllm``.
        distribution: The distribution to download for a version.
        surface: What others build on.
    """

    name: str
    package: str
    distribution: str
    surface: "Surface"
