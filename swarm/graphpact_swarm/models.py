"""`made_models` and `ModelFacts`: small models with random weights for runs without ``--model``.

Their weights are large enough that an answer depends on all of its prompt: a wrong key or position changes
tokens.

Does not: load a model; `graphpact_swarm.verdicts.reference` does, and engines do.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpact.errors import UsageError
from graphpact.files import read_file

GIVEN = "given"
"""The name of the model of ``--model``."""
MADE = ("llama", "windows", "experts")
"""The names of the models that are made: plain, with windows in some layers, and with experts."""
_WINDOW = 24
_TIED = 0.05
_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that kernels of other engines take
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "windows": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,  # as all that are released; SGLang computes no other
        },
    ),
    "experts": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
}


@dataclass(frozen=True)
class ModelFacts:
    """What draws need to know of a model.

    Args:
        path: The folder of its checkpoint.
        tokens: Token ids that prompts are made of; special ones are left out.
        max_len: The most tokens of a sequence.
        window: Tokens to which its layers, or some of them, attend; None for all.
    """

    path: Path
    tokens: Sequence[int]
    max_len: int
    window: int | None

    @classmethod
    def of(cls, path: Path) -> "ModelFacts":
        """Read them from a checkpoint.

        Raises:
            UsageError: There is no usable ``config.json``.
        """
        try:
            config = json.loads(read_file(path / "config.json"))
            config = config.get("text_config", config)
            size = int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--model {path}: {type(error).__name__}: {error}", hint="name the folder of a checkpoint"
            ) from error
        special: set[int] = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(name)
            special.update(value if isinstance(value, list) else () if value is None else (value,))
        return cls(
            path,
            [token for token in range(min(size, 4096)) if token not in special],
            int(config.get("max_position_embeddings") or 2048),
            config.get("sliding_window"),
        )


def make_model(name: str, folder: Path) -> Path:
    """Write the checkpoint of a made model, and return its folder; the same each time.

    Args:
        name: One of `MADE`.
        folder: Where its folder is made, unless it is there.
    """
    path = folder / name
    if (path / "config.json").exists():
        return path
    import torch  # noqa: PLC0415  seconds, and only where a model is made
    import transformers  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config, kind, more = _KINDS[name]
        model: Any = getattr(transformers, kind)(getattr(transformers, config)(**(_SHAPE | more)))
        if model.config.tie_word_embeddings:  # or each token would be followed by itself
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(_TIED)
                model.model.norm.weight.fill_(1 / _TIED)
    model.float().save_pretrained(path)
    return path
