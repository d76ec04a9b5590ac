"""Random registries, and the texts that descriptions of them must contain.

Does not: hold tests; those of tables are in `core/tests`, those of pictures in `engine/tests`.
"""

from typing import Any

import torch
from hypothesis import strategies as st

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
)

CPU = torch.device("cpu")
HOSTILE = [
    "<script>alert(1)</script>",
    "a\"b'c&amp;<&>]]>",
    "two\nlines\r\n\tand a tab",
    "\x00\x07\x1b[31mred",
    "\ud800 alone",
    "right\u202eleft",
    "[bold]markup[/bold]",
    "émoji 🙂 名前",
    "x" * 300,
]

_NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1, max_size=12))
_WORDS = st.one_of(st.none(), st.just(""), _NAMES)
_VALUES = {
    torch.int64: st.integers(-(2**40), 2**40),
    torch.float32: st.floats(width=32),
    torch.bool: st.booleans(),
}


@st.composite
def registries(draw: Any) -> CudaGraphBufferRegistry:
    """Return a registry of up to six slots with any names, owners, reasons, policies and shapes."""
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=4, max_num_tokens=9)
    for name in draw(st.lists(_NAMES, unique=True, max_size=6)):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(list(_VALUES)))
        registry.register_slot(
            GraphSlot(
                name,
                lambda _bs, _tokens, shape=shape: shape,
                dtype,
                axis=draw(st.sampled_from(["bs", "tokens", "none"])),
                padding_policy=draw(st.sampled_from(PaddingPolicy)),
                pad_value=draw(_VALUES[dtype]),
                enabled=draw(st.sampled_from([True, True, True, False])),
                copy_from_fb=False,
                owner=draw(_WORDS),
                reason=draw(_WORDS),
            )
        )
    return registry


def declared(registry: CudaGraphBufferRegistry) -> list[GraphSlot]:
    """Return every declared slot, including those that are not enabled."""
    return list(registry._slots.values())


def padding(slot: GraphSlot) -> str:
    """Return the expected text of the slot's padding policy, computed without the code under test."""
    about_a_value = slot.padding_policy in (PaddingPolicy.FILL_ONCE, PaddingPolicy.FILL_SENTINEL)
    return slot.padding_policy.value + (f" {slot.pad_value}" if about_a_value else "")


def spelled(text: str) -> str:
    """Return ``text`` with Python's escapes for characters that are not printable."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def small() -> CudaGraphBufferRegistry:
    """Return the decode registry with one more slot, which is not enabled."""
    registry = build_decode_registry(
        device=CPU, max_bs=4, max_num_token=8, seq_len_fill_value=1, enable_mrope=False
    )
    registry.register_slot(
        GraphSlot("later", lambda bs, _: (bs,), torch.int8, enabled=False, owner="nobody yet")
    )
    return registry
