"""The names of what an adapter checks: ``--adapter NAME [package.module:factory]``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphpact
from graphpact.errors import UnknownPluginError, UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_conformance.suite import Adapter, checks_by_lane, targets
from graphpact_conformance.suite.adapter import adapter_of
from graphpact_conformance.targets import Options, Target


class Checks:
    """An adapter without lanes.

    Args:
        make: The author's factory.
    """

    experiments = ()
    not_shown = ("kernels: there are none",)

    def __init__(self, make: Any) -> None:
        self.make = make

    def needs(self, options: Options) -> Iterator[Any]:
        """Return no need."""
        return self.lanes(options)

    def uncalled(self, plans: Any) -> Iterator[Any]:
        """Return no method."""
        return iter(plans)

    def lanes(self, options: Options) -> Iterator[Any]:
        """Return no lane."""
        del options
        return iter(())

    def probes(self, options: Options) -> Iterator[Any]:
        """Return no lane."""
        return self.lanes(options)


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> PluginCatalog:
    """Return a catalog with the adapters ``theirs``, a class, and ``acme``, an object with its factory."""
    offers = {"theirs": Checks, "acme": Checks("acme's")}
    right = PluginCatalog.select

    def select(self: PluginCatalog, kind: Any, name: str) -> Any:
        return offers[name] if kind == "adapter" and name in offers else right(self, kind, name)

    monkeypatch.setattr(PluginCatalog, "select", select)
    return PluginCatalog.scan()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the working directory, with ``make`` and ``Group.make``."""
    text = "def make(): pass\n\nclass Group:\n    make = staticmethod(make)\n"
    (tmp_path / "authors_module.py").write_text(text)
    (tmp_path / "raising_module.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "authors_module", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "authors_module"


def test_an_adapter_is_given_the_authors_factory(catalog: PluginCatalog, module: str) -> None:
    """``package.module:attribute`` is imported, from the working directory too, and attributes may nest."""
    for attribute in ("make", "Group.make"):
        (target,) = targets([f"adapter:theirs:{module}:{attribute}"], catalog)
        assert target == Target("adapter", f"{module}:{attribute}", adapter="theirs")
        assert target.names == f"--adapter theirs {module}:{attribute}"
        found = adapter_of(target, catalog)
        assert isinstance(found, Adapter)
        assert found.make.__name__ == "make"  # type: ignore[attr-defined]  # of the class above


def test_an_object_that_is_an_adapter_already_is_taken_as_it_is(catalog: PluginCatalog, module: str) -> None:
    """A reference may lead to an adapter with options of the author's."""
    (target,) = targets([f"adapter:theirs:{module}:make"], catalog)  # imports the module
    own = Checks("with options")
    sys.modules[module].own = own  # type: ignore[attr-defined]
    assert adapter_of(Target("adapter", f"{module}:own", adapter="theirs"), catalog) is own
    assert adapter_of(target, catalog) is not own


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_our_adapters_have_all_that_the_suite_asks_for(name: str, module: str) -> None:
    """They are adapters by the protocol, members that only a whole run uses among them."""
    adapter = adapter_of(Target("adapter", f"{module}:make", adapter=name), PluginCatalog.scan())
    assert isinstance(adapter, Adapter)


def test_a_third_partys_entry_point_needs_no_reference(catalog: PluginCatalog) -> None:
    """The entry point of an object with its own factory is checked by its name alone."""
    (target,) = targets(["adapter:acme"], catalog)
    assert target.names == "--adapter acme"
    assert adapter_of(target, catalog).make == "acme's"  # type: ignore[attr-defined]
    assert checks_by_lane(target, Options(), catalog) == {}


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("adapter:acme:authors_module:make", "has its own factory", "--adapter acme"),
        ("adapter:theirs", "needs what it is to check", "package.module:make_builder"),
        ("adapter:theirs:authors_module", "is no reference", "package.module:attribute"),
        ("adapter:theirs:authors_module:maek", "has no 'maek'", "did you mean 'make'"),
        ("adapter:theirs:no_such_module:make", "importing no_such_module raised", "can be imported here"),
        ("adapter:theirs:raising_module:make", "no such device", "can be imported here"),
    ],
)
def test_a_reference_that_leads_nowhere_is_a_usage_error(
    catalog: PluginCatalog, module: str, name: str, said: str, hint: str
) -> None:
    """Each wrong reference is refused before anything runs, with what was asked and what to do."""
    with pytest.raises(UsageError, match=said) as refused:
        targets([name], catalog)
    assert hint in str(refused.value.hint)


def test_an_unknown_adapter_is_named_with_what_is_there() -> None:
    """The command and the decorator name the installed adapters."""
    with pytest.raises(UnknownPluginError, match="no adapter is called 'vlm'") as refused:
        targets(["adapter:vlm:acme:make"], PluginCatalog.scan())
    assert "did you mean 'vllm'" in str(refused.value.hint)
    assert main(["check", "--adapter", "vlm", "acme:make"]) == 2
    with pytest.raises(pytest.Collector.CollectError, match="no adapter is called 'vlm'"):
        graphpact.conformance("acme:make", adapter="vlm")
