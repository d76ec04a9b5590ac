"""`attention_backend`: our attention backend in vLLM's registry, in each process that hears of it.

vLLM starts processes with its configuration, which they read before they call plugins. A backend that was
chosen by name and is not registered then ends them. So its name is sent with how to register it.

Does not: choose it; `graphpact_vllm.platform` does, without a choice of the user.
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from graphpact_vllm import ATTENTION_BACKEND


def attention_backend() -> Any:
    """Return vLLM's name of our attention backend, which is registered if it was not."""
    if ATTENTION_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION_BACKEND, "graphpact_vllm.attention.PagedBackend")
        name: Any = AttentionBackendEnum[ATTENTION_BACKEND]
        name.__reduce_ex__ = lambda _: (attention_backend, ())
    return AttentionBackendEnum[ATTENTION_BACKEND]
