"""A transformers decoder whose attention is a graphpact backend.

The tokens of all requests are one flat sequence; the backend's metadata separates requests. The attention
parameters of each layer are found by a probe, which refuses models that need more than attention, see
`graphpact_engine.models.probe`. MLA layers can attend over latents, see `graphpact_engine.models.latents`.

Does not: change a model's code, keep its own cache, or select a backend.
"""

import inspect
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import Axis
from graphpact.buffers.inputs import PROXIES
from graphpact.errors import CaptureError
from graphpact.plugin_calls import returned
from graphpact.step import Attend, StepOutputs
from graphpact_engine.errors import ModelCaptureError
from graphpact_engine.models.experts import mask_experts, routing
from graphpact_engine.models.gathering import GatheredTokens
from graphpact_engine.models.interface import Attention, attending
from graphpact_engine.models.latents import AbsorbedAttention, absorb_layers, latent_modules
from graphpact_engine.models.probe import probe_layers
from graphpact_engine.models.products import choose_products
from graphpact_engine.models.stages import receiving, stage_of
from graphpact_engine.ranks.stages import STAGE_OUTPUT


def _is_of_backend(error: BaseException) -> bool:
    """Return whether ``error`` passed through the lane's attention."""
    attend = LaneAttention.attend.__code__
    return any(frame.f_code is attend for frame, _ in traceback.walk_tb(error.__traceback__))


# Some models call this method of transformers to warn of padding tokens, for which they read input_ids on the
# host. A flat sequence has no padding tokens, and a graph cannot hold the read.
_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


def _warn_of_nothing(*_: object) -> None:
    """Replace `_PADDING_WARNING`."""


@dataclass(slots=True)
class LaneAttention:
    """An attention implementation that calls the lane's attention with the metadata of one forward pass.

    Args:
        attend_with: The attention of the lane.
        metadata: The metadata of the forward pass.
        layers: The attention layers, by the model's own numbers.
    """

    attend_with: Attend
    metadata: Any
    layers: dict[int, LayerSpec]

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        del asked  # recorded by the probe in the layer's spec
        out = self.attend_with(q, k, v, self.layers[module.layer_idx], self.metadata)
        backend = getattr(self.attend_with, "__self__", self.attend_with)
        tensor: torch.Tensor = returned(out, torch.Tensor, backend, "forward")
        return tensor


@dataclass(frozen=True, slots=True)
class LiveRows:
    """An attention implementation for the first rows of a forward pass; the rows after them get zeros.

    Args:
        attention: Attends.
        num_tokens: The number of rows that attend; 0 for a rank without requests.
    """

    attention: Attention
    num_tokens: int

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        live_q, live_k, live_v = (None if t is None else t[: self.num_tokens] for t in (q, k, v))
        if live_q is None or not self.num_tokens:
            return q.new_zeros(*q.shape[:2], (q if v is None else v).shape[2])
        out = self.attention.attend(module, live_q, live_k, live_v, asked)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[0] - out.shape[0]))


class TransformersModel:
    """The forward pass of a lane: returns logits, and optionally hidden states, of a batch.

    Args:
        model: A transformers model for causal language modelling, loaded with the attention
            implementation `ATTENTION_NAME`.
        hidden_states: Indices of transformers' ``hidden_states`` that a step also returns, concatenated in
            ``hidden_states`` ``[T, n * hidden_size]``: 0 is the embedding, ``i`` the output of layer ``i``
            counted from 1, and -1 the input of the language model head. Empty for none.
        gathering: Gathers the tokens of all ranks in its layers; None if each rank has all tokens.
        absorb: Whether MLA layers attend over latents (absorbed form), which needs `HeadLayout.MLA` in every
            backend; otherwise they run expanded, with keys and values of each head.

    Attributes:
        has_experts: Whether the model routes tokens to experts, which compute the first
            ``num_token_non_padded`` tokens of a batch that carries this number, and otherwise all.
        has_latents: Whether the model has MLA layers, in either form.
        stage: Its layers, if it is one stage of a pipeline; None for a whole model.

    Raises:
        UnsupportedModelError: The probe refuses the model (the message lists everything), or it has MLA
            layers that cannot be absorbed.
    """

    def __init__(
        self,
        model: Any,
        *,
        absorb: bool = False,
        hidden_states: Sequence[int] = (),
        gathering: GatheredTokens | None = None,
    ) -> None:
        self.model = model
        self._gathering = gathering
        self.stage = stage_of(model)
        self.hidden_states = tuple(hidden_states)
        self.has_experts = mask_experts(model)
        self.has_latents = bool(latent_modules(model))
        self._latents = absorb_layers(model) if absorb else {}
        choose_products(model)
        self.dtype: torch.dtype = model.dtype
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        for module in model.modules():
            if hasattr(module, _PADDING_WARNING):
                setattr(module, _PADDING_WARNING, _warn_of_nothing)
        self._layers = probe_layers(model, self._probed)

    @property
    def layers(self) -> list[LayerSpec]:
        """The attention layers, by ``layer_id``."""
        return list(self._layers.values())

    @property
    def width(self) -> int:
        """The size of hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def received(self) -> dict[str, int]:
        """Widths of what its stage gets from the stage before, by name; empty for a whole model."""
        return {} if self.stage is None or self.stage.is_first else {STAGE_OUTPUT: self.width}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and buffer with its name in the model; tied weights once."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``logits``, and ``hidden_states`` if requested.

        A stage before the last one returns only ``hidden_states`` ``[T, hidden_size]``: the output of its
        last layer. A stage after the first one reads those of the stage before from ``batch.extra``.

        In decode and for a ragged batch, logits are ``[bs, vocab]``, of the last token of each request. In
        other modes they are ``[T, vocab]``, of every token.

        Raises:
            ModelCaptureError: In a capture, the model's own code does work that a graph cannot hold.
        """
        last = batch.selected_rows
        attention = LaneAttention(attend, metadata, self._layers)
        # More than the tokens in an eager step in which another rank has more.
        rows = batch.num_tokens if self._gathering is None else self._gathering.rows(batch)
        try:
            padding = self._padding(batch, rows) if self.has_experts else None
            received = batch.extra[f"{PROXIES}{STAGE_OUTPUT}"] if self.received else None
            logits, hidden = self._in_rows(
                rows, attention, batch.input_ids, batch.positions, last, padding, received
            )
        except CaptureError as error:
            if _is_of_backend(error):
                raise
            model_type = self.model.config.model_type
            raise ModelCaptureError(
                f"model type {model_type!r} cannot be captured: {error.message}", rule=error.rule
            ) from error
        by_request = last is not None or batch.forward_mode.is_decode
        outputs: dict[str, tuple[torch.Tensor, Axis]] = {}
        if logits is not None:
            outputs["logits"] = logits, "bs" if by_request else "tokens"
        if hidden is not None:
            outputs["hidden_states"] = hidden, "tokens"
        return StepOutputs(**outputs)

    def _padding(self, batch: ForwardBatch, rows: int) -> torch.Tensor | None:
        """Return ``[rows, 1]`` bool: which rows of the experts are padding; None if all are real."""
        if self._gathering is not None:
            return self._gathering.padding(rows, self._gathering.local_count(batch, rows))
        count = batch.num_token_non_padded
        return None if count is None else (torch.arange(rows, device=count.device) >= count)[:, None]

    def _probed(
        self, attention: Attention, input_ids: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the results of tokens that all ranks have, for the probe.

        A stage after the first one gets numbers made from the token ids.
        """
        count = len(input_ids)
        rows = count if self._gathering is None else self._gathering.layout.padded_rows(count)
        received = None
        if self.received:
            factors = torch.linspace(1, 2, self.width, device=input_ids.device)
            received = torch.cos((input_ids[:, None] + 1) * factors).to(self.dtype)
        logits, hidden = self._in_rows(rows, attention, input_ids, positions, received=received)
        return next(found for found in (logits, hidden) if found is not None)

    def _in_rows(
        self,
        rows: int,
        attention: Attention,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        last: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a forward pass of ``rows`` rows, and return the results of the tokens, without the others."""
        count = len(input_ids)
        missing = rows - count
        if not missing:
            return self._forward(attention, input_ids, positions, last, padding, received)
        pad = torch.nn.functional.pad
        input_ids = pad(input_ids, (0, missing))
        positions = None if positions is None else pad(positions, (0, missing))
        received = None if received is None else pad(received, (0, 0, 0, missing))
        live = LiveRows(attention, count)
        logits, hidden = self._forward(live, input_ids, positions, last, padding, received)
        if logits is not None and last is None:
            logits = logits[:count]
        return logits, None if hidden is None else hidden[:count]

    def _forward(
        self,
        attention: Attention,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        last: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        more: dict[str, Any] = {"input_ids": input_ids[None]}
        if received is not None:  # it has no embedding; the layers get `received` itself
            more = {"inputs_embeds": received[None]}
        if positions is not None:
            more["position_ids"] = positions[None]
        if last is not None and self._takes_logits_to_keep:
            more["logits_to_keep"] = last
        if self.hidden_states:
            more["output_hidden_states"] = True
        absorbed = AbsorbedAttention(attention, self._latents) if self._latents else attention
        with attending(absorbed), routing(padding), receiving(received):
            if self.stage is not None and not self.stage.is_last:
                more.pop("logits_to_keep", None)
                return None, self.model.base_model(use_cache=False, **more).last_hidden_state[0]
            given = self.model(use_cache=False, **more)
        logits: torch.Tensor = given.logits[0]
        if last is not None and not self._takes_logits_to_keep:
            logits = logits[last]
        if not self.hidden_states:
            return logits, None
        hidden = [given.hidden_states[i] for i in self.hidden_states]
        if self._gathering is not None:
            hidden = [*map(self._gathering.gather_group, hidden)]
        return logits, torch.cat([each[0] for each in hidden], dim=-1)
