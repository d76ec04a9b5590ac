"""Step outputs: named tensors, each with the axis of its rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from graphpact import ForwardMode, GraphShape, StepOutputs
from graphpact.buffers import Axis
from graphpact.errors import EngineError

COUNTS = st.integers(1, 6)
AXES: list[Axis] = ["bs", "tokens", "none"]


def _rows(axis: Axis, requests: int, tokens: int) -> int:
    return {"bs": requests, "tokens": tokens, "none": 3}[axis]


@settings(derandomize=True, max_examples=100)
@given(
    padded=st.tuples(COUNTS, COUNTS),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    axes=st.lists(st.sampled_from(AXES), min_size=1, max_size=4),
)
def test_rows_are_cut_by_the_declared_axis(
    padded: tuple[int, int], share: tuple[float, float], axes: list[Axis]
) -> None:
    """Each output is sliced to the live rows of its axis without a copy, except with axis none."""
    requests, tokens = padded
    live = [int(most * part) for most, part in zip(padded, share, strict=True)]
    tensors = [torch.randn(_rows(axis, requests, tokens), 2) for axis in axes]
    named = {f"out{i}": (t, a) for i, (t, a) in enumerate(zip(tensors, axes, strict=True))}
    outputs = StepOutputs(**named)
    cut = outputs.rows(*live)
    assert list(cut) == list(named)
    assert dict(cut.axes) == dict(outputs.axes)
    for (tensor, axis), name in zip(named.values(), named, strict=True):
        assert torch.equal(cut[name], tensor[: _rows(axis, *live)])
        assert cut[name].data_ptr() == tensor.data_ptr() or not len(cut[name])


def test_the_axis_decides_where_requests_are_as_many_as_tokens() -> None:
    """If there are as many tokens as requests, each output is sliced by its declared axis."""
    four = torch.arange(4)
    outputs = StepOutputs(logits=(four, "bs"), hidden_states=(four, "tokens"))
    outputs.require_rows(GraphShape(ForwardMode.EXTEND, 4, 4))
    cut = outputs.rows(2, 3)
    assert cut.logits.tolist() == [0, 1]
    assert cut["hidden_states"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((torch.zeros(2), "rows"), "output 'hidden' has the axis 'rows'"),
        (torch.zeros(2), "output 'hidden' has the axis None"),
        ((torch.zeros(2), "bs", 1), "output 'hidden' has the axis None"),
        ((torch.tensor(1.0), "bs"), "output 'hidden' is tensor"),
        (([1, 2], "tokens"), r"output 'hidden' is \[1, 2\], which has no rows"),
        ((None, "none"), "output 'hidden' is None"),
    ],
)
def test_an_output_without_rows_or_axis_is_refused(value: Any, says: str) -> None:
    """An output with an unknown or missing axis, or without rows, is refused by name."""
    with pytest.raises(EngineError, match=says) as error:
        StepOutputs(logits=(torch.zeros(2), "bs"), hidden=value)
    assert "help: " in str(error.value)


@pytest.mark.parametrize(("axis", "due"), [("bs", 2), ("tokens", 6)])
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_another_number_of_rows_is_refused(axis: Axis, due: int, rows: int) -> None:
    """A wrong number of rows is refused with the name, both counts and the shape."""
    shape = GraphShape(ForwardMode.TARGET_VERIFY, 2, 6)
    outputs = StepOutputs(logits=(torch.zeros(due), axis), hidden=(torch.zeros(rows), axis))
    message = rf"output 'hidden' has {rows} rows; its axis '{axis}' has {due} in target"
    with pytest.raises(EngineError, match=message):
        outputs.require_rows(shape)
    StepOutputs(hidden=(torch.zeros(rows), "none")).require_rows(shape)


def test_outputs_are_a_mapping_by_name() -> None:
    """Step outputs are a mapping; the error for a missing output names it and lists the existing ones."""
    logits = torch.ones(2)
    outputs = StepOutputs(logits=(logits, "bs"), hidden=(torch.zeros(3), "tokens"))
    assert list(outputs) == ["logits", "hidden"]
    assert len(outputs) == 2
    assert "hidden" in outputs
    assert "seqs" not in outputs
    assert outputs["logits"] is outputs.logits is logits
    with pytest.raises(EngineError, match="no output 'seqs'; it has logits, hidden"):
        _ = outputs["seqs"]
    with pytest.raises(EngineError, match="no output 'logits'; it has none"):
        _ = StepOutputs().logits
    assert repr(outputs) == (
        "StepOutputs(logits=(2,) torch.float32 by bs, hidden=(3,) torch.float32 by tokens)"
    )


def test_a_copy_has_memory_of_its_own() -> None:
    """A clone keeps its values and axes when the graph writes its outputs again."""
    logits = torch.ones(2)
    outputs = StepOutputs(logits=(logits, "bs"))
    kept = outputs.clone()
    logits.fill_(9)
    assert kept.logits.tolist() == [1, 1]
    assert dict(kept.axes) == {"logits": "bs"}


def test_outputs_are_a_tree_of_their_tensors() -> None:
    """Step outputs are a pytree: a driver can flatten them, replace the tensors, and keep the axes."""
    outputs = StepOutputs(logits=(torch.ones(2), "bs"), hidden=(torch.zeros(3), "tokens"))
    leaves, spec = pytree.tree_flatten(outputs)
    assert all(a is b for a, b in zip(leaves, outputs.values(), strict=True))
    doubled = pytree.tree_unflatten([leaf * 2 for leaf in leaves], spec)
    assert isinstance(doubled, StepOutputs)
    assert doubled.logits.tolist() == [2, 2]
    assert dict(doubled.axes) == dict(outputs.axes)
