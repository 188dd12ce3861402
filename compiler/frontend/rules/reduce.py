"""`reduce`: the body becomes a kind; an init that is not the identity is applied with one
elementwise op.

A reduce of several operands whose results do not mix is split; one that mixes them (argmax) is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.frontend.rules.registry import RefusedError, imports, refuse
from compiler.ir.ops import BroadcastInDimAttrs, ReduceAttrs
from compiler.ir.ops.reduce import ELEMENTWISE_OF, identity
from compiler.ir.types import Value

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

_KINDS = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "multiply",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
    "stablehlo.xor": "xor",
}


@imports("stablehlo.reduce")
def reduce(site: Site) -> Sequence[Value]:
    """One `reduce` per operand."""
    count = len(site.operands) // 2
    dims = site.ints("dimensions")
    kinds = reduction_kinds(site, count)
    return [
        _reduce_one(site, site.operands[i], site.operands[count + i], kinds[i], dims)
        for i in range(count)
    ]


def _reduce_one(site: Site, operand: Value, init: Value, kind: str, dims: tuple[int, ...]) -> Value:
    """Reduce `operand`, then combine with `init` unless it is the identity of `kind`."""
    result = site.emit("reduce", (operand,), ReduceAttrs(kind, dims)).result
    start = site.constant(init)
    if start is not None and np.array_equal(start, identity(kind, operand.type.dtype)):
        return result
    return combine(site, kind, result, init)


def combine(site: Site, kind: str, result: Value, init: Value) -> Value:
    """Apply the scalar `init` to every element of `result` by the reduction `kind`."""
    if result.type.rank:
        init = site.emit(
            "broadcast_in_dim", (init,), BroadcastInDimAttrs((), result.type.shape)
        ).result
    return site.emit(ELEMENTWISE_OF.get(kind, kind), (result, init)).result


def body_kind(site: Site, region: int = 0) -> str:
    """The reduction of a body of two scalars."""
    block = site.op.regions[region].blocks[0]
    (result,) = list(block.operations)[-1].operands
    return _kind(site, block, result, set(block.arguments))


def reduction_kinds(site: Site, count: int) -> list[str]:
    """The reduction of each operand, read off the body."""
    block = site.op.regions[0].blocks[0]
    arguments = list(block.arguments)
    results = list(list(block.operations)[-1].operands)
    return [
        _kind(site, block, results[i], {arguments[i], arguments[count + i]}) for i in range(count)
    ]


def _kind(site: Site, block: Any, result: Any, pair: set[Any]) -> str:
    """The reduction that makes `result` of the two arguments of `pair`."""
    producer = site.block_producer(block, result)
    if producer is not None and set(producer.operands) == pair and producer.name in _KINDS:
        return _KINDS[producer.name]
    if len(block.arguments) > 2:
        refuse(
            "NCC_ISPP027",
            f"reduce requires one operand, got {len(block.arguments) // 2} that are mixed",
            "argmax and argmin are not supported: compare with the maximum instead",
        )
    what = producer.name if producer is not None else "an argument"
    raise RefusedError(
        "NCC_EVRF001",
        f"{site.name.removeprefix('stablehlo.')} requires a body of add, multiply, maximum,"
        f" minimum, and, or, xor; got {what}",
    )
