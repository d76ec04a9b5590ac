"""The reference pages have every public name, and help() has every field of every public class of data."""

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from support import load_reference

ROOT = Path(__file__).parents[1]
API = load_reference("api")
PACKAGES: dict[str, Path] = API.packages()


def _public(package: str) -> dict[str, ModuleType]:
    """Return the public modules of a package, imported, by name."""
    return {m.name: importlib.import_module(m.name) for m in API.modules(PACKAGES[package])}


def _defined(module: ModuleType) -> dict[str, Any]:
    """Return the public classes and functions that a module defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__name__", None) == name.partition("[")[0] == name
    }


def test_every_distribution_has_a_page() -> None:
    """There is a page for the package of each distribution of the workspace, and no other page."""
    projects = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    assert len(PACKAGES) == len(projects)
    pages = {path.name for path in (ROOT / "docs/reference").glob("*.md")}
    assert pages == {"README.md", *(f"{name}.md" for name in PACKAGES)}


def test_the_pages_are_what_the_source_would_write() -> None:
    """docs/reference is up to date: `python docs/reference.py` would change nothing."""
    old = [path.name for path, text in API.write().items() if path.read_text("utf-8") != text]
    assert old == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_its_page(package: str) -> None:
    """Each public class, function and method, and each name of an `__all__`, is on a page, and documented."""
    page = (ROOT / f"docs/reference/{package}.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## `([\w.]+)`$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    for name, module in _public(package).items():
        for at, value in _defined(module).items():
            _, heading, text = parts[name].partition(f"\n### `{at}`\n")
            assert heading, f"{name}.{at}"
            text = text.partition("\n### ")[0]
            assert re.search(r"\n```\n\n\S", text), f"{name}.{at} has no docstring on its page"
            for method, function in vars(value).items() if inspect.isclass(value) else ():
                is_own = inspect.isfunction(function) and function.__module__ == name
                if is_own and function.__name__ == method and not method.startswith("_"):
                    assert f"\n#### `{method}`\n" in text, f"{name}.{at}.{method}"
        for offered in getattr(module, "__all__", ()):
            assert f"`{offered}`" in parts[name], f"{name}.{offered}"


def _fields(cls: type[Any]) -> list[str]:
    """Return the public fields that a class of data adds to those of its bases, or the members of an enum."""
    if issubclass(cls, enum.Enum):
        return list(cls.__members__)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, BaseModel):
        names = [name for name, field in cls.model_fields.items() if not field.description]
    elif typing.is_typeddict(cls) or hasattr(cls, "_fields"):
        names = list(cls.__annotations__)
    else:
        return []
    own = inspect.get_annotations(cls)
    return [name for name in names if name in own and not name.startswith("_")]


@pytest.mark.parametrize("package", PACKAGES)
def test_help_explains_every_field_of_a_class_of_data(package: str) -> None:
    """`help()` of a dataclass, named tuple, typed dict or enum names each field; a model describes each."""
    lacking = {}
    for name, module in _public(package).items():
        for at, cls in _defined(module).items():
            told = inspect.getdoc(cls) or ""
            fields = _fields(cls) if inspect.isclass(cls) else []
            named = set(re.findall(r"^ *(\w+): ", told, re.MULTILINE))
            named |= set(re.findall(r"\b\w+\b", " ".join(re.findall("``.*?``", told))))
            named |= set(re.findall(r"\b[A-Z_]{2,}\b", told)) if _is_enum(cls) else set()
            if missing := [field for field in fields if field not in named]:
                lacking[f"{name}.{at}"] = missing
    assert lacking == {}


def _is_enum(cls: Any) -> bool:
    return inspect.isclass(cls) and issubclass(cls, enum.Enum)


def test_no_field_is_explained_where_help_does_not_look() -> None:
    """No field of a public dataclass has a string after it: `help()` of the class does not show it."""
    found = []
    for folder in PACKAGES.values():
        for module in API.modules(folder):
            for cls in [n for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)]:
                if not cls.name.startswith("_") and any(
                    "dataclass" in ast.unparse(each) for each in cls.decorator_list
                ):
                    found += [
                        f"{module.name}.{cls.name}.{ast.unparse(node.target)}"
                        for node, after in itertools.pairwise(cls.body)
                        if isinstance(node, ast.AnnAssign)
                        and isinstance(after, ast.Expr)
                        and "ClassVar" not in ast.unparse(node.annotation)
                    ]
    assert found == []
