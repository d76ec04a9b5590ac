"""Check released builders of engines: ``python -m peers [NAME...]``, with ``tests`` on the path.

Exit status: 0 if all findings are known, 1 if one is new or gone or the suite failed, 2 for an unknown
name, 3 if a wheel is not available.

It needs a package registry, or a cache that an earlier run filled.
"""

import argparse
import sys
from pathlib import Path

from graphpact_cli.console import data, note, print_table
from graphpact_conformance.targets import Options
from peers import other_checks, sglang_checks, vllm_checks
from peers.job import COLUMNS, as_json, is_as_known, run, table
from peers.page import FINDINGS, PAGE, findings, with_verdicts

ENGINES = {"vllm": vllm_checks, "sglang": sglang_checks, "other": other_checks}
"""Modules with ``rows()``."""


def main(arguments: list[str]) -> int:
    """Run the job; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m peers", description="Check released builders.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="builders; all without a name")
    parser.add_argument("--engine", choices=[*ENGINES], help="only builders of this engine")
    parser.add_argument("--size", choices=("quick", "normal", "thorough"), default="quick")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the verdicts as JSON")
    parser.add_argument("--page", action="store_true", help="write the page of peers and build/peers.md")
    asked = parser.parse_args(arguments)
    try:
        engines = [ENGINES[asked.engine]] if asked.engine else [*ENGINES.values()]
        rows = [row for engine in engines for row in engine.rows()]
    except RuntimeError as error:  # pip's answer
        note(str(error))
        return 3
    if unknown := {*asked.names} - {row.name for row in rows}:
        note(f"no such builder: {', '.join(sorted(unknown))}")
        return 2
    found = run([row for row in rows if not asked.names or row.name in asked.names], Options(size=asked.size))
    print_table(data(), COLUMNS, [*table(found)])
    if asked.results is not None:
        asked.results.parent.mkdir(parents=True, exist_ok=True)
        asked.results.write_text(as_json(found), encoding="utf-8")
    if asked.page:
        PAGE.write_text(with_verdicts(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
        FINDINGS.parent.mkdir(exist_ok=True)
        FINDINGS.write_text(findings(found), encoding="utf-8")
    return int(not is_as_known(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
