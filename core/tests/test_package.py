"""The package `graphpact`: its public names, and that its import is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import graphpact


def test_importing_graphpact_stays_light() -> None:
    """`import graphpact` imports neither torch, nor a plugin, nor the command line's tools."""
    command = [sys.executable, "-X", "importtime", "-c", "import graphpact"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "graphpact.errors" in imported
    heavy = {"torch", "pydantic", "typer", "rich", "graphpact_cli", "graphpact.lane"}
    assert not imported & (heavy | {"graphpact_flashinfer", "graphpact_cuda_graph"})


def test_every_public_name_is_there_and_declared_once() -> None:
    """Each name of `graphpact.__all__` can be imported, and the stub declares the same names."""
    stub = ast.parse(Path(graphpact.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    (declared,) = [
        ast.literal_eval(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert declared == graphpact.__all__
    for name in graphpact.__all__:
        assert getattr(graphpact, name) is not None
    assert "lane" not in graphpact.__all__
    assert "conformance" not in graphpact.__all__  # `import *` needs no other distribution
    assert graphpact.conformance is not None
    assert graphpact.lane.Lane is graphpact.Lane
    with pytest.raises(AttributeError, match="has no attribute 'lan'"):
        graphpact.lan  # noqa: B018
