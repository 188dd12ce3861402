"""The save policy of gathered weights: layer loops keep them from forward to backward.

A layer loop gathers a slice of a stacked weight in every iteration. With
`reshard_after_forward = false` the first loop that gathers a slice also writes it to a stack of its
own, and the loops after it read that stack instead of gathering again. Layers of unrolled code need
none of this: what they gathered is a value like any other (`cut/residuals.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import keeps_order, operands_of, takes_at
from shardwright.compiler.ir.ops import ReshapeAttrs
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CASTS, IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.remat.stacks import counted, stacks
from shardwright.sharding.indices.layers import visited_layers
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies.constraints import NARROWING

Key = tuple[Value, int, tuple[object, ...], tuple[object, ...]]
"""A stacked weight, the dim of its layers, what is done to a layer, and how the result lies."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """A constraint `point` that gathers the layer at `start` of a stacked weight."""

    point: Op
    start: Value
    key: Key


@dataclass(slots=True)
class Saver:
    """Rewrites a graph with gather points. `constraints` gains the layouts of what is added;
    `dropped` are the points that gather nothing any more.
    """

    points: frozenset[Op]
    constraints: dict[Value, ShardingSpec]
    stacks: dict[Key, Value] = field(default_factory=dict)
    dropped: set[Op] = field(default_factory=set)

    def run(self, graph: Graph) -> Graph:
        """`graph` with one gather per layer and weight among its loops."""
        loops = [op for op in graph.ops if op.regions]
        outside = graph.producers()
        gathers = {loop: list(self._gathers(loop, outside)) for loop in loops}
        ops: list[Op] = []
        for op in graph.ops:
            if op not in gathers:
                ops.append(op)
                continue
            after = loops[loops.index(op) + 1 :]
            later = {gather.key for loop in after for gather in gathers[loop]}
            ops += self._rewritten(op, gathers[op], later)
        return dce(with_ops(graph, ops))

    def _gathers(self, loop: Op, outside: Mapping[Value, Op]) -> Iterator[_Gather]:
        """The gather points of a loop whose slices walk all layers of a weight. JAX's backward loop
        slices weights that were converted all at once, or by the forward loop: those are the same
        gathers.
        """
        body = loop.regions[0]
        made, invariant = body.producers(), {body.inputs[i]: i for i in invariant_carries(loop)}
        for point in (op for op in body.ops if op in self.points):
            op, path = _taken(made, point.operands[0])
            dim = _layer_dim(op, invariant)
            if op is None or dim is None or not _walks(loop, op, dim):
                continue
            stack, start = loop.operands[invariant[op.operands[0]]], op.operands[1 + dim]
            weight, dim, before = _origin(outside, stack, dim)
            layout = _laid_out(point.result, self.constraints[point.result])
            yield _Gather(point, start, (weight, dim, path + before, layout))

    def _rewritten(self, loop: Op, gathers: Sequence[_Gather], later: set[Key]) -> list[Op]:
        """The loop that reads the stacks there are and fills those that later loops want."""
        body = _Body(self, loop)
        for gather in gathers:
            if gather.key in self.stacks:
                body.read(gather, self.stacks[gather.key])
                self.dropped.add(gather.point)
            elif gather.key in later:
                self.stacks[gather.key] = body.fill(gather)
        return body.finish()


def _taken(made: Mapping[Value, Op], value: Value) -> tuple[Op | None, tuple[object, ...]]:
    """The slice that `value` is made of, and what changes its elements on the way."""
    path: list[object] = []
    while (op := made.get(value)) is not None and not takes_at(op):
        if op.name in IDENTITIES:
            (value,) = operands_of(op, value)
            continue
        if op.name not in NARROWING:
            return None, ()
        if not keeps_order(op):
            path.append((op.name, op.attrs))
        value = op.operands[0]
    return op, tuple(path)


def _origin(
    made: Mapping[Value, Op], stack: Value, dim: int
) -> tuple[Value, int, tuple[object, ...]]:
    """(weight, dim of its layers, what changes elements) behind a stack of layers along `dim`: one
    that is converted as a whole, or layer by layer by an earlier loop.
    """
    path: list[object] = []
    while (op := made.get(stack)) is not None:
        if op.regions:
            row = _written(op, op.results.index(stack), dim)
            if row is None:
                break
            stack, dim, changed = row
            path += changed
            continue
        layers = slice(dim + 1)
        if op.name in CASTS:
            path.append((op.name, op.attrs))
        elif not (
            op.name in NARROWING
            and keeps_order(op)
            and op.operands[0].type.shape[layers] == stack.type.shape[layers]
        ):
            break
        stack = op.operands[0]
    return stack, dim, tuple(path)


def _written(loop: Op, carry: int, dim: int) -> tuple[Value, int, tuple[object, ...]] | None:
    """The same behind a result of a loop whose row `i` is layer `i` of something, changed; None
    where it is anything else.
    """
    body, known = loop.regions[0], counted(loop)
    made, invariant = body.producers(), {body.inputs[i]: i for i in invariant_carries(loop)}
    one = next((s for s in stacks(loop) if (s.carry, s.dim) == (carry, dim)), None)
    op, path = (None, ()) if one is None else _taken(made, one.value)
    row = _layer_dim(op, invariant)
    counter = known[body.inputs[loop.attrs.induction]]
    if op is None or row is None or known.get(op.operands[1 + row]) != counter:
        return None
    return loop.operands[invariant[op.operands[0]]], row, path


def _laid_out(value: Value, spec: ShardingSpec) -> tuple[object, ...]:
    """The type of a value and its layout, dims of one element left out."""
    dims = zip(value.type.shape, spec.dims, strict=True)
    return value.type.dtype, *((n, axes) for n, axes in dims if n > 1)


def _layer_dim(op: Op | None, invariant: Container[Value]) -> int | None:
    """The one dim along which a slice takes a part of an `invariant` carry; None for others."""
    if op is None or op.operands[0] not in invariant:
        return None
    pairs = zip(op.attrs.sizes, op.operands[0].type.shape, strict=True)
    dims = [d for d, (size, whole) in enumerate(pairs) if size != whole]
    return dims[0] if len(dims) == 1 else None


def _walks(loop: Op, op: Op, dim: int) -> bool:
    """True when a slice visits every layer along `dim` once."""
    visited = visited_layers(loop, op.operands[1 + dim])
    layers = op.operands[0].type.shape[dim]
    one = op.attrs.sizes[dim] == 1
    return one and visited is not None and np.array_equal(np.sort(visited), np.arange(layers))


@dataclass(slots=True)
class _Body:
    """A loop under construction: carries that are added, and ops in place of what is there."""

    owner: Saver
    loop: Op
    before: Builder = field(default_factory=Builder)
    carries: list[tuple[Value, Value, Value, Value]] = field(default_factory=list)
    instead: dict[Op, list[Op]] = field(default_factory=dict)

    def fill(self, gather: _Gather) -> Value:
        """Write what `gather` makes to a new stack; returns the stack behind the loop."""
        made, build = gather.point.result, Builder(loc=gather.point.loc)
        layer = made.type.shape
        empty = self.before.full((self.loop.attrs.trip, *layer), 0, made.type.dtype)
        inside = Value(empty.type)
        starts = _starts(build, gather, inside)
        row = build.reshape(made, (1, *layer))
        written = build.dynamic_update_slice(inside, row, starts)
        self.instead[gather.point] = [gather.point, *build.ops]
        layered = ShardingSpec(((), *self.owner.constraints[made].dims))
        return self._carry(empty, inside, written, layered)

    def read(self, gather: _Gather, stack: Value) -> None:
        """Take the layer from `stack` where `gather` stood."""
        made, build, inside = gather.point.result, Builder(loc=gather.point.loc), Value(stack.type)
        starts = _starts(build, gather, inside)
        taken = build.dynamic_slice(inside, starts, (1, *stack.type.shape[1:]))
        row = Op("reshape", (taken,), (made,), ReshapeAttrs(made.type.shape), loc=build.loc)
        self.instead[gather.point] = [*build.ops, row]
        self._carry(stack, inside, inside, self.owner.constraints[stack])

    def _carry(self, first: Value, inside: Value, after: Value, spec: ShardingSpec) -> Value:
        """Add a carry; returns its value behind the loop."""
        result = Value(first.type)
        self.carries.append((first, inside, after, result))
        self.owner.constraints.update(dict.fromkeys((first, inside, after, result), spec))
        return result

    def finish(self) -> list[Op]:
        """What stands in front of the loop, and the loop."""
        if not self.carries:
            return [self.loop]
        (body,), loop = self.loop.regions, self.loop
        ops = [new for op in body.ops for new in self.instead.get(op, [op])]
        firsts, insides, afters, results = zip(*self.carries, strict=True)
        region = with_ops(body, ops, (*body.outputs, *afters), (*body.inputs, *insides))
        operands, made = (*loop.operands, *firsts), (*loop.results, *results)
        return [*self.before.ops, Op("loop", operands, made, loop.attrs, (region,), loop.loc)]


def _starts(build: Builder, gather: _Gather, stack: Value) -> list[Value]:
    """Where a layer lies in its stack."""
    zero = build.full((), 0, gather.start.type.dtype)
    return [gather.start, *[zero] * (stack.type.rank - 1)]


def save_gathered(
    graph: Graph, points: Sequence[Op], constraints: Mapping[Value, ShardingSpec]
) -> tuple[Graph, dict[Value, ShardingSpec], list[Op]]:
    """(graph, layouts, gather points that are left), with gathered weights saved across loops."""
    saver = Saver(frozenset(points), dict(constraints))
    saved = saver.run(graph)
    return saved, saver.constraints, [op for op in points if op not in saver.dropped]
