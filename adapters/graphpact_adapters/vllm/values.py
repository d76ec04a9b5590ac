"""`Values`: what builders are constructed with, and the class of the batch that they get in a step.

    stand-ins      plain values of this distribution, without the engine
    the engine's   its own specs, configurations and batches, if an integration offers them (the group
                   ``graphpact.engines``) and the engine is installed

Does not: import vLLM; its integration does.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact_adapters import stand_ins
from graphpact_adapters.vllm.common import CommonAttentionMetadata
from graphpact_adapters.vllm.plain_values import Namespace, Sizes, kv_cache_spec, vllm_config

_ENGINE = "vllm"


class Values(Protocol):
    """What builders get."""

    @property
    def name(self) -> str:
        """Whose classes these are, for the report: ``vLLM 0.32.0``."""

    @property
    def common(self) -> type[Any]:
        """The dataclass of a batch. It is given those of the stand-in's fields that it has."""

    @property
    def kernel_libraries(self) -> Sequence[str]:
        """Modules of kernels that builders import. Those that are not installed get stand-ins."""

    def kv_cache_spec(self, sizes: Sizes) -> Any:
        """Return the specification of one group of the KV cache."""

    def vllm_config(self, sizes: Sizes, layers: dict[str, Any]) -> Any:
        """Return the engine's configuration, whose layers are ``layers``."""


class StandIns:
    """Plain values with the engine's names."""

    name = "stand-ins"
    common = CommonAttentionMetadata
    kernel_libraries: Sequence[str] = ()

    def kv_cache_spec(self, sizes: Sizes) -> Namespace:
        """Return a namespace with the names of vLLM's specs."""
        return kv_cache_spec(sizes)

    def vllm_config(self, sizes: Sizes, layers: dict[str, Any]) -> Namespace:
        """Return a namespace with the names of vLLM's configuration."""
        return vllm_config(sizes, layers)


STAND_INS: Values = StandIns()


@functools.cache
def installed_values() -> Values:
    """Return the values of the installed engine, or stand-ins if none is installed.

    Raises:
        ConfigError: The installed release of the engine is not supported.
    """
    catalog = PluginCatalog.scan()
    if not any(info.name == _ENGINE for info in catalog.infos("engine")):
        return STAND_INS
    offer = catalog.select("engine", _ENGINE)()
    if not offer.is_installed():
        return STAND_INS
    if (reason := offer.unavailable()) is not None:
        raise ConfigError(
            f"{reason}, and its own classes would be given to builders",
            hint="install a supported release, or check with stand-ins: Builders(make, values=STAND_INS)",
        )
    found: Values | None = offer.builder_values()
    if found is None:
        return STAND_INS
    stand_ins.install(absent=found.kernel_libraries)
    return found
