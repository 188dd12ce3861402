"""How graphs are rewritten: a level under reconstruction, with replaced values.

Ops whose operands and regions did not change are reused as they are, and a changed op keeps its
result values, so that tables keyed by value (specs, roles) survive a pass for every value that
survives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from shardwright.compiler.ir.build import defining
from shardwright.compiler.ir.types import Graph, Op, Value


class Level:
    """The new ops of one graph level and what its old values became."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.replaced: dict[Value, Value] = {}

    def now(self, value: Value) -> Value:
        """What `value` is in the new graph."""
        return self.replaced.get(value, value)

    def replace(self, old: Sequence[Value], new: Sequence[Value]) -> None:
        """Let later uses of `old` read `new`."""
        for before, after in zip(old, new, strict=True):
            if before is not after:
                self.replaced[before] = after

    def update(self, op: Op) -> Op:
        """`op` with its operands as they are now."""
        return reading(op, self.replaced)

    def finish(self, graph: Graph) -> Graph:
        """`graph` with the new ops."""
        return with_ops(graph, self.ops, tuple(self.now(v) for v in graph.outputs))


def with_ops(
    graph: Graph,
    ops: Sequence[Op],
    outputs: tuple[Value, ...] | None = None,
    inputs: tuple[Value, ...] | None = None,
    name: str = "",
) -> Graph:
    """`graph` with other ops, and where given other ends and another name; `graph` itself, which
    need not be verified again, when they are its own.
    """
    before = graph.inputs if inputs is None else inputs
    after = graph.outputs if outputs is None else outputs
    pairs = ((before, graph.inputs), (ops, graph.ops), (after, graph.outputs))
    is_same = all(len(new) == len(old) and all(map(is_, new, old)) for new, old in pairs)
    if is_same and name in ("", graph.name):
        return graph
    return Graph(before, tuple(ops), after, name or graph.name)


def replaced(
    graph: Graph,
    rule: Callable[[Op, Mapping[Value, Op]], Sequence[Op]],
    inside: Callable[[Graph], Graph],
) -> Graph:
    """`graph` with the ops that `rule` makes in place of an op, the last one for its results; where
    it makes none, the op stays. `rule` also gets the ops that make the values so far; regions are
    rewritten by `inside` first.
    """
    made: dict[Value, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = with_regions(op, tuple(map(inside, op.regions)))
        *before, last = rule(op, made) or (op,)
        for one in (*before, defining(last, op.results)):
            ops.append(one)
            made.update(dict.fromkeys(one.results, one))
    return with_ops(graph, ops)


def within(graph: Graph, inside: Callable[[Graph], Graph]) -> Graph:
    """`graph` with its regions rewritten."""
    return with_ops(graph, [with_regions(op, tuple(map(inside, op.regions))) for op in graph.ops])


def reading(op: Op, now: Mapping[Value, Value]) -> Op:
    """`op` with its operands as they are `now`, where that has them."""
    if now.keys().isdisjoint(op.operands):
        return op
    return with_operands(op, tuple(now.get(v, v) for v in op.operands))


def with_operands(op: Op, operands: tuple[Value, ...]) -> Op:
    """`op` itself, or a copy that reads other operands and defines the same results."""
    if all(map(is_, operands, op.operands)):
        return op
    return Op(op.name, operands, op.results, op.attrs, op.regions, op.loc)


def with_regions(op: Op, regions: tuple[Graph, ...]) -> Op:
    """`op` with other regions, attributes and carries unchanged."""
    if all(map(is_, regions, op.regions)):
        return op
    return Op(op.name, op.operands, op.results, op.attrs, regions, op.loc)


def with_results(op: Op, keep: Sequence[int], attrs: Any, regions: tuple[Graph, ...]) -> Op:
    """`op` with only the operand and result pairs of `keep`."""
    operands = tuple(op.operands[i] for i in keep)
    return Op(op.name, operands, tuple(op.results[i] for i in keep), attrs, regions, op.loc)


def carrying(loop: Op, first: Iterable[Value], results: Iterable[Value], region: Graph) -> Op:
    """`loop` with more carries at the end of its own, as `region` has them."""
    operands, ends = (*loop.operands, *first), (*loop.results, *results)
    return Op(loop.name, operands, ends, loop.attrs, (region,), loop.loc)


def with_invariants(loop: Op, inside: Mapping[Value, Value], ops: Sequence[Op]) -> Op:
    """`loop` with `ops` for its body, which have values from outside of it as they are `inside`."""
    body, more = loop.regions[0], tuple(inside.values())
    region = with_ops(body, ops, (*body.outputs, *more), (*body.inputs, *more))
    return carrying(loop, inside, [Value(v.type) for v in more], region)
