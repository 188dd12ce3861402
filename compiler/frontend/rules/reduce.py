"""`reduce`: the body becomes a kind; an init that is not the identity is applied with one
elementwise op.

A reduce of several operands whose results do not mix is split. One that keeps the position beside
the largest or smallest element (argmax, argmin) becomes two reductions around a comparison; others
that mix operands are refused. A body of one operand that is no reduction of the machine is folded
(`fold.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.compiler.frontend.mlir import direction, producer, results_of
from shardwright.compiler.frontend.rules.fold import fold_dims
from shardwright.compiler.frontend.rules.registry import RefusedError, Site, Values, imports, refuse
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.types import Value

KINDS = {f"stablehlo.{name}": kind for kind, name in ELEMENTWISE_OF.items()}
"""The op of a body -> the reduction it stands for."""


@imports("stablehlo.reduce")
def reduce(site: Site) -> Values:
    """One `reduce` per operand."""
    count = len(site.operands) // 2
    dims = site.ints("dimensions")
    extreme = _extreme(site) if count == 2 else None
    if extreme is not None:
        return _positions(site, extreme, dims)
    if count == 1 and known_kinds(site, count) is None:
        return fold_dims(site, dims)
    kinds = reduction_kinds(site, count)
    return [
        _reduce_one(site, site.operands[i], site.operands[count + i], kinds[i], dims)
        for i in range(count)
    ]


def _reduce_one(site: Site, operand: Value, init: Value, kind: str, dims: tuple[int, ...]) -> Value:
    """Reduce `operand`, then combine with `init` unless it is the identity of `kind`."""
    return combine(site, kind, site.make.reduce(operand, kind, dims), init)


def combine(site: Site, kind: str, result: Value, init: Value) -> Value:
    """Combine every element with the scalar `init` by `kind`, unless it is the identity of that."""
    start = site.constant(init)
    if start is not None and np.array_equal(start, identity(kind, result.type.dtype)):
        return result
    if result.type.rank:
        init = site.make.broadcast(init, result.type.shape)
    return site.make.op(ELEMENTWISE_OF[kind], result, init)


def body_kind(site: Site, region: int = 0) -> str:
    """The reduction of a body of two scalars."""
    block = site.op.regions[region].blocks[0]
    (result,) = results_of(block)
    return _kind(site, block, result, set(block.arguments))


def _positions(site: Site, kind: str, dims: tuple[int, ...]) -> Values:
    """The extreme value (NaN if there is one) and the smallest index among those that equal it."""
    operand, index, start, _ = site.operands
    best = _reduce_one(site, operand, start, kind, dims)
    make = site.make
    hit = make.compare(operand, make.spread_back(best, dims, operand), "EQ")
    if operand.type.dtype.is_float:
        hit = make.op("or", hit, make.compare(operand, operand, "NE"))
    beyond = make.splat(identity("min", index.type.dtype), index.type)
    return best, make.reduce(make.op("select", hit, index, beyond), "min", dims)


_DEEPEST = 5
"""Operators on a way through what `_extreme` looks for, and one more."""


def _extreme(site: Site) -> str | None:
    """max or min when the body is JAX's argmax or argmin: the better of two elements (a NaN wins,
    then the smaller index) with its index.
    """
    block = site.op.regions[0].blocks[0]
    a, i, b, j = block.arguments
    given = [_expression(v, _DEEPEST) for v in results_of(block)]
    earlier = ("LT", i, j)
    for kind, better in (("max", ("GT", a, b)), ("min", ("LT", a, b))):
        wins = ("or", frozenset((better, ("NE", a, a))))
        tie = ("and", frozenset((("EQ", a, b), earlier)))
        first = ("or", frozenset((wins, tie)))
        if given == [("select", wins, a, b), ("select", first, i, j)]:
            return kind
    return None


def _expression(value: Any, depth: int) -> Any:
    """A value of a reducer as a term `depth` operators deep; `and` and `or` have no order."""
    op = producer(value)
    if op is None or not depth:
        return value
    parts = [_expression(v, depth - 1) for v in op.operands]
    name = op.name.removeprefix("stablehlo.")
    if name == "compare":
        return (direction(op.attributes["comparison_direction"]), *parts)
    return (name, frozenset(parts)) if name in ("and", "or") else (name, *parts)


def reduction_kinds(site: Site, count: int) -> list[str]:
    """The reduction of each operand, read off the body."""
    block = site.op.regions[0].blocks[0]
    arguments = list(block.arguments)
    rows = zip(results_of(block), arguments[:count], arguments[count:], strict=True)
    return [_kind(site, block, result, {old, new}) for result, old, new in rows]


def known_kinds(site: Site, count: int) -> list[str] | None:
    """As `reduction_kinds`; None where one of the results is no reduction of its operand alone."""
    try:
        return reduction_kinds(site, count)
    except RefusedError:
        return None


def _kind(site: Site, block: Any, result: Any, pair: set[Any]) -> str:
    """The reduction that makes `result` of the two arguments of `pair`."""
    made = producer(result)
    if made is not None and set(made.operands) == pair and made.name in KINDS:
        return KINDS[made.name]
    if len(block.arguments) > 2:
        refuse(
            "NCC_ISPP027",
            f"reduce requires one operand, got {len(block.arguments) // 2} that are mixed",
            "of such reductions only argmax and argmin are supported",
        )
    what = made.name if made is not None else "an argument"
    raise RefusedError(
        "NCC_EVRF001",
        f"{site.name.removeprefix('stablehlo.')} requires a body of add, multiply, maximum,"
        f" minimum, and, or, xor; got {what}",
    )
