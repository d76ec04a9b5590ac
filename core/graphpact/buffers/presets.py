"""Ready registries: the slots that every decode lane needs, with the pad values that kernels expect.

Values and their reasons follow SGLang's ``build_decode_registry`` (PR 26742) and PR 26292: a padded
row is request row 0, whose table is all scratch, with the fill length that the attention backend
declares.

Does not: hold what a backend derives; backends declare their own slots.
"""

import torch

from graphpact.buffers.registry import CudaGraphBufferRegistry
from graphpact.buffers.slots import Axis, GraphSlot, PaddingPolicy

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

    def declare(name: str, axis: Axis, pad_value: int, where: torch.device | None = None) -> None:
        registry.register_slot(
            GraphSlot(
                name=name,
                shape_fn=lambda bs, tokens: (bs if axis == "bs" else tokens,),
                dtype=torch.int64,
                owner=_OWNER,
                axis=axis,
                device=where,
                padding_policy=PaddingPolicy.FILL_SENTINEL if pad_value else PaddingPolicy.ZERO,
                pad_value=pad_value,
            )
        )

    # Padded tokens run through the whole model: token 0 at position 0, written to scratch slot 0.
    declare("input_ids", "tokens", 0)
    declare("positions", "tokens", 0)
    declare("out_cache_loc", "tokens", 0)
    declare("req_pool_indices", "bs", 0)
    declare("seq_lens", "bs", seq_len_fill_value)
    declare("seq_lens_cpu", "bs", seq_len_fill_value, torch.device("cpu"))
    return registry
