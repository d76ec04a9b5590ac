"""The examples that are what `graphpact new` writes, each with a name of its own: `EXAMPLES`.

Pages show these files and tests run them, and the template of `graphpact_scaffold` is their only source.

Does not: write what the template does not have, such as the other recipes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pages import ROOT

from graphpact_scaffold.kinds import NewKind
from graphpact_scaffold.rendering import write_project

EXAMPLES: Mapping[str, tuple[NewKind, str, str]] = {
    "examples/third_party/my_attention/backend.py": (NewKind.attention_backend, "my_attention", "backend.py"),
    "examples/recipes/driver.py": (NewKind.graph_driver, "timed", "driver.py"),
    "examples/recipes/observer.py": (NewKind.observer, "slow_steps", "observer.py"),
    "examples/recipes/prompt_lookup.py": (NewKind.speculation, "prompt_lookup", "algorithm.py"),
}
"""The file of each example; the kind and the name of its plugin, and which file of its package it is."""


def example(path: str) -> str:
    """Return what the file of an example has to be: the template's, in the style of this repository."""
    kind, name, file = EXAMPLES[path]
    with tempfile.TemporaryDirectory() as folder:
        write_project(kind, name, Path(folder))
        text = Path(folder, name, file).read_text(encoding="utf-8")
    for command in (("check", "--select=I", "--fix"), ("format",)):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={ROOT / path}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text
