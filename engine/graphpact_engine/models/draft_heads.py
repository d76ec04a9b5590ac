"""The heads that draft tokens for a target model: EAGLE, EAGLE-3 and a frozen-KV MTP head.

A head reads, for each token, the token's embedding and the hidden state of the token before it. It returns
the input of the language model head, and the hidden state that it reads with the next token. The layers are
those of transformers' Llama. The names of the classes and of their weights are those of checkpoints.

    LlamaForCausalLMEagle         fc(embedding, hidden); Llama layers without the first and the last norm
    LlamaForCausalLMEagle3        fc of three hidden states; a layer that reads embedding and hidden state
    LlamaForCausalLMFrozenKvMtp   fc(embedding, hidden); layers that read the KV cache of a target layer

Does not: embed tokens or compute logits; `graphpact_engine.models.draft_model` does.
"""

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from graphpact_engine.models.interface import ATTENTION_NAME


class DraftHead(LlamaPreTrainedModel):  # type: ignore[misc]  # transformers has no types here
    """Base class of heads.

    Args:
        config: The config of the head.
        own: Names of weights that only some checkpoints of a head have, and this one has:
            ``embed_tokens.weight``, ``lm_head.weight``, ``fc.bias``, ``d2t``.

    Attributes:
        embed_tokens: The embedding of the head; None if it uses the target's.
        lm_head: The language model head; None if the head uses the target's.
        d2t: ``[draft_vocab_size]`` int64: the target's token id of each row of `lm_head`, minus the index of
            the row. None if every row has the token id of its index.
    """

    # EAGLE-3 checkpoints store t2d besides d2t, with the same information. It is a list, because transformers
    # 5.0 appends to it.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = ["^t2d$"]

    def __init__(self, config: LlamaConfig, own: Collection[str] = ()) -> None:
        super().__init__(config)
        size, drafted = config.hidden_size, getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if "embed_tokens.weight" in own else None
        self.lm_head = nn.Linear(size, drafted, bias=False) if "lm_head.weight" in own else None
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64) if "d2t" in own else None)
        self.layers: Any = nn.ModuleList(
            LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the language model head and the next hidden state, both ``[T, H]``.

        Attention goes through `graphpact_engine.models.interface`.

        Args:
            embeds: ``[T, H]``: the embedding of each token.
            hidden: ``[T, H]``: the hidden state before each token, the target's or the head's.
                EAGLE-3 takes ``[T, 3 * H]`` from the target.
            positions: ``[T]`` int64.
        """
        raise NotImplementedError

    def _run_layers(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the output ``[T, H]`` of the layers."""
        hidden = hidden[None]
        angles = self.rotary_emb(hidden, position_ids=positions[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles)
        return hidden[0]


class LlamaForCausalLMEagle(DraftHead):
    """The head of EAGLE-1 and EAGLE-2."""

    def __init__(self, config: LlamaConfig, own: Collection[str] = ()) -> None:
        super().__init__(config, own)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias="fc.bias" in own)
        self.layers[0].input_layernorm = nn.Identity()
        self.post_init()

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`. Both results are one tensor, like the target's last hidden state."""
        out = self._run_layers(self.fc(torch.cat((embeds, hidden), dim=-1)), positions)
        return out, out


class LlamaForCausalLMEagle3(DraftHead):
    """The head of EAGLE-3. In its first step it reads three hidden states of the target, concatenated."""

    def __init__(self, config: LlamaConfig, own: Collection[str] = ()) -> None:
        super().__init__(config, own)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * size, size, bias="fc.bias" in own)
        (layer,) = self.layers
        layer.hidden_norm = LlamaRMSNorm(size, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            one = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * size, one.out_features, bias=one.bias is not None))
        self.norm = LlamaRMSNorm(size, eps)
        self.post_init()

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`. The next hidden state is the output before the last norm."""
        if hidden.shape[-1] == self.fc.in_features:
            hidden = self.fc(hidden)
        (layer,) = self.layers
        both = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), dim=-1)[None]
        angles = self.rotary_emb(both, position_ids=positions[None])
        attended, _ = layer.self_attn(both, position_embeddings=angles)
        hidden = hidden + attended[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden), hidden


class LlamaForCausalLMFrozenKvMtp(DraftHead):
    """A multi-token prediction head whose layer attends over the KV cache of one layer of the target.

    Its attention has a query and an output projection only. The head adds no keys, so every draft sees only
    the keys of tokens that the target has read.
    """

    def __init__(self, config: LlamaConfig, own: Collection[str] = ()) -> None:
        super().__init__(config, own)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        for index, layer in enumerate(self.layers):
            layer.self_attn = FrozenKvAttention(config, index)
        self.norm = LlamaRMSNorm(size, eps)
        self.post_init()

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`. Both results are one tensor, the output after the norm."""
        both = torch.cat((self.embed_norm(embeds), self.hidden_norm(hidden)), dim=-1)
        out = self.norm(self._run_layers(self.fc(both), positions))
        return out, out


class FrozenKvAttention(nn.Module):
    """Attention that projects queries only. `Attention.attend` gets None for keys and values."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output ``[1, T, H]``; `LlamaDecoderLayer` defines the signature."""
        shape = hidden_states.shape[:-1]
        q = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        cos, sin = (part[:, None] for part in position_embeddings)
        q = q * cos + rotate_half(q) * sin
        out, _weights = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](self, q, None, None, None)
        return self.o_proj(out.reshape(*shape, -1)), None
