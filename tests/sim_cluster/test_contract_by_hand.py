"""Contractions of a kernel against sums that are written out, one operand of ones and twos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.sim_cluster.values.contract import plan_contract

SIZES = (2, 3, 4)
"""Iter dims 0, 1 and 2; a fourth, where there is one, has 5."""


def spanning(iter_dims: Sequence[int], sizes: Sequence[int], first: int) -> np.ndarray:
    """An operand of whole numbers over some iter dims, size 1 along the others."""
    shape = tuple(size if a in iter_dims else 1 for a, size in enumerate(sizes))
    return (np.arange(np.prod(shape), dtype=np.float32) + first).reshape(shape)


@pytest.mark.parametrize(
    ("lhs", "rhs", "over"),
    [
        ((0, 1), (1, 2), (1,)),  # rows, columns
        ((1, 2), (0, 1), (1,)),  # the second operand has the earlier iter dim
        ((0, 1, 2), (0, 1, 2), (2,)),  # batches
        ((0, 1, 2), (0, 2), (2,)),  # a batch and rows alone
        ((0, 2), (0, 1, 2), (2,)),  # a batch and columns alone
        ((0, 1), (1,), (0, 1)),  # an iter dim of the first alone is summed
        ((1,), (1, 2), (1, 2)),  # of the second alone
        ((2, 1), (0, 1), (1, 2, 0)),  # of each, turned round
        ((0,), (2,), ()),  # nothing is summed
        ((0, 1, 2), (0, 1, 2), (0, 1, 2)),  # all of it
        ((0,), (0,), (0, 2)),  # an iter dim of neither counts as often as it has points
        ((), (1,), (1, 2)),
    ],
)
def test_sums_of_products(lhs: Sequence[int], rhs: Sequence[int], over: Sequence[int]) -> None:
    a, b = spanning(lhs, SIZES, 1), spanning(rhs, SIZES, 2)
    whole = np.broadcast_to(a * b, np.broadcast_shapes(a.shape, b.shape))
    wanted = whole.sum(axis=tuple(over), keepdims=True)
    for iter_dim in set(over) - set(lhs) - set(rhs):
        wanted = wanted * SIZES[iter_dim]
    found = plan_contract(SIZES, lhs, rhs, over)(a, b)
    assert found.shape == wanted.shape and found.dtype == np.float32
    assert found.tolist() == wanted.tolist()


def test_a_product_of_two_by_two() -> None:
    """[[1, 2], [3, 4]] x [[5, 6], [7, 8]] = [[19, 22], [43, 50]]; twice, over an iter dim of two
    points that neither spans."""
    a = np.array([[1, 2], [3, 4]], np.float32).reshape(2, 2, 1, 1)
    b = np.array([[5, 6], [7, 8]], np.float32).reshape(1, 2, 2, 1)
    once = plan_contract((2, 2, 2, 2), (0, 1), (1, 2), (1,))(a, b)
    assert once.reshape(2, 2).tolist() == [[19, 22], [43, 50]]
    twice = plan_contract((2, 2, 2, 2), (0, 1), (1, 2), (1, 3))(a, b)
    assert twice.reshape(2, 2).tolist() == [[38, 44], [86, 100]]
