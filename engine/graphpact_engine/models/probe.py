"""Finds the attention layers of a model, and whether it computes each token only from its own sequence.

The engine runs the tokens of all requests as one flat row. So a token may depend on its id, its entry of
``position_ids`` and its attention outputs, and on nothing else. A few forward passes of one row check this.
Every second token of the row is the same one, at the same position, and the tokens between them are others.

    record      the equal tokens have equal queries, keys, values and logits, wherever they are in the row
    no ids      without ``position_ids`` a model uses positions 0, 1, 2, .., as it does with them
    positions   the others move to the model's last position; the equal tokens keep their results
    places      operations that number the tokens of the row, such as ``arange``, begin at 2**20, beyond every
                threshold of a model; the equal tokens keep their results
    others      the others become other tokens, whose attention returns NaN: neither reaches the equal tokens

Does not: find Python branches on the length of a row, beyond `_NUM_TOKENS`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpact.attention import LayerSpec
from graphpact.graphs.lines import Line
from graphpact_engine.errors import UnsupportedModelError
from graphpact_engine.models.interface import Attention
from graphpact_engine.models.stages import stage_of
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.trees import map_tensors

__tracebackhide__ = True  # the lines of the model are named, not those of this module

Forward = Callable[[Attention, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Runs a model: attention, token ids ``[T]``, positions ``[T]`` or None, to logits ``[T, vocab]``."""

_SUPPORTED = (
    "supported are decoders in which every layer attends causally through transformers' attention interface"
)

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
_KNOWN = _IGNORED | {"scaling", "sliding_window", "softcap", "s_aux", "kv_lora_rank"}

# Supported layer types of transformers, and whether they have a sliding window.
_WINDOWED = {"full_attention": False, "sliding_attention": True}

# Their frequencies depend on the longest sequence of a batch, so other requests would change the output.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_NUM_TOKENS = 23  # fewer for a model with fewer positions; a prime, unlike other sizes of a model
_SHIFT = 2**20  # beyond every context window, and exact in float32
_COUNTING = frozenset({"arange", "cumsum", "linspace"})  # operations that can number tokens
_INDEXING = re.compile("index|gather|scatter|embedding|take")  # operations with a tensor of indices
_EQUAL = slice(0, None, 2)
_OTHERS = slice(1, None, 2)


def probe_layers(model: Any, forward: Forward) -> dict[int, LayerSpec]:
    """Return the attention layers of a transformers model by their ``layer_idx``.

    Args:
        model: The transformers model.
        forward: Runs it.

    Raises:
        UnsupportedModelError: The model cannot run without masks and caches, needs attention that a
            `LayerSpec` cannot express, or computes a token from more than its sequence. The message lists
            everything.
    """
    config = model.config.get_text_config()
    tokens = _tokens(config, model.device)
    first = _Pass()
    try:
        with torch.inference_mode():
            first.run(forward, *tokens)
            refused = [*first.refused, *_unlike_plain_attention(model, config, first.layers)]
            if not all(_close(t[_EQUAL], t[:1]) for t in first.seen):
                refused.append("tokens that depend on their neighbours, or on their place in the batch")
            if not refused:
                refused += _beyond_its_sequence(config, forward, first, *tokens)
    except Exception as error:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot run: its forward pass in {model.dtype} without masks"
            f" and caches of transformers raised {type(error).__name__}: {error}",
            hint=_SUPPORTED,
        ) from error
    if refused:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported, because it has:"
            f" {'; '.join(dict.fromkeys(refused))}",
            hint=_SUPPORTED,
        )
    return first.layers


@dataclass(slots=True)
class _Pass:
    """An attention implementation that records the parameters and inputs of every layer.

    Its output is the same for every token; with ``spreads_nan``, NaN for the other tokens.
    """

    spreads_nan: bool = False
    layers: dict[int, LayerSpec] = field(default_factory=dict)
    seen: list[torch.Tensor] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)

    def run(self, forward: Forward, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Run the model; ``seen`` has the queries, keys and values of each layer, then the logits."""
        self.seen.append(forward(self, ids, positions))

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        if k is None or v is None:
            raise TypeError("attention without keys and values")
        layer_id = getattr(module, "layer_idx", None)
        if layer_id is None or layer_id in self.layers:
            self.refused["attention layers without a unique index"] = None
        if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.refused["attention that is not causal"] = None
        for name, value in asked.items():
            if name not in _KNOWN and value is not None and value is not False:
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
        self.seen += (q.clone(), k.clone(), v.clone())
        pattern = torch.linspace(-1, 1, q.shape[1] * v.shape[2], dtype=q.dtype, device=q.device)
        out = pattern.view(1, q.shape[1], v.shape[2]).repeat(len(q), 1, 1)
        if self.spreads_nan:
            out[_OTHERS] = torch.nan
        return out


def _tokens(config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and positions ``[T]``: every second token is the same one, at the same position.

    There are no special tokens among them, because a model may treat those differently.
    """
    count = min(_NUM_TOKENS, _num_positions(config))
    ends = getattr(config, "eos_token_id", None)
    special = {*ends} if isinstance(ends, list) else {ends}
    special |= {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos")}
    plain = [i for i in range(min(config.vocab_size, 32)) if i not in special] or [0]
    ids = torch.tensor([plain[i % len(plain)] for i in range(count)], device=device)
    ids[_EQUAL] = plain[-1]
    positions = torch.arange(count, device=device)
    positions[_EQUAL] = count // 2
    return ids, positions


def _beyond_its_sequence(
    config: Any, forward: Forward, first: _Pass, ids: torch.Tensor, positions: torch.Tensor
) -> Iterator[str]:
    """Yield what a token depends on, besides its id, its position and its attention output."""
    counted, given = _Pass(), _Pass()
    counted.run(forward, ids, None)
    given.run(forward, ids, torch.arange(len(ids), device=ids.device))
    if not all(map(_close, counted.seen, given.seen)):
        yield "its own positions: without position_ids they are not 0, 1, 2, .."
    far = positions.clone()
    far[_OTHERS] = _num_positions(config) - 1
    others = _Pass()
    others.run(forward, ids, far)
    if not _keeps(first.seen, others.seen):
        yield "tokens that depend on the positions of other tokens in the batch"
    moved, places = _Pass(), _ShiftedPlaces(len(ids))
    with places:
        moved.run(forward, ids, positions)
    if not _keeps(first.seen, moved.seen):
        yield f"tokens that depend on their place in the batch: {places.lines()}"
    mixed = _Pass(spreads_nan=True)
    mixed.run(forward, ids[:1].expand_as(ids), positions)
    # Later layers may round in another way: experts get other numbers of tokens.
    if not _keeps(first.seen[:3], mixed.seen[:3]) or any(t[_EQUAL].isnan().any() for t in mixed.seen):
        yield "tokens that depend on other tokens of the batch"


def _num_positions(config: Any) -> int:
    """Return how many positions a model has, as far as its configuration says."""
    count = getattr(config, "max_position_embeddings", None) or 0
    return int(count) if count > 0 else _NUM_TOKENS  # XLNet says -1: no limit


def _keeps(first: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether the equal tokens have the same results in two passes."""
    return all(_close(a[_EQUAL], b[_EQUAL]) for a, b in zip(first, other, strict=True))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b.expand_as(a), rtol=2e-2, atol=1e-4)


class _ShiftedPlaces(DispatchMode):
    """A dispatch mode in which the numbers of ``num_tokens`` tokens in a row begin at `_SHIFT`.

    Used as indices they keep their values, because a model may select its own rows by number.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._num_tokens = num_tokens
        self._lines: dict[str, None] = {}

    def lines(self) -> str:
        """Return the first lines of the model that number tokens."""
        return " and ".join(list(self._lines)[:2])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if _INDEXING.search(name):
            args = args[0], *map_tensors(_unshifted, args[1:])  # the first is the data
        result = func(*args, **(kwargs or {}))
        if name not in _COUNTING or result.shape[-1:] != (self._num_tokens,):
            return result
        if not (result.diff() == 1).all():
            return result
        self._lines[str(Line())] = None
        return result + _SHIFT


def _unshifted(index: torch.Tensor) -> torch.Tensor:
    if index.dtype not in (torch.int64, torch.int32):
        return index
    return torch.where(index >= _SHIFT // 2, index % _SHIFT, index)


def _unlike_plain_attention(model: Any, config: Any, layers: dict[int, LayerSpec]) -> Iterator[str]:
    """Yield features that the configuration names and the layers' attention arguments do not express."""
    if getattr(model, "_is_stateful", False):
        yield "state besides keys and values"
    stage = stage_of(model)
    own = range(config.num_hidden_layers) if stage is None else stage.own
    if len(layers) != len(own):
        yield f"{len(own)} layers, of which {len(layers)} use transformers' attention interface"
    kinds = (getattr(config, "layer_types", None) or [])[own.start : own.stop]
    for kind, layer in zip(kinds, layers.values(), strict=False):
        # The attention function receives no mask, so a layer that relies on its mask cannot run.
        if kind not in _WINDOWED or _WINDOWED[kind] is not (layer.sliding_window is not None):
            yield f"layers of type {kind!r}, whose attention arguments are those of plain attention"
            break
    window = getattr(config, "sliding_window", None)
    if window and not kinds and all(s.sliding_window is None for s in layers.values()):
        yield f"a sliding window of {window} that is not passed to its attention"
    if getattr(config, "use_bidirectional_attention", None):
        yield "attention that is not causal"
    for kind in sorted(_rope_types(config) & _BATCH_DEPENDENT_ROPE):
        yield f"rotary embedding {kind!r}, which depends on the longest sequence of a batch"


def _rope_types(config: Any) -> set[str]:
    """Return the rotary embedding types of a config, for all layers or by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return {str(table["rope_type"]) for table in tables if table.get("rope_type")}
