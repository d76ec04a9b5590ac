"""What builders get: the classes of an installed engine, or stand-ins."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_checks import assert_found, assert_right, findings_of
from vllm_builders import LANES, FreshLengths, OwnedBuilder, PagedBuilder

from graphpact.errors import ConfigError
from graphpact_adapters.vllm import Builders, CommonAttentionMetadata
from graphpact_adapters.vllm import values as values_of_builders
from graphpact_adapters.vllm.plain_values import Sizes, vllm_config
from graphpact_adapters.vllm.values import STAND_INS, Values, installed_values

_KERNELS = "acme_kernels_that_no_machine_has"


@dataclass
class EngineSpec:
    """A spec of the engine's own class."""

    block_size: int


class EngineBatch(CommonAttentionMetadata):
    """A batch of the engine's own class."""


class EngineValues:
    """What an engine gives to its builders."""

    name = "Acme 1.0"
    common = EngineBatch
    kernel_libraries = (_KERNELS,)

    def kv_cache_spec(self, sizes: Sizes) -> EngineSpec:
        """Return a spec of the engine."""
        return EngineSpec(sizes.block_size)

    def vllm_config(self, sizes: Sizes, layers: dict[str, Any]) -> Any:
        """Return a configuration."""
        return vllm_config(sizes, layers)


class OnlyOfTheEngine(OwnedBuilder):
    """A builder that takes the engine's own classes only."""

    def __init__(self, kv_cache_spec: Any, *args: Any) -> None:
        if not isinstance(kv_cache_spec, EngineSpec):
            raise TypeError(f"a spec of class {type(kv_cache_spec).__name__}")
        super().__init__(kv_cache_spec, *args)

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the metadata of a step."""
        if not isinstance(common, EngineBatch):
            raise TypeError(f"a batch of class {type(common).__name__}")
        return super().metadata(common)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An engine in the group ``graphpact.engines``, installed and supported."""
    offer = SimpleNamespace(installed=True, reason=None, values=EngineValues())
    made = SimpleNamespace(
        is_installed=lambda: offer.installed,
        unavailable=lambda: offer.reason,
        builder_values=lambda: offer.values,
    )
    catalog = SimpleNamespace(
        infos=lambda kind: [SimpleNamespace(name="vllm")] if kind == "engine" else [],
        select=lambda *_: lambda: made,
    )
    monkeypatch.setattr(values_of_builders.PluginCatalog, "scan", lambda: catalog)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    installed_values.cache_clear()
    yield offer
    installed_values.cache_clear()


def test_builders_get_the_classes_of_the_installed_engine(offer: SimpleNamespace) -> None:
    """A builder that refuses stand-ins passes, and the report says whose classes were used."""
    assert offer.installed
    checked = Builders(OnlyOfTheEngine)
    assert_right(checked, LANES["decode"])
    assert any("Acme 1.0" in note for note in checked.not_shown)


def test_verdicts_do_not_depend_on_whose_classes_they_are(offer: SimpleNamespace) -> None:
    """A planted bug is found with the same rule and field."""
    assert offer.installed
    for given in (None, STAND_INS):
        assert_found(findings_of(Builders(FreshLengths, values=given), LANES["decode"]), "GP01", "seq_lens")


@pytest.mark.parametrize(("installed", "values"), [(False, EngineValues()), (True, None)])
def test_without_the_engines_classes_builders_get_stand_ins(
    offer: SimpleNamespace, installed: bool, values: Values | None
) -> None:
    """An integration without its engine, or without its classes, changes nothing; the report says so."""
    offer.installed, offer.values = installed, values
    checked = Builders(PagedBuilder)
    assert checked.given is STAND_INS
    assert any("stand-ins" in note for note in checked.not_shown)


def test_a_release_that_is_not_supported_is_refused_by_name(offer: SimpleNamespace) -> None:
    """The error has the release, and the way to check without the engine."""
    offer.reason = "Acme 2.0 is none of 1.0"
    with pytest.raises(ConfigError, match=r"Acme 2\.0 is none of 1\.0") as caught:
        Builders.prepare()
    assert "values=STAND_INS" in str(caught.value.hint)
    assert Builders(PagedBuilder, values=STAND_INS).given is STAND_INS


def test_kernel_libraries_that_are_missing_can_be_imported(offer: SimpleNamespace) -> None:
    """The modules of builders import kernels, which are models of the adapter here."""
    assert offer.installed
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(_KERNELS)
    Builders.prepare()
    assert importlib.import_module(_KERNELS).attend() is not None
    del sys.modules[_KERNELS]
