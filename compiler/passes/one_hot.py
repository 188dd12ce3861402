"""A one-hot matrix times a table becomes a gather of the table's rows.

A row of the product has one term that is not zero times something, so that the values are those of
the gather, and of no row where the index lies outside. Only an infinity or a NaN in a row that is
not picked shows: the product spreads it, the gather does not. That is why it is done where a
release of neuronx-cc is asked for that does it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import behind, pairing, permutation
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    CompareAttrs,
    DotGeneralAttrs,
    GatherAttrs,
)
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Graph, Op, Value


def one_hot_gathers(graph: Graph) -> Graph:
    """`graph` with gathers for products of one-hot matrices with tables."""
    made = graph.producers()
    return replaced(graph, lambda op, _: _gathered(op, made), one_hot_gathers)


def _gathered(op: Op, made: Mapping[Value, Op]) -> list[Op]:
    """The ops that make the product of a one-hot matrix; none for another op."""
    dims = pairing(op) if isinstance(op.attrs, DotGeneralAttrs) else None
    if dims is None or dims.lhs_batch or len(dims.lhs_contract) != 1:
        return []
    for side, contract in enumerate((dims.lhs_contract[0], dims.rhs_contract[0])):
        value, dim = _behind_casts(op.operands[side], contract, made)
        index = _index(value, dim, made)
        if index is not None:
            table_dim = (dims.rhs_contract, dims.lhs_contract)[side][0]
            return _rows(op, index, dim, table_dim, side)
    return []


def _behind_casts(value: Value, dim: int, made: Mapping[Value, Op]) -> tuple[Value, int]:
    """What a value was before conversions and transposes of matrices; and its `dim` there."""
    value = behind(value, made, lambda op: op.name in CASTS)
    while value.type.rank == 2 and (order := permutation(made.get(value))):
        dim = order[dim]
        value = behind(made[value].operands[0], made, lambda op: op.name in CASTS)
    return value, dim


def _index(value: Value, dim: int, made: Mapping[Value, Op]) -> Value | None:
    """What is compared with the counts along `dim`, of a one-hot value."""
    test = made.get(value)
    if test is None or not isinstance(test.attrs, CompareAttrs) or test.attrs.direction != "EQ":
        return None
    for counts, index in (test.operands, test.operands[::-1]):
        if (
            index.type.dtype.is_integer
            and _repeats(index, dim, made)
            and _counts(counts, dim, made)
        ):
            return index
    return None


def _repeats(value: Value, dim: int, made: Mapping[Value, Op]) -> bool:
    """Whether the elements of a value are the same all along a dim."""
    op = made.get(value)
    if op is None or not isinstance(op.attrs, BroadcastInDimAttrs):
        return False
    sizes = dict(zip(op.attrs.dims, op.operands[0].type.shape, strict=True))
    return sizes.get(dim, 1) == 1


def _counts(value: Value, dim: int, made: Mapping[Value, Op]) -> bool:
    """Whether the elements of a value are 0, 1, ... along a dim, whatever the others."""
    found = known_elements(made, value)
    if found is None:
        op = made.get(value)  # a large one: what is repeated
        if op is None or not isinstance(op.attrs, BroadcastInDimAttrs) or dim not in op.attrs.dims:
            return False
        return _counts(op.operands[0], op.attrs.dims.index(dim), made)
    shape = [-1 if d == dim else 1 for d in range(found.ndim)]
    return bool((found == np.arange(found.shape[dim]).reshape(shape)).all())


def _rows(op: Op, index: Value, dim: int, table_dim: int, side: int) -> list[Op]:
    """The table's rows at `index`, zeros where it lies outside, in the dims of the product."""
    b, table = Builder(loc=op.loc), op.operands[1 - side]
    rank = index.type.rank
    first = b.slice(index, (0,) * rank, [1 if d == dim else n for d, n in _sizes(index)])
    free = tuple(n for d, n in _sizes(index) if d != dim)
    places = b.reshape(first, free)
    left = table.type.rank - 1
    behind_free = side == 0
    rows = b.op(
        "gather",
        table,
        places,
        attrs=GatherAttrs(
            offset_dims=tuple(range(len(free), len(free) + left) if behind_free else range(left)),
            collapsed_slice_dims=(table_dim,),
            start_index_map=(table_dim,),
            index_vector_dim=len(free),
            slice_sizes=tuple(1 if d == table_dim else n for d, n in _sizes(table)),
        ),
    )
    count = table.type.shape[table_dim]
    last, least = (b.full(free, n, places.type.dtype) for n in (_last(count, places), 0))
    inside = b.op("and", b.compare(places, last, "LE"), b.compare(places, least, "GE"))
    at = range(len(free)) if behind_free else range(left, left + len(free))
    mask = b.broadcast(inside, rows.type.shape, tuple(at))
    zero = b.full(rows.type.shape, 0.0, rows.type.dtype)
    b.in_type(b.op("select", mask, rows, zero), op.result.type.dtype)
    return b.ops


def _last(count: int, places: Value) -> int:
    """The last of `count` places, or of those that an index can name."""
    return min(count - 1, int(np.iinfo(places.type.dtype.numpy).max))


def _sizes(value: Value) -> list[tuple[int, int]]:
    return list(enumerate(value.type.shape))
