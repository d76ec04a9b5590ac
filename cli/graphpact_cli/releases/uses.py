"""`uses_of`: what of a surface a package uses, and where.

A method is overridden, a class or a function is called or imported, a member is named in a text as a dotted
path, or read from an object in a file that imports its class.

Does not: follow values. An attribute of the same name of another object counts as a use too.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphpact_cli.releases.changes import MemberChange
from graphpact_cli.releases.sources import Source
from graphpact_cli.releases.surface import Member

_PATH = re.compile(r"(?:[\w.]*\.)?(?P<owner>\w+)\.(?P<name>\w+)")


@dataclass(frozen=True, order=True)
class Use:
    """One use.

    Args:
        file: The file, from the folder of the package.
        line: The line, from 1.
        how: ``inherits``, ``overrides``, ``calls``, ``imports``, ``names`` or ``reads``.
    """

    file: str
    line: int
    how: str

    def __str__(self) -> str:
        """Return it for a table."""
        return f"{self.how} {self.file}:{self.line}"


def concerns(change: MemberChange, uses: Mapping[str, Sequence[Use]]) -> bool:
    """Return whether a change may break one of ``uses``, which are by the name of the member."""
    if change.kind == "added":
        return change.breaks_heirs and any(use.how == "inherits" for use in uses.get(change.owner, ()))
    return any(
        change.breaks_heirs if use.how in ("inherits", "overrides") else change.breaks_callers
        for use in uses.get(change.name, ())
    )


def uses_of(package: Source, members: Mapping[str, Member]) -> dict[str, list[Use]]:
    """Return the uses of each member by its dotted name, in the order of files and lines."""
    files = list(package.modules())
    heirs: dict[str, str] = {}  # classes of the package, by their names, and the member that each inherits
    found: dict[str, set[Use]] = defaultdict(set)
    for _ in range(2):  # an heir may be the base of a class in a file before it
        for path, tree in files:
            for name, line, how in _File(tree, members, heirs).uses():
                found[name].add(Use(path, line, how))
    return {name: sorted(uses) for name, uses in found.items()}


@dataclass
class _File:
    tree: ast.Module
    members: Mapping[str, Member]
    heirs: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)

    def uses(self) -> Iterator[tuple[str, int, str]]:
        """Yield member, line and kind of each use."""
        yield from self._imports()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield from self._class(node)
        by_name: dict[str, list[str]] = defaultdict(list)
        for dotted in self.members:
            owner, _, name = dotted.rpartition(".")
            if owner in self.classes:
                by_name[name].append(dotted)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.Attribute):
                target = self._dotted(node)
                for dotted in (target,) if target in self.members else by_name[node.attr]:
                    yield dotted, node.lineno, "reads"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._text(node.value, node.lineno)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, int, str]]:
        target = self._dotted(node.func)
        for dotted in (target, f"{target}.__init__"):
            if dotted in self.members:
                yield dotted, node.lineno, "calls"

    def _imports(self) -> Iterator[tuple[str, int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    self.names[alias.asname or alias.name] = dotted
                    if dotted in self.members:
                        self.classes.add(dotted)
                        yield dotted, node.lineno, "imports"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )

    def _class(self, node: ast.ClassDef) -> Iterator[tuple[str, int, str]]:
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            dotted = self._dotted(plain)
            owner = dotted if dotted in self.members else self.heirs.get(dotted.rpartition(".")[2])
            if owner is None:
                continue
            self.heirs[node.name] = owner
            self.classes.add(owner)
            yield owner, node.lineno, "inherits"
            for each in node.body:
                for name in _bound(each):
                    if f"{owner}.{name}" in self.members:
                        yield f"{owner}.{name}", each.lineno, "overrides"

    def _dotted(self, node: ast.expr) -> str:
        """Return the dotted name of an expression of names and attributes, or an empty text."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def _text(self, text: str, line: int) -> Iterator[tuple[str, int, str]]:
        path = _PATH.fullmatch(text)
        if path is None:
            return
        tail = f".{path['owner']}.{path['name']}"
        for dotted in self.members:
            if dotted.endswith(tail):
                yield dotted, line, "names"


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a class's body binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
