"""A loop over layers as several loops in a row, one per stage.

Iterations stay in order: part k runs its share of the trips on the boundaries that part k - 1 left.
What the body slices by its counter is sliced per part, what it writes slice by slice is joined
again, so that a part reads and writes its own layers only. The result is one program with the same
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import places_of, takes_at
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    ConcatenateAttrs,
    ConstantAttrs,
    LoopAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import UPDATES
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.indices.layers import ScannedLayers, visited_layers


def split_loop(scan: ScannedLayers, trips: Sequence[int]) -> list[Op]:
    """`scan.loop` as loops of `trips` iterations, with the ops that take stacks apart and join
    them; the last ops yield the results of the whole loop.

    Raises: ShardingError (SW_PIPELINE_LOOP) when the trips are not those of the loop, or a stack is
    not walked layer by layer.
    """
    loop = scan.loop
    if sum(trips) != loop.attrs.trip or min(trips) < 1:
        raise ShardingError(
            "SW_PIPELINE_LOOP",
            f"stages require parts of at least one layer that add up to {loop.attrs.trip}, got"
            f" {', '.join(map(str, trips))}",
            loop.loc,
        )
    walk = LayerWalk.of(scan)
    carries = list(loop.operands)
    pieces: dict[int, list[tuple[int, Value]]] = {carry: [] for carry in scan.stacks}
    ops: list[Op] = []
    first = 0
    for trip in trips:
        ops += _part(scan, walk, carries, first, trip)
        for carry, result in enumerate(ops[-1].results):
            if carry in pieces:
                pieces[carry].append((walk.low(carry, first, trip), result))
            elif carry in scan.boundaries:
                carries[carry] = result
        first += trip
    return [*ops, *_joined(scan, walk, carries, pieces)]


@dataclass(frozen=True, slots=True)
class LayerWalk:
    """The dim of every stack that layers lie along, and the layer each iteration touches."""

    dims: Mapping[int, int]
    layers: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, scan: ScannedLayers) -> LayerWalk:
        """Follow the counter to every slice and update of a stack."""
        loop, body = scan.loop, scan.loop.regions[0]
        dims = {**scan.weights, **scan.stacks}
        carry_of = {value: carry for carry, value in enumerate(body.inputs) if carry in dims}
        layers: dict[int, np.ndarray] = {}
        for op in body.ops:
            for position, value in enumerate(op.operands):
                carry = carry_of.get(value)
                if carry is None:
                    continue
                if position or not (takes_at(op) or op.name in UPDATES):
                    raise _not_walked(op)
                visited = visited_layers(loop, places_of(op)[dims[carry]])
                if visited is None:
                    raise _not_walked(loop)
                if not np.array_equal(layers.setdefault(carry, visited), visited):
                    raise _not_walked(op)
        return cls(dims, layers)

    def low(self, carry: int, first: int, trip: int) -> int:
        """The lowest layer that iterations `first` to `first + trip` touch.

        Raises ShardingError when they do not touch `trip` neighbouring layers.
        """
        touched = np.sort(self.layers[carry][first : first + trip])
        low = int(touched[0])
        if not np.array_equal(touched, np.arange(low, low + trip)):
            raise ShardingError(
                "SW_PIPELINE_LOOP",
                f"stages require a loop that walks its layers in order, got layers {touched}",
            )
        return low


def _not_walked(op: Op) -> ShardingError:
    """A stack is used otherwise than layer by layer."""
    return ShardingError(
        "SW_PIPELINE_LOOP",
        f"stages require stacks of layers that the loop walks by its counter, got {op.name}",
        op.loc,
        "read and write whole layers by the index of the loop",
    )


def _part(
    scan: ScannedLayers, walk: LayerWalk, carries: Sequence[Value], first: int, trip: int
) -> list[Op]:
    """A loop of the iterations `first` to `first + trip`, behind what takes its layers out of
    stacks."""
    before: list[Op] = []
    operands = list(carries)
    for carry, dim in walk.dims.items():
        before.append(layers_of(carries[carry], dim, walk.low(carry, first, trip), trip))
        operands[carry] = before[-1].result
    body = _Body(scan, walk, first, trip, [v.type for v in operands]).build()
    attrs = LoopAttrs(trip, scan.loop.attrs.induction)
    results = tuple(Value(v.type) for v in operands)
    return [*before, Op("loop", tuple(operands), results, attrs, (body,), scan.loop.loc)]


def layers_of(stack: Value, dim: int, low: int, count: int) -> Op:
    """`count` layers of a stack from layer `low` on."""
    shape = stack.type.shape
    start = tuple(low if d == dim else 0 for d in range(len(shape)))
    limit = tuple(low + count if d == dim else n for d, n in enumerate(shape))
    return make_op("slice", (stack,), SliceAttrs(start, limit, (1,) * len(shape)))


class _Body:
    """The body of one part: the counter starts at its first layer, stacks hold its layers only."""

    def __init__(
        self,
        scan: ScannedLayers,
        walk: LayerWalk,
        first: int,
        trip: int,
        types: Sequence[TensorType],
    ) -> None:
        self.scan, self.walk, self.first, self.trip = scan, walk, first, trip
        self.source = scan.loop.regions[0]
        self.inputs = tuple(Value(t) for t in types)
        self.now: dict[Value, Value] = dict(zip(self.source.inputs, self.inputs, strict=True))
        self.stack_of = {v: c for c, v in enumerate(self.source.inputs) if c in walk.dims}
        self.builder = Builder()

    def build(self) -> Graph:
        """The region."""
        induction = self.scan.loop.attrs.induction
        own = self.inputs[induction]
        self.now[self.source.inputs[induction]] = self._plus(own, self.first)
        for op in self.source.ops:
            self._copy(op)
        outputs = [self.now[v] for v in self.source.outputs]
        outputs[induction] = self._plus(own, 1)
        return dce(with_ops(self.source, self.builder.ops, tuple(outputs), self.inputs))

    def _plus(self, value: Value, number: int) -> Value:
        """`value + number`."""
        b = self.builder
        return b.add(value, b.constant(number, value.type.dtype)) if number else value

    def _place(self, carry: int, start: Value) -> Value:
        """Where this iteration is in the part's own stack; counted from the part's own counter
        where that is possible, so that parts with equally many layers are equal code.
        """
        low = self.walk.low(carry, self.first, self.trip)
        places = self.walk.layers[carry][self.first : self.first + self.trip] - low
        counter: Value = self.inputs[self.scan.loop.attrs.induction]
        forward = np.arange(self.trip)
        if counter.type == start.type and np.array_equal(places, forward):
            return counter
        if counter.type != start.type or not np.array_equal(places, forward[::-1]):
            return self._plus(start, -low)
        last = self.builder.constant(self.trip - 1, counter.type.dtype)
        return self.builder.op("subtract", last, counter)

    def _copy(self, op: Op) -> None:
        """`op` on this part's values; a walk of a stack counts from the part's lowest layer."""
        operands = [self.now.get(v, v) for v in op.operands]
        carry = self.stack_of.get(op.operands[0]) if op.operands else None
        if carry is not None:
            position = len(op.operands) - len(places_of(op)) + self.walk.dims[carry]
            operands[position] = self._place(carry, operands[position])
        results = tuple(
            Value(operands[0].type if carry is not None and op.name in UPDATES else v.type)
            for v in op.results
        )
        self.builder.append(Op(op.name, tuple(operands), results, op.attrs, op.regions, op.loc))
        self.now.update(zip(op.results, results, strict=True))


def _joined(
    scan: ScannedLayers,
    walk: LayerWalk,
    carries: Sequence[Value],
    pieces: Mapping[int, list[tuple[int, Value]]],
) -> Iterator[Op]:
    """The results of the whole loop: stacks joined in the order of layers, all else from the last
    part.
    """
    loop = scan.loop
    for carry, result in enumerate(loop.results):
        if carry in pieces:
            parts = [value for _, value in sorted(pieces[carry], key=lambda piece: piece[0])]
            joined = ConcatenateAttrs(walk.dims[carry])
            yield Op("concatenate", tuple(parts), (result,), joined, (), loop.loc)
        elif carry == loop.attrs.induction:
            trip = ConstantAttrs.full(loop.attrs.trip, result.type)
            yield Op("constant", (), (result,), trip, (), loop.loc)
        else:
            same = ReshapeAttrs(result.type.shape)
            yield Op("reshape", (carries[carry],), (result,), same, (), loop.loc)
