"""Properties of the Triton kernels under Triton's interpreter; ``test_triton.py`` runs them in a process.

Each is compared with the portable kernel without host reads, as it runs on a GPU. Blocks are small, so that a
row needs several programs, and a program several turns.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton.language as tl

from graphpact.errors import KernelRefusal
from graphpact_kernels import _library, _triton_indices, indices, schedule_size

EXAMPLES = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # they hold no state
)
INT = {"dtype": torch.int32}
COLUMNS = 48
PAGE_SIZES = st.sampled_from([1, 3, 16])


@pytest.fixture(autouse=True, params=[4, 1024])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable host reads in portable kernels; make the blocks of the Triton kernels small, or not."""
    monkeypatch.setattr(_library, "may_read", lambda tensor: False)
    for name in ("_ROWS", "_WIDTH"):
        monkeypatch.setattr(_triton_indices, name, tl.constexpr(request.param))
    if request.param == 4:
        monkeypatch.setattr(_triton_indices, "_MOST_PARTS", 2)
        monkeypatch.setattr(_triton_indices, "_MOST_CLEARING", 3)
    return


@st.composite
def tables(draw: st.DrawFn) -> torch.Tensor:
    """Draw ``req_to_token`` of 6 rows: dense, part of a wider tensor, or with strided columns."""
    made = torch.randint(1, 10**6, (12, 2 * COLUMNS), generator=torch.Generator().manual_seed(1)).to(**INT)
    return draw(
        st.sampled_from(
            [made[:6, :COLUMNS].contiguous(), made[:6, 5 : 5 + COLUMNS], made[::2, ::2], made.T[:6, :12]]
        )
    )


def requests(data: st.DataObject, count: int) -> torch.Tensor:
    """Draw ``[count]`` request rows, dense or every second element of a tensor."""
    rows = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    dense = torch.tensor(rows, dtype=dtype)
    return torch.stack([dense, dense + 99], dim=1)[:, 0] if data.draw(st.booleans()) else dense


def guarded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory filled with -7, and inside it an output of ``shape`` with dense rows."""
    memory = torch.full([size + 6 for size in shape], -7, **INT)
    return memory, memory[tuple(slice(3, 3 + size) for size in shape)]


@EXAMPLES
@given(
    data=st.data(),
    table=tables(),
    page_size=PAGE_SIZES,
    window=st.sampled_from([0, 0, 1, 7, 30]),
    room=st.sampled_from([-2, 0, 11]),
)
def test_paged_indices_equal_the_portable_kernel(
    data: st.DataObject, table: torch.Tensor, page_size: int, window: int, room: int
) -> None:
    """Offsets, pages, last pages and the rest are equal, with windows, fake rows and a small buffer."""
    real, fake = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 1))
    count = real + fake
    lens = data.draw(st.lists(st.integers(0, COLUMNS + 9), min_size=count, max_size=count))
    num_q = None
    if data.draw(st.booleans()):
        num_q = torch.tensor([data.draw(st.integers(0, n)) for n in lens], dtype=torch.int64)
    width = 0 if num_q is not None else data.draw(st.integers(1, 4))
    rows = requests(data, real)
    pages = sum(-(-n // page_size) for n in lens)
    capacity = max(0, pages + room)
    results = []
    for fill in (indices._fill_paged_indices, _triton_indices.fill_paged_indices):
        memory, outputs = zip(*(guarded(size) for size in (count + 1, capacity, count)), strict=True)
        fill(table, rows, torch.tensor(lens, dtype=torch.int64), num_q, width, window, page_size, *outputs)
        results.append([tensor.tolist() for tensor in memory])
    assert results[1] == results[0]


@EXAMPLES
@given(
    data=st.data(),
    table=tables(),
    page_size=PAGE_SIZES,
    uncounted=st.integers(0, 3),
    offsets=st.sampled_from([0, 1]),
)
def test_a_page_table_equals_the_portable_kernel(
    data: st.DataObject, table: torch.Tensor, page_size: int, uncounted: int, offsets: int
) -> None:
    """Lengths, optional offsets and the whole table are equal, even if wider than ``req_to_token``."""
    bs, width = data.draw(st.integers(0, 7)), data.draw(st.sampled_from([1, 5, COLUMNS, COLUMNS + 7]))
    lens = torch.tensor(
        data.draw(st.lists(st.integers(0, COLUMNS + 9), min_size=bs, max_size=bs)), dtype=torch.int64
    )
    rows = requests(data, bs)
    results = []
    for fill in (indices._fill_page_table, _triton_indices.fill_page_table):
        memory, outputs = zip(*(guarded(*shape) for shape in ((bs,), (bs + 1,), (bs, width))), strict=True)
        fill(
            *(table, rows, lens, uncounted, page_size, outputs[0]),
            outputs[1] if offsets else None,
            outputs[2],
        )
        results.append([tensor.tolist() for tensor in memory])
    assert results[1] == results[0]


@EXAMPLES
@given(queries=st.lists(st.integers(0, 70), max_size=9), spare=st.integers(0, 9), data=st.data())
def test_a_schedule_equals_the_portable_kernel(queries: list[int], spare: int, data: st.DataObject) -> None:
    """Query blocks, key blocks and the zeros around them are equal, to the end of the buffer."""
    bs = len(queries)
    keys = data.draw(st.lists(st.integers(0, 300), min_size=bs, max_size=bs))
    offsets = torch.tensor([0, *queries], **INT).cumsum(0).to(**INT)
    results = []
    for schedule in (indices._schedule_attention, _triton_indices.schedule_attention):
        memory, out = guarded(schedule_size(bs) + spare)
        schedule(offsets, torch.tensor(keys, **INT), out)
        results.append(memory.tolist())
    assert results[1] == results[0]


def test_sizes_that_do_not_agree_are_refused() -> None:
    """A kernel on raw memory refuses tensors of other sizes, and outputs that are not dense."""
    table, rows, lens = torch.ones(2, 8, **INT), torch.tensor([0, 1]), torch.tensor([2, 3])

    def new(size: int, step: int = 1) -> torch.Tensor:
        return torch.zeros(size * step, **INT)[::step]

    fill = _triton_indices.fill_paged_indices
    with pytest.raises(KernelRefusal, match="2 rows of 2 requests: kv_indptr has 2 entries, it needs 3"):
        fill(table, rows, lens, None, 1, 0, 1, new(2), new(9), new(2))
    with pytest.raises(KernelRefusal, match="num_q has 1 entries, it needs 2"):
        fill(table, rows, lens, lens[:1], 1, 0, 1, new(3), new(9), new(2))
    with pytest.raises(KernelRefusal, match=r"kv_indices has strides \(2,\)"):
        fill(table, rows, lens, None, 1, 0, 1, new(3), new(9, 2), new(2))
    with pytest.raises(KernelRefusal, match="3 rows of page_table: req_pool_indices has 2 entries"):
        _triton_indices.fill_page_table(table, rows, lens, 0, 1, new(2), None, new(12).view(3, 4))
    with pytest.raises(KernelRefusal, match="2 requests: schedule has 8 entries, it needs 17"):
        _triton_indices.schedule_attention(new(3), new(2), new(8))
