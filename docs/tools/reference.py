"""Write the documentation that comes from code: ``docs/reference/configuration.md``, parts of pages, schemas.

The schemas are those of ``results.json`` and of `graphpact bench --json`. The examples that the template of
new plugins has are written from it (`plugin_examples`). The parts of pages stand between
``<!-- include WHAT -->`` and ``<!-- /include -->``: source code, the modules of a package, the contracts of
imports, the slots of lanes, rules, tiers, bugs, hooks, acts, the help of commands (see `INCLUDES`). Run it
after a change of any of these; with ``--museum``, which takes minutes, after a change of the museum or of
the suite's experiments, for ``docs/reference/museum.md`` and ``build/museum.md``. Tests hold the pages to
what this script would write.

Does not: build a site, or write the reference of names: `make docs` reads that from the source.
"""

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import command_line
import gallery
import plugin_examples
from pages import DOCS, INCLUDED, PAGES, ROOT

from graphpact import hookspecs
from graphpact_bench.report import BenchReport
from graphpact_conformance.drivers.strictness import ROWS
from graphpact_conformance.real_bugs import REAL_BUGS
from graphpact_conformance.report.digest import rows, to_fix
from graphpact_conformance.results import PluginResults, Report, Result
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import RULES, rules_of
from graphpact_conformance.tier_rules import TIER_RULES, TIERS
from graphpact_engine.config import config_keys
from graphpact_guard.settings import WORDS

SCHEMA = ROOT / "conformance/graphpact_conformance/results.schema.json"
BENCH_SCHEMA = ROOT / "benchmarks/graphpact_bench/report.schema.json"
MUSEUM_DETAILS = ROOT / "build/museum.md"


_ABOUT = {
    "lanes.NAME": """\
Every table `[lanes.NAME]` is a lane. A name begins with a letter and has only letters of a to z, digits
and underscores. A mode for which no lane is written has one that is called like it: `decode`, `prefill`.

Of several lanes of one mode, the first that has a captured shape for a batch runs it, in the order in which
the lanes are written. If none has one, the first lane runs it eagerly. A lane that would never run, because
an earlier one captures all its shapes, is refused.
""",
}


def configuration() -> str:
    """Return the page of every configuration key."""
    lines = [
        "# Configuration",
        "",
        "Later sources win: defaults, the file of `--config`, the environment, options, `--set`.",
        "",
    ]
    for section, keys in itertools.groupby(config_keys(), lambda key: key.name.rpartition(".")[0]):
        lines += [
            f"## `[{section}]`",
            "",
            *_ABOUT.get(section, "").splitlines(),
            *([""] if section in _ABOUT else []),
            "| key | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in keys:
            name = key.name.rpartition(".")[2]
            default = "" if key.default is None else f"`{_toml(key.default)}`"
            lines.append(f"| `{name}` | {key.allowed} | {default} | {key.description} |")
        lines.append("")
    lines += [
        "Each key has [a variable of the environment](environment.md#keys-of-the-configuration) too.",
        "",
    ]
    return "\n".join(lines)


def results_schema() -> str:
    """Return the JSON schema of ``results.json``, as `graphpact check --report` writes it."""
    return json.dumps(Report.model_json_schema(mode="serialization"), indent=2) + "\n"


def included(page: str) -> str:
    """Return ``page`` with every included part up to date."""

    def write(part: re.Match[str]) -> str:
        begin, kind, names, end = part.groups()
        return begin + INCLUDES[kind](*names.split()) + end

    return INCLUDED.sub(write, page)


@contextmanager
def _examples_importable() -> Iterator[None]:
    """Have the folder of examples on the path."""
    sys.path.append(str(ROOT / "examples"))
    try:
        yield
    finally:
        sys.path.pop()


def _source(module: str, *names: str) -> str:
    """Return the source of functions and classes of ``module``, one code block."""
    parts = []
    for name in names:
        with _examples_importable():
            value: Any = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
        parts.append(textwrap.dedent(inspect.getsource(value)).strip())
    return "```python\n" + "\n\n".join(parts) + "\n```\n"


def _part(module: str, name: str, *attributes: str) -> str:
    """Return the assignments to attributes in a class of ``module``, one code block."""
    source = _source(module, name).removeprefix("```python\n").removesuffix("```\n")
    (definition,) = ast.parse(source).body
    parts = [
        textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
        for node in definition.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in attributes
    ]
    return "```python\n" + "\n".join(parts) + "\n```\n"


def _file(path: str) -> str:
    """Return a file of the repository as a code block; its suffix is the language."""
    language = {".py": "python"}.get(Path(path).suffix, Path(path).suffix[1:])
    return f"```{language}\n" + (ROOT / path).read_text(encoding="utf-8").strip() + "\n```\n"


def _modules(folder: str) -> str:
    """Return a table of a package: the first line of the docstring of each module and each folder."""
    rows = ["| file | holds |", "|---|---|"]
    root = ROOT / folder
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/__init__.py"))]:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        line = text.partition("\n")[0].replace("``", "`").replace("|", "\\|")
        name = path.name if path.parent == root else f"{path.parent.name}/"
        rows.append(f"| `{name}` | {line} |")
    return "\n".join(rows) + "\n"


def _contracts(*ids: str) -> str:
    """Return the import contracts of ``pyproject.toml`` as code blocks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    lines = []
    for each in ids:
        contract = contracts[each]
        lines += [f"`{each}`: {contract['name']}.", ""]
        if contract["type"] == "layers":
            lines += ["```", *contract["layers"], "```", ""]
        elif contract["type"] == "forbidden":
            for key, said in (("source_modules", "These"), ("forbidden_modules", "do not import")):
                lines.append(f"- {said}: {', '.join(f'`{name}`' for name in contract[key])}")
            but = [f"`{name}`" for name in contract.get("ignore_imports", ())]
            lines += [f"- except: {', '.join(but)}", ""] if but else [""]
    return "\n".join(lines).rstrip() + "\n"


def _draft_lanes(algorithm: str, *lanes: str) -> str:
    """Return the slots of lanes of a speculation algorithm."""
    import draft_lanes  # noqa: PLC0415  builds an engine

    return draft_lanes.tables(algorithm, *lanes)


def _rules_of(kind: str) -> str:
    """Return a table of the rules of speculation algorithms, or of observers."""
    rows = ["| rule | level | what holds |", "|---|---|---|"]
    return (
        "\n".join(rows + [f"| {r} | {r.level} | {r.requirement} |" for r in rules_of(kind).values()]) + "\n"
    )


def _tiers(_: str = "") -> str:
    """Return a table of the rules of each tier."""
    parts = []
    for tier in TIERS:
        rows = ["| rule | what holds | why | concerns |", "|---|---|---|---|"]
        for rule in TIER_RULES.values():
            if rule.tier == tier:
                kinds = ", ".join(sorted(kind.replace("_", " ") for kind in rule.kinds)) or "all kinds"
                proof = f" The proof is {rule.takes}." if rule.takes else ""
                rows.append(f"| `{rule.name}` | {rule.sentence}{proof} | {rule.why} | {kinds} |")
        parts.append(f"## {tier.capitalize()}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _guard_words(_: str) -> str:
    """Return a table of the words of ``GRAPHPACT``."""
    rows = ["| word | asks to |", "|---|---|"]
    return "\n".join(rows + [f"| `{word.form}` | {word.text} |" for word in WORDS.values()]) + "\n"


def _hooks(*names: str) -> str:
    """Return the signature and the text of hooks."""
    parts = []
    for name in names:
        hook = getattr(hookspecs, name)
        spec = textwrap.dedent(inspect.getsource(hook)).partition('"""')[0]
        signature = spec.partition("\n")[2].strip().removesuffix(":")
        text = (inspect.getdoc(hook) or "").replace("``", "`")
        parts.append(f"## `{name}`\n\n```python\n{signature}\n```\n\n{text}\n")
    return "\n".join(parts)


_MUSEUM = """\
# The museum

Each exhibit is a real bug of a real engine, planted by a small edit in a plugin that is otherwise right. The
suite has to catch it under its own rule; other rules may fire as well. Each right plugin in another style has
to pass. `python docs/tools/reference.py --museum` runs all of them and writes this page, and
`build/museum.md` with every exhibit, its thread, and the rules that fire. `graphpact museum --list` names
them without a run. [The gallery of bugs](../explanation/bugs/index.md) tells the story of each rule, with its
exhibits.

"""


def museum(visits: Sequence[Mapping[str, Any]]) -> str:
    """Return the museum page: the caught bugs, by rule.

    Args:
        visits: The output of `graphpact museum --json`: one entry per visit, in the order of the museum.
    """
    exhibits, variants = _split(visits)
    caught, passed = (sum(t["is_right"] for t in group) for group in (exhibits, variants))
    several = [t for t in exhibits if len(_broken(t)) > 1]
    lines = [
        (
            f"**{caught} of {len(exhibits)} exhibits caught under their own rule,"
            f" {passed} of {len(variants)} right plugins pass.**"
        ),
        "",
        (
            f"Of {len(several)} that break more than one rule, the report's advice where to begin is the"
            f" exhibit's own rule in {sum(_begins_right(t) for t in several)}; of all exhibits, in"
            f" {sum(_begins_right(t) for t in exhibits)}."
        ),
        "",
        "| rule | caught | an exhibit | what is planted in it | thread |",
        "|---|---|---|---|---|",
    ]
    for rule in RULES.values():
        of_rule = [t for t in exhibits if t["rule"] == rule.id]
        first, count = of_rule[0], f"{sum(t['is_right'] for t in of_rule)} of {len(of_rule)}"
        lines.append(f"| {rule} | {count} | `{first['name']}` | {first['what']} | {first['thread']} |")
    lines += ["", "| right plugins of | pass |", "|---|---|"]
    for base in dict.fromkeys(t["base"] for t in variants):
        of_base = [t["is_right"] for t in variants if t["base"] == base]
        lines.append(f"| {base} | {sum(of_base)} of {len(of_base)} |")
    return _MUSEUM + "\n".join(lines) + "\n"


def museum_details(visits: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of ``build/museum.md``: the matrix of rules, every exhibit, every correct plugin.

    Args:
        visits: The argument of `museum`.
    """
    exhibits, variants = _split(visits)
    lines = [
        "# Every exhibit",
        "",
        "● its own rule, ○ another rule that fires too.",
        "",
        "| exhibit | " + " | ".join(rule.removeprefix("GP") for rule in RULES) + " |",
        "|---|" + ":-:|" * len(RULES),
    ]
    for t in exhibits:
        marks = ["" if rule not in t["findings"] else "●" if rule == t["rule"] else "○" for rule in RULES]
        lines.append(f"| `{t['name']}` | {' | '.join(marks)} |")
    lines += ["", "## What is planted", ""]
    for rule in RULES.values():
        lines += [
            f"### {rule}",
            "",
            "| exhibit | planted in | what | thread |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{t['name']}` | {t['base']}: {', '.join(_kinds(t))} | {t['what']} | {t['thread']} |"
            for t in exhibits
            if t["rule"] == rule.id
        ]
        lines.append("")
    lines += ["## Right plugins in other styles", "", "| variant | of | style |", "|---|---|---|"]
    lines += [f"| `{t['name']}` | {t['base']} | {t['what']} |" for t in variants]
    return "\n".join(lines) + "\n"


def _split(visits: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the visits of exhibits and the visits of correct plugins."""
    return [t for t in visits if t["rule"] is not None], [t for t in visits if t["rule"] is None]


def _broken(visit: Mapping[str, Any]) -> list[str]:
    return [rule for rule in visit["findings"] if rule in RULES]


def _begins_right(visit: Mapping[str, Any]) -> bool:
    results = [
        Result(rule=f["rule"], check="a visit", lane=visit["lanes"][0], outcome="fail", findings=[f])
        for f in visit["findings"].values()
    ]
    plugin = PluginResults(
        kind="plugin", name=visit["name"], distribution="", version="", contract=None, results=results
    )
    return [row.key for row in to_fix(rows(plugin))[:1]] == [visit["rule"]]


def _kinds(visit: Mapping[str, Any]) -> list[str]:
    """Return the kinds of step of the checked lanes."""
    return list(dict.fromkeys(lane.partition("-")[0] for lane in visit["lanes"]))


def _visit_museum() -> list[dict[str, Any]]:
    from graphpact_museum.cli import describe  # noqa: PLC0415  only where it is asked for
    from graphpact_museum.collection import EXHIBITS, VARIANTS  # noqa: PLC0415
    from graphpact_museum.gallery import visit_all  # noqa: PLC0415

    visits = visit_all((*EXHIBITS, *VARIANTS), workers=os.cpu_count() or 1)
    return [describe(visit) for visit in visits]


def _rules() -> str:
    lines = [
        "| rule | level | since | what holds | hooks | a real bug |",
        "|---|---|---|---|---|---|",
        *map(_rule, RULES.values()),
    ]
    return "\n".join(lines) + "\n"


def _rule(rule: Rule) -> str:
    hooks = ", ".join(f"`{hook}`" for hook in rule.hooks)
    story = REAL_BUGS[rule.id]
    cells = (
        str(rule),
        rule.level,
        str(rule.since),
        rule.requirement,
        hooks,
        f"[{story.thread}]({story.url})",
    )
    return f"| {' | '.join(cells)} |"


def _acts() -> str:
    rows = [*ROWS.values()]
    counts = Counter(row["tape"] for row in rows)
    told = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    lines = ["", f"{len(rows)} acts: {told}.", ""]
    for kind, acts in itertools.groupby(rows, lambda row: row["kind"]):
        lines += [f"## {kind.capitalize()}", "", "| act | CUDA | tape |", "|---|---|---|"]
        lines += [f"| {a['act']} | {_linked(a)} | {'; '.join(_tape(a))} |" for a in acts]
        lines.append("")
    return "\n".join(lines)


def _linked(row: dict[str, str]) -> str:
    """Return a text about CUDA's behaviour in which the verdict links to its source."""
    if not row["source"]:
        return row["cuda"]
    verdict, colon, why = row["cuda"].partition(":")
    return f"[{verdict}]({row['source']}){colon}{why}"


def _tape(row: dict[str, str]) -> list[str]:
    return [row["tape"], *([row["note"]] if "note" in row else [])]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


INCLUDES: Mapping[str, Callable[..., str]] = {
    "source": _source,
    "part": _part,
    "file": _file,
    "modules": _modules,
    "contracts": _contracts,
    "draft_lanes": _draft_lanes,
    "guard": _guard_words,
    "rules": _rules,
    "rules_of": _rules_of,
    "tiers": _tiers,
    "acts": _acts,
    "hooks": _hooks,
    "bugs": gallery.bugs,
    "classes": gallery.classes,
    "help": command_line.help_of,
    "writer": command_line.writer,
}
"""The functions that make the text of ``<!-- include KIND ARGUMENTS -->``, by kind."""


if __name__ == "__main__":
    if "--museum" in sys.argv[1:]:
        told = _visit_museum()
        (DOCS / "reference/museum.md").write_text(museum(told), encoding="utf-8")
        MUSEUM_DETAILS.parent.mkdir(exist_ok=True)
        MUSEUM_DETAILS.write_text(museum_details(told), encoding="utf-8")
    (DOCS / "reference/configuration.md").write_text(configuration(), encoding="utf-8")
    SCHEMA.write_text(results_schema(), encoding="utf-8")
    BENCH_SCHEMA.write_text(BenchReport.schema_text(), encoding="utf-8")
    for path in plugin_examples.EXAMPLES:
        (ROOT / path).write_text(plugin_examples.example(path), encoding="utf-8")
    for page in PAGES:
        page.write_text(included(page.read_text(encoding="utf-8")), encoding="utf-8")
