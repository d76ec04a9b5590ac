"""Loads a checkpoint directory as ``save_pretrained`` writes it: config, safetensors and tokenizer.

All files are checked before the model is built. Weights are read from safetensors files only, because reading
a pickle can run code. Python files of a checkpoint are run only with ``trust_remote_code``.

Does not: download anything.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_engine.models.generation_config import GenerationDefaults, load_generation_defaults

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Args:
        path: The directory.
        model: The transformers model, in evaluation mode, on its device.
        generation: End tokens and defaults of sampling parameters.
        max_model_len: Number of positions of the model.
        vocab_size: Number of token ids of the model.
    """

    path: Path
    model: Any
    generation: GenerationDefaults
    max_model_len: int
    vocab_size: int


def load_checkpoint(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load the model of a checkpoint directory.

    Args:
        path: The directory.
        dtype: Dtype of weights and computation; None: float32 on a CPU, else the checkpoint's dtype.
        device: Device of the weights.
        attention: Name of the registered attention function that the model calls.
        trust_remote_code: Whether to run Python files of the checkpoint.

    Raises:
        CheckpointError: The directory is missing, is no checkpoint, or has no safetensors weights, or the
            weights are broken or do not match the config.
        UnsupportedModelError: The architecture is not a decoder of transformers.
    """
    _check_directory(path)
    for file in _weight_files(path):
        _check_safetensors(file)
    quiet = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **quiet)
    except Exception as error:
        raise _not_loaded(path, "config.json", error) from error
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{path}: {config.model_type} is an encoder-decoder model; graphpact runs decoders"
        )
    text = config.get_text_config()
    generation = load_generation_defaults(path, config, int(text.vocab_size))
    if dtype is None:
        own = text.dtype
        dtype = torch.float32 if own is None or device.type == "cpu" else own
    # transformers logs mismatches between weights and config; they are raised as errors below instead.
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **quiet,
        )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attention,):
            raise UnsupportedModelError(
                f"{path}: model type {config.model_type!r} does not use transformers' attention interface",
                hint="graphpact runs models whose attention uses that interface",
            ) from error
        raise _not_loaded(path, "the weights", error) from error
    finally:
        log.setLevel(level)
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if found.get(kind):
            listed = sorted(map(str, found[kind]))
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise CheckpointError(
                f"{path}: the weights do not match config.json: {kind.replace('_', ' ')}"
                f" {', '.join(listed[:3])}{more}",
                hint="save config and weights of one model together with save_pretrained",
            )
    return Checkpoint(
        path=path,
        model=model.to(device).eval(),
        generation=generation,
        max_model_len=int(getattr(text, "max_position_embeddings", None) or 2048),
        vocab_size=int(text.vocab_size),
    )


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: The directory has no tokenizer, or a broken one.
    """
    hint = "save one with tokenizer.save_pretrained, or pass token ids instead of text"
    if not trust_remote_code and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        # some versions of transformers return an empty tokenizer without files
        raise CheckpointError(
            f"{path}: no tokenizer: there is none of {', '.join(_TOKENIZER_FILES)}", hint=hint
        )
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise CheckpointError(
            f"{path}: the tokenizer cannot be loaded: {_one_line(error)}", hint=hint
        ) from error


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory" if not path.exists() else f"{path} is not a directory",
            hint="give the directory that save_pretrained wrote: config.json and *.safetensors",
        )
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"{path}: not a checkpoint: there is no config.json",
            hint="give the directory that save_pretrained wrote: config.json and *.safetensors",
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{config}: not a configuration: expected a JSON object")


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint: those of its index, or the single file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a weight index: {_one_line(error)}") from error
        files = [path / Path(str(name)).name for name in names]
    else:
        files = [path / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return files
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles and not index.is_file():
        raise CheckpointError(
            f"{path}: the weights are pickle files ({', '.join(pickles[:3])}), which are never read:"
            " reading a pickle can run code",
            hint="if you trust them, convert them: model.save_pretrained(..) writes safetensors",
        )
    raise CheckpointError(
        f"{path}: weights are missing: {', '.join(missing[:3])}",
        hint="copy the whole directory that save_pretrained wrote",
    )


def _check_safetensors(file: Path) -> None:
    """Read the header, which also checks that the file has the length that the header declares."""
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a complete safetensors file ({file.stat().st_size:,} bytes):"
            f" {_one_line(error)}",
            hint="copy or download the file again",
        ) from error


def _not_loaded(path: Path, part: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: transformers cannot load {part}: {_one_line(error)}",
        hint="remote code is run only with model.trust_remote_code = true"
        if "trust_remote_code" in str(error)
        else None,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
