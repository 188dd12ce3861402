"""`sort`: several operands reordered together along one dim.

The comparator is data: keys in order of weight, each an operand with a direction and an order of
its elements. Equal elements keep their places. Integers have one order; floats may be compared
bit by bit (`total`: -NaN < -inf < -0 < 0 < inf < NaN) or as numbers (`numeric`: zeros are equal,
all NaNs are equal and come after inf).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.compiler.ir.factors import Factor, along
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch
from shardwright.compiler.ir.types import Op, TensorType

ORDERS = ("total", "numeric")
DIRECTIONS = ("LT", "GT")


@dataclass(frozen=True, slots=True)
class SortAttrs:
    """`keys`: (operand, direction LT or GT, order) from the first compared to the last."""

    dim: int
    keys: tuple[tuple[int, str, str], ...]


def _infer(attrs: SortAttrs, *types: TensorType) -> tuple[TensorType, ...]:
    if not types or any(t.shape != types[0].shape for t in types):
        raise mismatch("operands of one shape", [str(t) for t in types])
    check_dims("dim", (attrs.dim,), types[0].rank)
    for operand, direction, order in attrs.keys:
        known = direction in DIRECTIONS and order in ORDERS
        if not known or not 0 <= operand < len(types):
            raise mismatch("keys (operand, LT or GT, total or numeric)", attrs.keys)
    if not attrs.keys:
        raise mismatch("at least one key", attrs.keys)
    return types


def _flops(op: Op) -> int:
    """n log2 n comparisons."""
    n = op.operands[0].type.shape[op.attrs.dim]
    return op.operands[0].type.num_elements * int(max(n - 1, 0)).bit_length()


def rank_of(x: np.ndarray, order: str) -> np.ndarray:
    """Integers that are ordered as the elements of `x`."""
    if x.dtype.kind in "iu":
        return x
    if x.dtype.kind == "b":
        return x.astype(np.int8)
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    if order == "numeric":
        wide = np.where(wide == 0, np.zeros((), wide.dtype), wide)
        wide = np.where(np.isnan(wide), np.asarray(np.nan, wide.dtype), wide)
    bits = wide.view(f"i{wide.dtype.itemsize}")
    mask = np.iinfo(bits.dtype).max
    return np.asarray(np.where(bits < 0, bits ^ mask, bits))


def _reference(op: Op, *args: np.ndarray) -> tuple[np.ndarray, ...]:
    keys = [rank_of(args[operand], order) for operand, _, order in op.attrs.keys]
    turned = [
        ~key if direction == "GT" else key
        for key, (_, direction, _) in zip(keys, op.attrs.keys, strict=True)
    ]
    order = np.lexsort(turned[::-1], axis=op.attrs.dim)
    return tuple(np.take_along_axis(a, order, axis=op.attrs.dim) for a in args)


def _factors(op: Op) -> list[Factor]:
    """All operands and results are reordered along one dim; the others walk together."""
    numbers = range(len(op.operands) + len(op.results))
    return [along(numbers, d) for d in range(op.operands[0].type.rank) if d != op.attrs.dim]


define("sort", Kind.SORT, SortAttrs, _infer, _reference, flops=_flops, factors=_factors)
