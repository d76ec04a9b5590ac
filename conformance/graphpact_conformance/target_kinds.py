"""The kinds of plugins that the suite checks, and the prefixes of their names.

Does not: import anything, because completion in a shell needs these names at once.
"""

from typing import Literal

TargetKind = Literal["attention_backend", "runner", "graph_driver", "speculation", "observer", "adapter"]

LANE_KINDS: tuple[TargetKind, ...] = ("attention_backend", "runner")
"""The kinds that are checked in lanes of a model, alone and in pairs."""
PREFIXES: dict[TargetKind, str] = {
    "graph_driver": "driver",
    "speculation": "speculation",
    "observer": "observer",
}
"""The kinds that are checked by the requirements of a contract, each with the prefix of its names."""
TARGET_KINDS: tuple[TargetKind, ...] = (*LANE_KINDS, *PREFIXES)
"""The kinds of plugins that are checked by their names; an adapter's targets have a reference too."""
