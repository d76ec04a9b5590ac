"""Declared inputs of lanes, and registries with them, with the pad values that kernels expect.

Names, arguments, policies and values follow SGLang's ``build_decode_registry`` and
``build_prefill_registry`` (PRs 26742, 26292, 22404, issue 24361). Padding rows are request row 0, whose row
of ``req_to_token`` is all scratch; KV slot 0, which is scratch; position 0; the length that the attention
backend declares.

Does not: declare the metadata of backends; they declare their own slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.buffers.registry import CudaGraphBufferRegistry
from graphpact.buffers.sharing import SharedBuffers
from graphpact.buffers.slots import FillContext, GraphSlot, PaddingPolicy, ShapeFn
from graphpact.errors import SlotError
from graphpact.parallel import compute_local_num_token_non_padded, local_num_token_non_padded

_DECODE, _PREFILL = "decode inputs", "prefill inputs"
_HOST = torch.device("cpu")
_CUT_OFF = "the outputs that padding rows compute from it are finite and cut off"


def _requests(max_bs: int, _: int) -> tuple[int, ...]:
    return (max_bs,)


def _tokens(_: int, max_num_tokens: int) -> tuple[int, ...]:
    return (max_num_tokens,)


def build_decode_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype = torch.int64,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    nsa_enable_prefill_cp: bool = False,
    enable_prefill_cp: bool = False,
    require_mlp_tp_gather: bool = False,
    dp_size: int = 1,
    register_global_num_tokens: bool = True,
    share_pool: bool | SharedBuffers | None = False,
    source: Any = None,
    enable_mrope: bool = True,
    zero_input_ids: bool = False,
    lane: str | None = None,
) -> CudaGraphBufferRegistry:
    """Return a registry with the inputs of decode and of other modes whose requests are padded.

    Args:
        device: Device of the slots; ``seq_lens_cpu`` lies on the host.
        max_bs: Largest captured request count.
        max_num_token: Largest captured token count.
        seq_len_fill_value: ``seq_lens`` of a padding row, declared by the attention backend.
        cache_loc_dtype: Dtype of ``out_cache_loc``.
        enable_mamba_track: Add ``mamba_track_indices`` and ``mamba_track_mask``.
        is_encoder_decoder: Add ``encoder_lens``.
        encoder_len_fill_value: Its initial value: the encoder's longest input.
        encoder_lens_dtype: Its dtype.
        enable_num_token_non_padded: Add ``num_token_non_padded``.
        require_gathered_buffer: Whether activations are gathered over DP ranks. Then that count is this
            rank's share of the padded shape, and ``global_num_tokens_*`` hold the padded count.
        nsa_enable_prefill_cp: Whether context parallelism splits the tokens. Then the count is the batch's.
        enable_prefill_cp: The later name of ``nsa_enable_prefill_cp`` in the original.
        require_mlp_tp_gather: Whether ``global_num_tokens_*`` hold a count for each DP rank.
        dp_size: DP ranks.
        register_global_num_tokens: Add ``global_num_tokens_gpu`` and ``global_num_tokens_for_logprob_gpu``.
        share_pool: See `CudaGraphBufferRegistry`. The original shares by default.
        source: An object with a tensor for each slot, adopted instead of allocated. A tensor of another dtype
            of the same kind (integer, float) sets the slot's dtype. An int32 tensor for an int64 slot takes
            int64 batch fields too (`GraphSlot.narrows`): ids and lengths are below 2**31. Its
            ``ngram_embedding_info`` and ``pp_proxy_tensors``, if present, become slots too.
        enable_mrope: Add ``mrope_positions``; a model without them saves its memory and copy.
        zero_input_ids: Zero the padding rows of ``input_ids``; the original keeps earlier tokens there.
        lane: See `CudaGraphBufferRegistry`.

    Raises:
        SlotError: ``source`` lacks a tensor, or has one of another shape, device or kind of dtype.
    """
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool, lane=lane
    )
    slot = partial(_declare, _DECODE)
    slots = [
        *_token_slots(slot, cache_loc_dtype),  # an earlier position may lie outside a rope table
        *_request_slots(slot, seq_len_fill_value),
    ]
    if not zero_input_ids:
        reason = f"any token of an earlier batch is in the vocabulary; {_CUT_OFF}"
        slots[0] = slot("input_ids", _tokens, policy=PaddingPolicy.FOREACH_COPY, reason=reason)
    if enable_mrope:
        slots.append(_mrope(slot))
    if enable_mamba_track:
        slots += [
            slot("mamba_track_indices", _requests, axis="bs"),
            slot("mamba_track_mask", _requests, torch.bool, axis="bs"),
        ]
    if is_encoder_decoder:
        encoder_lens = slot(
            "encoder_lens",
            _requests,
            encoder_lens_dtype,
            axis="bs",
            policy=PaddingPolicy.FILL_ONCE,
            pad_value=encoder_len_fill_value,
            reason="padding rows are request row 0, all scratch at any length",
        )
        slots.append(encoder_lens)
    if enable_num_token_non_padded:
        is_local = require_gathered_buffer and not (nsa_enable_prefill_cp or enable_prefill_cp)
        slots.append(num_token_non_padded_slot(_DECODE, is_local=is_local))
    if register_global_num_tokens:
        count = dp_size if require_mlp_tp_gather else 1
        slots += [
            _global_num_tokens(slot, name, count, is_padded=require_gathered_buffer)
            for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
        ]
    _register(registry, slots, source)
    nested = getattr(source, "ngram_embedding_info", None)
    reason = f"columns and lengths of an earlier batch are in the token table; {_CUT_OFF}"
    kept = partial(slot, axis="none", policy=PaddingPolicy.KEEP_PAD, reason=reason)
    infos = {n: getattr(nested, n) for n in ("column_starts", "req_lens")} if nested is not None else {}
    _adopt(registry, kept, infos, "ngram_embedding_info.", _ngram)
    kept = partial(slot, axis="none", policy=PaddingPolicy.KEEP_PAD, reason=_CUT_OFF)
    _adopt(registry, kept, _proxies(source), "pp_proxy_tensors.", _proxy)
    reason = "a trace reads it, and no kernel"
    kept = partial(slot, axis="bs", policy=PaddingPolicy.FOREACH_COPY, reason=reason)
    _adopt(registry, kept, {n: getattr(source, n, None) for n in ("rids_int", "bootstrap_room_ids_int")})
    return registry


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype = torch.int64,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    enable_mamba_track: bool = False,
    register_input_embeds: bool = True,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    nsa_enable_prefill_cp: bool = False,
    enable_prefill_cp: bool = False,
    share_pool: bool | SharedBuffers | None = False,
    source: Any = None,
    lane: str | None = None,
) -> CudaGraphBufferRegistry:
    """Return a registry with the inputs of prefill graphs, which pad tokens and not requests.

    Graphs compute padding tokens too, so the padding rows of every token slot are zeroed. Arguments and
    errors are those of `build_decode_registry`, with these differences. ``max_bs`` is the largest request
    count of a batch. ``is_multimodal`` adds ``mrope_positions`` and ``input_embeds``,
    ``[max_num_token, hidden_size]`` of ``embed_dtype`` (by default torch's): the model writes it, and no fill
    copies it. With ``register_input_embeds=False`` it is an input of the batch, without a slot.
    ``enable_mamba_track`` adds ``mamba_track_seqlens`` too. ``pp_proxy_tensors`` of the source follow the
    tokens; its other extra tensors are not adopted.
    """
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool, lane=lane
    )
    slot = partial(_declare, _PREFILL)
    embeds = None
    if is_multimodal and register_input_embeds:
        embeds = hidden_size, embed_dtype or torch.get_default_dtype()
    slots = _token_slots(slot, cache_loc_dtype, mrope=is_multimodal, embeds=embeds)
    if embeds is not None:
        slots[-1] = replace(slots[-1], copy_from_fb=False)
    if enable_mamba_track:
        reason = "the number of requests is not padded"
        kept = partial(slot, axis="bs", policy=PaddingPolicy.FOREACH_COPY, reason=reason)
        slots += [
            kept("mamba_track_indices", _requests),
            kept("mamba_track_mask", _requests, torch.bool),
            kept("mamba_track_seqlens", _requests, torch.int32),
        ]
    if enable_num_token_non_padded:
        is_local = require_gathered_buffer and not (nsa_enable_prefill_cp or enable_prefill_cp)
        slots.append(num_token_non_padded_slot(_PREFILL, is_local=is_local))
    _register(registry, slots, source)
    _adopt(registry, slot, _proxies(source), "pp_proxy_tensors.", _proxy)
    return registry


def input_slots(
    mode: ForwardMode,
    *,
    seq_len_fill_value: int,
    num_draft_steps: int = 1,
    num_draft_tokens: int = 1,
    trees: bool = False,
    num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    mrope: bool = False,
    embeds: tuple[int, torch.dtype] | None = None,
) -> list[GraphSlot]:
    """Return the inputs of graphs of ``mode`` whose requests and tokens are padded.

    Padding requests are row 0 of ``req_to_token``, all scratch, with the length that the backend declares; in
    a ragged batch they have no tokens. Padding tokens are token 0 at position 0, written to KV slot 0. In a
    tree they see all draft tokens of their request, so that no row of scores is fully masked.

    Args:
        mode: Forward mode of the lane's batches.
        seq_len_fill_value: ``seq_lens`` of a padding request, declared by the attention backend; see
            `Capabilities.padded_seq_len`.
        num_draft_steps: Steps of a draft decode.
        num_draft_tokens: Tokens of a request in target verify.
        trees: Add ``tree_mask`` to a target verify.
        num_token_non_padded: Add the slot of that name.
        require_gathered_buffer: See `build_decode_registry`.
        mrope: Add ``mrope_positions``.
        embeds: Add ``input_embeds`` of this width and dtype.
    """
    owner = f"{mode.value} inputs"
    slot = partial(_declare, owner)
    steps = num_draft_steps if mode is ForwardMode.DRAFT_DECODE else None
    slots = _token_slots(slot, steps=steps, mrope=mrope, embeds=embeds)
    slots += _request_slots(slot, seq_len_fill_value)
    if mode.is_ragged:
        slots += [
            slot("extend_seq_lens", _requests, axis="bs"),
            slot("extend_seq_lens_cpu", _requests, axis="bs", device=_HOST),
        ]
    if mode is ForwardMode.TARGET_VERIFY and trees:
        mask = slot("tree_mask", lambda _, n: (n, num_draft_tokens), torch.bool, pad_value=True)
        slots.append(mask)
    if mode is ForwardMode.DRAFT_EXTEND:
        slots.append(slot("num_correct_drafts", _requests, torch.int32, axis="bs"))
    if num_token_non_padded:
        slots.append(num_token_non_padded_slot(owner, is_local=require_gathered_buffer))
    return slots


# -- slots -----------------------------------------------------------------------------------------

_Declarer = Callable[..., GraphSlot]


def _declare(
    owner: str,
    name: str,
    shape_fn: ShapeFn,
    dtype: torch.dtype = torch.int64,
    *,
    axis: Any = "tokens",
    policy: PaddingPolicy | None = None,
    pad_value: int | None = None,
    **more: Any,
) -> GraphSlot:
    """Return a slot of ``owner``, by default with padding rows of ``pad_value``."""
    if policy is None:
        policy = PaddingPolicy.ZERO if pad_value is None else PaddingPolicy.FILL_SENTINEL
    return GraphSlot(
        name, shape_fn, dtype, axis=axis, padding_policy=policy, pad_value=pad_value, owner=owner, **more
    )


def _token_slots(
    slot: _Declarer,
    cache_loc_dtype: torch.dtype = torch.int64,
    steps: int | None = None,
    *,
    mrope: bool = False,
    embeds: tuple[int, torch.dtype] | None = None,
) -> list[GraphSlot]:
    """Return the slots by token, padded by zeros: ids, positions, KV slots, and what else a lane has.

    Args:
        slot: Declares a slot.
        cache_loc_dtype: Dtype of the KV slots.
        steps: Steps of a draft decode, whose KV slots are ``[max_num_tokens, steps]``.
        mrope: Add multimodal positions.
        embeds: Add embeddings of this width and dtype.
    """
    slots = [
        slot("input_ids", _tokens),
        slot("positions", _tokens),
        slot("out_cache_loc", lambda _, n: (n, steps) if steps else (n,), cache_loc_dtype),
    ]
    if mrope:
        slots.append(_mrope(slot))
    if embeds is not None:
        slots.append(slot("input_embeds", lambda _, n: (n, embeds[0]), embeds[1]))
    return slots


def _request_slots(slot: _Declarer, fill_value: int) -> list[GraphSlot]:
    """Return the slots ``[max_bs]`` int64: request rows, and lengths on the device and on the host."""
    return [
        slot("req_pool_indices", _requests, axis="bs"),
        slot("seq_lens", _requests, axis="bs", pad_value=fill_value),
        slot("seq_lens_cpu", _requests, axis="bs", pad_value=fill_value, device=_HOST),
    ]


def _mrope(slot: _Declarer) -> GraphSlot:
    """Return ``[3, max_num_tokens]`` int64: temporal, height and width positions."""
    return slot("mrope_positions", lambda _, n: (3, n), slice_fn=lambda buffer, n: buffer[:, :n])


def num_token_non_padded_slot(owner: str, *, is_local: bool) -> GraphSlot:
    """Return ``[1]`` int32: real tokens; with ``is_local`` those of this rank, at capture as at replay."""

    def post_fill(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        if not is_local:
            return
        padded = context.padded_num_tokens
        count = getattr(batch, "num_token_non_padded_cpu", None)
        if count is not None:
            buffer.fill_(local_num_token_non_padded(count, padded))
            return
        count = getattr(batch, "num_token_non_padded", None)
        if count is None:
            raise SlotError(
                "the batch has neither num_token_non_padded_cpu nor num_token_non_padded; slot"
                " 'num_token_non_padded' is computed from them",
                hint="set num_token_non_padded_cpu to the real tokens of all attention-TP ranks",
            )
        buffer.copy_(compute_local_num_token_non_padded(count, padded))

    return _declare(
        owner,
        "num_token_non_padded",
        lambda *_: (1,),
        torch.int32,
        axis="none",
        copy_from_fb=not is_local,
        post_fill=post_fill,
    )


def _global_num_tokens(slot: _Declarer, name: str, count: int, *, is_padded: bool) -> GraphSlot:
    """Return ``[count]`` int32: tokens of each DP rank; with ``is_padded`` the padded count for all."""
    padded = (lambda buffer, _, context: buffer.fill_(context.padded_num_tokens)) if is_padded else None
    return slot(name, lambda *_: (count,), torch.int32, axis="none", copy_from_fb=False, post_fill=padded)


def _register(registry: CudaGraphBufferRegistry, slots: list[GraphSlot], source: Any | None) -> None:
    """Register ``slots``, each bound to the tensor of its name in ``source`` if there is one."""
    missing = [s.label for s in slots if source is not None and getattr(source, s.name, None) is None]
    if missing:
        hint = "give a tensor for each, or leave source out to allocate them"
        raise SlotError(f"the source lacks {', '.join(missing)}; nothing was adopted", hint=hint)
    for slot in slots:
        tensor = getattr(source, slot.name, None)
        declared = slot if tensor is None else _with_dtype_of(tensor, slot)
        registry.register_slot(declared, bind=tensor)


def _with_dtype_of(tensor: torch.Tensor, slot: GraphSlot) -> GraphSlot:
    """Return ``slot`` with the dtype of ``tensor`` if both are of one kind, otherwise unchanged."""
    kinds = [(d is torch.bool, d.is_complex, d.is_floating_point) for d in (tensor.dtype, slot.dtype)]
    if tensor.dtype is slot.dtype or kinds[0] != kinds[1]:
        return slot
    narrows = slot.dtype is torch.int64 and tensor.dtype is torch.int32
    return replace(slot, dtype=tensor.dtype, narrows=narrows)


def _adopt(
    registry: CudaGraphBufferRegistry,
    slot: _Declarer,
    tensors: Mapping[str, torch.Tensor | None],
    prefix: str = "",
    source_of: Callable[..., torch.Tensor | None] | None = None,
) -> None:
    """Register a slot in the memory of each of ``tensors``, with its shape and dtype; None has no slot.

    Its name begins with ``prefix``. A fill copies ``source_of(name, batch, context)``, or the field.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            shape, source = tuple(tensor.shape), source_of and partial(source_of, name)
            declared = slot(prefix + name, lambda *_, n=shape: n, tensor.dtype, source_fn=source)
            registry.register_slot(declared, bind=tensor)


def _proxies(source: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors ``[rows, ...]`` that pipeline stages pass on."""
    return getattr(source, "pp_proxy_tensors", None) or {}


def _ngram(name: str, batch: Any, _: FillContext) -> torch.Tensor | None:
    info = getattr(batch, "ngram_embedding_info", None)
    return None if info is None else getattr(info, name)


def _proxy(name: str, _: Any, context: FillContext) -> torch.Tensor | None:
    proxies = context.pp_proxy_tensors
    if proxies is None:
        return None
    if name not in proxies.tensors:
        raise SlotError(
            f"pp_proxy_tensors has no {name!r}, which slot 'pp_proxy_tensors.{name}' copies; it has"
            f" {', '.join(proxies.tensors) or 'none'}",
            hint="send every declared tensor, or declare the ones that are sent",
        )
    tensor: torch.Tensor = proxies.tensors[name]
    return tensor
