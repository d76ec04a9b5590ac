"""Where the examples of the repository are: one measurement uses their trained models.

Does not: download anything.
"""

from pathlib import Path

from graphpact_bench.timing import UnavailableWayError

_HERE = Path(__file__).parents[2] / "examples"


def examples_folder() -> Path:
    """Return the folder of the examples.

    Raises:
        UnavailableWayError: The package is not installed from a clone of the repository (``pip install -e``).
    """
    if not (_HERE / "models/tiny-llama").is_dir():
        raise UnavailableWayError(
            "its model is among the examples of the repository, and the package is installed without them",
            hint="run it in a clone: pip install -e benchmarks",
        )
    return _HERE
