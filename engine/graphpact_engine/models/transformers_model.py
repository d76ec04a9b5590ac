"""A transformers decoder whose attention is a graphpact backend.

The model calls attention through transformers' ``AttentionInterface``, under a name without a registered
mask function, so no mask is built. The tokens of all requests are one flat sequence; the backend's metadata
separates requests. The attention parameters of each layer are found by a probe: one forward pass of two
tokens at one position. MLA layers can attend over latents, see `graphpact_engine.models.latents`.

Does not: change a model's code, have a cache of its own, or select a backend.
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

# Arguments that do not change the result of attention.
_IGNORED = frozenset(
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

# Supported layer types of transformers, and whether they have a sliding window.
_WINDOWED = {"full_attention": False, "sliding_attention": True}

_SUPPORTED = (
    "supported are decoders in which every layer attends causally through transformers' attention"
    " interface"
)

# Their frequencies depend on the longest sequence of a batch, so other requests would change the output.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class _Attention(Protocol):
    """The implementation that the registered attention function calls."""

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
    """Attend over ``[1, heads, T, dim]``; the signature is defined by transformers."""
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
    """An attention implementation that records the parameters of every layer and returns zeros."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor:
        layer_id = getattr(module, "layer_idx", None)
        if layer_id is None or layer_id in self.layers:
            self.refused["attention layers without a unique index"] = None
        if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.refused["attention that is not causal"] = None
        if not all(torch.allclose(t[0], t[1], rtol=2e-2, atol=1e-4) for t in (q, k, v)):
            self.refused[
                "queries, keys or values that depend on other tokens or on positions besides position_ids"
            ] = None
        known = {"scaling", "sliding_window", "softcap", "s_aux", "kv_lora_rank"} | _IGNORED
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
    """An attention implementation that calls the lane's attention with the metadata of one forward pass."""

    attend_with: Attend
    metadata: Any
    layers: dict[int, LayerSpec]

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]
    ) -> torch.Tensor:
        del asked  # recorded by the probe in the layer's spec
        return self.attend_with(q, k, v, self.layers[module.layer_idx], self.metadata)


@dataclass(slots=True)
class _Absorbed:
    """An attention implementation that absorbs MLA layers and passes other layers to ``inner`` unchanged."""

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
    """The forward pass of a lane: returns logits, and optionally hidden states, of a batch.

    Args:
        model: A transformers model for causal language modelling, loaded with the attention
            implementation `ATTENTION_NAME`.
        hidden_states: Whether a step also returns ``hidden_states``, ``[T, hidden_size]``: the output of the
            last layer for each token, before the head.
        absorb: Whether MLA layers attend over latents (absorbed form), which needs `HeadLayout.MLA` in every
            backend; otherwise they run expanded, with keys and values of each head.

    Attributes:
        has_latents: Whether the model has MLA layers, in either form.

    Raises:
        UnsupportedModelError: The model has state besides keys and values, needs attention that a
            `LayerSpec` cannot express (the message lists everything), or has MLA layers that cannot be
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
        """The attention layers, by ``layer_id``."""
        return list(self._layers.values())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and buffer with its name in the model; tied weights once."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``logits``, and ``hidden_states`` if enabled.

        In decode and for a ragged batch, logits are ``[bs, vocab]``, of the last token of each request. In
        other modes they are ``[T, vocab]``, of every token.
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
        # The same token twice at the same position: any difference comes from something else.
        tokens = torch.zeros(2, dtype=torch.int64, device=self.model.device)
        try:
            with torch.inference_mode():
                self._forward(probe, tokens, tokens, None)
        except Exception as error:
            raise UnsupportedModelError(
                f"model type {name!r} cannot run: its forward pass in {self.dtype} without masks and caches"
                f" of transformers raised {type(error).__name__}: {error}",
                hint=_SUPPORTED,
            ) from error
        refused = list(probe.refused)
        if getattr(self.model, "_is_stateful", False):
            refused.append("state besides keys and values")
        if len(probe.layers) != config.num_hidden_layers:
            refused.append(
                f"{config.num_hidden_layers} layers, of which {len(probe.layers)} use transformers' attention"
                " interface"
            )
        kinds = getattr(config, "layer_types", None) or []
        for kind, layer in zip(kinds, probe.layers.values(), strict=False):
            # The attention function receives no mask, so a layer that relies on its mask cannot run.
            if kind not in _WINDOWED or _WINDOWED[kind] is not (layer.sliding_window is not None):
                refused.append(
                    f"layers of type {kind!r}, whose attention arguments are those of plain attention"
                )
                break
        window = getattr(config, "sliding_window", None)
        if window and not kinds and all(s.sliding_window is None for s in probe.layers.values()):
            refused.append(f"a sliding window of {window} that is not passed to its attention")
        if getattr(config, "use_bidirectional_attention", None):
            refused.append("attention that is not causal")
        refused += [
            f"rotary embedding {kind!r}, which depends on the longest sequence of a batch"
            for kind in sorted(_rope_types(config) & _BATCH_DEPENDENT_ROPE)
        ]
        if refused:
            raise UnsupportedModelError(
                f"model type {name!r} is not supported, because it has: {'; '.join(refused)}",
                hint=_SUPPORTED,
            )
        return probe.layers


def _rope_types(config: Any) -> set[str]:
    """Return the rotary embedding types of a config, for all layers or by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return {str(table["rope_type"]) for table in tables if table.get("rope_type")}
