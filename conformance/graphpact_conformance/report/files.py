"""Reports as files: write a directory of them, and read ``results.json``.

Does not: read another version of the format.
"""

import json
from pathlib import Path

from pydantic import ValidationError

from graphpact.errors import UsageError
from graphpact.files import read_file, write_file
from graphpact_conformance.report.junit import to_junit
from graphpact_conformance.report.page import to_html
from graphpact_conformance.results import SCHEMA_VERSION, Report

FILES = ("results.json", "junit.xml", "report.html")
"""The files that `save` writes."""

_HINT = "a report is the results.json of `graphpact check --report DIR`"


def make_directory(directory: Path) -> None:
    """Create the directory of a report, so that a long run does not fail at its end.

    Raises:
        UsageError: It cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"no report can be written to {directory}: {_why(error)}") from error


def save(report: Report, directory: Path) -> None:
    """Write ``results.json``, ``junit.xml`` and ``report.html`` into ``directory``; needs jinja2.

    Raises:
        UsageError: They cannot be written.
        GraphpactError: The disk is full or broken.
    """
    make_directory(directory)
    texts = (report.model_dump_json(indent=2) + "\n", to_junit(report), to_html(report))
    for name, text in zip(FILES, texts, strict=True):
        write_file(directory / name, text)


def load_report(path: Path) -> Report:
    """Read the report in ``path``, a ``results.json``, or in the directory ``path``.

    Raises:
        UsageError: It is missing, not JSON, not a report, or in another version of the format.
    """
    file = path / FILES[0] if path.is_dir() else path
    try:
        content = read_file(file)
        raw = json.loads(content.decode())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {_why(error)}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise UsageError(f"{file} is not a report: it has no schema_version", hint=_HINT)
    version = raw["schema_version"]
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{file} has schema version {version!r}; this graphpact reads {SCHEMA_VERSION}",
            hint="read it with the graphpact that wrote it: environment.graphpact in the file",
        )
    try:
        return Report.model_validate_json(content)  # it also refuses what could not be written as JSON again
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        count = error.error_count()
        more = f", and {count - 1} more" if count > 1 else ""
        raise UsageError(f"{file} is not a report: {place}: {first['msg']}{more}", hint=_HINT) from error


def _why(error: OSError) -> str:
    return error.strerror or str(error)
