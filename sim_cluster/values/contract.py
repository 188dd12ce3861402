"""Contractions of a kernel as one batched matrix product.

`plan_contract` sorts the iter dims of both operands into batch, rows, columns and summed iter dims
once; the returned function only transposes, reshapes and calls `np.matmul`, which accumulates in
the storage type (fp32 for all narrow floats).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardwright.sim_cluster.values.elementwise import reduce_array

Contract = Callable[[np.ndarray, np.ndarray], np.ndarray]


def plan_contract(
    sizes: Sequence[int], lhs: Sequence[int], rhs: Sequence[int], over: Sequence[int]
) -> Contract:
    """A function (lhs, rhs) -> sum over `over` of lhs * rhs.

    Shapes: operands and result have one axis per iter dim of `sizes`, size 1 where the value does
    not span the iter dim; `lhs` and `rhs` name the iter dims the operands span. Iter dims of `over`
    that one operand lacks are summed in the other first.
    """
    left, right, summed = set(lhs), set(rhs), set(over)
    shared = [a for a in range(len(sizes)) if a in left and a in right]
    batch = [a for a in shared if a not in summed]
    rows = [a for a in sorted(left - right - summed)]
    columns = [a for a in sorted(right - left - summed)]
    inner = [a for a in shared if a in summed]
    only_left, only_right = (
        tuple(sorted(left & summed - right)),
        tuple(sorted(right & summed - left)),
    )
    scale = math.prod(sizes[a] for a in summed - left - right)
    # The operand with the earlier iter dim gives the rows, so that the result comes out in iter dim
    # order.
    swap = bool(columns) and (not rows or columns[0] < rows[0])
    if swap:
        rows, columns, only_left, only_right = columns, rows, only_right, only_left
    product = _product(sizes, batch, rows, columns, inner)

    def contract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if swap:
            a, b = b, a
        if only_left:
            a = reduce_array(a, "add", only_left)
        if only_right:
            b = reduce_array(b, "add", only_right)
        result = product(a, b)
        return result * np.asarray(scale, result.dtype) if scale != 1 else result

    return contract


def _product(
    sizes: Sequence[int],
    batch: Sequence[int],
    rows: Sequence[int],
    columns: Sequence[int],
    inner: Sequence[int],
) -> Contract:
    """The batched product with all shapes worked out."""

    def count(iter_dims: Sequence[int]) -> int:
        return math.prod(sizes[a] for a in iter_dims)

    rest = [a for a in range(len(sizes)) if a not in {*batch, *rows, *columns, *inner}]
    left_axes = (*batch, *rows, *inner, *columns, *rest)
    right_axes = (*batch, *inner, *columns, *rows, *rest)
    # Batch iter dims stay separate axes: merging those of a transposed view would copy it.
    outer = tuple(sizes[a] for a in batch)
    left_shape = (*outer, count(rows), count(inner))
    right_shape = (*outer, count(inner), count(columns))
    result_axes = (*batch, *rows, *columns, *inner, *rest)
    kept = tuple(sizes[a] for a in (*batch, *rows, *columns))
    result_shape = kept + (1,) * (len(inner) + len(rest))
    back = tuple(result_axes.index(a) for a in range(len(sizes)))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        left = a.transpose(left_axes).reshape(left_shape)
        right = b.transpose(right_axes).reshape(right_shape)
        result: np.ndarray = np.matmul(left, right)
        return result.reshape(result_shape).transpose(back)

    return product
