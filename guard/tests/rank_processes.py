"""Run one script as several ranks on this machine, and read what each prints.

Does not: know what the script does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_ranks(script: Path, arguments: Sequence[Sequence[str]]) -> list[Any]:
    """Run ``script`` once for each list of arguments, all at the same time; return the JSON that each prints.

    Raises:
        AssertionError: A rank failed; the message has what all wrote to stderr.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *its],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for its in arguments
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), [err for _, err in ended]
    return [json.loads(out) for out, _ in ended]
