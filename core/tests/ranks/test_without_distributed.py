"""A torch without ``torch.distributed``: everything can be imported that runs in one process."""

import subprocess
import sys

_CODE = """
import torch.distributed as dist
kept = {"is_available", "device_mesh", "distributed_c10d"}
for name in [name for name in vars(dist) if not name.startswith("_") and name not in kept]:
    delattr(dist, name)
import graphpact_tape.collectives
assert "graphpact.ranks" not in __import__("sys").modules
import graphpact.ranks
import graphpact_engine.ranks
"""


def test_ranks_can_be_imported_without_it() -> None:
    """The tape does not import the ranks, and neither they nor those of the engine need it to be imported."""
    found = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
