"""Reads ``config.json`` and refuses what graphpact does not serve, before transformers builds anything of it.

Does not: know an architecture; transformers checks the values that its model types define.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphpact.files import read_file
from graphpact_engine.checkpoint_folder import CONFIG_NAME, GIVE, require_checkpoint_folder
from graphpact_engine.errors import CheckpointError

_NAME, _GIVE = CONFIG_NAME, GIVE

# Keys by which model types count layers. A layer has at least one tensor.
_LAYER_COUNTS = frozenset(
    {
        "decoder_layers",
        "encoder_layers",
        "n_layer",
        "n_layers",
        "num_decoder_layers",
        "num_encoder_layers",
        "num_hidden_layers",
        "num_layers",
    }
)
# Where model types name their number of positions, in the order of preference.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_POSITIVE_IN_ROPE = frozenset(
    {
        "rope_theta",
        "factor",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
    }
)
_POSITIVE = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
# Words in the keys of sizes and of numbers of parts.
_SIZE_WORDS = frozenset(
    {"d", "dim", "embd", "head", "heads", "inner", "layer", "layers", "n", "num", "rank", "size", "width"}
)
_EPSILON = ("_eps", "_epsilon")
# An open interval of the time step of state space models.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file whose content is an object.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, or does not contain an object.
    """
    try:
        content = json.loads(read_file(file).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got a {type(content).__name__}: {_short(content)}"
        )
    return content


def _require_files(path: Path) -> None:
    """Refuse a directory with a pipe or a device, which transformers would wait for or read."""
    try:
        odd = [
            each.name for each in path.iterdir() if each.exists() and not (each.is_file() or each.is_dir())
        ]
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be listed: {one_line(error)}", hint=_GIVE) from error
    if odd:
        raise CheckpointError(f"{path}: {min(odd)!r} is a pipe or a device, not a file", hint=_GIVE)


def read_config(path: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint directory.

    Raises:
        CheckpointError: There is no such file, or it asks for what graphpact does not serve: quantised
            weights, an adapter, or files outside the directory.
    """
    require_checkpoint_folder(path)
    _require_files(path)
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path}: there is an adapter (adapter_config.json); graphpact serves whole models",
            hint="merge the adapter into its model with PEFT's merge_and_unload, and save that model",
        )
    file = path / _NAME
    if not file.is_file():
        raise CheckpointError(f"{path}: not a checkpoint: there is no {_NAME}", hint=_GIVE)
    config = read_json(file)
    remote = config.get("auto_map") if trust_remote_code else None
    if not isinstance(config.get("model_type"), str) and remote is None:
        # transformers would take the type from the name of the directory
        raise CheckpointError(f"{file}: model_type is {_short(config.get('model_type'))}", hint=_GIVE)
    if config.get("configuration_files") is not None:
        raise CheckpointError(
            f"{file}: configuration_files names other files to read in its place; only {_NAME} is read"
        )
    if any(isinstance(code, str) and "--" in code for _, code in _items({"auto_map": remote})):
        raise CheckpointError(
            f"{file}: auto_map names code of another repository: {_short(remote)}",
            hint="copy the Python files into the checkpoint, and name them without 'repository--'",
        )
    for where, value in _items(config):
        key = where.rpartition(".")[2]
        if key in {"quantization_config", "compression_config"} and value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise CheckpointError(
                f"{file}: the weights are quantised ({where}: {_short(method)});"
                " graphpact runs unquantised float weights",
                hint="save the model with float weights (bfloat16, float16, float32)",
            )
    return config


def require_plausible(path: Path, config: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse a number of layers that the weights cannot have, before anything of that size is built.

    Raises:
        CheckpointError: ``config`` counts more layers than there are tensors.
    """
    for where, value in _items(config):
        if where.rpartition(".")[2] in _LAYER_COUNTS and isinstance(value, int) and value > num_tensors:
            raise CheckpointError(
                f"{path / _NAME}: {where} is {_short(value)}; the weights have {num_tensors:,} tensors",
                hint="save config and weights of one model together with save_pretrained",
            )


def require_numbers(path: Path, config: Any) -> None:
    """Refuse numbers with which every model computes nonsense: NaN, a rotary scale of 0, a negative epsilon.

    Args:
        path: The directory.
        config: The config as transformers completed it.

    Raises:
        CheckpointError: The message names the key and its value.
    """
    for where, value in _items(config.to_dict()):
        key = where.rpartition(".")[2]
        positive = key in _POSITIVE or (key in _POSITIVE_IN_ROPE and "rope_" in where)
        need = None
        if isinstance(value, float) and not math.isfinite(value) and key not in _MAY_BE_INFINITE:
            need = "a finite number"
        elif positive and value is not None and not isinstance(value, list | tuple):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                need = "a positive number"
        elif key.endswith(_EPSILON) and isinstance(value, int | float) and value < 0:
            need = "0 or a positive number"
        if need:
            raise CheckpointError(f"{path / _NAME}: {where} is {_short(value)}; it must be {need}")


@contextmanager
def naming_odd_values(config: Mapping[str, Any]) -> Iterator[None]:
    """Add the suspicious values of ``config`` to an error that describes only their effect.

    Suspicious are sizes below 1, whole numbers too large for a size or an id, and names that a lookup did not
    find.
    """
    try:
        yield
    except CheckpointError as error:
        cause = error.__cause__
        missing = cause.args[0] if isinstance(cause, KeyError) and cause.args else None
        odd = [
            f"{where} is {_short(value)}"
            for where, value in _items(config)
            if (isinstance(value, str) and value == missing)
            or (type(value) is int and (value >= 2**31 or (value < 1 and _is_size(where))))
        ]
        if not odd:
            raise
        values = f"{', '.join(odd[:3])} in {_NAME}"
        raise CheckpointError(f"{error.message}; {values}", hint=error.hint) from cause


def _is_size(where: str) -> bool:
    """Return whether a dotted key is the key of a size or of a number of parts."""
    return not _SIZE_WORDS.isdisjoint(where.rpartition(".")[2].split("_"))


def max_positions(path: Path, config: Any) -> int | None:
    """Return the number of positions of a model; None if its config does not say.

    Args:
        path: The directory.
        config: The config of the decoder, as transformers completed it.

    Raises:
        CheckpointError: That number, or the sliding window, is not a valid sequence length.
    """
    for name in ("sliding_window", *_POSITIONS):
        value = getattr(config, name, None)
        if value is None or (name == "sliding_window" and value == 0 and value is not False):
            continue  # Qwen2-MoE says 0 for no window
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{path / _NAME}: {name} is {_short(value)}; it must be a whole number from 1 to 2**31 - 1"
            )
        if name in _POSITIONS:
            return value
    return None


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line of at most about 300 characters.

    Lone surrogates, which no terminal can print, are escaped.
    """
    text = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _items(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key, joined by dots with its parents, and its value; for a list, each element."""
    waiting: list[tuple[str, Any]] = [(str(key), value) for key, value in content.items()]
    while waiting:  # no recursion: a file may nest deeper than Python's stack
        where, value = waiting.pop()
        yield where, value
        if isinstance(value, dict):
            waiting += [(f"{where}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(where, inner) for inner in value]


def _short(value: Any) -> str:
    return "missing" if value is None else reprlib.repr(value)
