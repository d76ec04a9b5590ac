"""Loads the tokenizer of a checkpoint directory.

Does not: download anything, or run Python files of the checkpoint without ``trust_remote_code``.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from graphpact_engine.errors import CheckpointError
from graphpact_engine.models.config_file import one_line
from graphpact_engine.models.quiet import quiet

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: The directory has no tokenizer, or a broken one.
    """
    hint = "save one with tokenizer.save_pretrained, or pass token ids instead of text"
    if not trust_remote_code and not any((path / name).is_file() for name in _FILES):
        # some versions of transformers return an empty tokenizer without files
        raise CheckpointError(f"{path}: no tokenizer: there is none of {', '.join(_FILES)}", hint=hint)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
            tokenizer.decode(tokenizer.encode("a"))  # some faults of its files show only here
    except Exception as error:
        raise CheckpointError(
            f"{path}: the tokenizer cannot be loaded: {one_line(error)}", hint=hint
        ) from error
    return tokenizer
