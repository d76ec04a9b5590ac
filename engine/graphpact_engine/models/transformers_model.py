"""A transformers decoder whose attention is a graphpact backend.

The model calls attention through transformers' ``AttentionInterface``, under a name for which no mask
is registered, so no mask is built; tokens of all requests come as one flat sequence, told apart by the
metadata of the backend. What each layer asks of attention is seen by running two tokens at one position
once. Layers with latents (MLA) attend over them on request, see `graphpact_engine.models.latents`.

Does not: change a model's code, keep a cache of its own, or pick a backend.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import Axis
from graphpact.step import Attend, StepOutputs
from graphpact_engine.errors import UnsupportedModelError
from graphpact_engine.models.latents import (
    LatentLayer,
    latent_layers,
    latent_modules,
    latents_as_keys,
)

ATTENTION_NAME = "graphpact"

# Arguments that say nothing about how to attend.
_INDIFFERENT = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_hidden_states",
        "position_ids",
        "use_cache",
    }
)

# Layer types of transformers whose attention we know, and whether they come with a sliding window.
_WINDOWED = {"full_attention": False, "sliding_attention": True}

_SUPPORTED = (
    "decoders run whose every layer attends causally through transformers' attention interface"
)

# These choose their frequencies by the longest sequence: a request's neighbours would change its text.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class _Attention(Protocol):
    """What the registered attention function hands its call to."""

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor: ...


_active: ContextVar[_Attention] = ContextVar("graphpact_attention")


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over ``[1, heads, T, dim]``; the signature is transformers'."""
    asked["attention_mask"] = attention_mask
    if asked.get("scaling") is None:
        asked["scaling"] = query.shape[-1] ** -0.5
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = _active.get().attend(module, q, k, v, asked)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


@contextmanager
def _attending(attention: _Attention) -> Iterator[None]:
    token = _active.set(attention)
    try:
        yield
    finally:
        _active.reset(token)


@dataclass(slots=True)
class _Probe:
    """Notes what every layer asks of attention, and answers with zeros."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor:
        layer_id = getattr(module, "layer_idx", None)
        if layer_id is None or layer_id in self.layers:
            self.refused["attention layers without an index of their own"] = None
        if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.refused["attention that is not causal"] = None
        if not all(torch.allclose(t[0], t[1], rtol=2e-2, atol=1e-4) for t in (q, k, v)):
            self.refused["positions, or a mixing of tokens, of its own"] = None
        known = {"scaling", "sliding_window", "softcap", "s_aux", "kv_lora_rank"} | _INDIFFERENT
        for name, value in asked.items():
            if name not in known and value is not None and value is not False:
                self.refused[f"attention argument {name!r}"] = None
        self.layers[layer_id if layer_id is not None else -1] = LayerSpec(
            layer_id=len(self.layers),
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            scaling=float(asked["scaling"]),
            sliding_window=asked.get("sliding_window"),
            softcap=asked.get("softcap"),
            sinks=asked.get("s_aux"),
            kv_lora_rank=asked.get("kv_lora_rank"),
        )
        return q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))


@dataclass(slots=True)
class _LaneAttention:
    """Hands every layer's attention to the lane's, with the metadata of one forward pass."""

    attend_with: Attend
    metadata: Any
    layers: dict[int, LayerSpec]

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor:
        del asked  # seen by the probe, and part of the layer's spec
        return self.attend_with(q, k, v, self.layers[module.layer_idx], self.metadata)


@dataclass(slots=True)
class _Absorbed:
    """Hands the attention of layers with latents on in absorbed form, and that of others as it is."""

    inner: _Attention
    latents: dict[Any, LatentLayer]

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor:
        layer = self.latents.get(module)
        if layer is None:
            return self.inner.attend(module, q, k, v, asked)
        asked["kv_lora_rank"] = layer.kv_lora_rank
        return layer.expand_output(self.inner.attend(module, layer.absorb_query(q), k, v, asked))


class TransformersModel:
    """The forward pass of a lane: a batch in, logits out, and hidden states where they are asked for.

    Args:
        model: A transformers model for causal language modelling, loaded with the attention
            implementation `ATTENTION_NAME`.
        hidden_states: Whether a step also gives ``hidden_states``, ``[T, hidden_size]``: what the last layer
            leaves of each token, before the head.
        absorb: Whether its MLA layers, if it has any, attend over latents (absorbed form), for which every
            backend needs `HeadLayout.MLA`; otherwise each head has keys and values of its own.

    Attributes:
        has_latents: Whether the model has MLA layers, in whichever form.

    Raises:
        UnsupportedModelError: The model keeps state besides keys and values, asks of attention what no
            graphpact backend can be told (the message lists it all), or has MLA layers that cannot be
            absorbed.
    """

    def __init__(self, model: Any, *, absorb: bool = False, hidden_states: bool = False) -> None:
        self.model = model
        self.hidden_states = hidden_states
        self.has_latents = bool(latent_modules(model))
        self._latents = latent_layers(model) if absorb else {}
        self.dtype: torch.dtype = model.dtype
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers = self._probe()

    @property
    def layers(self) -> list[LayerSpec]:
        """What every attention layer asks, by ``layer_id``."""
        return list(self._layers.values())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and buffer by its name in the model; what is tied comes once."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``logits``, and ``hidden_states`` where they are asked for.

        Logits are ``[bs, vocab]``, of each request's last token, in a ragged batch and in decode; in other
        modes ``[T, vocab]``, of every token.
        """
        last = None
        if batch.extend_seq_lens is not None:
            last = torch.cumsum(batch.extend_seq_lens, dim=0) - 1
        attention = _LaneAttention(attend, metadata, self._layers)
        logits, hidden = self._forward(attention, batch.input_ids, batch.positions, last)
        by_request = last is not None or batch.forward_mode.is_decode
        outputs: dict[str, tuple[torch.Tensor, Axis]] = {
            "logits": (logits, "bs" if by_request else "tokens")
        }
        if hidden is not None:
            outputs["hidden_states"] = (hidden, "tokens")
        return StepOutputs(**outputs)

    def _forward(
        self,
        attention: _Attention,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        more: dict[str, Any] = {}
        if last is not None and self._takes_logits_to_keep:
            more["logits_to_keep"] = last
        if self.hidden_states:
            more["output_hidden_states"] = True
        absorbed = _Absorbed(attention, self._latents) if self._latents else attention
        with _attending(absorbed), latents_as_keys(self._latents):
            given = self.model(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **more
            )
        logits: torch.Tensor = given.logits[0]
        if last is not None and not self._takes_logits_to_keep:
            logits = logits[last]
        return logits, given.hidden_states[-1][0] if self.hidden_states else None

    def _probe(self) -> dict[int, LayerSpec]:
        config = self.model.config.get_text_config()
        name = config.model_type
        probe = _Probe()
        # One token twice, at one position: what tells them apart is no position_ids.
        tokens = torch.zeros(2, dtype=torch.int64, device=self.model.device)
        try:
            with torch.inference_mode():
                self._forward(probe, tokens, tokens, None)
        except Exception as error:
            raise UnsupportedModelError(
                f"model type {name!r} cannot run: without masks and caches of transformers its forward pass"
                f" in {self.dtype} raised {type(error).__name__}: {error}",
                hint=_SUPPORTED,
            ) from error
        refused = list(probe.refused)
        if getattr(self.model, "_is_stateful", False):
            refused.append("a state besides keys and values")
        if len(probe.layers) != config.num_hidden_layers:
            refused.append(
                f"{config.num_hidden_layers} layers of which {len(probe.layers)} attend through"
                " transformers' attention interface"
            )
        kinds = getattr(config, "layer_types", None) or []
        for kind, layer in zip(kinds, probe.layers.values(), strict=False):
            # Of what is done by masks alone the attention function is not told.
            if kind not in _WINDOWED or _WINDOWED[kind] is not (layer.sliding_window is not None):
                refused.append(f"layers of type {kind!r} that ask for no more than plain attention")
                break
        window = getattr(config, "sliding_window", None)
        if window and not kinds and all(s.sliding_window is None for s in probe.layers.values()):
            refused.append(f"a sliding window of {window} that its attention is not told of")
        if getattr(config, "use_bidirectional_attention", None):
            refused.append("attention that is not causal")
        refused += [
            f"rotary embedding {kind!r}, which is scaled by the longest sequence of a batch"
            for kind in sorted(_rope_types(config) & _BATCH_DEPENDENT_ROPE)
        ]
        if refused:
            raise UnsupportedModelError(
                f"model type {name!r} has what graphpact cannot run: {'; '.join(refused)}",
                hint=_SUPPORTED,
            )
        return probe.layers


def _rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding that a config names, for all layers or by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return {str(table["rope_type"]) for table in tables if table.get("rope_type")}
