"""Loads a checkpoint directory as ``save_pretrained`` writes it: config and safetensors.

The config is read and the weight files are opened. Then the model is built without memory and compared with
them. Then the weights are read, from the files that are open. Python files of a checkpoint are run only with
``trust_remote_code``.

Does not: download anything, or let transformers look for weights.
"""

import copy
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from graphpact.errors import GraphpactError
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_engine.models.config_file import (
    max_positions,
    naming_odd_values,
    one_line,
    read_config,
    require_numbers,
    require_plausible,
)
from graphpact_engine.models.generation_config import GenerationDefaults, load_generation_defaults
from graphpact_engine.models.quiet import quiet
from graphpact_engine.models.sharding import Sharding, make_local
from graphpact_engine.models.weight_checks import loadable, require_finite_weights, require_size
from graphpact_engine.models.weight_files import StoredTensor, open_weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Args:
        path: The directory.
        model: The transformers model, in evaluation mode, on its device.
        generation: End tokens and defaults of sampling parameters.
        max_model_len: Number of positions of the model; None if its config does not say.
        vocab_size: Number of token ids of the model.
    """

    path: Path
    model: Any
    generation: GenerationDefaults
    max_model_len: int | None
    vocab_size: int


def load_checkpoint(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    sharding: Sharding | None = None,
) -> Checkpoint:
    """Load the model of a checkpoint directory.

    Args:
        path: The directory.
        dtype: Dtype of weights and computation; None for float32 on a CPU and the checkpoint's dtype
            elsewhere.
        device: Device of the weights.
        attention: Name of the registered attention function that the model calls.
        trust_remote_code: Whether to run Python files of the checkpoint.
        sharding: How ranks split the model; None for the whole model.

    Raises:
        CheckpointError: The directory is missing, is no checkpoint, or has no safetensors weights; the
            weights are broken, quantised, not finite, or do not match the config; the config has values
            that no model can have.
        UnsupportedModelError: The architecture is not a decoder of transformers.
    """
    raw = read_config(path, trust_remote_code=trust_remote_code)
    _require_known_type(path, raw)
    stored = open_weights(path, raw)
    require_plausible(path, raw, len(stored))
    with naming_odd_values(raw):
        return _load(
            path,
            stored,
            dtype=dtype,
            device=device,
            attention=attention,
            trust_remote_code=trust_remote_code,
            sharding=sharding,
        )


def _require_known_type(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse a model type that transformers does not have, unless the config names its own code."""
    model_type = raw.get("model_type")
    if raw.get("auto_map") is None and model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{path}: config.json has model_type {reprlib.repr(model_type)}, which transformers"
            f" {transformers.__version__} does not know",
            hint="check its spelling; a newer transformers may have it",
        )


def _load(
    path: Path,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    attention: str,
    trust_remote_code: bool,
    sharding: Sharding | None,
) -> Checkpoint:
    """Load the model of a directory whose config was read and whose weight files are open."""
    with loading(path, "config.json", attention):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{path}: {config.model_type} is an encoder-decoder model; graphpact runs decoders"
        )
    require_numbers(path, config)
    max_model_len = max_positions(path, text)
    if dtype is None:
        dtype = torch.float32 if text.dtype is None or device.type == "cpu" else text.dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
            raise CheckpointError(
                f"{path}: config.json asks for dtype {dtype}; graphpact computes in bfloat16, float16,"
                " float32 or float64",
                hint="set model.dtype to one of them",
            )
    with loading(path, "the model of config.json", attention), torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )
    model = load_weights(path, stored, built, dtype=dtype, device=device, sharding=sharding)
    vocab_size = int(text.vocab_size)
    generation = load_generation_defaults(path, config, vocab_size)
    return Checkpoint(path, model, generation, max_model_len, vocab_size)


def load_weights(
    path: Path,
    stored: Mapping[str, StoredTensor],
    built: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sharding: Sharding | None = None,
    **arguments: Any,
) -> Any:
    """Return the model with its weights, in evaluation mode.

    Args:
        path: The directory.
        stored: The tensors of its files, by their names in the model.
        built: The model of its config, on the device ``meta``.
        dtype: Dtype of the weights.
        device: Device of the weights.
        sharding: How ranks split the model; None for the whole model.
        arguments: What the constructor of the model takes besides the config.

    Raises:
        CheckpointError: The weights are quantised, not finite, or not those of the model.
    """
    require_size(path, stored, built)
    slices = loadable(stored, built)
    attention = built.config._attn_implementation  # noqa: SLF001  transformers has no other name for it
    model_class = type(built)
    if sharding is not None:
        tied = bool(built.config.get_text_config().tie_word_embeddings)
        model_class, arguments = sharding.class_of(model_class, tied=tied), arguments | sharding.arguments
    with loading(path, "the weights", attention):
        model, found = model_class.from_pretrained(
            None,  # no directory: the weights are those of `state_dict`, and no others
            config=built.config,
            state_dict=slices,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **arguments,
        )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if found.get(kind):
            listed = sorted(" ".join(str(key).split()) for key in found[kind])
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise CheckpointError(
                f"{path}: the weights do not match config.json: {kind.replace('_', ' ')}"
                f" {', '.join(listed[:3])}{more}",
                hint="save config and weights of one model together with save_pretrained",
            )
    if sharding is not None:
        model.__class__ = type(built)
        make_local(model)
    model = model.to(device).eval()
    require_finite_weights(path, model)
    return model


@contextmanager
def loading(path: Path, part: str, attention: str) -> Iterator[None]:
    """Turn errors of transformers while it loads ``part`` into refusals, and silence its warnings."""
    try:
        with quiet():
            yield
    except GraphpactError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attention,):
            raise UnsupportedModelError(
                f"{path}: the model does not use transformers' attention interface",
                hint="graphpact runs models whose attention uses that interface",
            ) from error
        raise _not_loaded(path, part, error) from error


def _not_loaded(path: Path, part: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: transformers cannot load {part}: {one_line(error)}",
        hint="remote code is run only with model.trust_remote_code = true"
        if "trust_remote_code" in str(error)
        else None,
    )
