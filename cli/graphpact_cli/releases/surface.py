"""`read_surface`: the classes and functions of a release that others build on.

Members that a class inherits from a class of the same package count as its own, and a name that a module
imports from another one is followed. So code that only moved is no change.

Does not: read private names, annotations of parameters, or what a decorator does.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphpact_cli.releases.sources import Source

Surface = Mapping[str, tuple[str, ...]]
"""The names of classes and functions by the dotted name of their module."""

_HOPS = 8
"""Imports of an import that are followed."""
_SPECIAL = ("__init__", "__call__", "__new__")
_KINDS = ("abstractmethod", "classmethod", "staticmethod", "property", "cached_property")


@dataclass(frozen=True)
class Member:
    """A class, a function, a method or a field.

    Args:
        name: Its dotted name, such as ``vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__``.
        kind: ``class``, ``function``, ``method`` or ``field``.
        parts: What callers and heirs depend on: parameters with their defaults, or the type of a field.
        marks: What decorators say, such as ``abstractmethod``.
    """

    name: str
    kind: str
    parts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def read_surface(source: Source, surface: Surface) -> dict[str, Member]:
    """Return the members of a surface by name. What the release does not have is left out."""
    found = {}
    for module, names in surface.items():
        for name in names:
            for member in _members(source, module, name):
                found[member.name] = member
    return found


def _members(source: Source, module: str, name: str) -> Iterator[Member]:
    place = _definition(source, module, name)
    if place is None:
        return
    home, node = place
    dotted = f"{module}.{name}"
    if not isinstance(node, ast.ClassDef):
        yield _function(dotted, node, "function")
        return
    yield Member(dotted, "class")
    seen: set[str] = set()
    for each in _lineage(source, home, node, _HOPS):
        for member in _body(dotted, each):
            if member.name not in seen:
                seen.add(member.name)
                yield member


_Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definition(source: Source, module: str, name: str, hops: int = _HOPS) -> tuple[str, _Defined] | None:
    """Return where ``name`` of a module is defined: the module and the node."""
    tree = source.module(module)
    if tree is None or not hops:
        return None
    for node in reversed(tree.body):
        if isinstance(node, _Defined) and node.name == name:
            return module, node
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    home = _imported(source, module, statement)
                    return _definition(source, home, alias.name, hops - 1)
    return None


def _imported(source: Source, module: str, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module from which ``node`` imports."""
    if not node.level:
        return node.module or ""
    is_package = not (source.root / f"{module.replace('.', '/')}.py").is_file()
    parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _lineage(source: Source, module: str, node: ast.ClassDef, hops: int) -> Iterator[ast.ClassDef]:
    """Yield a class and those that it inherits from, as far as they are in the same package."""
    yield node
    for base in node.bases if hops else ():
        plain = base.value if isinstance(base, ast.Subscript) else base
        place = _definition(source, module, plain.id) if isinstance(plain, ast.Name) else None
        if place is not None and isinstance(place[1], ast.ClassDef):
            yield from _lineage(source, place[0], place[1], hops - 1)


def _body(dotted: str, node: ast.ClassDef) -> Iterator[Member]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_public(each.name):
                yield _function(f"{dotted}.{each.name}", each, "method")
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            if _is_public(each.target.id):
                parts = (ast.unparse(each.annotation), *(() if each.value is None else ("has a default",)))
                yield Member(f"{dotted}.{each.target.id}", "field", parts)
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Name) and _is_public(target.id):
                    yield Member(f"{dotted}.{target.id}", "field", (f"= {ast.unparse(each.value)}",))


def _is_public(name: str) -> bool:
    return name in _SPECIAL or not name.startswith("_")


def _function(dotted: str, node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> Member:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    parts = [_parameter(*each) for each in zip(positional, defaults, strict=True)]
    if given.vararg is not None or given.kwonlyargs:
        parts.append("*" if given.vararg is None else f"*{given.vararg.arg}")
    parts += [_parameter(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        parts.append(f"**{given.kwarg.arg}")
    marks = [ast.unparse(each).rpartition(".")[2] for each in node.decorator_list]
    return Member(dotted, kind, tuple(parts), tuple(mark for mark in marks if mark in _KINDS))


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
