"""Tests of the job's readers: each form of metadata of one batch gives the attention of that batch."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.attention import LayerSpec
from graphpact.errors import KernelRefusal
from graphpact_adapters.kernel_reads import PagedReads, Part, Reads
from peers import vllm_readers

BLOCK, BLOCKS, WIDTH = 4, 24, 5
LAYER = LayerSpec(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, scaling=0.4)


class Step(NamedTuple):
    """A batch as a builder sees it, padding rows included."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def starts(self) -> list[int]:
        """The query offset of each request, and the end."""
        return [sum(self.query_lens[:at]) for at in range(len(self.query_lens) + 1)]

    @property
    def tokens(self) -> int:
        """The number of tokens, including padding."""
        return len(self.slot_mapping)

    @property
    def owners(self) -> list[int]:
        """The request of each live token."""
        return [at for at, count in enumerate(self.query_lens) for _ in range(count)]

    @property
    def keys(self) -> list[int]:
        """Keys that each token sees; 0 for a padding token."""
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        live = [length - count + 1 + at for count, length in pairs for at in range(count)]
        return live + [0] * (self.tokens - len(live))


@st.composite
def steps(draw: st.DrawFn, width: int | None = None) -> Step:
    """Draw a batch; ``width`` is the number of each request's queries."""
    counts = draw(st.lists(st.integers(1, 4) if width is None else st.just(width), min_size=1, max_size=4))
    lengths = [count + draw(st.integers(0, 15)) for count in counts]
    padding = draw(st.integers(0, 2))
    blocks = draw(st.permutations(range(1, BLOCKS)))
    table = torch.zeros(len(counts) + padding, WIDTH, dtype=torch.int32)
    slots = []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        used = -(-length // BLOCK)
        own, blocks = blocks[:used], blocks[used:]
        table[row, :used] = torch.tensor(own)
        slots += [own[at // BLOCK] * BLOCK + at % BLOCK for at in range(length - count, length)]
    more = padding * width if width else draw(st.integers(0, 3))
    slot_mapping = torch.tensor(slots + [-1] * more)
    return Step(counts + [0] * padding, lengths + [0] * padding, table, slot_mapping)


def ints(values: list[int]) -> torch.Tensor:
    """Return int32 numbers."""
    return torch.tensor(values, dtype=torch.int32)


def attended(reads: Reads, step: Step) -> torch.Tensor:
    """Return the outputs of the live tokens, with keys and values that depend only on the batch."""
    made = torch.Generator().manual_seed(step.tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    size = BLOCK * BLOCKS
    cache: Any = SimpleNamespace(k=[drawn(size, 1, 8)], v=[drawn(size, 1, 8)])
    q, k, v = drawn(step.tokens, 2, 8), drawn(step.tokens, 1, 8), drawn(step.tokens, 1, 8)
    return reads.attend(q, k, v, LAYER, cache, BLOCK)[: len(step.owners)]


def right(step: Step) -> torch.Tensor:
    """Return the outputs of one launch over the requests."""
    part = Part(
        seq_lens=ints(step.seq_lens),
        block_table=step.block_table,
        query_start_loc=ints(step.starts),
        num_tokens=step.tokens,
    )
    return attended(PagedReads((part,), step.slot_mapping, step.tokens), step)


def by_token(step: Step) -> SimpleNamespace:
    """Return metadata with the request and the keys of each token; padding tokens have no request."""
    padding = step.tokens - len(step.owners)
    return SimpleNamespace(
        q_to_req=ints(step.owners + [len(step.query_lens)] * padding),
        q_to_klen=ints(step.keys),
        block_table=step.block_table,
        num_actual_tokens=step.tokens,
    )


def flex_metadata(step: Step) -> SimpleNamespace:
    """Return metadata of blocks: a group visits the blocks of all its tokens' requests."""
    size, tokens = 2, step.tokens
    owners = step.owners + [0] * (tokens - len(step.owners))
    groups = -(-tokens // size)
    indices = torch.zeros(groups + 1, size * WIDTH, dtype=torch.int32)
    counts = torch.zeros(groups, dtype=torch.int32)
    for group in range(groups):
        rows = step.block_table[sorted(set(owners[group * size : (group + 1) * size]))]
        visited = rows[rows > 0]
        indices[group, : len(visited)] = visited
        counts[group] = len(visited)
    logical = torch.full((len(step.seq_lens), BLOCKS), -1)
    for row, blocks in enumerate(step.block_table):
        for at, block in enumerate(blocks[blocks > 0].tolist()):
            logical[row, block] = at
    return SimpleNamespace(
        block_mask=SimpleNamespace(kv_num_blocks=counts[None, None]),
        persistent_kv_indices=indices,
        persistent_doc_ids=ints(owners),
        physical_to_logical=logical,
        seq_lens=ints(step.seq_lens),
        query_start_loc=ints(step.starts),
        decode_offset=ints([n - c for n, c in zip(step.seq_lens, step.query_lens, strict=True)]),
        num_actual_tokens=tokens,
        q_block_size=size,
        kv_block_size=BLOCK,
    )


@given(steps())
def test_rows_found_by_the_token_are_those_of_its_request(step: Step) -> None:
    """A request and a number of keys for each token give the attention of the batch, with padding tokens."""
    reads = vllm_readers.rocm_octave(by_token(step), step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


@given(steps(), st.data())
def test_a_token_of_another_request_is_seen(step: Step, data: st.DataObject) -> None:
    """A token with the request of another one has another output, because its keys are in other blocks."""
    metadata = by_token(step)
    at = data.draw(st.integers(0, len(step.owners) - 1))
    if len(set(step.owners)) == 1:
        return
    metadata.q_to_req[at] = (step.owners[at] + 1) % len(set(step.owners))
    reads = vllm_readers.rocm_octave(metadata, step.slot_mapping)
    assert not torch.allclose(attended(reads, step)[at], right(step)[at])


@given(steps())
def test_an_indexers_choice_of_all_keys_is_full_attention(step: Step) -> None:
    """With every key chosen, sparse attention by ``req_id_per_token`` is attention."""
    padding = step.tokens - len(step.owners)
    metadata = SimpleNamespace(
        req_id_per_token=ints(step.owners + [0] * padding),
        block_table=step.block_table,
        seq_lens=ints(step.seq_lens),
        query_start_loc=ints(step.starts),
        num_actual_tokens=step.tokens,
    )
    reads = vllm_readers.sparse_mla(metadata, step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


@given(steps())
def test_a_window_of_all_keys_is_full_attention(step: Step) -> None:
    """A list of KV slots for each token gives the attention of the batch."""
    slots = torch.full((step.tokens, 1, WIDTH * BLOCK), -1, dtype=torch.int32)
    for token, owner in enumerate(step.owners):
        count = step.keys[token]
        blocks = step.block_table[owner][torch.arange(count) // BLOCK]
        slots[token, 0, :count] = blocks * BLOCK + torch.arange(count) % BLOCK
    metadata = SimpleNamespace(
        decode_swa_indices=slots, decode_swa_lens=ints(step.keys), num_decode_tokens=step.tokens
    )
    reads = vllm_readers.sparse_swa(metadata, step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


@given(steps())
def test_blocks_under_a_mask_are_the_keys_of_the_request(step: Step) -> None:
    """Blocks of a group's requests, and a mask over physical positions, give the attention of the batch."""
    reads = vllm_readers.flex(flex_metadata(step), step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


def test_the_blocks_of_a_group_lie_in_the_builders_row() -> None:
    """More blocks than the view of a capture has are read on in its row, as a kernel does by the stride."""
    table = torch.tensor([[3, 5, 7, 9, 0]], dtype=torch.int32)
    step = Step([1], [16], table, torch.tensor([9 * BLOCK + 3]))
    metadata = flex_metadata(step)
    metadata.block_mask.kv_indices = metadata.persistent_kv_indices[None, None, :1, :1]  # of the capture
    reads = vllm_readers.flex(metadata, step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


def test_a_length_bounds_the_keys_of_blocks() -> None:
    """With a stale, shorter length the last keys are not seen, whatever the mask allows."""
    table = torch.tensor([[3, 5, 0, 0, 0]], dtype=torch.int32)
    step = Step([1], [7], table, torch.tensor([5 * BLOCK + 2]))
    metadata = flex_metadata(step)
    metadata.seq_lens.fill_(4)
    found = attended(vllm_readers.flex(metadata, step.slot_mapping), step)
    torch.testing.assert_close(found, right(step._replace(seq_lens=[4])))


@given(steps())
def test_lists_on_the_host_are_read_as_they_are(step: Step) -> None:
    """TurboQuant's loop over requests takes its offsets and lengths from host tensors, and keeps them."""
    metadata = SimpleNamespace(
        seq_lens=ints(step.seq_lens),
        seq_lens_cpu=ints(step.seq_lens),
        query_start_loc_cpu=ints(step.starts),
        block_table=step.block_table,
        num_actual_tokens=step.tokens,
        num_decodes=0,
        num_decode_tokens=0,
        is_prefill=True,
    )
    reads = vllm_readers.turboquant(metadata, step.slot_mapping)
    metadata.seq_lens.fill_(1)
    metadata.seq_lens_cpu.fill_(1)
    torch.testing.assert_close(attended(reads, step), right(step))


@given(steps(width=1), st.integers(0, 2))
def test_decodes_before_a_loop_over_requests_are_one_launch(step: Step, more: int) -> None:
    """If decodes precede requests with host lists, the model runs both kinds of launch."""
    decodes = max(len(step.owners) - more, 0)
    metadata = SimpleNamespace(
        seq_lens=ints(step.seq_lens),
        seq_lens_cpu=ints(step.seq_lens),
        query_start_loc_cpu=ints(step.starts),
        block_table=step.block_table,
        num_actual_tokens=step.tokens,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        is_prefill=True,
    )
    reads = vllm_readers.turboquant(metadata, step.slot_mapping)
    assert len(reads.parts) == 1 + bool(decodes)
    torch.testing.assert_close(attended(reads, step), right(step))


@given(step=steps(width=2), ragged=st.booleans())
def test_queries_are_as_many_in_each_request_unless_offsets_say_otherwise(
    step: Step, *, ragged: bool
) -> None:
    """FlashInfer's decode divides tokens by requests, or takes offsets; AITER's takes offsets."""
    rows = len(step.seq_lens)
    decode = SimpleNamespace(
        seq_lens=ints(step.seq_lens),
        block_tables=step.block_table,
        q_cu_seq_lens=ints(step.starts) if ragged else None,
        q_len_per_req=2,
        max_seq_len=40,
        max_query_len=2,
    )
    metadata = SimpleNamespace(
        decode=decode,
        decode_metadata=decode,
        seq_lens=ints(step.seq_lens),
        block_table=step.block_table,
        query_start_loc=ints(step.starts),
        num_decodes=rows,
        num_decode_tokens=step.tokens,
        num_actual_tokens=step.tokens,
        max_seq_len=40,
        causal=True,
    )
    readers = (vllm_readers.flashinfer, vllm_readers.rocm_aiter_flash_attention)
    for reads in [reader(metadata, step.slot_mapping) for reader in readers]:
        torch.testing.assert_close(attended(reads, step), right(step))


@pytest.mark.parametrize("queries", [1, 2])
def test_an_indexers_row_is_a_token_or_a_request_with_as_many(queries: int) -> None:
    """A table with a row for each request serves all its tokens; one with a row for each token serves it."""
    table = torch.tensor([[3, 5, 0, 0, 0], [2, 0, 0, 0, 0]], dtype=torch.int32)
    slots = [5 * BLOCK + at for at in range(2)] + [2 * BLOCK + 1 + at for at in range(2)]
    step = Step([2, 2], [6, 3], table, torch.tensor(slots))
    rows = table if queries == 2 else table.repeat_interleave(2, 0)
    decode = SimpleNamespace(seq_lens=ints(step.keys).view(-1, queries), block_table=rows)
    metadata = SimpleNamespace(decode=decode, num_decode_tokens=4)
    reads = vllm_readers.indexer(metadata, step.slot_mapping)
    torch.testing.assert_close(attended(reads, step), right(step))


def test_a_request_that_is_not_there_is_refused() -> None:
    """A live token whose request is past the table raises; a padding token's request is not read."""
    step = Step([1], [2], torch.tensor([[3, 0, 0, 0, 0]], dtype=torch.int32), torch.tensor([13]))
    metadata = by_token(step)
    metadata.q_to_req[0] = 7
    with pytest.raises((IndexError, KernelRefusal)):
        attended(vllm_readers.rocm_octave(metadata, step.slot_mapping), step)
