"""`require_capabilities`: refuses a model that an attention backend cannot run, and names alternatives.

Does not: define what a backend can do; the backend declares that, see `graphpact.attention.Capabilities`.
"""

from collections.abc import Callable, Sequence

import torch

from graphpact.attention import AttentionBackend, Capabilities, LayerSpec
from graphpact.attention.capabilities import in_words
from graphpact.batch import ForwardMode
from graphpact.plugins import Loaded, PluginCatalog
from graphpact_engine.errors import UnsupportedModelError


def require_capabilities(
    name: str,
    capabilities: Capabilities,
    layers: Sequence[LayerSpec],
    *,
    mode: ForwardMode,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    topk: int = 1,
    remedy: Callable[[], str] = lambda: "select another engine.attention_backend",
    others: Callable[[], list[str]] | None = None,
) -> None:
    """Refuse a model that needs a capability that backend ``name`` does not declare.

    Args:
        name: The name of the backend in the configuration.
        capabilities: The declared capabilities of the backend.
        layers: The attention layers of the model.
        mode: The forward mode of the lane's batches.
        dtype: Dtype of queries and KV cache.
        device: Device of the lane.
        page_size: KV slots per page.
        topk: Branches of a request in a draft decode.
        remedy: Returns a hint that names the key that selects the backend; called only on refusal.
        others: Returns the names of the installed backends that could replace it; called only on refusal.
            None to name no alternatives.

    Raises:
        UnsupportedModelError: Lists every missing capability, and the backends that have them all.
    """
    missing = capabilities.missing(
        layers, mode=mode, dtype=dtype, device=device, page_size=page_size, topk=topk
    )
    if not missing:
        return
    names = None if others is None else others()
    hint = "install an attention backend that has it" if names == [] else remedy()
    hint += "; `graphpact plugins` lists the capabilities of each"
    sizes = capabilities.page_sizes
    if len(missing) == 1 and sizes is not None and page_size not in sizes:
        hint = f"set engine.page_size = {' or '.join(in_words(sizes))}, or {hint}"
    raise UnsupportedModelError(
        f"attention backend {name!r} cannot run this model's {mode.value}: it lacks "
        + "; ".join(missing)
        + ("" if names is None else f"; {list_alternatives(names)}"),
        hint=hint,
    )


def list_alternatives(names: Sequence[str]) -> str:
    """Return the part of an error that lists the attention backends that fit."""
    if not names:
        return "no other installed attention backend fits"
    return f"attention backends that fit: {', '.join(names)}"


def backends_that(fits: Callable[[type[AttentionBackend]], bool], catalog: PluginCatalog) -> list[str]:
    """Return the names of the installed attention backends that ``fits`` accepts.

    Broken backends, and those for which ``fits`` raises, are left out.
    """

    def ask(backend: type[AttentionBackend]) -> bool:
        try:
            return fits(backend)
        except Exception:  # noqa: BLE001  third-party code; a refused provider raises too
            return False

    return [
        plugin.info.name
        for plugin in map(catalog.load, catalog.infos("attention_backend"))
        if isinstance(plugin, Loaded) and ask(plugin.cls)
    ]
