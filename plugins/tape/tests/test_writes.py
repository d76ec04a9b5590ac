"""`write` writes a tensor of any layout: dense, strided, expanded, with overlapping windows, or empty."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact_tape.writes import write

quick = settings(derandomize=True, deadline=None)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sizes and strides, and return a view with them and its base tensor."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    offset = draw(st.integers(0, 3))
    base = torch.arange(64)
    return base.as_strided(sizes, strides, offset), base


@quick
@given(views(), st.sampled_from([torch.int64, torch.float32, torch.bool, torch.int8, torch.uint16]))
def test_a_view_has_the_new_contents_and_nothing_else_changes(
    drawn: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """After a write every element is new, and memory outside the view is as before."""
    of_numbers, numbers = drawn
    base = numbers.to(dtype)
    view = base.as_strided(of_numbers.shape, of_numbers.stride(), of_numbers.storage_offset())
    mine = set(of_numbers.flatten().tolist())
    new = torch.arange(64).flip(0).to(dtype)
    wanted = new.as_strided(view.shape, view.stride(), view.storage_offset()).clone()
    before = base.tolist()
    write(view, wanted)
    assert torch.equal(view.long(), wanted.long())
    assert [base.tolist()[i] for i in range(64) if i not in mine] == [
        before[i] for i in range(64) if i not in mine
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_view_of_narrow_floats_is_written(dtype: torch.dtype) -> None:
    """An expanded view of float8 has the new contents."""
    view = torch.zeros(1, 3).to(dtype).expand(4, 3)
    write(view, torch.full((4, 3), 2.0).to(dtype))
    assert view.float().unique().tolist() == [2.0]
