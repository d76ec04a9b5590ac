"""The inputs of lanes as one table of slots, from which runners and whole registries take theirs.

    INPUTS                     every input with its usual padding, without an owner
    input_slots                the inputs of one forward mode, for the lanes of runners
    build_decode_registry      a registry as in SGLang, for graphs that pad requests
    build_prefill_registry     a registry as in SGLang, for graphs that pad tokens only

Names, arguments, policies and values of the two builders follow SGLang (PRs 26742, 26292, 22404, issue
24361). A padding row has request row 0, whose row of ``req_to_token`` contains only scratch; KV slot 0, which
is scratch too; position 0; and the length that the attention backend declares.

Does not: declare the metadata of backends; they declare their own slots.
"""

from collections.abc import Callable, Mapping, Sequence
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

PROXIES = "pp_proxy_tensors."
"""The beginning of the names of tensors that a pipeline stage gets from the stage before."""

_HOST = torch.device("cpu")
_CUT_OFF = "outputs that are computed from it in padding rows are finite, and they are cut off"


def _per_request(name: str, dtype: torch.dtype = torch.int64, **more: Any) -> GraphSlot:
    """Return a slot ``[max_bs]``, with zeros in padding rows unless ``more`` says otherwise."""
    options = {"padding_policy": PaddingPolicy.ZERO, **more}
    return GraphSlot(name, lambda bs, _: (bs,), dtype, axis="bs", **options)


def _per_token(
    name: str, shape_fn: ShapeFn = lambda _, n: (n,), dtype: torch.dtype = torch.int64, **more: Any
) -> GraphSlot:
    """Return a slot ``[max_num_tokens, ...]``, with zeros in padding rows unless ``more`` says otherwise."""
    options = {"padding_policy": PaddingPolicy.ZERO, **more}
    return GraphSlot(name, shape_fn, dtype, axis="tokens", **options)


def _count(name: str, **more: Any) -> GraphSlot:
    """Return a slot ``[1]`` int32 that has no rows of requests or tokens."""
    return GraphSlot(
        name, lambda *_: (1,), torch.int32, axis="none", padding_policy=PaddingPolicy.ZERO, **more
    )


INPUTS: Mapping[str, GraphSlot] = {
    slot.name: slot
    for slot in (
        _per_token("input_ids"),
        _per_token("positions"),  # an earlier position may lie outside a rope table
        _per_token("out_cache_loc"),
        _per_token("mrope_positions", lambda _, n: (3, n), slice_fn=lambda buffer, n: buffer[:, :n]),
        _per_token("input_embeds", lambda _, n: (n, 0), torch.float32),
        _per_token(
            "tree_mask",
            lambda _, n: (n, 1),
            torch.bool,
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=True,
        ),
        _per_request("req_pool_indices"),
        _per_request("seq_lens", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=1),
        _per_request("seq_lens_cpu", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=1, device=_HOST),
        _per_request("extend_seq_lens"),
        _per_request("extend_seq_lens_cpu", device=_HOST),
        _per_request("num_correct_drafts", torch.int32),
        _per_request("mamba_track_indices"),
        _per_request("mamba_track_mask", torch.bool),
        _per_request("mamba_track_seqlens", torch.int32),
        _per_request(
            "encoder_lens",
            torch.int32,
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
            reason="padding rows are request row 0, which has only scratch KV slots at any length",
        ),
        _count("num_token_non_padded"),
        _count("global_num_tokens_gpu", copy_from_fb=False),
        _count("global_num_tokens_for_logprob_gpu", copy_from_fb=False),
    )
}
"""Every input that a lane or a registry may have. A width, dtype or pad value that depends on a model or a
backend is replaced where the input is added."""


class _Inputs:
    """The inputs of one owner, in the order in which they are added."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.slots: list[GraphSlot] = []

    def add(self, *names: str, **changes: Any) -> None:
        """Add inputs from the table, with ``changes`` to their declarations."""
        self.slots += [replace(INPUTS[name], owner=self.owner, **changes) for name in names]

    def add_tokens(self, cache_loc_dtype: torch.dtype = torch.int64, steps: int | None = None) -> None:
        """Add ids, positions and KV slots: ``[max_num_tokens, steps]`` in a draft decode of ``steps``."""
        self.add("input_ids", "positions")
        shape: ShapeFn = (lambda _, n: (n, steps)) if steps else (lambda _, n: (n,))
        self.add("out_cache_loc", shape_fn=shape, dtype=cache_loc_dtype)

    def add_requests(self, seq_len_fill_value: int) -> None:
        """Add the request rows, and the lengths on the device and on the host."""
        self.add("req_pool_indices")
        self.add("seq_lens", "seq_lens_cpu", pad_value=seq_len_fill_value)

    def add_embeds(self, width: int, dtype: torch.dtype, **changes: Any) -> None:
        """Add embeddings of ``width``."""
        self.add("input_embeds", shape_fn=lambda _, n: (n, width), dtype=dtype, **changes)

    def add_proxy(self, name: str, width: int, dtype: torch.dtype) -> None:
        """Add a tensor of the pipeline stage before, which the batch carries by its dotted name."""
        self.slots.append(_per_token(f"{PROXIES}{name}", lambda _, n: (n, width), dtype, owner=self.owner))

    def add_num_token_non_padded(self, *, is_local: bool) -> None:
        """Add the count of real tokens; see `num_token_non_padded_slot`."""
        self.slots.append(num_token_non_padded_slot(self.owner, is_local=is_local))


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
        device: Device of the slots; ``seq_lens_cpu`` is on the host.
        max_bs: Largest captured request count.
        max_num_token: Largest captured token count.
        seq_len_fill_value: ``seq_lens`` of a padding row, declared by the attention backend.
        cache_loc_dtype: Dtype of ``out_cache_loc``.
        enable_mamba_track: Add ``mamba_track_indices`` and ``mamba_track_mask``.
        is_encoder_decoder: Add ``encoder_lens``.
        encoder_len_fill_value: Initial value of ``encoder_lens``: the length of the encoder's longest input.
        encoder_lens_dtype: Dtype of ``encoder_lens``.
        enable_num_token_non_padded: Add ``num_token_non_padded``.
        require_gathered_buffer: Whether activations are gathered over DP ranks. If so,
            ``num_token_non_padded`` counts this rank's share of the padded shape, and ``global_num_tokens_*``
            contain the padded count.
        nsa_enable_prefill_cp: Whether context parallelism splits the tokens. If so, ``num_token_non_padded``
        is the batch's count.
        enable_prefill_cp: The later name of ``nsa_enable_prefill_cp`` in the original.
        require_mlp_tp_gather: Whether ``global_num_tokens_*`` contain a count for each DP rank.
        dp_size: DP ranks.
        register_global_num_tokens: Add ``global_num_tokens_gpu`` and ``global_num_tokens_for_logprob_gpu``.
        share_pool: See `CudaGraphBufferRegistry`. The original shares by default.
        source: An object with a tensor for each slot, which is adopted instead of allocating one. A tensor of
            another dtype of the same kind (integer, float) sets the slot's dtype. An int32 tensor for an
            int64 slot also takes int64 batch fields (`GraphSlot.narrows`), because ids and lengths are below
            2**31. The ``ngram_embedding_info`` and ``pp_proxy_tensors`` of the source, if present, become
            slots too.
        enable_mrope: Add ``mrope_positions``. A model that does not use them saves the memory and the copy.
        zero_input_ids: Zero the padding rows of ``input_ids``; the original keeps earlier tokens there.
        lane: See `CudaGraphBufferRegistry`.

    Raises:
        SlotError: ``source`` lacks a tensor, or has one of another shape, device or kind of dtype.
    """
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool, lane=lane
    )
    inputs = _Inputs("decode inputs")
    inputs.add_tokens(cache_loc_dtype)
    if not zero_input_ids:
        reason = f"every token of an earlier batch is in the vocabulary; {_CUT_OFF}"
        keeps = PaddingPolicy.FOREACH_COPY
        inputs.slots[0] = replace(inputs.slots[0], padding_policy=keeps, reason=reason)
    inputs.add_requests(seq_len_fill_value)
    if enable_mrope:
        inputs.add("mrope_positions")
    if enable_mamba_track:
        inputs.add("mamba_track_indices", "mamba_track_mask")
    if is_encoder_decoder:
        inputs.add("encoder_lens", dtype=encoder_lens_dtype, pad_value=encoder_len_fill_value)
    if enable_num_token_non_padded:
        splits_tokens = nsa_enable_prefill_cp or enable_prefill_cp
        inputs.add_num_token_non_padded(is_local=require_gathered_buffer and not splits_tokens)
    if register_global_num_tokens:
        ranks = dp_size if require_mlp_tp_gather else 1
        inputs.add(
            "global_num_tokens_gpu",
            "global_num_tokens_for_logprob_gpu",
            shape_fn=lambda *_: (ranks,),
            post_fill=_fill_padded_count if require_gathered_buffer else None,
        )
    _register(registry, inputs.slots, source)
    _adopt_extras(registry, source)
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
    count of a batch. ``is_multimodal`` adds ``mrope_positions`` and ``input_embeds``. The embeddings are
    ``[max_num_token, hidden_size]`` of ``embed_dtype`` (by default torch's default dtype); the model writes
    them, and no fill copies them. With ``register_input_embeds=False`` they are an input of the batch without
    a slot. ``enable_mamba_track`` adds ``mamba_track_seqlens`` too. The rows of the source's
    ``pp_proxy_tensors`` are tokens. Other extra tensors of the source are not adopted.
    """
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool, lane=lane
    )
    inputs = _Inputs("prefill inputs")
    inputs.add_tokens(cache_loc_dtype)
    if is_multimodal:
        inputs.add("mrope_positions")
    if is_multimodal and register_input_embeds:
        dtype = embed_dtype or torch.get_default_dtype()
        inputs.add_embeds(hidden_size, dtype, copy_from_fb=False)
    if enable_mamba_track:
        inputs.add(
            "mamba_track_indices",
            "mamba_track_mask",
            "mamba_track_seqlens",
            padding_policy=PaddingPolicy.FOREACH_COPY,
            reason="the number of requests is not padded",
        )
    if enable_num_token_non_padded:
        splits_tokens = nsa_enable_prefill_cp or enable_prefill_cp
        inputs.add_num_token_non_padded(is_local=require_gathered_buffer and not splits_tokens)
    _register(registry, inputs.slots, source)
    proxy = partial(_per_token, owner=inputs.owner)
    _adopt(registry, proxy, _proxies(source), PROXIES, _proxy)
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
    proxies: Mapping[str, tuple[int, torch.dtype]] | None = None,
) -> list[GraphSlot]:
    """Return the inputs of graphs of ``mode`` whose requests and tokens are padded.

    Padding requests are row 0 of ``req_to_token``, which contains only scratch, with the length that the
    backend declares. In a ragged batch they have no tokens. Padding tokens are token 0 at position 0, and
    their keys go to KV slot 0. In a tree they see all draft tokens of their request, so that no row of scores
    is fully masked.

    Args:
        mode: Forward mode of the lane's batches.
        seq_len_fill_value: ``seq_lens`` of a padding request, declared by the attention backend; see
            `Capabilities.padded_seq_len`.
        num_draft_steps: Steps of a draft decode.
        num_draft_tokens: Tokens of a request in target verify.
        trees: Whether to add ``tree_mask`` to a target verify.
        num_token_non_padded: Whether to add the slot of that name.
        require_gathered_buffer: See `build_decode_registry`.
        mrope: Add ``mrope_positions``.
        embeds: Width and dtype of ``input_embeds``; None to leave them out.
        proxies: Width and dtype of each tensor of the pipeline stage before, by name.
    """
    inputs = _Inputs(f"{mode.value} inputs")
    inputs.add_tokens(steps=num_draft_steps if mode is ForwardMode.DRAFT_DECODE else None)
    if mrope:
        inputs.add("mrope_positions")
    if embeds is not None:
        inputs.add_embeds(*embeds)
    for name, (width, dtype) in (proxies or {}).items():
        inputs.add_proxy(name, width, dtype)
    inputs.add_requests(seq_len_fill_value)
    if mode.is_ragged:
        inputs.add("extend_seq_lens", "extend_seq_lens_cpu")
    if mode is ForwardMode.TARGET_VERIFY and trees:
        inputs.add("tree_mask", shape_fn=lambda _, n: (n, num_draft_tokens))
    if mode is ForwardMode.DRAFT_EXTEND:
        inputs.add("num_correct_drafts")
    if num_token_non_padded:
        inputs.add_num_token_non_padded(is_local=require_gathered_buffer)
    return inputs.slots


def num_token_non_padded_slot(owner: str, *, is_local: bool) -> GraphSlot:
    """Return ``[1]`` int32: the number of real tokens, for layers that must not touch padding.

    Args:
        owner: The runner that declares it.
        is_local: Whether it counts the real tokens in this rank's share of the padded shape, at capture and
            at replay. Otherwise the number in the batch is copied.
    """
    post_fill = _fill_local_count if is_local else _keep_copied_count
    slot = INPUTS["num_token_non_padded"]
    return replace(slot, owner=owner, copy_from_fb=not is_local, post_fill=post_fill)


# -- computed contents -----------------------------------------------------------------------------


def _fill_local_count(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
    """Write the number of real tokens in this rank's share of the padded shape (PR 22404)."""
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


def _keep_copied_count(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
    """Write nothing. A slot with a ``post_fill`` is in every view, even if the template lacks the field."""
    del buffer, batch, context


def _fill_padded_count(buffer: torch.Tensor, _: Any, context: FillContext) -> None:
    """Write the padded token count, which is the same for every rank."""
    buffer.fill_(context.padded_num_tokens)


# -- adopting memory -------------------------------------------------------------------------------


def _adopt_extras(registry: CudaGraphBufferRegistry, source: Any) -> None:
    """Register tensors that a ``source`` may have in addition to the declared inputs of decode."""
    keeps: dict[str, Any] = {
        "owner": "decode inputs",
        "axis": "none",
        "padding_policy": PaddingPolicy.KEEP_PAD,
    }
    nested = getattr(source, "ngram_embedding_info", None)
    infos = {n: getattr(nested, n) for n in ("column_starts", "req_lens")} if nested is not None else {}
    reason = f"columns and lengths of an earlier batch are inside the token table; {_CUT_OFF}"
    _adopt(registry, partial(GraphSlot, **keeps, reason=reason), infos, "ngram_embedding_info.", _ngram)
    proxy = partial(GraphSlot, **keeps, reason=_CUT_OFF)
    _adopt(registry, proxy, _proxies(source), PROXIES, _proxy)
    traced = {n: getattr(source, n, None) for n in ("rids_int", "bootstrap_room_ids_int")}
    changes: dict[str, Any] = {
        "padding_policy": PaddingPolicy.FOREACH_COPY,
        "reason": "only tracing reads it, no kernel does",
    }
    _adopt(registry, partial(GraphSlot, **{**keeps, "axis": "bs", **changes}), traced)


def _register(registry: CudaGraphBufferRegistry, slots: Sequence[GraphSlot], source: Any | None) -> None:
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
    slot: Callable[..., GraphSlot],
    tensors: Mapping[str, torch.Tensor | None],
    prefix: str = "",
    source_of: Callable[..., torch.Tensor | None] | None = None,
) -> None:
    """Register one slot for each of ``tensors``, in its memory; a tensor that is None gets no slot.

    The slot has the tensor's shape and dtype, and its name begins with ``prefix``. A fill copies the result
    of ``source_of(name, batch, context)``, or without ``source_of`` the batch field.
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
            f"pp_proxy_tensors has no {name!r}, which slot '{PROXIES}{name}' copies; it has"
            f" {', '.join(proxies.tensors) or 'none'}",
            hint="send every declared tensor, or declare the ones that are sent",
        )
    tensor: torch.Tensor = proxies.tensors[name]
    return tensor
