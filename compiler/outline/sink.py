"""Loop invariants that are made of counts, constants and a core's position move into the loop body,
so that no mask is ever stored.

What is cheap to make again (counts, comparisons, selections, broadcasts) is cloned into the body; a
transcendental function stays outside, at the size it has before it is broadcast, and enters the
body as an invariant carry. So does a number that masks depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.compiler.ir.build import cloned
from shardwright.compiler.ir.facts import is_constant_like, operands_of
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.rewrite import reading, with_invariants, with_ops, with_regions
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.positions import HEAVY, Positions
from shardwright.compiler.support.intervals import Interval
from shardwright.compiler.support.walks import answered

Ranges = Mapping[Value, Interval]


def sink_invariants(graph: Graph, ranges: Ranges | None = None) -> Graph:
    """`graph` with light invariants of constants, and of integers with `ranges`, cloned into its
    loops, nested loops first.
    """
    known = ranges or {}
    positions = Positions(graph, known)
    made: dict[Value, Op] = {}
    free: set[Value] = set()
    ops: list[Op] = []
    for op in graph.ops:
        if op.regions:
            op = _sink(op, _Cloner(made, positions.numbers), free | positions.wanted, known)
        elif is_constant_like(op) and all(v in free for v in op.operands):
            free.update(op.results)
        ops.append(op)
        made.update(dict.fromkeys(op.results, op))
    return with_ops(graph, ops)


def _sink(loop: Op, cloner: _Cloner, light: Collection[Value], ranges: Ranges) -> Op:
    body = loop.regions[0]
    now: dict[Value, Value] = {}
    for operand, before, after in zip(loop.operands, body.inputs, body.outputs, strict=True):
        if before is after and operand in light and operand.type.rank:
            now[before] = cloner.value(operand)
    renamed = [reading(op, now) for op in body.ops]
    outputs = tuple(
        now.get(v, v) if b is not v else v for b, v in zip(body.inputs, body.outputs, strict=True)
    )
    loop = with_regions(loop, (with_ops(body, body.ops, outputs),))
    loop = with_invariants(loop, cloner.carried, [*cloner.ops, *renamed])
    carried = {v: ranges[o] for o, v in cloner.carried.items() if o in ranges}
    return with_regions(loop, (sink_invariants(loop.regions[0], {**ranges, **carried}),))


class _Cloner:
    """Clones the light part of values; `carried` maps heavy values and `numbers` to new body
    inputs.
    """

    def __init__(self, made: Mapping[Value, Op], numbers: Collection[Value]) -> None:
        self.made = made
        self.numbers = numbers
        self.ops: list[Op] = []
        self.carried: dict[Value, Value] = {}
        self._now: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        """What `value` is inside the body."""
        return answered(value, self._now, self._read, self._clone)

    def _stays(self, value: Value) -> bool:
        return value in self.numbers or self.made[value].name in HEAVY

    def _read(self, value: Value) -> tuple[Value, ...]:
        return () if self._stays(value) else tuple(operands_of(self.made[value], value))

    def _clone(self, value: Value) -> Value:
        if self._stays(value):
            self.carried[value] = Value(value.type)
            return self.carried[value]
        op = self.made[value]
        if op.name in IDENTITIES:
            (operand,) = operands_of(op, value)
            self.ops.append(make_op(op.name, (self._now[operand],), op.attrs, loc=op.loc))
            return self.ops[-1].result
        self.ops.append(cloned(op, self._now))
        return self._now[value]
