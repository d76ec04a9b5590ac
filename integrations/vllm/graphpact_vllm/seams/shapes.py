"""`shape_of`: the shape of a graph of vLLM, from its descriptor.

Does not: import vLLM; both kinds of descriptors are told apart by their fields.
"""

import functools
from typing import Any


def query_len_of(desc: Any) -> int | None:
    """Return the tokens of each request of a graph that serves no others; None for any."""
    if hasattr(desc, "uniform_token_count"):  # of model runner V2
        length: int | None = desc.uniform_token_count
        return length
    return desc.num_tokens // desc.num_reqs if desc.uniform else None


@functools.lru_cache(maxsize=1024)
def shape_of(desc: Any) -> str:
    """Return the shape of a graph: ``8``, or ``8 tokens, 4 requests``.

    Args:
        desc: A ``BatchExecutionDescriptor`` of model runner V2, or a ``BatchDescriptor``.
    """
    parts = [f"{desc.num_tokens}"]
    if desc.num_reqs is not None:
        if desc.num_reqs != desc.num_tokens:
            parts = [f"{desc.num_tokens} tokens", f"{desc.num_reqs} requests"]
        if query_len_of(desc) is None:
            parts.append("mixed")
    for name, what in (("num_active_loras", "LoRAs"), ("num_ubatches", "micro-batches")):
        count = getattr(desc, name, 0)
        if count > (name == "num_ubatches"):
            parts.append(f"{count} {what}")
    return ", ".join(parts)
