"""Layers wrapped in groups: one gather of weights, one reduction of gradients, for several layers.

A loop over layers becomes a loop over groups whose body is the layers of a group one behind the
other; its collectives over data axes share buckets (`buckets.py`), whose moments see that all
weights of a group are ready at once and its gradients at its end. A function waits for its
collectives before it returns, so such a body is left in one piece (`LoopAttrs.whole`). Layers that
are left over are a smaller group behind the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.build import Builder, fresh
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConstantAttrs, LoopAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops, with_regions, with_results
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.overlap.assign import free_values
from shardwright.sharding.cut.overlap.buckets import bucketed, bucketed_outside
from shardwright.sharding.cut.overlap.streams import is_layer_loop


def grouped(graph: Graph, layers: int, most_bytes: int, root: str = "each") -> Graph:
    """`graph` with `layers` iterations of every loop that moves weights or gradients as one, in
    buckets of up to `most_bytes`, and what stands outside of loops in units as `root` says
    (`StrategySettings.root_unit`); the graph itself where there is no such loop.
    """
    found = _in_groups(graph, layers, most_bytes)
    if root == "each" or found is graph:  # without a loop the layers stand there too
        return found
    return bucketed_outside(found, across_loops=root == "all")


def _in_groups(graph: Graph, layers: int, most_bytes: int) -> Graph:
    """The same without units of what stands outside of loops."""
    level = Level()
    for op in graph.ops:
        op = level.update(op)
        if is_layer_loop(op):
            level.replace(op.results, _groups(level, op, layers, most_bytes))
        else:
            inner = tuple(_in_groups(region, layers, most_bytes) for region in op.regions)
            level.ops.append(with_regions(op, inner))
    return level.finish(graph)


def _groups(level: Level, loop: Op, layers: int, most_bytes: int) -> Sequence[Value]:
    """The loop over whole groups, and the one group of what is left; the carries behind them."""
    trip, carries = loop.attrs.trip, loop.operands
    size = min(layers, trip)
    whole = trip // size * size
    for begin, count, members in ((0, trip // size, size), (whole, 1, trip - whole)):
        if members:
            counted = _number(level.ops, loop, 0)
            operands = _with_counter(loop, carries, counted)
            body = bucketed(_body(loop, begin, members), most_bytes)
            results = tuple(Value(v.type) for v in carries)
            attrs = LoopAttrs(count, loop.attrs.induction, whole=True)
            level.ops.append(Op("loop", operands, results, attrs, (body,), loop.loc))
            carries = results
    return _with_counter(loop, carries, _number(level.ops, loop, trip))


def _body(loop: Op, begin: int, members: int) -> Graph:
    """The iterations of one group, the first group of which starts with iteration `begin`."""
    body, induction = loop.regions[0], loop.attrs.induction
    free = free_values(loop)
    inputs = tuple(Value(v.type) for v in body.inputs)
    b, carries, counter = Builder(), inputs, inputs[induction]
    kind = counter.type.dtype
    first = b.multiply(counter, b.constant(members, kind))
    for member in range(members):
        index = b.add(first, b.constant(begin + member, kind))
        now = dict(zip(body.inputs, _with_counter(loop, carries, index), strict=True))
        for op in body.ops:
            _again(b.ops, op, now, free)
        carries = tuple(now[v] for v in body.outputs)
    after = b.add(counter, b.constant(1, kind))
    return with_ops(body, b.ops, _with_counter(loop, carries, after), inputs)


def _again(ops: list[Op], op: Op, now: dict[Value, Value], free: set[Value]) -> None:
    """A copy of `op`. A barrier holds only what depends on other layers: weights behind it would
    wait for the layer before and could not be gathered with those of their group.
    """
    if op.name in IDENTITIES:
        now.update((r, now[v]) for r, v in zip(op.results, op.operands, strict=True) if r in free)
        held = [i for i, result in enumerate(op.results) if result not in free]
        op = with_results(op, held, op.attrs, ())
    if op.results:
        ops.append(fresh(op, [now[v] for v in op.operands]))
        now.update(zip(op.results, ops[-1].results, strict=True))


def _with_counter(loop: Op, carries: Sequence[Value], counter: Value) -> tuple[Value, ...]:
    """`carries` with another value for the counter of `loop`."""
    return tuple(counter if i == loop.attrs.induction else v for i, v in enumerate(carries))


def _number(ops: list[Op], loop: Op, number: int) -> Value:
    """A constant of the type of the counter."""
    type = loop.operands[loop.attrs.induction].type
    ops.append(make_op("constant", (), ConstantAttrs.full(number, type)))
    return ops[-1].result
