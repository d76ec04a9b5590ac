"""The public names and the imports of the library."""

import subprocess
import sys


def test_the_import_is_light() -> None:
    """Importing the library, and a capture, import no compiler, no command line and no vendor library."""
    heavy = {"torch._inductor", "torch._dynamo", "typer", "rich", "transformers", "flashinfer"}
    code = (
        "import sys, torch, graphpact_tape; device = torch.device('cpu'); x = torch.ones(2, device=device);"
        "drivers = [graphpact_tape.TapeDriver(device, strict=strict) for strict in (False, True)];"
        "[driver.capture(lambda: x + 1).replay() for driver in drivers];"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
