"""Sums of products in the other order, where that saves a pass around the ring.

A softmax's gradient needs, per row, the sum over keys j of p[j] (a . v[j]); summed the other way it
is a . (sum of p[j] v[j]), which needs nothing of `a` while keys come by. When `a` is the gradient
that arrives only after the forward result is known, that is a pass less; the inner sum is the
attention output itself, and is then carried once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import is_sum, pairing, permutation
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.ring.index import Index

_MOST_FACTORS = 64
"""Of a product that is looked at (our choice: a softmax's gradient has three)."""


@dataclass(frozen=True, slots=True)
class _Product:
    """`op` sums, along the index, the values `others` times `dot`; dim i of them is dim `order[i]`
    of the result of `dot`, whose operand number `moving` walks along the index.
    """

    op: Op
    others: tuple[Value, ...]
    dot: Op
    order: tuple[int, ...]
    moving: int


def reordered(index: Index) -> Graph:
    """The level with the sums it has of such products in the other order; itself without any."""
    graph = index.level.graph
    found = {p.op: p for op in graph.ops if index.ends(op) for p in _products(index, op)}
    if not found:
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        ops += _other_order(index, found[op]) if op in found else [op]
    return with_ops(graph, ops)


def _products(index: Index, op: Op) -> Iterator[_Product]:
    """The first way to read the operand of a sum as such a product."""
    (value, *_) = op.operands
    if not is_sum(op) or op.attrs.dims != (index.dims[value],):
        return
    leaves = list(islice(_leaves(index, value), _MOST_FACTORS + 1))
    if len(leaves) > _MOST_FACTORS:
        return
    for number, leaf in enumerate(leaves):
        dot, order = _contraction(index, leaf)
        others = (*leaves[:number], *leaves[number + 1 :])
        if dot is None or not others:
            continue
        moving = [i for i, v in enumerate(dot.operands) if v in index.derived]
        if len(moving) == 1 and _only_the_index_is_free(index, dot, moving[0]):
            yield _Product(op, others, dot, order, moving[0])
            return


def _leaves(index: Index, value: Value) -> Iterator[Value]:
    """The factors of a product, one that is there twice twice."""
    todo = [value]
    while todo:
        one = todo.pop()
        op = index.level.made.get(one)
        if op is None or op.name != "multiply":
            yield one
        else:
            todo += op.operands[::-1]


def _contraction(index: Index, value: Value) -> tuple[Op | None, tuple[int, ...]]:
    """The contraction behind a value that is only transposed or converted, and the dims of its
    result.
    """
    order = tuple(range(value.type.rank))
    op = index.level.made.get(value)
    while op is not None and ((moved := permutation(op)) is not None or op.name in CASTS):
        order = order if moved is None else tuple(moved[d] for d in order)
        op = index.level.made.get(op.operands[0])
    return (None if pairing(op) is None else op), order


def _only_the_index_is_free(index: Index, dot: Op, moving: int) -> bool:
    """True when the operand along the index has no other free dim, and the other one none of it."""
    free = dot.attrs.free_dims(*(v.type.rank for v in dot.operands))[moving]
    only = free == (index.dims[dot.operands[moving]],)
    return bool(only and dot.operands[1 - moving] not in index.dims)


def _other_order(index: Index, product: _Product) -> list[Op]:
    """The ops that make the same sum, the contraction's own sum last; they yield the result."""
    b = Builder(loc=product.op.loc)
    weights = reduce(b.multiply, product.others)
    attrs, along = product.dot.attrs, product.dot.operands[product.moving]
    batch = (attrs.lhs_batch, attrs.rhs_batch)[product.moving]
    where = index.dims[product.op.operands[0]]
    shared = tuple(product.order.index(d) for d in range(len(batch)))
    weights = b.in_type(weights, along.type.dtype)
    contract, kind = ((where,), (index.dims[along],)), product.op.result.type.dtype
    inner = b.dot(weights, along, contract, (shared, batch), kind)
    still = b.transpose(product.dot.operands[1 - product.moving], _layout(product, where))
    still = b.in_type(still, kind)
    last = tuple(range(weights.type.rank - 1, inner.type.rank))
    total = b.reduce(b.multiply(still, inner), "add", last)
    free = [d for d in range(weights.type.rank) if d not in (*shared, where)]
    made = [*shared, *free]
    total = b.transpose(total, [made.index(d) for d in sorted(made)])
    *ops, end = b.ops
    return [*ops, Op(end.name, end.operands, product.op.results, end.attrs, (), end.loc)]


def _layout(product: _Product, where: int) -> list[int]:
    """The dims of the operand beside the index: those it shares, its free ones in the order of the
    weights, and those summed over in the order of the other operand.
    """
    dot, moving = product.dot, product.moving
    a, ranks = dot.attrs, [v.type.rank for v in dot.operands]
    batch = (a.lhs_batch, a.rhs_batch)[1 - moving]
    free = a.free_dims(*ranks)[1 - moving]
    first = len(batch) + (0 if moving else 1)
    by_place = {product.order.index(first + k): d for k, d in enumerate(free)}
    assert where not in by_place, "the index is no dim of what stays"
    sums = (a.lhs_contract, a.rhs_contract)
    by_other = sorted(zip(sums[moving], sums[1 - moving], strict=True))
    return [*batch, *(by_place[d] for d in sorted(by_place)), *(d for _, d in by_other)]
