"""The preset registries: every slot, every flag, and adopted tensors."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    PaddingPolicy,
    SharedBuffers,
    build_decode_registry,
    build_prefill_registry,
)
from graphpact.errors import SlotError
from support import fill, make_slot

I64, I32, BOOL = torch.int64, torch.int32, torch.bool
BS, TOKENS, LEN, ENCODER, HIDDEN, DP = 4, 12, 3, 9, 5, 2
KEEP, SENTINEL, ZERO = PaddingPolicy.KEEP_PAD, PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO
FOREACH, ONCE = PaddingPolicy.FOREACH_COPY, PaddingPolicy.FILL_ONCE

Row = tuple[tuple[int, ...], torch.dtype, str, PaddingPolicy, int | float | None]
"""Shape, dtype, axis, policy and pad value of a slot."""

DECODE: dict[str, Row] = {
    "input_ids": ((TOKENS,), I64, "tokens", FOREACH, None),
    "positions": ((TOKENS,), I64, "tokens", ZERO, None),
    "out_cache_loc": ((TOKENS,), I64, "tokens", ZERO, None),
    "req_pool_indices": ((BS,), I64, "bs", ZERO, None),
    "seq_lens": ((BS,), I64, "bs", SENTINEL, LEN),
    "seq_lens_cpu": ((BS,), I64, "bs", SENTINEL, LEN),
    "mrope_positions": ((3, TOKENS), I64, "tokens", ZERO, None),
    "mamba_track_indices": ((BS,), I64, "bs", ZERO, None),
    "mamba_track_mask": ((BS,), BOOL, "bs", ZERO, None),
    "encoder_lens": ((BS,), I32, "bs", ONCE, ENCODER),
    "num_token_non_padded": ((1,), I32, "none", ZERO, None),
    "global_num_tokens_gpu": ((1,), I32, "none", ZERO, None),
    "global_num_tokens_for_logprob_gpu": ((1,), I32, "none", ZERO, None),
}
ALL_OF_DECODE: dict[str, Any] = {
    "enable_mamba_track": True,
    "is_encoder_decoder": True,
    "encoder_len_fill_value": ENCODER,
    "enable_num_token_non_padded": True,
}
OF_SOURCE: dict[str, Row] = {
    "ngram_embedding_info.column_starts": ((BS,), I32, "none", KEEP, None),
    "ngram_embedding_info.req_lens": ((BS,), I32, "none", KEEP, None),
    "pp_proxy_tensors.hidden_states": ((TOKENS, HIDDEN), torch.float32, "none", KEEP, None),
    "pp_proxy_tensors.residual": ((TOKENS, HIDDEN), torch.float32, "none", KEEP, None),
    "rids_int": ((BS,), I64, "bs", FOREACH, None),
    "bootstrap_room_ids_int": ((BS,), I64, "bs", FOREACH, None),
}
PREFILL: dict[str, Row] = {
    "input_ids": ((TOKENS,), I64, "tokens", ZERO, None),
    "positions": ((TOKENS,), I64, "tokens", ZERO, None),
    "out_cache_loc": ((TOKENS,), I64, "tokens", ZERO, None),
    "mrope_positions": ((3, TOKENS), I64, "tokens", ZERO, None),
    "input_embeds": ((TOKENS, HIDDEN), torch.float16, "tokens", ZERO, None),
    "mamba_track_indices": ((BS,), I64, "bs", FOREACH, None),
    "mamba_track_mask": ((BS,), BOOL, "bs", FOREACH, None),
    "mamba_track_seqlens": ((BS,), I32, "bs", FOREACH, None),
    "num_token_non_padded": ((1,), I32, "none", ZERO, None),
}
ALL_OF_PREFILL: dict[str, Any] = {
    "is_multimodal": True,
    "hidden_size": HIDDEN,
    "embed_dtype": torch.float16,
    "enable_mamba_track": True,
    "enable_num_token_non_padded": True,
}


def _decode(**more: Any) -> CudaGraphBufferRegistry:
    return build_decode_registry(
        device="cpu", max_bs=BS, max_num_token=TOKENS, seq_len_fill_value=LEN, **more
    )


def _prefill(**more: Any) -> CudaGraphBufferRegistry:
    return build_prefill_registry(device="cpu", max_bs=BS, max_num_token=TOKENS, **more)


def _table(registry: CudaGraphBufferRegistry) -> dict[str, Row]:
    table: dict[str, Row] = {}
    for slot in registry:
        assert slot.buffer is not None
        shape, dtype = tuple(slot.buffer.shape), slot.buffer.dtype
        table[slot.name] = (shape, dtype, slot.axis, slot.padding_policy, slot.pad_value)
    return table


def _source(registry: CudaGraphBufferRegistry, **more: Any) -> SimpleNamespace:
    """Return a new tensor of ones for each slot of ``registry``."""
    tensors = {s.name: torch.ones_like(s.buffer) for s in registry if s.buffer is not None}
    return SimpleNamespace(**tensors, **more)


def _nested() -> dict[str, Any]:
    """Return further tensors that a source may have."""
    counts = {name: torch.ones(BS, dtype=I32) for name in ("column_starts", "req_lens")}
    states = {name: torch.ones(TOKENS, HIDDEN) for name in ("hidden_states", "residual")}
    return {
        "ngram_embedding_info": SimpleNamespace(**counts),
        "pp_proxy_tensors": states,
        "rids_int": torch.zeros(BS, dtype=I64),
        "bootstrap_room_ids_int": torch.full((BS,), -1),
    }


def _fill(registry: CudaGraphBufferRegistry, *, proxies: Any = None, **fields: Any) -> None:
    """Fill 2 requests with 5 tokens, padded to 3 and 8."""
    registry.fill_from(
        SimpleNamespace(**fields),
        raw_bs=2,
        padded_bs=3,
        raw_num_tokens=5,
        padded_num_tokens=8,
        pp_proxy_tensors=proxies,
    )


def _content(registry: CudaGraphBufferRegistry, name: str) -> Any:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer.tolist()


# -- decode ----------------------------------------------------------------------------------------


def test_every_slot_of_decode() -> None:
    """With every flag on, decode has these slots in this order, each declared by the same owner."""
    registry = _decode(**ALL_OF_DECODE)
    assert _table(registry) == DECODE
    assert list(_table(registry)) == list(DECODE)
    assert {slot.owner for slot in registry} == {"decode inputs"}
    assert registry.get_slot("seq_lens_cpu").device == torch.device("cpu")


def test_new_buffers_of_decode_hold_what_padding_holds() -> None:
    """Before any fill every slot holds its padding value, so that a capture reads valid rows."""
    for slot in _decode(**ALL_OF_DECODE):
        assert slot.buffer is not None
        pad = {"seq_lens": LEN, "seq_lens_cpu": LEN, "encoder_lens": ENCODER}.get(slot.name, 0)
        assert (slot.buffer == pad).all()


@pytest.mark.parametrize(
    ("flags", "gone", "changed"),
    [
        ({"enable_mamba_track": False}, {"mamba_track_indices", "mamba_track_mask"}, {}),
        ({"is_encoder_decoder": False}, {"encoder_lens"}, {}),
        ({"enable_num_token_non_padded": False}, {"num_token_non_padded"}, {}),
        (
            {"register_global_num_tokens": False},
            {"global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"},
            {},
        ),
        ({"enable_mrope": False}, {"mrope_positions"}, {}),
        ({"zero_input_ids": True}, set(), {"input_ids": ((TOKENS,), I64, "tokens", ZERO, None)}),
        (
            {"cache_loc_dtype": I32},
            set(),
            {"out_cache_loc": ((TOKENS,), I32, "tokens", ZERO, None)},
        ),
        (
            {"encoder_lens_dtype": I64, "encoder_len_fill_value": 7},
            set(),
            {"encoder_lens": ((BS,), I64, "bs", ONCE, 7)},
        ),
        (
            {"require_mlp_tp_gather": True, "dp_size": DP},
            set(),
            {
                "global_num_tokens_gpu": ((DP,), I32, "none", ZERO, None),
                "global_num_tokens_for_logprob_gpu": ((DP,), I32, "none", ZERO, None),
            },
        ),
        ({"dp_size": DP}, set(), {}),
        ({"require_gathered_buffer": True}, set(), {}),
        ({"nsa_enable_prefill_cp": True}, set(), {}),
        ({"lane": "decode"}, set(), {}),
        ({"share_pool": SharedBuffers()}, set(), {}),
    ],
)
def test_flags_of_decode(flags: dict[str, Any], gone: set[str], changed: dict[str, Row]) -> None:
    """Each flag removes or changes only the slots that belong to it."""
    expected = {name: row for name, row in DECODE.items() if name not in gone} | changed
    assert _table(_decode(**(ALL_OF_DECODE | flags))) == expected


def test_decode_alone() -> None:
    """With no flag decode has the inputs of every model, mrope positions and global counts."""
    always = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    counts = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    assert _decode().slot_names() == [*always, "seq_lens_cpu", "mrope_positions", *counts]


@pytest.mark.parametrize(("gathered", "expected"), [(True, 8), (False, 0)])
@pytest.mark.parametrize("dp_size", [1, DP])
def test_global_counts(dp_size: int, *, gathered: bool, expected: int) -> None:
    """If gathered, every count is the padded number of tokens; otherwise a fill writes none."""
    registry = _decode(require_gathered_buffer=gathered, require_mlp_tp_gather=dp_size > 1, dp_size=dp_size)
    names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    _fill(registry, **{name: torch.full((dp_size,), 99, dtype=I32) for name in names})
    for name in names:
        assert _content(registry, name) == [expected] * dp_size


def test_decode_after_a_fill() -> None:
    """After a padded fill of full buffers, all padding rows hold what their policy requires."""
    registry = _decode(**ALL_OF_DECODE)
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(77)
    fields = {}
    for slot in registry:
        if slot.axis != "none":
            head = slot.slice_for(2, 5)
            fields[slot.name] = torch.ones_like(head)
    _fill(registry, num_token_non_padded=torch.tensor([5], dtype=I32), **fields)
    kept = {"input_ids": 77, "encoder_lens": 77}
    for name in fields:
        slot = registry.get_slot(name)
        raw, padded, most = (2, 3, BS) if slot.axis == "bs" else (5, 8, TOKENS)
        pad = kept.get(name, slot.initial_value)
        beyond: int | bool = 77
        if slot.dtype is BOOL:
            beyond = True
        row = [1] * raw + [pad] * (padded - raw) + [beyond] * (most - padded)
        assert _content(registry, name) == ([row] * 3 if name == "mrope_positions" else row)


# -- prefill ---------------------------------------------------------------------------------------


def test_every_slot_of_prefill() -> None:
    """With every flag on, prefill has these slots in this order, each declared by the same owner."""
    registry = _prefill(**ALL_OF_PREFILL)
    assert _table(registry) == PREFILL
    assert list(_table(registry)) == list(PREFILL)
    assert {slot.owner for slot in registry} == {"prefill inputs"}


@pytest.mark.parametrize(
    ("flags", "gone", "changed"),
    [
        ({"is_multimodal": False}, {"mrope_positions", "input_embeds"}, {}),
        ({"register_input_embeds": False}, {"input_embeds"}, {}),
        (
            {"embed_dtype": None, "hidden_size": 2},
            set(),
            {"input_embeds": ((TOKENS, 2), torch.float32, "tokens", ZERO, None)},
        ),
        (
            {"enable_mamba_track": False},
            {"mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens"},
            {},
        ),
        ({"enable_num_token_non_padded": False}, {"num_token_non_padded"}, {}),
        (
            {"cache_loc_dtype": I32},
            set(),
            {"out_cache_loc": ((TOKENS,), I32, "tokens", ZERO, None)},
        ),
        ({"require_gathered_buffer": True}, set(), {}),
        ({"nsa_enable_prefill_cp": True}, set(), {}),
        ({"lane": "prefill"}, set(), {}),
        ({"share_pool": SharedBuffers()}, set(), {}),
    ],
)
def test_flags_of_prefill(flags: dict[str, Any], gone: set[str], changed: dict[str, Row]) -> None:
    """Each flag removes or changes only the slots that belong to it."""
    expected = {name: row for name, row in PREFILL.items() if name not in gone} | changed
    assert _table(_prefill(**(ALL_OF_PREFILL | flags))) == expected


def test_prefill_alone() -> None:
    """With no flag prefill has three token slots and no request slot, since requests are not padded."""
    assert _prefill().slot_names() == ["input_ids", "positions", "out_cache_loc"]


def test_prefill_zeroes_every_token_tail() -> None:
    """The padding rows of every token slot are zero, since the graph runs them; embeddings are not copied."""
    registry = _prefill(**ALL_OF_PREFILL)
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(7)
    ones = torch.ones(5, dtype=I64)
    tokens = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), ones)
    embeds = torch.ones(5, HIDDEN, dtype=torch.float16)
    _fill(registry, mrope_positions=torch.ones(3, 5, dtype=I64), input_embeds=embeds, **tokens)
    row = [1] * 5 + [0] * 3 + [7] * 4
    for name in tokens:
        assert _content(registry, name) == row
    assert _content(registry, "mrope_positions") == [row] * 3
    embedded = [[7] * HIDDEN] * 5 + [[0] * HIDDEN] * 3 + [[7] * HIDDEN] * 4  # not copied
    assert _content(registry, "input_embeds") == embedded


def test_the_names_of_arguments_are_the_originals() -> None:
    """Both factories have the original's arguments, in its order and by name, and optional ones of ours.

    Only the first ones are required; the original also requires ``cache_loc_dtype``.
    """
    sizes = ["device", "max_bs", "max_num_token"]
    both = ["share_pool", "source"]
    decode = [*sizes, "seq_len_fill_value", "cache_loc_dtype", "enable_mamba_track"]
    decode += ["is_encoder_decoder", "encoder_len_fill_value", "encoder_lens_dtype"]
    decode += ["enable_num_token_non_padded", "require_gathered_buffer", "enable_prefill_cp"]
    decode += ["require_mlp_tp_gather", "dp_size", "register_global_num_tokens", *both]
    prefill = [*sizes, "cache_loc_dtype", "is_multimodal", "hidden_size", "embed_dtype"]
    prefill += ["enable_mamba_track", "register_input_embeds", *both]
    counts = {"nsa_enable_prefill_cp", "enable_prefill_cp"}
    counts |= {"enable_num_token_non_padded", "require_gathered_buffer"}
    required = {build_decode_registry: decode[:4], build_prefill_registry: prefill[:3]}
    for build, original, ours in (
        (build_decode_registry, decode, {"enable_mrope", "zero_input_ids", "lane"}),
        (build_prefill_registry, prefill, {"lane"}),
    ):
        parameters = inspect.signature(build).parameters
        assert [name for name in parameters if name in original] == original
        assert {*parameters} - {*original} - counts == ours
        assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        optional = [name for name, p in parameters.items() if p.default is not p.empty]
        assert [name for name in parameters if name not in optional] == required[build]
        assert parameters["share_pool"].default is False  # the original's default is True
        assert parameters["lane"].default is None


# -- adopting --------------------------------------------------------------------------------------

both = pytest.mark.parametrize(("build", "flags"), [(_decode, ALL_OF_DECODE), (_prefill, ALL_OF_PREFILL)])


@both
def test_a_source_is_adopted(build: Any, flags: dict[str, Any]) -> None:
    """Every slot adopts the source's tensor of its name, at its address, and writes nothing to it."""
    source = _source(build(**flags))
    registry = build(**flags, source=source)
    assert registry.slot_names() == list(vars(source))
    for slot in registry:
        tensor = getattr(source, slot.name)
        assert slot.buffer is tensor
        assert (tensor == 1).all()


@both
def test_a_source_that_lacks_tensors(build: Any, flags: dict[str, Any]) -> None:
    """If a source lacks tensors, the error names all of them, and no tensor is adopted."""
    source = _source(build(**flags))
    source.positions = None
    del source.mamba_track_mask
    with pytest.raises(SlotError) as error:
        build(**flags, source=source)
    for part in ("'positions'", "'mamba_track_mask'", "nothing was adopted", "\n  help: "):
        assert part in str(error.value)
    assert "'input_ids'" not in str(error.value)


@both
def test_a_source_of_another_kind(build: Any, flags: dict[str, Any]) -> None:
    """A source tensor of another kind of dtype, or another shape, is refused with slot and owner."""
    source = _source(build(**flags))
    for wrong in (
        torch.ones(TOKENS, dtype=torch.float32),
        torch.ones(TOKENS, dtype=torch.bool),
        torch.ones(TOKENS + 1, dtype=I32),
    ):
        source.positions = wrong
        with pytest.raises(SlotError, match=r"slot 'positions' of (decode|prefill) inputs: declared"):
            build(**flags, source=source)


@both
def test_a_source_brings_its_dtypes(build: Any, flags: dict[str, Any]) -> None:
    """A source tensor of another dtype of the same kind is adopted with its dtype, padded and filled."""
    source = _source(build(**flags))
    other = {I64: I32, I32: I64, torch.float16: torch.bfloat16}
    for name, tensor in vars(source).items():
        setattr(source, name, tensor.to(other.get(tensor.dtype, tensor.dtype)))
    registry = build(**flags, source=source)
    for slot in registry:
        assert slot.buffer is getattr(source, slot.name)
        assert slot.dtype is slot.buffer.dtype
    for fields in (I32, I64):
        _fill(
            registry,
            positions=torch.full((5,), 2**31 - 1, dtype=fields),
            out_cache_loc=torch.full((5,), 9, dtype=fields),
        )
        assert source.positions.tolist() == [2**31 - 1] * 5 + [0] * 3 + [1] * 4
        assert source.out_cache_loc.tolist() == [9] * 5 + [0] * 3 + [1] * 4
    with pytest.raises(SlotError, match=r"which has .* torch\.float32"):
        _fill(registry, positions=torch.ones(5))


def test_a_narrow_buffer_takes_wide_lengths() -> None:
    """An adopted int32 buffer takes the int64 lengths of a batch, and the pad value after them."""
    source = _source(_decode())
    source.seq_lens = torch.ones(BS, dtype=I32)
    registry = _decode(source=source)
    assert registry.get_slot("seq_lens").narrows
    assert not registry.get_slot("req_pool_indices").narrows
    lens = torch.tensor([2**31 - 1, 5])
    _fill(registry, seq_lens=lens)
    assert source.seq_lens.tolist() == [2**31 - 1, 5, LEN, 1]


def test_only_32_bits_are_narrowed() -> None:
    """int16 memory is adopted, but a fill from int64 is refused, because a length may not fit."""
    source = _source(_decode())
    source.seq_lens = torch.ones(BS, dtype=torch.int16)
    registry = _decode(source=source)
    assert registry.get_slot("seq_lens").dtype is torch.int16
    with pytest.raises(SlotError, match=r"int16 from this batch, which has .* torch\.int64"):
        _fill(registry, seq_lens=torch.tensor([3, 5]))


def test_a_narrow_slot_outside_a_source_takes_no_wide_field() -> None:
    """A declared slot takes int64 into int32 only with ``narrows=True``, and no other dtype may narrow."""
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4)
    registry.register_slot(make_slot("plain", dtype=I32))
    registry.register_slot(make_slot("narrow", dtype=I32, narrows=True))
    wide = torch.tensor([3, 5])
    with pytest.raises(SlotError, match="slot 'plain'"):
        fill(registry, 2, 4, plain=wide)
    fill(registry, 2, 4, narrow=wide)
    assert _content(registry, "narrow")[:4] == [3, 5, 0, 0]
    with pytest.raises(SlotError, match="only int64 to int32 can be narrowed"):
        make_slot("short", dtype=torch.int16, narrows=True)


def test_what_decode_adopts_besides() -> None:
    """Nested fields, proxy tensors and tracer ids of a source become slots with these names."""
    source = _source(_decode(), **_nested())
    registry = _decode(source=source)
    table = _table(registry)
    assert {name: row for name, row in table.items() if name in OF_SOURCE} == OF_SOURCE
    assert len(table) == len(vars(source)) - 2 + 4
    buffer = registry.get_slot("ngram_embedding_info.req_lens").buffer
    assert buffer is source.ngram_embedding_info.req_lens
    assert registry.get_slot("pp_proxy_tensors.residual").buffer is source.pp_proxy_tensors["residual"]
    assert registry.get_slot("rids_int").buffer is source.rids_int


def test_nested_fields_are_copied() -> None:
    """Tensors of a nested field fill as many rows as they have, and all other rows are kept."""
    source = _source(_decode(), **_nested())
    registry = _decode(source=source)
    info = SimpleNamespace(
        column_starts=torch.tensor([7, 8], dtype=I32), req_lens=torch.tensor([4, 5], dtype=I32)
    )
    _fill(registry, ngram_embedding_info=info)
    assert source.ngram_embedding_info.column_starts.tolist() == [7, 8, 1, 1]
    assert source.ngram_embedding_info.req_lens.tolist() == [4, 5, 1, 1]
    for fields in ({}, {"ngram_embedding_info": None}):
        _fill(registry, **fields)
        assert source.ngram_embedding_info.column_starts.tolist() == [7, 8, 1, 1]


def _sent(**values: float) -> SimpleNamespace:
    return SimpleNamespace(tensors={k: torch.full((5, HIDDEN), v) for k, v in values.items()})


@pytest.mark.parametrize("build", [_decode, _prefill])
def test_a_stage_sends_all_or_nothing(build: Callable[..., CudaGraphBufferRegistry]) -> None:
    """A declared proxy tensor that was not sent is refused, instead of kept from an earlier step."""
    source = _source(build(), pp_proxy_tensors=_nested()["pp_proxy_tensors"])
    registry = build(source=source)
    with pytest.raises(SlotError, match=r"no 'residual', which slot 'pp_proxy_tensors.residual'"):
        _fill(registry, proxies=_sent(hidden_states=2.0))
    assert all((states == 1).all() for states in source.pp_proxy_tensors.values())


def test_proxies_of_decode_are_copied() -> None:
    """Proxy tensors fill as many rows as they have, and other rows are kept; a stage may send nothing."""
    source = _source(_decode(), **_nested())
    registry = _decode(source=source)
    _fill(registry, proxies=_sent(hidden_states=2.0, residual=3.0))
    states = source.pp_proxy_tensors
    assert states["hidden_states"][:, 0].tolist() == [2] * 5 + [1] * 7
    assert states["residual"][:, 0].tolist() == [3] * 5 + [1] * 7
    _fill(registry)
    assert states["hidden_states"][:, 0].tolist() == [2] * 5 + [1] * 7


def test_proxies_of_prefill_zero_their_tails() -> None:
    """Prefill runs padding tokens, so padding rows of proxy tensors are zero; a stage may send nothing."""
    source = _source(_prefill(), pp_proxy_tensors=_nested()["pp_proxy_tensors"])
    registry = _prefill(source=source)
    row = ((TOKENS, HIDDEN), torch.float32, "tokens", ZERO, None)
    assert _table(registry)["pp_proxy_tensors.hidden_states"] == row
    _fill(registry, proxies=_sent(hidden_states=2.0, residual=3.0))
    states = source.pp_proxy_tensors
    assert states["hidden_states"][:, 0].tolist() == [2] * 5 + [0] * 3 + [1] * 4
    assert states["residual"][:, 0].tolist() == [3] * 5 + [0] * 3 + [1] * 4
    for rows in states.values():
        rows.fill_(7)
    _fill(registry)
    for rows in states.values():
        assert rows[:, 0].tolist() == [7] * 5 + [0] * 3 + [7] * 4


def test_ids_of_a_tracer_keep_their_tails() -> None:
    """Ids for a tracer are copied by request, and their padding rows are kept."""
    source = _source(_decode(), **_nested())
    registry = _decode(source=source)
    ids = torch.tensor([10, 11])
    _fill(registry, rids_int=ids, bootstrap_room_ids_int=ids)
    assert source.rids_int.tolist() == [10, 11, 0, 0]
    assert source.bootstrap_room_ids_int.tolist() == [10, 11, -1, -1]


# -- lanes -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("gathered", [False, True])
def test_a_lane_takes_every_slot(build: Any, flags: dict[str, Any], *, gathered: bool) -> None:
    """With every flag and every tensor of a source, each slot has an owner and any required reason."""
    flags = flags | {"require_gathered_buffer": gathered}
    assert build(**flags, lane="x").lane == "x"
    registry = build(**flags, lane="x", source=_source(build(**flags), **_nested()))
    for slot in registry:
        assert slot.owner
        assert slot.reason or not slot.keeps_tail


def test_planted_reason_that_is_missing() -> None:
    """A lane refuses a slot of a preset that lacks its reason, so the test above can fail."""
    slot = replace(_decode().get_slot("input_ids"), reason=None)
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4, lane="x")
    with pytest.raises(SlotError, match="slot 'input_ids' of decode inputs: FOREACH_COPY without"):
        registry.register_slot(slot)
