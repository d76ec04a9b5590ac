"""Operations of torch whose out-variant computes the same bits as the operation itself.

An out-variant has the name and the arguments of the operation and writes into a given tensor. Torch promises
nothing else: ``native_batch_norm.out`` computes other values for an input that is not contiguous. Therefore a
tape uses only the out-variants listed here. ``test_outs.py`` compares each of them with the operation, for
several layouts, dtypes and sizes. To add an operation here, add samples for it there.

Does not: list operations for which an out-variant has no advantage, such as those that draw random numbers.
"""

from typing import Any

import torch

_ELEMENTWISE = """
    abs acos asin atan bitwise_not ceil cos cosh erf erfc exp exp2 expm1 floor frac isinf isnan log
    log10 log1p log2 logical_not neg reciprocal relu round rsqrt sgn sigmoid sign sin sinh sqrt tan tanh trunc
    elu gelu hardsigmoid hardswish hardtanh leaky_relu mish nan_to_num silu softplus threshold
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar div.Tensor
    div.Scalar div.Tensor_mode floor_divide remainder.Tensor remainder.Scalar fmod.Tensor
    atan2 maximum minimum fmax fmin pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
    logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
    clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor
    where.self lerp.Tensor lerp.Scalar addcmul addcdiv masked_fill.Scalar masked_fill.Tensor
"""
_REDUCTIONS = """
    sum sum.dim_IntList mean mean.dim prod prod.dim_int amax amin max min max.dim min.dim argmax argmin
    all all.dim any any.dim cumsum cumprod logsumexp linalg_vector_norm var.correction std.correction
    var_mean.correction _softmax _log_softmax topk sort sort.stable native_layer_norm native_group_norm
    count_nonzero.dim_IntList
"""
_PRODUCTS = "mm bmm addmm baddbmm mv addmv dot convolution"
_MOVES = """
    cat stack gather index.Tensor index_select index_put index_add index_copy scatter.src scatter.value
    scatter_add scatter_reduce.two take embedding tril triu flip roll repeat constant_pad_nd
    searchsorted.Tensor bucketize.Tensor complex polar histc
"""
_FACTORIES = """
    arange arange.start_step eye full linspace ones zeros
    full_like ones_like zeros_like new_full new_ones new_zeros
"""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


EQUAL_OUTS = frozenset(
    _overload(name)
    for names in (_ELEMENTWISE, _REDUCTIONS, _PRODUCTS, _MOVES, _FACTORIES)
    for name in names.split()
)
"""The operations, as overloads. Source: the kernels of torch 2.11 to 2.13."""
