"""Transformers models on graphpact attention: loads checkpoints, and runs the forward pass of a batch.

Does not: contain model code. It needs the extra ``graphpact[engine]``; without it, importing this package
raises a `UsageError`.
"""

from graphpact.errors import UsageError

try:
    import safetensors as _safetensors  # noqa: F401  only to check that it is installed
    import transformers as _transformers  # noqa: F401  only to check that it is installed
except ImportError as error:
    raise UsageError(
        f"running a model needs the package {error.name!r}, which is not installed",
        hint='pip install "graphpact[engine]"',
    ) from error

from graphpact_engine.models.checkpoint import Checkpoint, load_checkpoint
from graphpact_engine.models.draft_model import DraftModel, load_draft_model
from graphpact_engine.models.gathering import GatheredTokens
from graphpact_engine.models.interface import ATTENTION_NAME
from graphpact_engine.models.sharding import Sharding
from graphpact_engine.models.tokenizer import load_tokenizer
from graphpact_engine.models.transformers_model import TransformersModel

__all__ = [
    "ATTENTION_NAME",
    "Checkpoint",
    "DraftModel",
    "GatheredTokens",
    "Sharding",
    "TransformersModel",
    "load_checkpoint",
    "load_draft_model",
    "load_tokenizer",
]
