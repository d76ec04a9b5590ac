"""`require_capabilities`: whether an attention backend can run a model, and which others could.

Does not: know what a backend can do; it declares that, see `graphpact.attention.Capabilities`.
"""

from collections.abc import Callable, Sequence

import torch

from graphpact.attention import Capabilities, LayerSpec
from graphpact.attention.capabilities import in_words
from graphpact.batch import ForwardMode
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
    others: Callable[[], list[str]] | None = None,
) -> None:
    """Refuse a model that asks of backend ``name`` what it does not declare.

    Args:
        name: What the backend is selected by.
        capabilities: What it declares.
        layers: What the model asks for.
        mode: What the lane's batches are.
        dtype: Of queries and KV cache.
        device: The lane's.
        page_size: KV slots in a page.
        topk: Branches of a request in a draft decode.
        others: Finds the names of the installed backends that would do in its place; called where it is
            refused. None where nobody knows.

    Raises:
        UnsupportedModelError: Lists everything that is missing, and who has it all.
    """
    missing = capabilities.missing(
        layers, mode=mode, dtype=dtype, device=device, page_size=page_size, topk=topk
    )
    if not missing:
        return
    names = None if others is None else others()
    hint = (
        "install an attention backend that has it"
        if names == []
        else "select another engine.attention_backend"
    )
    hint += "; `graphpact plugins` lists what each has"
    sizes = capabilities.page_sizes
    if len(missing) == 1 and sizes is not None and page_size not in sizes:
        hint = f"set engine.page_size = {' or '.join(in_words(sizes))}, or {hint}"
    raise UnsupportedModelError(
        f"attention backend {name!r} cannot run this model's {mode.value}: it lacks "
        + "; ".join(missing)
        + ("" if names is None else f"; {say_others(names)}"),
        hint=hint,
    )


def say_others(names: Sequence[str]) -> str:
    """Return in words which other attention backends would do."""
    if not names:
        return "no other attention backend that is installed would do"
    return f"attention backends that would do: {', '.join(names)}"
