"""All exhibits and all variants.

Does not: declare one; see `graphpact_museum.exhibit`.
"""

import importlib

from graphpact_museum import ROOMS
from graphpact_museum.exhibit import Exhibit, Variant, declared

for _room in ROOMS:
    importlib.import_module(f"graphpact_museum.{_room}")

EXHIBITS = tuple(
    sorted((piece for piece in declared if isinstance(piece, Exhibit)), key=lambda e: (e.rule, e.name))
)
"""Every exhibit, by its rule and its name."""
VARIANTS = tuple(sorted((piece for piece in declared if isinstance(piece, Variant)), key=lambda v: v.name))
"""Every variant, by its name."""
