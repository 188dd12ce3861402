"""Sinking: a loop invariant that is cheaper to make again than to read is made inside the loop.

Causal masks and filled tensors are the case: tracing computes them once before a scan over layers,
so every layer would read them from memory. A value qualifies when it follows from constants and
iota through cheap ops alone; transcendental tables (rotary embeddings) stay outside. The carries
that become unused are left to `dce`.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.analysis import invariant_carries
from compiler.ir.types import Graph, Op, Value
from compiler.passes.rewrite import with_operands, with_regions

_SOURCES = frozenset(("constant", "iota"))
_CHEAP = frozenset(
    [
        "add",
        "subtract",
        "multiply",
        "maximum",
        "minimum",
        "negate",
        "abs",
        "and",
        "or",
        "xor",
        "not",
        "compare",
        "select",
        "convert",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "slice",
    ]
)


def sink(graph: Graph) -> Graph:
    """`graph` with cheap constant invariants made inside the loops that read them."""
    makers: dict[Value, Op] = {}
    ops = []
    for op in graph.ops:
        if op.name == "loop":
            op = with_regions(op, (sink(_with_cones(op, makers)),))
        elif op.name in _SOURCES or _qualifies(op, makers):
            makers[op.result] = op
        ops.append(op)
    return Graph(graph.inputs, tuple(ops), graph.outputs, graph.name)


def _qualifies(op: Op, makers: Mapping[Value, Op]) -> bool:
    return op.name in _CHEAP and all(v in makers for v in op.operands)


def _with_cones(loop: Op, makers: Mapping[Value, Op]) -> Graph:
    """The body with its own copies of the cones of qualifying invariants."""
    body = loop.regions[0]
    made: dict[Value, Value] = {}
    clones: list[Op] = []
    inside: dict[Value, Value] = {}
    for i in invariant_carries(loop):
        if loop.operands[i] in makers:
            inside[body.inputs[i]] = _clone(loop.operands[i], makers, made, clones)
    if not inside:
        return body
    ops = [_reading(op, inside) for op in body.ops]
    return Graph(body.inputs, (*clones, *ops), body.outputs, body.name)


def _clone(
    value: Value, makers: Mapping[Value, Op], made: dict[Value, Value], clones: list[Op]
) -> Value:
    """A copy of `value` made by ops appended to `clones`; shared parts are copied once."""
    if value not in made:
        op = makers[value]
        operands = tuple(_clone(v, makers, made, clones) for v in op.operands)
        result = Value(value.type)
        clones.append(Op(op.name, operands, (result,), op.attrs, (), op.loc))
        made[value] = result
    return made[value]


def _reading(op: Op, inside: Mapping[Value, Value]) -> Op:
    return with_operands(op, tuple(inside.get(v, v) for v in op.operands))
