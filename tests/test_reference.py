"""Tests that every public name has a docstring for the reference, and that `help()` describes every field.

They read the source without importing it, as the reference does. A module, a class or a function is public
if no part of its dotted name begins with an underscore.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from support import load_reference

ROOT = Path(__file__).parents[1]
FOLDERS = [
    file.parent
    for at in ("*/*", "plugins/*/*", "integrations/*/*")
    for file in sorted(ROOT.glob(f"{at}/__init__.py"))
    if (file.parents[1] / "pyproject.toml").exists()
]
PACKAGES = {folder.name: folder for folder in FOLDERS}
"""The package folders of all distributions, by package name."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DATA = {"BaseModel", "NamedTuple", "TypedDict"}
_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


class Module(NamedTuple):
    """The source of one module.

    Args:
        name: Its dotted name.
        tree: Its syntax tree, including that of its stub, which lists the names that are imported on access.
    """

    name: str
    tree: ast.Module


@cache
def _modules(package: str) -> list[Module]:
    """Return the public modules of a package."""
    found = []
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if (stub := path.with_suffix(".pyi")).exists():
                tree.body += ast.parse(stub.read_text(encoding="utf-8")).body
            found.append(Module(".".join(parts), tree))
    return found


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the public definitions of a module or a class, without overloads."""
    for node in body:
        if isinstance(node, _DEFINITIONS) and not node.name.startswith("_") and not _is(node, "overload"):
            yield node


def _is(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *decorators: str) -> bool:
    return any(ast.unparse(each).endswith(decorators) for each in definition.decorator_list)


def _classes(package: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the public classes of a package, with their dotted names."""
    for module in _modules(package):
        for node in _public(module.tree.body):
            if isinstance(node, ast.ClassDef):
                yield f"{module.name}.{node.name}", node


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, assigns or imports."""
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_the_site_has_the_names_that_plugins_import() -> None:
    """docs/conf.py lists packages and modules that exist; what examples import of ours is among them."""
    public = {ROOT / path: modules for path, modules in load_reference("conf").PUBLIC.items()}
    assert set(public) <= {*PACKAGES.values()}
    for folder, modules in public.items():
        for module in modules:
            assert (folder / module).is_dir() or (folder / f"{module}.py").exists(), f"{folder}: {module}"
    imported = [
        name
        for path in ROOT.glob("examples/**/*.py")
        if not path.name.startswith(("make_", "train_", "break_"))
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("graphpact")
    ]
    assert len(imported) > 40
    for name in imported:
        package, _, module = name.partition(".")
        modules = public[PACKAGES[package]]
        assert not modules or not module or module.partition(".")[0] in modules, name


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


@pytest.mark.few(2)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package: str) -> None:
    """Each public module, class, function and method has a docstring; each name of an `__all__` is bound."""
    lacking = []
    for module in _modules(package):
        lacking += [] if ast.get_docstring(module.tree) else [module.name]
        for node in _public(module.tree.body):
            lacking += [] if ast.get_docstring(node) else [f"{module.name}.{node.name}"]
            for method in _public(node.body) if isinstance(node, ast.ClassDef) else ():
                if not ast.get_docstring(method) and not _is(method, ".setter", ".deleter"):
                    lacking.append(f"{module.name}.{node.name}.{method.name}")
        offered = [n.value for n in module.tree.body if isinstance(n, ast.Assign) and _target(n) == "__all__"]
        names = set(ast.literal_eval(offered[0])) if offered else set()
        lacking += [f"{module.name}.{name}" for name in names - {*_bound(module.tree)}]
    assert lacking == []


def _target(node: ast.stmt) -> str:
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node))


@cache
def _all_bases() -> dict[str, set[str]]:
    """Return the names of all direct and indirect bases of every class, including private ones."""
    direct: dict[str, set[str]] = {}
    for folder in PACKAGES.values():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                    direct.setdefault(node.name, set()).update(bases)
    while any(found - direct[name] for name, found in _grown(direct)):
        for name, found in list(_grown(direct)):
            direct[name] |= found
    return direct


def _grown(bases: dict[str, set[str]]) -> Iterator[tuple[str, set[str]]]:
    for name, direct in bases.items():
        yield name, set().union(*(bases.get(base, set()) for base in direct))


def _fields(cls: ast.ClassDef) -> list[str]:
    """Return the public fields that a data class adds to those of its bases, or the members of an enum."""
    bases = _all_bases()[cls.name]
    if bases & _ENUMS:
        fields = [n for n in cls.body if isinstance(n, ast.Assign) and not isinstance(n.value, ast.Name)]
    elif bases & _DATA or any("dataclass" in ast.unparse(each) for each in cls.decorator_list):
        fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and not _is_described(node)]
    else:
        return []
    return [_target(node) for node in fields if not _target(node).startswith("_")]


def _is_described(node: ast.AnnAssign) -> bool:
    """Return whether a field needs no docstring text: it is a class variable or has a `description`."""
    given = [keyword.arg for keyword in getattr(node.value, "keywords", ())]
    return "ClassVar" in ast.unparse(node.annotation) or "description" in given


@pytest.mark.parametrize("package", PACKAGES)
def test_help_explains_every_field_of_a_class_of_data(package: str) -> None:
    """`help()` of a dataclass, named tuple, typed dict or enum names each field; models describe each."""
    lacking = {}
    for name, cls in _classes(package):
        told = ast.get_docstring(cls) or ""
        named = set(re.findall(r"^ *(\w+): ", told, re.MULTILINE))
        named |= set(re.findall(r"\b\w+\b", " ".join(re.findall("``.*?``", told))))
        if _all_bases()[cls.name] & _ENUMS:
            named |= set(re.findall(r"\b[A-Z_]{2,}\b", told))
        if missing := [field for field in _fields(cls) if field not in named]:
            lacking[name] = missing
    assert lacking == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_field_is_explained_where_help_does_not_look(package: str) -> None:
    """No field of a public dataclass is documented by a string after it: `help()` does not show that."""
    found = [
        f"{name}.{_target(node)}"
        for name, cls in _classes(package)
        if any("dataclass" in ast.unparse(each) for each in cls.decorator_list)
        for node, after in itertools.pairwise(cls.body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and "ClassVar" not in ast.unparse(node.annotation)
    ]
    assert found == []
