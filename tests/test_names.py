"""One name, one meaning: no two public classes or functions of our distributions have the same name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OFFERED_BY_SEVERAL = {
    *("PortableKernels", "CompiledKernels", "NativeKernels"),  # the providers of a plugin's kernels
    "measure",  # what each measurement of the benchmarks offers to their command
    "main",  # what a process runs
}


def public_names(file: Path) -> Iterator[str]:
    """Yield the public classes and functions of a module; a private module has no public functions."""
    is_private = file.stem.startswith("_") and file.stem != "__init__"
    kinds = ast.ClassDef if is_private else (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name


def test_no_two_public_things_have_one_name() -> None:
    """Each public class and function of a distribution is defined once."""
    found = defaultdict(list)
    for file in [*ROOT.glob("*/graphpact*/**/*.py"), *ROOT.glob("plugins/*/graphpact*/**/*.py")]:
        module = file.relative_to(ROOT)
        for name in public_names(file):
            found[name].append(module)
    several = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert {name: modules for name, modules in several.items() if name not in OFFERED_BY_SEVERAL} == {}
