"""Answer `graphpact bench` for one engine: ``PYTHON serve.py FILE``.

A request is a line of JSON on stdin, with one key; its answer is a line of JSON on stdout:

    {"load": {...}}                            -> {"versions": {"vllm": "0.32.0", ...}}
    {"write": {"prompts": ..., "count": ...}}  -> {"tokens": ..., "first": ..., "steps": ...}
    either, if it fails                        -> {"error": "ImportError: ...", "versions": {...}}

FILE has ``PACKAGES``, whose versions are answered, and ``ENGINE``, the class of an object that is made from
the options of ``load`` and has ``write(prompts, count)``. Whatever it prints goes to stderr. The program ends
with its stdin.

Does not: import graphpact, or any package beside Python's own.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def serve(engine_file: str) -> None:
    """Answer every line of stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints is no answer
    sys.stdout = sys.stderr  # which is not buffered
    engine_kind = _module(engine_file)
    engine: Any = None
    for line in sys.stdin:
        ((what, options),) = json.loads(line).items()
        try:
            if what == "load":
                engine = engine_kind.ENGINE(**options)
                answer: dict[str, Any] = {"versions": _versions(engine_kind.PACKAGES)}
            else:
                answer = engine.write(**options)
        except Exception as error:  # noqa: BLE001  the other side reports it
            traceback.print_exc()
            versions = _versions(engine_kind.PACKAGES)
            answer = {"error": f"{type(error).__name__}: {error}", "versions": versions}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _module(file: str) -> Any:
    """Return the module in ``file``, whose folder stays off the path: its names are those of packages."""
    spec = importlib.util.spec_from_file_location("engine_of_bench", file)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018  for the type checker
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, in which `llama_cpp` is another module
    serve(sys.argv[1])
