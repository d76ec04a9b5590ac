"""One name, one meaning: no two public classes of our distributions have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = {"PortableKernels", "CompiledKernels", "NativeKernels", "Recorder"}
"""Names that several plugins may use: the providers of their kernels, and the recorders of drivers."""


def test_no_two_public_classes_have_one_name() -> None:
    """Each public class name of a distribution is defined once; museum and tests are not searched."""
    found = defaultdict(list)
    for file in [*ROOT.glob("*/graphpact*/**/*.py"), *ROOT.glob("plugins/*/graphpact*/**/*.py")]:
        if "museum" in file.parts:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(ROOT)))
    assert {n: f for n, f in found.items() if len(f) > 1 and n not in SHARED} == {}
