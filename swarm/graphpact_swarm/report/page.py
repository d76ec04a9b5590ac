"""`write_page`: one HTML page with what was found, and features by verdict; without scripts.

Texts of engines are not trusted: the template escapes HTML.

Does not: import jinja2 before a page is written.
"""

from pathlib import Path
from typing import Any

from graphpact.files import write_file
from graphpact_swarm.report.results import Results

FILE = "report.html"


def write_page(folder: Path, results: Results) -> Path:
    """Write the page of results to a folder, and return its path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  only for a page

    environment = Environment(
        loader=PackageLoader("graphpact_swarm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path = folder / FILE
    write_file(path, environment.get_template("report.html.jinja").render(**_names(results)))
    return path


def _names(results: Results) -> dict[str, Any]:
    runs = list(results.results.values())
    coverage = results.coverage
    kinds = ("kind ", "graph ", "eager ", "event ")
    seconds = sum(each.verdict.seconds for each in runs)
    return {
        "head": results.head,
        "runs": runs,
        "wrong": results.count("finding"),
        "known": results.known(),
        "found": [
            (each_of, results.smaller.get(signature)) for signature, each_of in results.found().items()
        ],
        "features": list(results.by_feature()),
        "seen": [
            (
                kind.strip(),
                [
                    (name.removeprefix(kind), n)
                    for name, n in sorted(coverage.seen.items())
                    if name.startswith(kind)
                ],
            )
            for kind in kinds
        ],
        "pairs": len(coverage.pairs),
        "near_ties": sum(each.verdict.near_ties for each in runs),
        "worst_error": max((each.verdict.worst_error for each in runs), default=0.0),
        "seconds": seconds,
        "start_seconds": sum(each.start_seconds for each in runs),
        "skipped": len(results.skipped),
    }
