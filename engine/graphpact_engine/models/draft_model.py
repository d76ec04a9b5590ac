"""`DraftModel`: the forward pass of a draft head in a lane, and `load_draft_model`, which loads one.

A draft directory is a checkpoint like the target's: ``config.json``, whose ``architectures`` names the head,
and safetensors. Names of weights may begin with ``model.``. A head without weights for its embedding or its
language model head uses the target's.

Does not: draft, verify, or know where hidden states come from.
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import Axis
from graphpact.errors import EngineError
from graphpact.speculation import HIDDEN_STATES
from graphpact.step import Attend, StepOutputs
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_engine.models.checkpoint import load_weights, loading
from graphpact_engine.models.config_file import (
    max_positions,
    naming_odd_values,
    read_config,
    require_numbers,
    require_plausible,
)
from graphpact_engine.models.draft_heads import (
    DraftHead,
    LlamaForCausalLMEagle,
    LlamaForCausalLMEagle3,
    LlamaForCausalLMFrozenKvMtp,
)
from graphpact_engine.models.interface import ATTENTION_NAME, attending
from graphpact_engine.models.transformers_model import LaneAttention, TransformersModel
from graphpact_engine.models.weight_files import StoredTensor, open_weights

_HEADS: Mapping[str, type[DraftHead]] = {
    head.__name__: head
    for head in (LlamaForCausalLMEagle, LlamaForCausalLMEagle3, LlamaForCausalLMFrozenKvMtp)
}
_OPTIONAL = frozenset({"embed_tokens.weight", "lm_head.weight", "fc.bias", "d2t"})
_TRAINED_FOR = "a draft model is trained for one target; select the draft of this target, or the other target"


class DraftModel:
    """The forward pass of a draft head: returns logits over the target's vocabulary, and hidden states.

    It reads ``input_ids``, ``positions`` and the field `HIDDEN_STATES` of a batch. Row ``i`` has a token and
    the hidden state of the token before it, and drafts the token after it. In a head with its own KV cache, a
    row has the position of its hidden state. On frozen KV, a row has the position of its token.

    Args:
        head: The head, with its weights.
        target: The target; gives the embedding and the language model head that the draft lacks.
        layers: The attention layers of the head.
        target_layers: See below.
        max_model_len: See below.

    Attributes:
        layers: The attention layers, by ``layer_id`` from 0. Their own caches follow those of the target.
        has_own_kv: Whether the layers write keys and values; False if they read the target's (frozen KV).
        hidden_size: Width of the hidden states that the draft returns, and reads after its first step.
        target_layers: Indices of transformers' ``hidden_states`` of the target that the draft reads in its
            first step, concatenated; see `TransformersModel`.
        target_hidden_size: Width of these hidden states.
        max_model_len: Number of positions; None if the config does not say.
        vocab_size: Number of token ids, equal to the target's.
    """

    def __init__(
        self,
        head: DraftHead,
        target: TransformersModel,
        *,
        layers: list[LayerSpec],
        target_layers: tuple[int, ...],
        max_model_len: int | None,
    ) -> None:
        self.head = head
        self.layers = layers
        self.has_own_kv = not isinstance(head, LlamaForCausalLMFrozenKvMtp)
        self.hidden_size: int = head.config.hidden_size
        self.target_layers = target_layers
        self.target_hidden_size = len(target_layers) * self.hidden_size
        self.max_model_len = max_model_len
        self.vocab_size: int = head.config.vocab_size
        self._embed = head.embed_tokens or target.model.get_input_embeddings()
        self._lm_head = head.lm_head or target.model.get_output_embeddings()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and buffer of the head, without those of the target that it reads."""
        yield from self.head.named_parameters()
        yield from self.head.named_buffers()

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``logits`` and ``hidden_states``.

        Both are ``[bs, ..]`` where the batch selects a row of each request (ragged batches, draft extend)
        and in decode; otherwise ``[T, ..]``. Tokens that an EAGLE-3 head does not draft have the logit -inf.
        A soft cap that the target's own code applies to logits is not applied.

        Raises:
            EngineError: The batch has no hidden states.
        """
        hidden = batch.extra.get(HIDDEN_STATES)
        if hidden is None:
            raise EngineError(
                f"the {batch.forward_mode.value} batch of a draft model has no field {HIDDEN_STATES!r};"
                f" extra contains {', '.join(batch.extra) or 'nothing'}",
                hint="the runner of the lane has to make a slot and dummy values for it",
            )
        with attending(LaneAttention(attend, metadata, dict(enumerate(self.layers)))):
            read, hidden = self.head(self._embed(batch.input_ids), hidden, batch.positions)
        rows = batch.selected_rows
        if rows is not None:
            read, hidden = read[rows], hidden[rows]
        axis: Axis = "bs" if rows is not None or batch.forward_mode.is_decode else "tokens"
        return StepOutputs(logits=(self._logits(read), axis), hidden_states=(hidden, axis))

    def _logits(self, read: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary."""
        logits: torch.Tensor = self._lm_head(read)
        if self.head.d2t is None:
            return logits
        every = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return every.index_copy(1, target_ids(self.head.d2t), logits)


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target's token id of each row of a draft's language model head."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def load_draft_model(path: Path, *, target: TransformersModel) -> DraftModel:
    """Load the draft model of a directory, in the dtype and on the device of its target.

    Raises:
        CheckpointError: As for every checkpoint; the draft has another vocabulary or hidden size than the
            target, or reads layers that the target does not have.
        UnsupportedModelError: The architecture is not a draft head.
    """
    raw = read_config(path, trust_remote_code=False)
    head_class = _head_class(path, raw)
    stored = _renamed(path, open_weights(path, raw))
    own = {name: stored[name] for name in _OPTIONAL if name in stored}
    require_plausible(path, raw, len(stored))
    with naming_odd_values(raw):
        with loading(path, "config.json", ATTENTION_NAME):
            config = LlamaConfig.from_dict({**raw, "attn_implementation": ATTENTION_NAME})
        require_numbers(path, config)
        max_model_len = max_positions(path, config)
        _require_same_sizes(path, config, target)
        _require_token_ids(path, config, own)
        target_layers: tuple[int, ...] = (-1,)
        if head_class is LlamaForCausalLMEagle3:
            target_layers = _eagle3_layers(path, config, len(target.layers))
        with loading(path, "the model of config.json", ATTENTION_NAME), torch.device("meta"):
            built = head_class(config, own)
        if isinstance(built, LlamaForCausalLMFrozenKvMtp):
            layers = _frozen_layers(path, config, target)
        else:
            layers = _own_layers(built, len(target.layers))
        head = load_weights(
            path, stored, built, dtype=target.dtype, device=target.model.device, own=frozenset(own)
        )
    return DraftModel(head, target, layers=layers, target_layers=target_layers, max_model_len=max_model_len)


def _head_class(path: Path, raw: Mapping[str, Any]) -> type[DraftHead]:
    """Return the class that ``architectures`` names."""
    named = raw.get("architectures")
    known = [name for name in named if name in _HEADS] if isinstance(named, list) else []
    if len(known) != 1 or raw["model_type"] != "llama":
        raise UnsupportedModelError(
            f"{path}: not a draft model: config.json has architectures {reprlib.repr(named)} and model_type"
            f" {reprlib.repr(raw['model_type'])}; draft models are of model_type 'llama' and one of"
            f" {', '.join(_HEADS)}",
            hint="give the directory of a draft head; where a published head names the architecture of its"
            " target, set architectures in config.json to that of the head",
        )
    return _HEADS[known[0]]


def _renamed(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by their names in a head."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        plain = name.removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = f"layers.0.{plain.removeprefix('midlayer.')}"
        if plain in renamed:
            raise CheckpointError(
                f"{path}: the weights have two tensors for {plain!r}; one is {name!r}",
                hint="remove the one that does not belong to this checkpoint",
            )
        renamed[plain] = tensor
    return renamed


def _require_same_sizes(path: Path, config: Any, target: TransformersModel) -> None:
    """Refuse a draft for a target of another size."""
    of_target = target.model.config.get_text_config()
    for key, wanted in (
        ("vocab_size", of_target.vocab_size),
        ("hidden_size", of_target.hidden_size),
        ("target_hidden_size", of_target.hidden_size),
    ):
        found = getattr(config, key, wanted)  # only configs of EAGLE-3 may contain the last key
        if found != wanted:
            raise CheckpointError(
                f"{path}: the draft model has {key} {reprlib.repr(found)}; the target's is {wanted}",
                hint=_TRAINED_FOR,
            )


def _require_token_ids(path: Path, config: Any, own: Mapping[str, StoredTensor]) -> None:
    """Refuse a language model head whose rows do not have different token ids of the target."""
    drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
    if "d2t" not in own:
        if drafted != config.vocab_size:
            raise CheckpointError(
                f"{path}: draft_vocab_size is {reprlib.repr(drafted)} of {config.vocab_size} tokens, but the"
                " weights have no d2t with their ids",
                hint="copy the whole checkpoint",
            )
        return
    if "lm_head.weight" not in own:
        raise CheckpointError(
            f"{path}: the weights have d2t but no lm_head.weight, whose rows it describes",
            hint="copy the whole checkpoint",
        )
    d2t = own["d2t"].read()
    if d2t.dtype is not torch.int64 or d2t.shape != (drafted,) or not _numbers(d2t, config.vocab_size):
        raise CheckpointError(
            f"{path}: d2t is {own['d2t'].dtype} {list(d2t.shape)}, and does not give each of {drafted} rows"
            f" of lm_head a different token id from 0 to {config.vocab_size - 1}",
            hint="d2t[i] is int64: the target's token id of row i, minus i",
        )


def _numbers(d2t: torch.Tensor, vocab_size: int) -> bool:
    """Return whether ``d2t`` gives each row a different token id."""
    ids = target_ids(d2t)
    return int(ids.min()) >= 0 and int(ids.max()) < vocab_size and len(ids.unique()) == len(ids)


def _eagle3_layers(path: Path, config: Any, count: int) -> tuple[int, ...]:
    """Return which hidden states of ``count`` layers an EAGLE-3 head reads, as transformers numbers them."""
    more = getattr(config, "eagle_config", None) or {}
    named = more.get("eagle_aux_hidden_state_layer_ids") if isinstance(more, dict) else None
    if named is not None:  # numbers of layers, from 0
        named = [i + 1 if type(i) is int else i for i in named] if isinstance(named, list) else named
    else:
        named = getattr(config, "eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
    if (
        not isinstance(named, list)
        or len(named) != 3
        or not all(type(i) is int and 0 <= i <= count for i in named)
    ):
        raise CheckpointError(
            f"{path}: an EAGLE-3 head reads the target's hidden states {reprlib.repr(named)}; a target of"
            f" {count} layers has those from 0 to {count}",
            hint="name three as eagle_aux_hidden_state_layer_ids in config.json",
        )
    if config.num_hidden_layers != 1 or getattr(config, "norm_before_residual", False):
        raise UnsupportedModelError(
            f"{path}: the EAGLE-3 head has {config.num_hidden_layers} layers and norm_before_residual"
            f" {getattr(config, 'norm_before_residual', False)}; graphpact runs one layer, without it"
        )
    return tuple(named)


def _own_layers(head: DraftHead, first: int) -> list[LayerSpec]:
    """Return layers whose KV caches are numbered from ``first``."""
    return [
        LayerSpec(
            layer_id=index,
            num_q_heads=head.config.num_attention_heads,
            num_kv_heads=head.config.num_key_value_heads,
            head_dim=layer.self_attn.head_dim,
            v_head_dim=layer.self_attn.head_dim,
            scaling=layer.self_attn.scaling,
            kv_layer=first + index,
        )
        for index, layer in enumerate(head.layers)
    ]


def _frozen_layers(path: Path, config: Any, target: TransformersModel) -> list[LayerSpec]:
    """Return layers that attend as ``target_kv_layer`` of the target does, over its KV cache."""
    count = len(target.layers)
    index = getattr(config, "target_kv_layer", count - 1)
    if type(index) is not int or not 0 <= index < count:
        raise CheckpointError(
            f"{path}: target_kv_layer is {reprlib.repr(index)}; the target has layers 0 to {count - 1}",
            hint=_TRAINED_FOR,
        )
    layer = target.layers[index]
    asked = (config.num_attention_heads, config.head_dim, config.rope_parameters)
    theirs = target.model.config.get_text_config()
    found = (layer.num_q_heads, layer.head_dim, getattr(theirs, "rope_parameters", None))
    if layer.kv_lora_rank is not None or layer.v_head_dim != layer.head_dim or asked != found:
        latent = ", in a latent" if layer.kv_lora_rank is not None else ""
        raise CheckpointError(
            f"{path}: the draft model has (heads, head_dim, rope_parameters) {asked}; layer {index} of the"
            f" target, whose KV cache it reads, has {found}{latent}",
            hint=_TRAINED_FOR,
        )
    return [replace(layer, layer_id=i, kv_layer=layer.cache_layer) for i in range(config.num_hidden_layers)]
