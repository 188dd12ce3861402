"""`dot_general`: batched contraction of two tensors.

The result dims are batch, then the free dims of lhs, then those of rhs, as in StableHLO. Narrow
floats multiply exactly and accumulate in fp32; `dtype` is the element type the sum is rounded to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.factors import Factor, FactorKind, in_pairs
from shardwright.compiler.ir.opdef import FIRST, SECOND, Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.roles import DIMS, PLACES
from shardwright.compiler.ir.types import Op, TensorType, tensor_type


@dataclass(frozen=True, slots=True)
class DotGeneralAttrs:
    """Dimension numbers and the result element type (StableHLO's preferred element type)."""

    lhs_batch: tuple[int, ...] = field(metadata=PLACES)
    rhs_batch: tuple[int, ...] = field(metadata=PLACES)
    lhs_contract: tuple[int, ...] = field(metadata=DIMS)
    rhs_contract: tuple[int, ...] = field(metadata=DIMS)
    dtype: DType

    def contract(self, side: int) -> tuple[int, ...]:
        """The contracted dims of one operand."""
        return (self.lhs_contract, self.rhs_contract)[side]

    def batch(self, side: int) -> tuple[int, ...]:
        """The batch dims of one operand."""
        return (self.lhs_batch, self.rhs_batch)[side]

    def free_dims(self, lhs_rank: int, rhs_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The free dims of lhs and of rhs, ascending."""
        lhs_used = set(self.lhs_batch + self.lhs_contract)
        rhs_used = set(self.rhs_batch + self.rhs_contract)
        lhs = tuple(d for d in range(lhs_rank) if d not in lhs_used)
        return lhs, tuple(d for d in range(rhs_rank) if d not in rhs_used)


def _infer(attrs: DotGeneralAttrs, lhs: TensorType, rhs: TensorType) -> TensorType:
    check_dims("lhs dims", attrs.lhs_batch + attrs.lhs_contract, lhs.rank)
    check_dims("rhs dims", attrs.rhs_batch + attrs.rhs_contract, rhs.rank)
    for what, lhs_dims, rhs_dims in (
        ("batch", attrs.lhs_batch, attrs.rhs_batch),
        ("contracting", attrs.lhs_contract, attrs.rhs_contract),
    ):
        left, right = [lhs.shape[d] for d in lhs_dims], [rhs.shape[d] for d in rhs_dims]
        if left != right:
            raise mismatch(f"equal {what} dims", f"lhs {_sizes(left)} and rhs {_sizes(right)}")
    if lhs.dtype is not rhs.dtype:
        got = f"{lhs.dtype.value} and {rhs.dtype.value}"
        raise mismatch("operands of one element type", got)
    lhs_free, rhs_free = attrs.free_dims(lhs.rank, rhs.rank)
    shape = [lhs.shape[d] for d in attrs.lhs_batch + lhs_free] + [rhs.shape[d] for d in rhs_free]
    return tensor_type(tuple(shape), attrs.dtype)


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(str(s) for s in sizes) or "none"


def _flops(op: Op) -> int:
    lhs = op.operands[0].type
    contracted = math.prod(lhs.shape[d] for d in op.attrs.lhs_contract)
    return int(2 * contracted * op.result.type.num_elements)


def _reference(op: Op, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    attrs, out, lhs, rhs = op.attrs, op.result.type, widen(lhs), widen(rhs)
    wide = np.float32 if out.dtype.is_narrow else out.dtype.numpy
    lhs_free, rhs_free = attrs.free_dims(lhs.ndim, rhs.ndim)
    batch = [lhs.shape[d] for d in attrs.lhs_batch]
    depth = math.prod(lhs.shape[d] for d in attrs.lhs_contract)
    left = lhs.transpose(attrs.lhs_batch + lhs_free + attrs.lhs_contract)
    right = rhs.transpose(attrs.rhs_batch + attrs.rhs_contract + rhs_free)
    rows = math.prod(lhs.shape[d] for d in lhs_free)
    columns = math.prod(rhs.shape[d] for d in rhs_free)
    left = left.reshape(*batch, rows, depth).astype(wide, copy=False)
    right = right.reshape(*batch, depth, columns).astype(wide, copy=False)
    # BLAS adds terms in an order that depends on how operands lie in memory: here it may not.
    product = np.matmul(np.ascontiguousarray(left), np.ascontiguousarray(right))
    return cast(product.reshape(out.shape), out.dtype)


def _factors(op: Op) -> list[Factor]:
    """Batch and free dims go on; of a part of the contracted ones there are partial sums."""
    a, (lhs, rhs) = op.attrs, op.operands
    batch = list(zip(a.lhs_batch, a.rhs_batch, strict=True))
    lhs_free, rhs_free = a.free_dims(lhs.type.rank, rhs.type.rank)
    middle = len(batch) + len(lhs_free)
    summed = zip(a.lhs_contract, a.rhs_contract, strict=True)
    return [
        *(Factor(((0, i), (1, j), (2, d))) for d, (i, j) in enumerate(batch)),
        *in_pairs(0, lhs_free, 2, range(len(batch), middle)),
        *in_pairs(1, rhs_free, 2, range(middle, op.result.type.rank)),
        *(Factor(((0, i), (1, j)), FactorKind.COMBINED) for i, j in summed),
    ]


define(
    "dot_general",
    Kind.CONTRACTION,
    DotGeneralAttrs,
    _infer,
    _reference,
    flops=_flops,
    linear=(FIRST, SECOND),
    factors=_factors,
)
