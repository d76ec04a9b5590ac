"""Write ``docs/reference/``: a page for each distribution, with every public name of its modules.

Read from the source, not from imported modules: signatures and fields as they are written, and the docstring
of each. A module, a class or a function is public if no part of its dotted name begins with an underscore; a
constant, if it has a docstring.

Does not: write prose. A name that a page explains badly needs a better docstring.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/reference"
_SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Module(NamedTuple):
    """The source of one module.

    Args:
        name: Its dotted name.
        tree: Its syntax tree.
    """

    name: str
    tree: ast.Module


def packages() -> dict[str, Path]:
    """Return the folder of the package of every distribution, by the package's name."""
    files = [*ROOT.glob("*/*/__init__.py"), *ROOT.glob("plugins/*/*/__init__.py")]
    folders = {f.parent.name: f.parent for f in files if (f.parents[1] / "pyproject.toml").exists()}
    return dict(sorted(folders.items()))


def modules(folder: Path) -> list[Module]:
    """Return the public modules of the package in ``folder``, the package itself first."""
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if (stub := path.with_suffix(".pyi")).exists():  # the names that it imports on access
                tree.body += ast.parse(stub.read_text(encoding="utf-8")).body
            found.append(Module(".".join(parts), tree))
    return sorted(found, key=lambda module: module.name)


def page(name: str, folder: Path) -> str:
    """Return the page of the package ``name``."""
    told = modules(folder)
    lines = [
        f"# `{name}`",
        "",
        "Written by `python docs/reference.py` from the source. Fields and arguments are as in `help()`.",
        "",
        *(f"- [`{module.name}`](#{_anchor(module.name)})" for module in told),
        "",
    ]
    for module in told:
        lines += [
            f"## `{module.name}`",
            "",
            *_text(ast.get_docstring(module.tree)),
            *_exports(module),
        ]
        for node, doc in _documented(module.tree.body):
            lines += _member(node, doc, "###")
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    """Return the page that lists the others."""
    lines = ["# Reference", "", "Every public name, one page for each distribution.", ""]
    for name, folder in packages().items():
        told = ast.get_docstring(modules(folder)[0].tree) or ""
        lines.append(f"- [`{name}`]({name}.md): {_inline(told.partition(chr(10))[0])}")
    return "\n".join(lines) + "\n"


def write() -> dict[Path, str]:
    """Return the text of every page, by its path."""
    told = {PAGES / f"{name}.md": page(name, folder) for name, folder in packages().items()}
    return told | {PAGES / "README.md": index()}


# -- definitions -------------------------------------------------------------------------------------


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str | None]]:
    """Yield the public definitions of a body, and the constants and attributes with a docstring."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, _DEFINITIONS):
            if not node.name.startswith("_") and not _is_overload(node):
                yield node, ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not _name(node).startswith("_"):
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield node, inspect.cleandoc(str(after.value.value))
            elif description := _description(node):
                yield node, description


def _member(node: ast.stmt, doc: str | None, level: str) -> list[str]:
    """Return the lines of one definition: a heading, the code, and the docstring."""
    lines = [f"{level} `{_name(node)}`", "", "```python", _code(node), "```", "", *_text(doc)]
    if isinstance(node, ast.ClassDef):
        inner = [*node.body]
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                inner += each.body  # attributes are documented where they are set
        for part, told in _documented(inner):
            lines += _member(part, told, level + "#")
    return lines


def _code(node: ast.stmt) -> str:
    """Return a definition without its body: a signature, a class with its fields, a constant."""
    if isinstance(node, ast.ClassDef):
        lines = [f"@{ast.unparse(each)}" for each in node.decorator_list]
        bases = ", ".join(map(ast.unparse, [*node.bases, *(k.value for k in node.keywords)]))
        lines.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign | ast.Assign)]
        lines += [f"    {_short(n)}" for n in fields if not _name(n).startswith("_")]
        lines += [textwrap.indent(_code(init), "    ") for init in inits]
        return "\n".join(lines if len(lines) > 1 else [*lines, "    ..."])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = [f"@{ast.unparse(each)}" for each in node.decorator_list]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        given = ast.unparse(node.args)
        if len(given) > 80:  # an argument on each line
            given = "\n    " + ",\n    ".join(_arguments(node.args)) + ",\n"
        return "\n".join([*lines, f"def {node.name}({given}){returns}: ..."])
    return _short(node)


def _arguments(given: ast.arguments) -> list[str]:
    """Return the arguments of a function, each as it is written."""
    found, depth, begin, text = [], 0, 0, ast.unparse(given)
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append(text[begin:at].strip())
            begin = at + 1
    return [*found, text[begin:].strip()]


def _short(node: ast.stmt) -> str:
    """Return an assignment in one line; a long value is left out."""
    text = ast.unparse(node)
    return text if len(text) <= 100 and "\n" not in text else text.partition(" = ")[0] + " = ..."


def _name(node: ast.stmt) -> str:
    if isinstance(node, _DEFINITIONS):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
    return target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)


def _is_overload(node: ast.stmt) -> bool:
    return any(ast.unparse(each) == "overload" for each in getattr(node, "decorator_list", ()))


def _description(node: ast.Assign | ast.AnnAssign) -> str | None:
    """Return the description of a pydantic field, or None."""
    for keyword in getattr(node.value, "keywords", ()):
        if keyword.arg == "description" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return None


# -- text --------------------------------------------------------------------------------------------


def _exports(module: Module) -> list[str]:
    """Return what a package has from its modules: the names of ``__all__``, by module."""
    lists = [n.value for n in module.tree.body if isinstance(n, ast.Assign) and _name(n) == "__all__"]
    offered = set(ast.literal_eval(lists[0])) if lists else set()
    lines = []
    lazy = [n for each in module.tree.body if isinstance(each, ast.If) for n in each.body]
    for node in [*module.tree.body, *lazy]:  # lazy: `if TYPE_CHECKING`, imported on access
        names = [each.asname or each.name for each in getattr(node, "names", ())]
        if isinstance(node, ast.ImportFrom) and (names := [n for n in names if n in offered]):
            told = ", ".join(f"`{name}`" for name in names)
            lines.append(f"- from [`{node.module}`](#{_anchor(str(node.module))}): {told}")
    return [*lines, ""] if lines else []


def _text(doc: str | None) -> list[str]:
    """Return a docstring as Markdown: its sections become lists."""
    if not doc:
        return []
    lines: list[str] = []
    section = False
    for line in doc.splitlines():
        if re.fullmatch(f"({'|'.join(_SECTIONS)}):", line):
            section, lines = True, [*lines, f"**{line[:-1]}**", ""]
        elif section and (item := re.fullmatch(r" {4}(\*{0,2}[\w.]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {_inline(item[2])}")
        elif section and line.startswith("        "):
            lines.append(f"  {_inline(line.strip())}")
        elif section and line.startswith("    "):
            lines.append(_inline(line.strip()))
        else:
            section = section and not line
            lines.append(line if line.startswith("    ") else _inline(line))
    return [*lines, ""]


def _inline(line: str) -> str:
    return line.replace("``", "`")


def _anchor(name: str) -> str:
    """Return the anchor that forges give to the heading of a module."""
    return name.replace(".", "").lower()
