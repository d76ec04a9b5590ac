"""Refuses weights that would give meaningless results: quantised, not finite, or far too few for the model.

transformers casts what it loads. Integers and 8-bit floats, which mean nothing without their scales, would
become float weights.

Does not: dequantise, or compare names and shapes with those of the model; transformers compares them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphpact_engine.errors import CheckpointError
from graphpact_engine.models.weight_files import StoredTensor

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

# Last parts of tensor names that only quantised checkpoints have, and the formats that write them.
_FORMATS = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "scales": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_scale": "FP8 or INT8",
    "weight_scale_inv": "block-wise FP8",
    "input_scale": "FP8 or INT8",
    "SCB": "bitsandbytes, 8 bits",
    "absmax": "bitsandbytes, 4 bits",
    "quant_map": "bitsandbytes, 4 bits",
    "W_q": "HQQ",
    "gate_up_proj_blocks": "MXFP4",
    "down_proj_blocks": "MXFP4",
}

# A model may have this many times the elements of its weights, plus this many: tied weights are stored
# once, and masks and rotary tables are not stored.
_SHARED, _COMPUTED = 2, 2**28


def require_size(path: Path, stored: Mapping[str, StoredTensor], built: torch.nn.Module) -> None:
    """Refuse a model far larger than its weights, before memory is allocated for it.

    Args:
        path: The directory of the checkpoint.
        stored: The tensors of its files.
        built: The model on the device ``meta``.

    Raises:
        CheckpointError: The model is too large; the message contains both numbers of elements.
    """
    asked = sum(t.numel() for t in [*built.parameters(), *built.buffers()])
    held = sum(tensor.numel for tensor in stored.values())
    if asked > _SHARED * held + _COMPUTED:
        raise CheckpointError(
            f"{path}: config.json describes a model of {asked:,} numbers; the weights have {held:,}",
            hint="save config and weights of one model together with save_pretrained",
        )


def loadable(stored: Mapping[str, StoredTensor], built: Any) -> dict[str, Any]:
    """Return the slices to load, by name: float tensors, and others in the dtype of the model's own buffer.

    Other tensors that the model type ignores, such as the masks in old GPT-2 files, are left out.

    Args:
        stored: The tensors of the checkpoint's files.
        built: The transformers model on the device ``meta``.

    Raises:
        CheckpointError: A tensor belongs to a quantised checkpoint.
    """
    own = built.state_dict()
    ignored = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001  transformers has no other name for it
    slices = {}
    for name, tensor in stored.items():
        kind = _FORMATS.get(name.rpartition(".")[2]) if name not in own else None
        if tensor.dtype not in _FLOATS and name in own:
            fits = tensor.read().dtype == own[name].dtype
        else:
            fits = tensor.dtype in _FLOATS and kind is None
        if fits:
            slices[name] = tensor.data
        elif name in own or not any(pattern.search(name) for pattern in ignored):
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} is {tensor.dtype}"
                f"{f', of the format {kind}' if kind else ''}; graphpact runs unquantised float weights",
                hint="save the model with float weights (bfloat16, float16, float32)",
            )
    return slices


def require_finite_weights(path: Path, model: torch.nn.Module) -> None:
    """Refuse weights with NaN or infinite values.

    Buffers may be infinite, as masks are, except the frequencies of a rotary embedding.

    Raises:
        CheckpointError: The message names the first such parameter or buffer.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not _is_finite(weight):
            raise CheckpointError(
                f"{path}: weight {name!r} has NaN or infinite values in {weight.dtype}",
                hint="copy or download the weights again; if model.dtype is set, try float32",
            )
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point() or _is_finite(buffer):
            continue
        rotary = "inv_freq" in name
        if rotary or bool(buffer.isnan().any()):
            raise CheckpointError(
                f"{path}: buffer {name!r} has NaN or infinite values",
                hint="correct the parameters of the rotary embedding in config.json" if rotary else None,
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite; compute a mask only if the sum is not finite."""
    wide = tensor.dtype if tensor.dtype is torch.float64 else torch.float32
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())
