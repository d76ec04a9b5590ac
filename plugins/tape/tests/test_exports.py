"""The public names and the imports of the library."""

import subprocess
import sys

import graphpact_tape


def test_every_public_name_is_exported_once_and_in_order() -> None:
    """``__all__`` is sorted, and every name in it exists."""
    assert graphpact_tape.__all__ == sorted(set(graphpact_tape.__all__))
    assert all(hasattr(graphpact_tape, name) for name in graphpact_tape.__all__)


def test_the_import_is_light() -> None:
    """Importing the library imports no compiler, no command line and no vendor library."""
    heavy = {"torch._inductor", "torch._dynamo", "typer", "rich", "transformers", "flashinfer"}
    code = f"import sys, graphpact_tape; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
