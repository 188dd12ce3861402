"""One pass around the ring: a loop over the blocks of a gathered index.

Every rank starts with its own block and sends it on while it works on it, so that after as many
steps as ranks each has seen all blocks and held two. Sums and maxima are carried; what is scattered
back along the index travels with its block and comes home. The body is localized over a virtual
axis of blocks by the rules that localize graphs over cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.combinations import EXTREMES
from shardwright.compiler.ir.facts import combination
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import AxisIndexAttrs
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.compiler.passes.cse import cse
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.cut.ring.body import Body, aligned
from shardwright.sharding.cut.ring.index import Index
from shardwright.sharding.cut.ring.terms import Pass
from shardwright.sharding.partition.permutes import ring_pairs

FARTHEST = {DType.F16: 65504.0}
FARTHEST_WIDE = 3.0e38
"""What a maximum or minimum of floats starts from: finite, so that a row without any score yet is
shifted by a number and its sum stays zero instead of NaN.
"""


def ring_ops(index: Index, step: Pass) -> list[Op]:
    """The ops of one pass; they make the results of its reductions, under the same values.

    Raises: ShardingError for an op that cannot work on a block.
    """
    body = Body(index, step)
    graph = body.localized()
    ring = _Ring(index, body, graph, Builder(loc=index.entries[0].loc))
    made = ring.run()
    names = {new: old for old, new in made.items()}
    return [_renamed(op, names) for op in ring.outer.ops]


def _renamed(op: Op, names: Mapping[Value, Value]) -> Op:
    """`op` with values under other names."""
    operands = tuple(names.get(v, v) for v in op.operands)
    results = tuple(names.get(v, v) for v in op.results)
    return Op(op.name, operands, results, op.attrs, op.regions, op.loc)


@dataclass(slots=True)
class _Ring:
    """The loop of a pass under construction around its localized body."""

    index: Index
    body: Body
    graph: Graph
    outer: Builder

    @property
    def size(self) -> int:
        """Ranks of the ring."""
        return int(self.index.entries[0].attrs.group_size)

    def run(self) -> dict[Value, Value]:
        """Emit loop, last block and what follows; the new values of what the pass makes."""
        blocks = [entry.operands[0] for entry in self.body.blocks]
        folded = [self._start(op) for op in self.body.folds]
        whole = [self._zeros(value.type) for value in self.body.step.collected]
        position = self.outer.axis_index(self.index.axes)
        still = [*self.body.invariants, position]
        carried = [*blocks, *folded, *whole]
        shifts = [len(blocks) + n for n, op in enumerate(self.body.folds) if self.body.shifts(op)]

        def trip(inner: Builder, count: Value, carries: tuple[Value, ...]) -> list[Value]:
            moving = carries[: len(carried)]
            rest = carries[len(carried) : len(carried) + len(still)]
            sent = [self._send(inner, v) for v in moving[: len(blocks)]]
            made = self._step(inner, count, moving, rest)
            return [*sent, *self._travelled(inner, made), *rest, *(moving[i] for i in shifts)]

        before = [carried[i] for i in shifts]  # so that a step makes its maxima beside them
        results = self.outer.loop(self.size - 1, [*carried, *still, *before], trip)
        last = self.outer.constant(self.size - 1, DType.I32)
        made = self._step(self.outer, last, results[: len(carried)], still)
        travelled = self._travelled(self.outer, made)
        return self._finish(self._merged(travelled, results[len(carried) + len(still) :]))

    def _merged(self, made: Sequence[Value], kept: Sequence[Value]) -> Sequence[Value]:
        """`made`, with equal reductions carried once: those that differ in their scales alone.
        `kept` stay although nobody reads them.
        """
        ops = self.outer.ops
        own = {value for op in ops for value in op.results}
        read = dict.fromkeys(v for op in ops for v in op.operands if v not in own)
        graph = dce(cse(with_ops(self.graph, ops, (*made, *kept), tuple(read))))
        ops[:] = graph.ops
        return graph.outputs[: len(made)]

    def _start(self, op: Op) -> Value:
        """What a reduction starts from."""
        type = self.body.carried_type(op)
        if op.name in REDUCTIONS_OF_RANKS:
            return self._zeros(op.result.type)
        kind = combination(op)
        number = float(identity(kind, type.dtype))
        if kind in EXTREMES and type.dtype.is_float:
            number = math.copysign(FARTHEST.get(type.dtype, FARTHEST_WIDE), number)
        return self.outer.full(type.shape, number, type.dtype)

    def _zeros(self, type: TensorType) -> Value:
        return self.outer.full(type.shape, 0, type.dtype)

    def _send(self, builder: Builder, value: Value) -> Value:
        """`value` to the next rank."""
        return builder.collective_permute(value, ring_pairs(self.size), self.index.axes, self.size)

    def _step(
        self, builder: Builder, count: Value, moving: Sequence[Value], still: Sequence[Value]
    ) -> list[Value]:
        """The work on the block at hand; folds and collected values after it."""
        block = self._block_number(builder, count, still[-1])
        first = len(self.body.blocks)
        last = first + len(self.body.folds)
        outputs = inline(builder, self.graph, [*moving[:last], *still[:-1]], block)
        stored = map(
            partial(self._store, builder, block),
            *(self.body.step.collected, moving[last:], outputs[last - first :]),
        )
        return [*outputs[: last - first], *stored]

    def _block_number(self, builder: Builder, count: Value, position: Value) -> Value:
        """Which block a rank works on at step `count`: its own first, then those behind it."""
        size = builder.constant(self.size, DType.I32)
        behind = builder.op("subtract", position, count)
        around = builder.add(behind, size)
        wraps = builder.compare(behind, builder.constant(0, DType.I32), "LT")
        return builder.op("select", wraps, around, behind)

    def _store(
        self, builder: Builder, block: Value, value: Value, whole: Value, part: Value
    ) -> Value:
        """`whole` with the part of one block."""
        dim, zero = self.index.dims[value], builder.constant(0, DType.I32)
        length = builder.constant(part.type.shape[dim], DType.I32)
        start = builder.multiply(block, length)
        starts = [start if d == dim else zero for d in range(whole.type.rank)]
        return builder.dynamic_update_slice(whole, part, starts)

    def _travelled(self, builder: Builder, made: Sequence[Value]) -> list[Value]:
        """What travels with its block goes to the next rank; the rest stays."""
        folds = len(self.body.folds)
        pairs = zip(self.body.folds, made, strict=False)
        moved = [self._send(builder, v) if op.name in REDUCTIONS_OF_RANKS else v for op, v in pairs]
        return [*moved, *made[folds:]]

    def _finish(self, made: Sequence[Value]) -> dict[Value, Value]:
        """Reductions scaled by what came out of their sums, in the type they had."""
        found: dict[Value, Value] = {}
        carried = dict(zip(self.body.folds, made, strict=False))
        for op, term in self.body.step.folds.items():
            value = carried[op]
            for scale in term.scales:
                row = aligned(self.outer, scale.row, scale.row.source, value.type)
                value = self.outer.op("divide" if scale.inverse else "multiply", value, row)
            value = self.outer.in_type(value, op.result.type.dtype)
            if value in found.values():
                value = self.outer.reshape(value, value.type.shape)
            found[op.result] = value
        found |= zip(self.body.step.collected, made[len(self.body.folds) :], strict=True)
        return found


def inline(builder: Builder, graph: Graph, inputs: Sequence[Value], block: Value) -> list[Value]:
    """The ops of `graph` at the end of `builder`; `block` is the position over blocks."""
    now = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        if isinstance(op.attrs, AxisIndexAttrs):
            now[op.result] = block
            continue
        new = make_op(op.name, [now[v] for v in op.operands], op.attrs, op.regions, op.loc)
        now.update(zip(op.results, builder.append(new), strict=True))
    return [now[v] for v in graph.outputs]
