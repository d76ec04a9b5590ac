"""``junit.xml``: a suite for each plugin, a class for each rule, a test case for each lane.

Failures are JUnit failures, and errors of the suite are JUnit errors. Requirements that did not run and known
failures are skipped with their reason.

Does not: mark a SHOULD; it is a failure like a MUST, independent of the exit code.
"""

from collections.abc import Iterable
from xml.etree import ElementTree as ET

from graphpact_conformance.report.digest import evidence, plain, rows, say
from graphpact_conformance.results import Outcome, PluginResults, Report, Result

_ELEMENTS = {
    Outcome.FAIL: "failure",
    Outcome.XPASS: "failure",
    Outcome.ERROR: "error",
    Outcome.XFAIL: "skipped",
    Outcome.UNSUPPORTED: "skipped",
    Outcome.NOT_RUN: "skipped",
}


def to_junit(report: Report) -> str:
    """Return ``report`` as JUnit XML."""
    everything = [result for plugin in report.plugins for result in plugin.results]
    root = ET.Element("testsuites", {"name": "graphpact check", **_totals(everything)})
    for plugin in report.plugins:
        root.append(_suite(plugin, report))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(plugin: PluginResults, report: Report) -> ET.Element:
    suite = ET.Element(
        "testsuite",
        {
            "name": plain(plugin.label),
            "timestamp": plain(report.started),
            **_totals(plugin.results),
        },
    )
    properties = ET.SubElement(suite, "properties")
    about = {
        "distribution": f"{plugin.distribution} {plugin.version}",
        "contract": plugin.contract or "",
        "drivers": ", ".join(plugin.drivers),
        "provider": plugin.provider or "",
        "device": plugin.device,
        "seed": str(report.seed),
    }
    for name, value in about.items():
        ET.SubElement(properties, "property", name=name, value=plain(value))
    for row in rows(plugin):
        for result in row.results:
            suite.append(_case(f"{plugin.label}.{row.label}", row.requirement, result))
    return suite


def _case(class_name: str, requirement: str, result: Result) -> ET.Element:
    case = ET.Element(
        "testcase",
        classname=plain(class_name),
        name=plain(f"{result.lane} :: {result.check}"),
        time=f"{result.seconds:.3f}",
    )
    if result.outcome in _ELEMENTS:
        element = ET.SubElement(
            case,
            _ELEMENTS[result.outcome],
            type=result.outcome.value,
            message=plain(_message(result)),
        )
        element.text = plain(_body(requirement, result))
    return case


def _message(result: Result) -> str:
    """Return one line: a short form of the first finding of a failure, otherwise the reason."""
    if not result.findings or (result.reason and result.outcome is not Outcome.FAIL):
        return result.reason or say(result.outcome)
    first = result.findings[0]
    what = f"{first.field}: " if first.field else ""
    return f"{what}expected {first.expected}, actual {first.actual}"


def _body(requirement: str, result: Result) -> str:
    lines = [requirement, *([result.reason] if result.reason else [])]
    for finding in result.findings:
        lines += ["", *(f"{name}: {text}" for name, text in evidence(finding))]
    return "\n".join(lines)


def _totals(results: Iterable[Result]) -> dict[str, str]:
    results = list(results)
    kinds = [_ELEMENTS.get(result.outcome) for result in results]
    return {
        "tests": str(len(results)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }
