"""Loop invariants that are made of constants alone move into the loop body, so that no mask is ever
stored.

What is cheap to make again (counts, comparisons, selections, broadcasts) is cloned into the body; a
transcendental function stays outside, at the size it has before it is broadcast, and enters the
body as an invariant carry.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.types import Graph, Op, Value
from compiler.lower.body import is_constant_like
from compiler.walks import answered

HEAVY = frozenset(
    (
        "cosine",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sqrt",
        "tanh",
    )
)


def sink_invariants(graph: Graph) -> Graph:
    """`graph` with light constant invariants cloned into its loops, nested loops first."""
    made: dict[Value, Op] = {}
    free: set[Value] = set()
    ops: list[Op] = []
    for op in graph.ops:
        if op.name == "loop":
            op = _sink(op, made, free)
        elif is_constant_like(op) and all(v in free for v in op.operands):
            free.update(op.results)
        ops.append(op)
        made.update(dict.fromkeys(op.results, op))
    return Graph(graph.inputs, tuple(ops), graph.outputs, graph.name)


def _sink(loop: Op, made: Mapping[Value, Op], free: set[Value]) -> Op:
    body = loop.regions[0]
    cloner = _Cloner(made)
    now: dict[Value, Value] = {}
    for operand, before, after in zip(loop.operands, body.inputs, body.outputs, strict=True):
        if before is after and operand in free and operand.type.rank:
            now[before] = cloner.value(operand)
    if not now:
        return Op(
            loop.name, loop.operands, loop.results, loop.attrs, (sink_invariants(body),), loop.loc
        )
    outside, inside = list(cloner.carried), list(cloner.carried.values())
    renamed = [
        Op(o.name, tuple(now.get(v, v) for v in o.operands), o.results, o.attrs, o.regions, o.loc)
        for o in body.ops
    ]
    outputs = tuple(
        now.get(v, v) if b is not v else v for b, v in zip(body.inputs, body.outputs, strict=True)
    )
    region = Graph((*body.inputs, *inside), (*cloner.ops, *renamed), (*outputs, *inside), body.name)
    results = (*loop.results, *(Value(v.type) for v in outside))
    region = sink_invariants(region)
    return Op(loop.name, (*loop.operands, *outside), results, loop.attrs, (region,), loop.loc)


class _Cloner:
    """Clones the light part of free values; `carried` maps heavy values to new body inputs."""

    def __init__(self, made: Mapping[Value, Op]) -> None:
        self.made = made
        self.ops: list[Op] = []
        self.carried: dict[Value, Value] = {}
        self._now: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        """What `value` is inside the body."""
        return answered(value, self._now, self._read, self._clone)

    def _read(self, value: Value) -> tuple[Value, ...]:
        op = self.made[value]
        return () if op.name in HEAVY else op.operands

    def _clone(self, value: Value) -> Value:
        op = self.made[value]
        if op.name in HEAVY:
            self.carried[value] = Value(value.type)
            return self.carried[value]
        operands = tuple(self._now[v] for v in op.operands)
        results = tuple(Value(r.type) for r in op.results)
        self.ops.append(Op(op.name, operands, results, op.attrs, (), op.loc))
        self._now.update(zip(op.results, results, strict=True))
        return self._now[value]
