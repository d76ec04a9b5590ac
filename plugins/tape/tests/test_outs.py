"""The operations of ``graphpact_tape.outs``, each compared with its out-variant."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphpact_tape.nodes import out_variant
from graphpact_tape.outs import EQUAL_OUTS
from graphpact_tape.trees import tensors_of

CPU = torch.device("cpu")
COMMON = (torch.float32, torch.bfloat16, torch.int64)
RARE = (torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64)

Fill = Callable[..., torch.Tensor]
Samples = Callable[[Fill, tuple[int, ...]], list[tuple[Any, ...]]]
"""A function ``(fill, shape)`` that yields arguments of calls: positional ones, then a dict of named ones."""


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    return t


def _reversed(t: torch.Tensor) -> torch.Tensor:
    """Return a copy whose strides ascend."""
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _stepped(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with gaps between its elements, at an offset."""
    if not t.dim():
        return torch.stack([t, t])[1]
    wide = t.new_zeros([2 * n + 1 for n in t.shape])
    view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def _expanded(t: torch.Tensor) -> torch.Tensor:
    """Return a view that repeats the first part along the first axis."""
    return t[:1].expand(t.shape) if t.dim() and t.shape[0] else t


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


LAYOUTS = {
    f.__name__.removeprefix("_"): f for f in (_contiguous, _reversed, _stepped, _expanded, _channels_last)
}
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (3, 0, 2), (6, 4), (2, 3, 4), (2, 3, 4, 5))


def _filler(layout: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Fill:
    """Return a function that makes tensors of a layout with values from -3 to 3."""
    generator = torch.Generator().manual_seed(7)

    def fill(*shape: int, dtype: torch.dtype = dtype, below: int | None = None) -> torch.Tensor:
        if below is not None:  # indices
            return layout(torch.randint(0, max(below, 1), shape, generator=generator, dtype=dtype))
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 6 - 3
        if dtype.is_complex:
            values = torch.complex(values, values.flip(0) if values.dim() else values)
        return layout((values > 0 if dtype is torch.bool else values).to(dtype))

    return fill


I64 = torch.int64
ROWS = torch.tensor([4, 0, 2])
TWICE = torch.tensor([4, 4, 2])
TARGETS = torch.tensor([[4, 0, 2, 1], [4, 1, 2, 1]])


def _pairs(t: Fill, s: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return pairs: two tensors of one shape, a tensor and a row, a tensor and one without axes."""
    return [(t(*s), t(*s)), (t(*s), t(*s[-1:])), (t(*s), t())]


def _images(t: Fill, s: tuple[int, ...]) -> torch.Tensor:
    return t(2, 4, *(s[-2:] if len(s) > 1 else (5, 6)))


def _axes(s: tuple[int, ...]) -> tuple[int, int]:
    """Return the first and the last axis."""
    return 0, -1 if s else 0


def _each(names: str, samples: Samples) -> dict[str, Samples]:
    return dict.fromkeys(names.split(), samples)


SAMPLES: dict[str, Samples] = {
    **_each(
        """
        abs acos asin atan bitwise_not ceil cos cosh erf erfc exp exp2 expm1 floor frac isinf isnan log
        log10 log1p log2 logical_not neg reciprocal relu round rsqrt sgn sigmoid sign sin sinh sqrt tan tanh
        trunc elu hardsigmoid hardswish hardtanh leaky_relu mish nan_to_num silu softplus sum mean prod max
        min all any ones_like zeros_like
        """,
        lambda t, s: [(t(*s),)],
    ),
    **_each(
        """
        rsub.Tensor floor_divide remainder.Tensor fmod.Tensor atan2 maximum minimum fmax fmin
        pow.Tensor_Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or
        logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor clamp_min.Tensor
        clamp_max.Tensor
        """,
        _pairs,
    ),
    **_each(
        """
        add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar remainder.Scalar eq.Scalar ne.Scalar
        lt.Scalar le.Scalar gt.Scalar ge.Scalar bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
        clamp_min clamp_max bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar full_like
        """,
        lambda t, s: [(t(*s), 2)],
    ),
    **_each(
        "sum.dim_IntList mean.dim amax amin logsumexp",
        lambda t, s: [(t(*s), [axis] if s else [], keep) for axis in _axes(s) for keep in (False, True)],
    ),
    **_each(
        "prod.dim_int max.dim min.dim argmax argmin all.dim any.dim",
        lambda t, s: [(t(*s), axis, keep) for axis in _axes(s) for keep in (False, True)],
    ),
    **_each("cumsum cumprod sort", lambda t, s: [(t(*s), axis) for axis in _axes(s)]),
    **_each("_softmax _log_softmax", lambda t, s: [(t(*s), axis, False) for axis in _axes(s)]),
    **_each(
        "var.correction std.correction var_mean.correction",
        lambda t, s: [(t(*s), [-1] if s else None, {"correction": 1, "keepdim": True})],
    ),
    **_each("add.Tensor sub.Tensor", lambda t, s: [*_pairs(t, s), (t(*s), t(*s), {"alpha": 2}), (t(*s), 2)]),
    **_each("mul.Tensor div.Tensor", lambda t, s: [*_pairs(t, s), (t(*s), 2), (t(*s), 0.3)]),
    **_each("bitwise_left_shift.Tensor bitwise_right_shift.Tensor", lambda t, s: [(t(*s), t(*s).abs())]),
    **_each("addcmul addcdiv", lambda t, s: [(t(*s), t(*s), t(*s), {"value": 2})]),
    **_each("lerp.Tensor clamp.Tensor", lambda t, s: [(t(*s), t(*s), t(*s))]),
    "gelu": lambda t, s: [(t(*s), {"approximate": how}) for how in ("none", "tanh")],
    "threshold": lambda t, s: [(t(*s), 0, 2)],
    "div.Tensor_mode": lambda t, s: [(t(*s), t(*s), {"rounding_mode": how}) for how in ("floor", "trunc")],
    "pow.Scalar": lambda t, s: [(2, t(*s))],
    "pow.Tensor_Scalar": lambda t, s: [(t(*s), n) for n in (2, 2.0, 3, 0.5)],
    "clamp": lambda t, s: [(t(*s), -1, 1), (t(*s), None, 1)],
    "where.self": lambda t, s: [(t(*s, dtype=torch.bool), t(*s), other) for other in (t(*s), t())],
    "lerp.Scalar": lambda t, s: [(t(*s), t(*s), 0.3)],
    "masked_fill.Scalar": lambda t, s: [(t(*s), t(*s, dtype=torch.bool), 2)],
    "masked_fill.Tensor": lambda t, s: [(t(*s), t(*s, dtype=torch.bool), t())],
    "count_nonzero.dim_IntList": lambda t, s: [(t(*s), [-1] if s else [])],
    "linalg_vector_norm": lambda t, s: [(t(*s), 2, [-1] if s else None, True), (t(*s), 2)],
    "topk": lambda t, s: [(t(*s), min(2, s[-1]) if s else 1)],
    "sort.stable": lambda t, s: [(t(*s), {"stable": True, "dim": axis}) for axis in _axes(s)],
    "native_layer_norm": lambda t, s: [
        (t(*s), list(s[-1:]), *weights, 1e-5) for weights in ((None, None), (t(*s[-1:]), t(*s[-1:])))
    ],
    "native_group_norm": lambda t, s: [
        (_images(t, s), t(4), t(4), 2, 4, _images(t, s)[0, 0].numel(), 2, 1e-5)
    ],
    "convolution": lambda t, s: [
        (_images(t, s), t(4, 2, 1, 1), t(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
        (t(2, 4, 8), t(3, 4, 3), None, [1], [1], [1], False, [0], 1),
    ],
    "cat": lambda t, s: [([t(*s), t(*s)], axis) for axis in _axes(s)] + [([t(*s), t(0)], 0)],
    "stack": lambda t, s: [([t(*s), t(*s)], axis) for axis in (0, -1)],
    "gather": lambda t, s: [(t(*s), 0, t(*s, dtype=I64, below=s[0] if s else 1))],
    "tril": lambda t, s: [(t(*s), 1)],
    "triu": lambda t, s: [(t(*s), -1)],
    "flip": lambda t, s: [(t(*s), [0] if s else [])],
    "roll": lambda t, s: [(t(*s), [1], [0] if s else [])],
    "repeat": lambda t, s: [(t(*s), [2, *[1] * len(s)])],
    "constant_pad_nd": lambda t, s: [(t(*s), [1, 2], 3)],
    "searchsorted.Tensor": lambda t, s: [(t(9).sort().values, t(*s), {"right": True})],
    "bucketize.Tensor": lambda t, s: [(t(*s), t(9).sort().values)],
    "complex": lambda t, s: [(t(*s), t(*s))],
    "polar": lambda t, s: [(t(*s).abs(), t(*s))],
    "histc": lambda t, s: [(t(*s), 4, -3, 3)],
    "full": lambda t, s: [(list(s), 1, {"dtype": t().dtype})],
    "ones": lambda t, s: [(list(s), {"dtype": t().dtype})],
    "zeros": lambda t, s: [(list(s), {"dtype": t().dtype})],
    "new_full": lambda t, s: [(t(*s), [2, 3], 1)],
    "new_ones": lambda t, s: [(t(*s), [2, 3])],
    "new_zeros": lambda t, s: [(t(*s), [2, 3])],
}
"""The arguments of operations that take tensors of any shape."""

FIXED: dict[str, Callable[[Fill], list[tuple[Any, ...]]]] = {
    "mm": lambda t: [(t(5, n), t(n, 3)) for n in (0, 1, 7, 40)],
    "bmm": lambda t: [(t(2, 5, n), t(2, n, 3)) for n in (0, 1, 7, 40)],
    "addmm": lambda t: [
        (bias, t(5, n), t(n, 3), {"beta": 2, "alpha": 3}) for n in (0, 7) for bias in (t(3), t(5, 3))
    ],
    "baddbmm": lambda t: [(t(2, 5, 3), t(2, 5, n), t(2, n, 3), {"beta": 2}) for n in (0, 7)],
    "mv": lambda t: [(t(5, n), t(n)) for n in (0, 7)],
    "addmv": lambda t: [(t(5), t(5, n), t(n), {"alpha": 2}) for n in (0, 7)],
    "dot": lambda t: [(t(n), t(n)) for n in (0, 9)],
    "index.Tensor": lambda t: [
        (t(6, 4), [t(5, dtype=I64, below=6)]),
        (t(6, 4, 3), [None, t(2, 2, dtype=I64, below=4)]),
        (t(6, 4), [t(3, dtype=I64, below=6), t(3, dtype=I64, below=4)]),
    ],
    "index_select": lambda t: [(t(6, 4), axis, t(5, dtype=I64, below=4)) for axis in (0, 1)],
    "index_put": lambda t: [(t(6, 4), [ROWS], t(3, 4)), (t(6, 4), [TWICE], t(3, 4), True)],
    "index_add": lambda t: [(t(6, 4), 0, TWICE, t(3, 4))],
    "index_copy": lambda t: [(t(6, 4), 0, ROWS, t(3, 4))],
    "scatter.src": lambda t: [(t(6, 4), 0, TARGETS[:1], t(1, 4))],
    "scatter.value": lambda t: [(t(6, 4), 0, TARGETS, 2)],
    "scatter_add": lambda t: [(t(6, 4), 0, TARGETS, t(2, 4))],
    "scatter_reduce.two": lambda t: [(t(6, 4), 0, TARGETS, t(2, 4), how) for how in ("sum", "amax", "mean")],
    "take": lambda t: [(t(6, 4), t(3, 2, dtype=I64, below=24))],
    "embedding": lambda t: [(t(6, 4), t(2, 3, dtype=I64, below=6)), (t(6, 4), t(0, dtype=I64))],
    "arange": lambda t: [(7, {"dtype": t().dtype})],
    "arange.start_step": lambda t: [(1, 9, 3, {"dtype": t().dtype})],
    "eye": lambda t: [(4, {"dtype": t().dtype})],
    "linspace": lambda t: [(0, 1, 5, {"dtype": t().dtype})],
}
"""The arguments of operations that require certain shapes."""


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def _calls(op: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments for ``op``: every sample in every layout, dtype and shape."""
    fixed = FIXED.get(_name(op))
    for layout, dtype, shape in itertools.product(LAYOUTS.values(), dtypes, [()] if fixed else SHAPES):
        fill = _filler(layout, dtype)
        try:
            samples = fixed(fill) if fixed else SAMPLES[_name(op)](fill, shape)
        except (RuntimeError, IndexError, NotImplementedError):  # torch cannot make such a sample
            continue
        for args in samples:
            kwargs = args[-1] if isinstance(args[-1], dict) else {}
            yield args[: len(args) - bool(kwargs)], kwargs


def _bits(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()).view(torch.uint8)


@pytest.mark.few(15)
@pytest.mark.parametrize(
    "dtypes", [COMMON, pytest.param(RARE, marks=pytest.mark.sweep)], ids=["common", "rare"]
)
@pytest.mark.parametrize("op", sorted(EQUAL_OUTS, key=str), ids=_name)
@pytest.mark.filterwarnings("ignore")
def test_an_out_variant_that_is_trusted_computes_the_same_bits(
    op: Any, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A listed out-variant equals the operation bit for bit, for all layouts, dtypes and sizes."""
    variant, names, taken = out_variant(op)
    contiguous: set[bool] = set()
    takes_tensors = False
    for args, kwargs in _calls(op, dtypes):
        try:
            wanted = tensors_of(op(*args, **kwargs))
        except (
            RuntimeError,
            IndexError,
            NotImplementedError,
            TypeError,
        ):  # the operation does not support this dtype or shape
            continue
        outs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CPU) for t in wanted]
        for t in outs:
            t.untyped_storage().fill_(0xA5)
        kept = {name: value for name, value in kwargs.items() if name in taken}
        variant(*args, **kept, **dict(zip(names, outs, strict=True)))
        again = tensors_of(op(*args, **kwargs))
        for out, want, same in zip(outs, wanted, again, strict=True):
            assert out.shape == want.shape
            assert torch.equal(_bits(out), _bits(want)) or not torch.equal(_bits(want), _bits(same)), (
                args,
                kwargs,
            )
        contiguous.add(all(t.is_contiguous() for t in tensors_of(args)))
        takes_tensors |= bool(tensors_of(args))
    if contiguous or dtypes is COMMON:  # some operations support only common dtypes
        assert contiguous == ({True, False} if takes_tensors else {True})


def test_every_trusted_out_variant_has_samples() -> None:
    """The samples of this file and the list name the same operations."""
    assert SAMPLES.keys() | FIXED.keys() == {_name(op) for op in EQUAL_OUTS}
