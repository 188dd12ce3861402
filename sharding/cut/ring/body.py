"""What a rank does with one block of a gathered index: the ops of a pass on a block.

The body is first written in whole types: entries, values to slice and what stays the same are its
inputs, running reductions its first outputs. Localizing it over a virtual axis whose ranks are the
blocks gives the work on one block, with offsets of positions and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder, subgraph
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF, EXTREMES
from shardwright.compiler.ir.facts import combination, pairing
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.traits import IDENTITIES, REDUCTIONS, REDUCTIONS_OF_RANKS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.passes.cse import cse
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.cut.ring.index import Index, is_cheap
from shardwright.sharding.cut.ring.terms import Applied, Pass, Row
from shardwright.sharding.localize.context import Localizer
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec, replicated, sharded

BLOCKS = ("blocks",)
"""The virtual axis whose ranks are the blocks."""


def aligned(builder: Builder, row: Row, value: Value, like: TensorType) -> Value:
    """`value`, shaped as the source of `row`, repeated to the type `like`."""
    order = sorted(i for i, _ in row.dims)
    pairs = sorted(row.dims, key=lambda pair: pair[1])
    flat = builder.reshape(value, [value.type.shape[i] for i in order])
    turned = [order.index(i) for i, _ in pairs]
    if turned != sorted(turned):
        flat = builder.transpose(flat, turned)
    flat = builder.in_type(flat, like.dtype)
    return builder.broadcast(flat, like.shape, [d for _, d in pairs])


def wide(type: TensorType) -> TensorType:
    """The type a sum is carried in from block to block."""
    return tensor_type(type.shape, DType.F32) if type.dtype.is_narrow else type


@dataclass(slots=True)
class Body:
    """One pass over an index as a function of one block.

    `blocks` are the gathers whose blocks come around, `folds` its reductions, `invariants` what it
    reads besides, each with the input that stands for it.
    """

    index: Index
    step: Pass
    blocks: dict[Op, Value] = field(default_factory=dict)
    folds: dict[Op, Value] = field(default_factory=dict)
    invariants: dict[Value, Value] = field(default_factory=dict)
    _builder: Builder = field(default_factory=Builder)
    _now: dict[Value, Value] = field(default_factory=dict)
    _before: dict[Value, Value] = field(default_factory=dict)
    _first: dict[Hashable, Value] = field(default_factory=dict)
    _specs: dict[Value, ShardingSpec] = field(default_factory=dict)

    def shifts(self, op: Op) -> bool:
        """True for a maximum that a shift of this pass follows."""
        reads = [v for ops in self.step.bridges.values() for later in ops for v in later.operands]
        return op.result in (*self.step.bridges, *reads)

    def carried_type(self, op: Op) -> TensorType:
        """The type a reduction is carried in."""
        if op.name in REDUCTIONS_OF_RANKS:
            return op.operands[0].type
        kept = op.name in REDUCTIONS and op.attrs.kind in EXTREMES
        return op.result.type if kept else wide(op.result.type)

    def localized(self) -> Graph:
        """The work on one block; inputs are blocks, carried reductions, invariants.

        Raises: ShardingError for an op that cannot work on a block.
        """
        whole = self._whole()
        for value in (*whole.inputs, *(v for op in whole.ops for v in op.results)):
            self._specs.setdefault(value, replicated(value.type.rank))
        mesh = Mesh(((BLOCKS[0], self.index.entries[0].attrs.group_size),))
        return cse(dce(Localizer(mesh, self._specs).region(whole)))

    def _whole(self) -> Graph:
        """The body in whole types."""
        outputs = {op: self._fold(op) for op, t in self.step.folds.items() if t.shift is None}
        carried = {op.result: value for op, value in self.folds.items()}
        for source, ops in self.step.bridges.items():
            self._now[source] = self._bridge(source, ops, self._now)
            self._before[source] = self._bridge(source, ops, carried)
        outputs |= {op: self._fold(op) for op, t in self.step.folds.items() if t.shift is not None}
        collected = [self._value(v) for v in self.step.collected]
        results = (*(outputs[op] for op in self.folds), *collected)
        inputs = (*self.blocks.values(), *self.folds.values(), *self.invariants.values())
        return subgraph(inputs, self._builder.ops, results, "block")

    def _value(self, value: Value) -> Value:
        """What `value` is in the body, where equal values are one."""
        key = (self.index.level.numbers[value], self.index.dims.get(value))
        value = self._first.setdefault(key, value)
        if value not in self._now:
            self._now[value] = self._make(value)
            if value in self.index.dims:
                spec = sharded(value.type.rank, self.index.dims[value], BLOCKS)
                self._specs[self._now[value]] = spec
        return self._now[value]

    def _make(self, value: Value) -> Value:
        op = self.index.level.made.get(value)
        if value not in self.index.dims:
            return self._outside(value)
        if op is not None and op in self.index.entries:
            self.blocks[op] = Value(value.type)
            return self.blocks[op]
        if op is not None and (value in self.index.derived or is_cheap(op)):
            return self._clone(op, value)
        whole = self._outside(value)
        return self._builder.all_slice(whole, self.index.dims[value], BLOCKS)

    def _outside(self, value: Value) -> Value:
        """What stays the same from block to block: an input, or a view of one. A loop would have a
        view of its operand stored, and read a transposed one in short runs.
        """
        op = self.index.level.made.get(value)
        if op is not None and op.name in VIEWS:
            return self._append(op, [self._outside(v) for v in op.operands])
        return self.invariants.setdefault(value, Value(value.type))

    def _clone(self, op: Op, value: Value) -> Value:
        """`op` on what its operands are."""
        if op.name in IDENTITIES:
            return self._value(op.operands[op.results.index(value)])
        return CLONES.get(op.name, Body._repeat)(self, op)

    def _repeat(self, op: Op) -> Value:
        return self._append(op, [self._value(v) for v in op.operands])

    def _unscaled(self, op: Op) -> Value:
        """A row that scales is left to the end."""
        kept = [v for v in op.operands if v not in self.step.rows]
        return self._value(kept[0]) if len(kept) == 1 else self._repeat(op)

    def _append(self, op: Op, operands: list[Value], attrs: object = None) -> Value:
        """`op` on `operands`."""
        made = make_op(op.name, operands, attrs or op.attrs, (), op.loc)
        return self._builder.append(made)[0]

    def _bridge(self, source: Value, ops: Sequence[Op], start: dict[Value, Value]) -> Value:
        """What follows from a running maximum, at its value in `start`."""
        now = dict(start)
        for op in ops:
            if op.name in IDENTITIES:
                pairs = zip(op.operands, op.results, strict=True)
                now |= {result: now[v] for v, result in pairs if v in now}
                continue
            operands = [now[v] if v in now else self._value(v) for v in op.operands]
            now[op.result] = self._append(op, operands)
        return now[source]

    def _fold(self, op: Op) -> Value:
        """The reduction with one more block."""
        shift, type = self.step.folds[op].shift, self.carried_type(op)
        if op.name in REDUCTIONS_OF_RANKS:
            carried = self.folds[op] = Value(type)
            total = self._builder.add(carried, self._value(op.operands[0]))
            self._specs[carried] = self._specs[total] = sharded(type.rank, op.attrs.dim, BLOCKS)
            return total
        part = self._partial(op)
        carried = self.folds[op] = Value(type)
        if shift is not None:
            carried = self._builder.multiply(carried, self._factor(shift, type))
        kind = combination(op)
        total = self._builder.op(ELEMENTWISE_OF[kind], carried, part)
        self._now[op.result] = total
        return total

    def _partial(self, op: Op) -> Value:
        """The reduction of the block alone, in the type it is carried in."""
        type = self.carried_type(op)
        operands = [self._value(v) for v in op.operands]
        if (dims := pairing(op)) is not None:
            return self._append(op, operands, replace(dims, dtype=type.dtype))
        (given,) = operands
        taken = self._builder.in_type(given, type.dtype)
        self._specs[taken] = self._specs[given]
        return self._append(op, [taken])

    def _factor(self, shift: Applied, like: TensorType) -> Value:
        """What a sum of shifted exponentials is multiplied by when the shift moves."""
        source = shift.row.source
        old, new = self._before[source], self._now[source]
        ends = (old, new) if shift.inverse else (new, old)
        wide_ends = [self._builder.convert(v, like.dtype) for v in ends]
        moved = self._builder.op("subtract", *wide_ends)
        return aligned(self._builder, shift.row, self._builder.op("exponential", moved), like)


CLONES: Mapping[str, Callable[[Body, Op], Value]] = {
    "multiply": Body._unscaled,
    "divide": Body._unscaled,
}
"""What a block does for an op of the whole; the same, unless it is here."""
