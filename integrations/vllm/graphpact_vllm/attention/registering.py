"""`attention_backends`: our attention backends in vLLM's registry, in each process that hears of them.

vLLM starts processes with its configuration, which they read before they call plugins. A backend that was
chosen by name and is not registered then ends them. So its name is sent with how to register it.

Does not: choose one; `graphpact_vllm.tape.platform` does, without a choice of the user.
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from graphpact.plugins import PluginCatalog
from graphpact_vllm import ATTENTION_BACKEND, plugged_names


def attention_backends() -> None:
    """Register our backend, and each installed backend of graphpact; imports none of them."""
    attention_backend(ATTENTION_BACKEND)
    for name in plugged_names(PluginCatalog.scan()):
        attention_backend(name)


def attention_backend(name: str) -> Any:
    """Return vLLM's name of an attention backend of ours, which is registered if it was not."""
    if name not in AttentionBackendEnum.__members__:
        is_ours = name == ATTENTION_BACKEND
        path = (
            "graphpact_vllm.attention.paged.PagedBackend"
            if is_ours
            else f"graphpact_vllm.attention.plugged.{name}"
        )
        register_backend(name, path)
        made: Any = AttentionBackendEnum[name]
        made.__reduce_ex__ = lambda _: (attention_backend, (name,))
    return AttentionBackendEnum[name]
