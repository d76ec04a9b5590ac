"""Ready registries: the slots that every decode lane needs, with the pad values that kernels expect.

Values and their reasons follow SGLang's ``build_decode_registry`` (PR 26742) and PR 26292: a padded
row is request row 0, whose table is all scratch, with the fill length that the attention backend
declares.

Does not: hold what a backend derives; backends declare their own slots.
"""

import torch

from graphpact.buffers.registry import CudaGraphBufferRegistry
from graphpact.buffers.slots import GraphSlot, PaddingPolicy

_OWNER = "decode inputs"


def build_decode_registry(
    *, max_bs: int, max_num_tokens: int, device: torch.device, seq_len_fill_value: int
) -> CudaGraphBufferRegistry:
    """Return a registry with the inputs of decode.

    Args:
        max_bs: Largest request bucket.
        max_num_tokens: Largest token bucket.
        device: Where the slots lie; ``seq_lens_cpu`` lies on the host.
        seq_len_fill_value: Length of a padded row, declared by the attention backend.
    """
    registry = CudaGraphBufferRegistry(max_bs=max_bs, max_num_tokens=max_num_tokens, device=device)

    def per_token(name: str) -> None:
        # Padded tokens run through the whole model: token 0 at position 0, written to scratch slot 0.
        registry.register_slot(
            GraphSlot(
                name=name,
                shape_fn=lambda _bs, tokens: (tokens,),
                dtype=torch.int64,
                owner=_OWNER,
                axis="tokens",
                padding_policy=PaddingPolicy.ZERO,
            )
        )

    def per_request(name: str, pad_value: int, slot_device: torch.device | None = None) -> None:
        registry.register_slot(
            GraphSlot(
                name=name,
                shape_fn=lambda bs, _tokens: (bs,),
                dtype=torch.int64,
                owner=_OWNER,
                axis="bs",
                device=slot_device,
                padding_policy=PaddingPolicy.FILL_SENTINEL,
                pad_value=pad_value,
            )
        )

    per_token("input_ids")
    per_token("positions")
    per_token("out_cache_loc")
    per_request("req_pool_indices", 0)
    per_request("seq_lens", seq_len_fill_value)
    per_request("seq_lens_cpu", seq_len_fill_value, torch.device("cpu"))
    return registry
