"""Finds the weight files of a checkpoint and opens each once: what is checked is what is read.

The files are those that transformers takes: the one that ``transformers_weights`` of the config names,
``model.safetensors``, or the files of ``model.safetensors.index.json``. Each is a safetensors file, because
reading a pickle can run code, and is in the checkpoint's own directory. A symbolic link may lead to another
file of that directory and, from a snapshot of the Hugging Face cache, to the ``blobs`` of that cache.

Does not: read a tensor, or know what the model does with it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graphpact_engine.errors import CheckpointError
from graphpact_engine.models.config_file import one_line, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WHOLE = "copy the whole directory that save_pretrained wrote"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an open safetensors file.

    Args:
        file: The file.
        data: The open slice of safetensors; ``data[...]`` reads the tensor.
    """

    file: Path
    data: Any

    @property
    def dtype(self) -> str:
        """The dtype as safetensors spells it, such as ``"BF16"``."""
        return str(self.data.get_dtype())

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.data.get_shape())

    def read(self) -> torch.Tensor:
        """Read the tensor."""
        tensor: torch.Tensor = self.data[...]
        return tensor


def open_weights(path: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Open the weight files of a checkpoint and return their tensors by name.

    A file stays open and mapped while a tensor of it is referenced. Only headers are read.

    Args:
        path: The directory.
        config: The content of ``config.json``.

    Raises:
        CheckpointError: A file is missing, is outside the directory, is not a complete safetensors file, or
            does not contain the tensors of the index; two files contain a tensor of one name.
    """
    wanted = _wanted(path, config)
    tensors: dict[str, StoredTensor] = {}
    for name, listed in wanted.items():
        file = path / name
        held = _open(file)
        absent = sorted(listed - held.keys())
        if absent:
            raise CheckpointError(
                f"{file}: there is no tensor {absent[0]!r}, which the index places in it",
                hint=_WHOLE,
            )
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise CheckpointError(
                f"{path}: two files hold a tensor {twice[0]!r}: {tensors[twice[0]].file.name} and {name}",
                hint=_WHOLE,
            )
        tensors |= held
    return tensors


def _wanted(path: Path, config: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names of the weight files, each with the tensors that an index places in it."""
    named = config.get("transformers_weights")
    if named is not None and not isinstance(named, str):
        raise CheckpointError(
            f"{path / 'config.json'}: transformers_weights is {named!r}, not the name of a file"
        )
    file = named or (_INDEX if (path / _INDEX).exists() else _SINGLE)
    if not file.endswith(".json"):
        _require_own_files(path, [file])
        return {file: set()}
    _require_own_files(path, [file], suffix=".json")
    wanted = _files_of_index(path / file)
    _require_own_files(path, list(wanted))
    if not named and _SINGLE not in wanted and (path / _SINGLE).exists():
        raise CheckpointError(
            f"{path}: there are two sets of weights: {_SINGLE}, and {len(wanted)} files of {_INDEX}",
            hint="remove the one that does not belong to this checkpoint",
        )
    return wanted


def _files_of_index(index: Path) -> dict[str, set[str]]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: not a weight index: there is no object weight_map", hint=_WHOLE)
    files: dict[str, set[str]] = {}
    for tensor, name in placed.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{index}: not a weight index: tensor {tensor!r} has {name!r} in place of a file",
                hint=_WHOLE,
            )
        files.setdefault(name, set()).add(tensor)
    return dict(sorted(files.items()))


def _require_own_files(path: Path, names: list[str], *, suffix: str = ".safetensors") -> None:
    """Raise unless every name is that of a file of its kind inside the directory."""
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in name or ":" in name:
            raise CheckpointError(f"{path}: the weight file {name!r} is outside the directory", hint=_WHOLE)
        if parts.suffix != suffix:
            raise CheckpointError(
                f"{path}: the weight file {name!r} is not a {suffix} file; no others are read",
                hint=_WHOLE,
            )
    missing = [name for name in names if not _is_file(path / name)]
    if missing:
        raise _missing(path, missing)
    home = path.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # the Hugging Face cache: snapshots/REVISION/NAME -> blobs/HASH
        allowed.append(home.parent.parent / "blobs")
    for name in names:
        real = (path / name).resolve()
        if not any(real.is_relative_to(folder) for folder in allowed):
            raise CheckpointError(
                f"{path}: the weight file {name!r} is a link out of the directory, to {real}",
                hint="give the directory that holds the weights, or copy them",
            )


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # such as a name that is too long
        return False


def _missing(path: Path, names: list[str]) -> CheckpointError:
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles and names == [_SINGLE]:
        return CheckpointError(
            f"{path}: the weights are pickle files ({', '.join(pickles[:3])}), which are never read:"
            " reading a pickle can run code",
            hint="if you trust them, convert them: model.save_pretrained(..) writes safetensors; so does"
            " safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')",
        )
    listed = ", ".join(name if name.isprintable() else repr(name) for name in names[:3])
    return CheckpointError(f"{path}: weights are missing: {listed}", hint=_WHOLE)


def _open(file: Path) -> dict[str, StoredTensor]:
    """Read the header, which also checks that the file has the length that the header declares."""
    try:
        opened: Any = safe_open(file, framework="pt")
        names = list(opened.keys())
        return {name: StoredTensor(file, opened.get_slice(name)) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a complete safetensors file ({file.stat().st_size:,} bytes): {one_line(error)}",
            hint="copy or download the file again",
        ) from error
