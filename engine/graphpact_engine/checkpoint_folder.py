"""`require_checkpoint_folder`: refuses a path that is no checkpoint, before packages are imported to load it.

Does not: read the files; `graphpact_engine.models` does, and finds everything else that is wrong.
"""

from pathlib import Path

from graphpact_engine.errors import CheckpointError

CONFIG_NAME = "config.json"
"""The file that every checkpoint has."""

GIVE = f"give the directory that save_pretrained wrote: {CONFIG_NAME} and *.safetensors"
"""The help for a path that is no checkpoint."""


def require_checkpoint_folder(path: Path) -> None:
    """Check that ``path`` is a directory with the file of a model's configuration.

    Raises:
        CheckpointError: It is not.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory" if not path.exists() else f"{path} is not a directory", hint=GIVE
        )
    if not (path / CONFIG_NAME).exists() and not (path / "adapter_config.json").exists():
        raise CheckpointError(f"{path}: not a checkpoint: there is no {CONFIG_NAME}", hint=GIVE)
