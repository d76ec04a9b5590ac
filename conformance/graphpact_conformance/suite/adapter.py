"""`Adapter`: code of another engine, as lanes of the suite; found in the group ``graphpact.adapters``.

An entry point is a class, ``cls(factory)``, or an object of one: a third party's code, ready to check.

    graphpact check --adapter vllm package.module:make_builder      cls(make_builder)
    graphpact check --adapter acme                                  the object of the entry point ``acme``

A class may have a static method ``prepare()``, which is called before ``package.module`` is imported.

Does not: know an engine; `graphpact_adapters` does.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from graphpact.errors import UsageError, did_you_mean
from graphpact.plugin_calls import describe_error
from graphpact.plugins import PluginCatalog
from graphpact_conformance.experiments import Experiment
from graphpact_conformance.experiments.experiment import PlannedLane
from graphpact_conformance.lane.uncalled import Uncalled
from graphpact_conformance.targets import Options, Target


@dataclass(frozen=True)
class Needs:
    """The values that the code reads in one kind of step and the adapter lacks.

    Args:
        kind: The kind of step, with which the names of its lanes begin; None if it makes nothing to run.
        paths: The values, as the code reads them, each once.
        stopped: The error that ended the probe, after which it may read more; None if it ended by itself.
    """

    kind: str | None
    paths: Sequence[str]
    stopped: str | None = None

    def __str__(self) -> str:
        more = f"; perhaps more, as it then raised {self.stopped}" if self.stopped else ""
        return f"needs {', '.join(self.paths)}, which its factory can give{more}"


@runtime_checkable
class Adapter(Protocol):
    """Code of another engine that prepares replays, and the lanes in which it is checked."""

    @property
    def experiments(self) -> Sequence[Experiment]:
        """The experiments of its lanes."""

    @property
    def not_shown(self) -> Sequence[str]:
        """The parts that lanes on a CPU cannot exercise, each with the reason."""

    def needs(self, options: Options) -> Iterable[Needs]:
        """Return the values that the code reads and the adapter lacks, by kind of step."""

    def lanes(self, options: Options) -> Iterable[PlannedLane]:
        """Return the lanes of a run."""

    def uncalled(self, plans: Sequence[PlannedLane]) -> Iterable[Uncalled]:
        """Return the methods of the code that its engine calls, and none of the lanes of a run."""

    def probes(self, options: Options) -> Iterable[tuple[str, PlannedLane]]:
        """Return lanes of what the code does not declare, each with the declaration that it lacks."""


def adapter_of(target: Target, catalog: PluginCatalog) -> Adapter:
    """Return the adapter of a target, with the author's factory.

    Raises:
        PluginError: No adapter of that name is installed, or it is rejected.
        UsageError: A factory is missing, or given where there is one already; it cannot be imported.
    """
    found: Any = catalog.select("adapter", str(target.adapter))
    if not isinstance(found, type):
        if target.name != target.adapter:
            raise UsageError(
                f"adapter {target.adapter!r} has its own factory; {target.name!r} was given too",
                hint=f"graphpact check --adapter {target.adapter}",
            )
        return found  # type: ignore[no-any-return]  # the catalog has looked at it
    if target.name == target.adapter:
        raise UsageError(
            f"adapter {target.adapter!r} needs what it is to check",
            hint=f"give a builder class or a factory: --adapter {target.adapter} package.module:make_builder",
        )
    if (prepare := getattr(found, "prepare", None)) is not None:
        prepare()
    given = _imported(target.name)
    cls: Any = found
    adapter: Adapter = given if isinstance(given, cls) else cls(given)
    return adapter


def _imported(reference: str) -> Any:
    """Return the object ``package.module:attribute``; modules of the working directory are found too."""
    module, separator, attribute = reference.partition(":")
    if not separator or not module or not attribute:
        raise UsageError(
            f"{reference!r} is no reference",
            hint="write package.module:attribute, such as acme.attention:make",
        )
    here = os.getcwd()  # noqa: PTH109  an entry of sys.path is a string
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise UsageError(
            f"{reference}: importing {module} raised {describe_error(error)}",
            hint="give a module that can be imported here; the working directory is on its path",
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = did_you_mean(name, [n for n in dir(found) if n[0] != "_"])
            raise UsageError(
                f"{reference}: {module} has no {name!r}", hint=f"did you mean {near!r}?" if near else None
            )
        found = getattr(found, name)
    return found
