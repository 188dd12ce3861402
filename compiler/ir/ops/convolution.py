"""`convolution`: windows of lhs slide over its spatial dims and are contracted with rhs.

Any dimension numbers, strides, paddings (negative ones crop), dilations of either side, and groups
of features or of the batch, as in StableHLO; a reversed window is a reversed rhs. Narrow floats
multiply exactly and accumulate in fp32; `dtype` is the element type the sum is rounded to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.factors import Factor, FactorKind
from shardwright.compiler.ir.opdef import FIRST, SECOND, Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.ops.shape import pad_array
from shardwright.compiler.ir.ops.window import window_array, window_count
from shardwright.compiler.ir.types import Op, TensorType, tensor_type


@dataclass(frozen=True, slots=True)
class ConvolutionAttrs:
    """Dimension numbers, then one entry per spatial dim, then groups and the result element type.

    `lhs` is (batch, feature, spatial...), `rhs` (output feature, input feature, spatial...), `out`
    (batch, feature, spatial...): which dim of the tensor plays each part. `low` and `high` pad the
    dilated lhs.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_groups: int
    batch_groups: int
    dtype: DType


def dilated(size: int, dilation: int) -> int:
    """Positions that `size` elements take with `dilation - 1` holes between neighbours."""
    return (size - 1) * dilation + 1 if size else 0


def _infer(attrs: ConvolutionAttrs, lhs: TensorType, rhs: TensorType) -> TensorType:
    _check_form(lhs, rhs, attrs)
    batch, feature, *space = (lhs.shape[d] for d in attrs.lhs)
    outputs, inputs, *taps = (rhs.shape[d] for d in attrs.rhs)
    _check_groups(batch, feature, outputs, inputs, attrs)
    sizes = [batch // attrs.batch_groups, outputs]
    for i, (length, size) in enumerate(zip(space, taps, strict=True)):
        padded = dilated(length, attrs.lhs_dilation[i]) + attrs.low[i] + attrs.high[i]
        sizes.append(window_count(padded, size, attrs.strides[i], attrs.rhs_dilation[i]))
    shape = [0] * len(sizes)
    for dim, size in zip(attrs.out, sizes, strict=True):
        shape[dim] = size
    return tensor_type(tuple(shape), attrs.dtype)


def _check_form(lhs: TensorType, rhs: TensorType, attrs: ConvolutionAttrs) -> None:
    """Refuse ranks and attribute lengths that do not match."""
    rank = len(attrs.lhs)
    if rank < 2 or not lhs.rank == rhs.rank == rank == len(attrs.rhs) == len(attrs.out):
        raise mismatch(f"operands of rank {rank}", f"{lhs} and {rhs}")
    for what, dims in (("lhs", attrs.lhs), ("rhs", attrs.rhs), ("out", attrs.out)):
        check_dims(f"{what} dims", dims, rank)
    per_dim = (attrs.strides, attrs.low, attrs.high, attrs.lhs_dilation, attrs.rhs_dilation)
    if any(len(given) != rank - 2 for given in per_dim):
        raise mismatch(f"{rank - 2} spatial dims", per_dim)
    if min((*attrs.strides, *attrs.lhs_dilation, *attrs.rhs_dilation), default=1) < 1:
        raise mismatch("strides and dilations of 1 or more", per_dim)
    if lhs.dtype is not rhs.dtype:
        raise mismatch("operands of one element type", f"{lhs.dtype.value} and {rhs.dtype.value}")


def _check_groups(
    batch: int, feature: int, outputs: int, inputs: int, attrs: ConvolutionAttrs
) -> None:
    """Refuse features and batches that groups do not divide."""
    groups, batches = attrs.feature_groups, attrs.batch_groups
    if min(groups, batches) != 1:
        raise mismatch("groups of features or of the batch", (groups, batches))
    if feature != inputs * groups:
        raise mismatch(f"{inputs * groups} input features ({groups} groups of {inputs})", feature)
    if outputs % (groups * batches) or batch % batches:
        need = f"output features and batch divisible by {groups * batches} groups"
        raise mismatch(need, (outputs, batch))


def _flops(op: Op) -> int:
    """Products with elements of lhs; those with the zeros between them are not counted."""
    rhs = op.operands[1].type
    depth = math.prod(rhs.shape[d] for d in op.attrs.rhs[1:])
    products = 2 * op.result.type.num_elements * depth
    return int(products // math.prod(op.attrs.lhs_dilation))


def _reference(op: Op, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    attrs, out = op.attrs, op.result.type
    lhs, rhs = widen(lhs).transpose(attrs.lhs), widen(rhs).transpose(attrs.rhs)
    wide = np.float32 if out.dtype in (DType.BF16, DType.F16) else out.dtype.numpy
    none = (0, 0)
    interior = tuple(d - 1 for d in attrs.lhs_dilation)
    lhs = pad_array(lhs, 0, none + attrs.low, none + attrs.high, none + interior)
    dims = tuple(range(2, lhs.ndim))
    count = tuple(out.shape[d] for d in attrs.out[2:])
    starts = (0,) * len(dims)
    windows = window_array(
        lhs, dims, starts, count, attrs.strides, rhs.shape[2:], attrs.rhs_dilation
    )
    parts = attrs.feature_groups * attrs.batch_groups
    split_dim = 1 if attrs.feature_groups > 1 else 0
    groups = zip(
        np.split(windows.astype(wide, copy=False), parts, axis=split_dim),
        np.split(rhs.astype(wide, copy=False), parts, axis=0),
        strict=True,
    )
    taps = [1, *range(2 + len(dims), 2 + 2 * len(dims))]
    products = [np.tensordot(w, r, (taps, [1, *dims])) for w, r in groups]
    joined = np.moveaxis(np.concatenate(products, axis=-1), -1, 1)
    back = tuple(attrs.out.index(d) for d in range(joined.ndim))
    return joined.transpose(back).astype(out.dtype.numpy, copy=False)


def _factors(op: Op) -> list[Factor]:
    """Batch, input and output features, and dims that windows of one element do not leave. What
    groups split on one side and the output features are the same groups; of input features that
    groups split, and of a batch, no part gives a part while it has several of them.
    """
    a, taps = op.attrs, [op.operands[1].type.shape[d] for d in op.attrs.rhs[2:]]
    found = []
    if a.batch_groups == 1:
        found.append(Factor(((0, a.lhs[0]), (2, a.out[0]))))
    if a.feature_groups == 1:
        found.append(Factor(((0, a.lhs[1]), (1, a.rhs[1])), FactorKind.COMBINED))
    outputs = ((1, a.rhs[0]), (2, a.out[1]))
    if (split := grouped_dim(a)) is None:
        found.append(Factor(outputs))
    else:
        found.append(Factor(((0, split), *outputs), FactorKind.GROUPED))
    rows = zip(taps, a.strides, a.low, a.high, a.lhs_dilation, strict=True)
    still = [k for k, row in enumerate(rows, 2) if row == (1, 1, 0, 0, 1)]
    return found + [Factor(((0, a.lhs[k]), (2, a.out[k]))) for k in still]


def grouped_dim(a: ConvolutionAttrs) -> int | None:
    """The dim of lhs that groups split, if there are several."""
    if a.feature_groups > 1:
        return a.lhs[1]
    return a.lhs[0] if a.batch_groups > 1 else None


def in_fewer_groups(a: ConvolutionAttrs, ways: int) -> ConvolutionAttrs:
    """The attributes of one of `ways` equal shares of the groups, which `ways` divides."""
    if a.feature_groups > 1:
        return replace(a, feature_groups=a.feature_groups // ways)
    return replace(a, batch_groups=a.batch_groups // ways)


define(
    "convolution",
    Kind.CONTRACTION,
    ConvolutionAttrs,
    _infer,
    _reference,
    flops=_flops,
    linear=(FIRST, SECOND),
    factors=_factors,
)
