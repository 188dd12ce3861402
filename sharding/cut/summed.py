"""Sums over micro-batches that are added up, and reduced, where a layer's share is made.

A backward loop over layers writes each layer's gradient into a stack, and behind the loop the whole
stack is added to the accumulator: every gradient is stored, read back and added. Instead the loop
carries the accumulator and adds each layer's gradient to its slice: no stack is held, and half of
the traffic is left. In the last micro-batch (`overlap/ends.py`) the sum is reduced over cores, and
with each slice that leaves a layer can be reduced beside the next. The sums are the same to the
bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.facts import resized, resized_dim, splat
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import ConstantAttrs, DynamicSliceAttrs
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.outline.overwritten import covering_writes
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.remat.stacks import counted

LEAST_BYTES = 2**18
"""Of a layer's gradient in the accumulator's type. Less is added, and reduced, faster with that of
all layers behind the loop: a transfer of NeuronCore-v2 takes 2 us whatever it moves (documented),
in which 0.8 MB pass. Our choice between shards of 128 KiB, which lose on three models of four, and
of 512 KiB, which win on all (docs/design/0075).
"""


@dataclass(frozen=True, slots=True)
class _Ending:
    """What becomes of the stack that fills `carry` of `loop`: `ops`, each of what the one before
    makes, to slices as to the whole. One of them may add it to an `accumulator`.
    """

    loop: Op
    carry: int
    ops: tuple[Op, ...]
    accumulator: Value | None

    @property
    def result(self) -> Value:
        """What the last op makes."""
        return self.ops[-1].result

    @property
    def is_reduced(self) -> bool:
        """Whether the sum is reduced over cores."""
        return any(op.name in REDUCTIONS_OF_RANKS for op in self.ops)

    @property
    def is_in_place(self) -> bool:
        """Whether the result can take the place of the accumulator."""
        return self.accumulator is not None and self.result.type == self.accumulator.type


def summed(graph: Graph, fused: bool = True, least_bytes: int = LEAST_BYTES) -> Graph:
    """`graph` with every sum of an input and a stack, and what follows it, and every cast of a
    stack that is an output, inside of the loop that fills the stack, where an iteration writes
    `least_bytes` of it and nothing else reads either; the graph itself where there is none.
    Without `fused` only what is reduced over cores.
    """
    found: dict[Op, list[_Ending]] = {}
    for one in _endings(graph):
        whole = one.result if one.accumulator is None else one.accumulator
        large = whole.type.num_bytes >= least_bytes * one.loop.attrs.trip
        if large and (fused or one.is_reduced):
            found.setdefault(one.loop, []).append(one)
    if not found:
        return graph
    moved = {op for own in found.values() for one in own for op in one.ops}
    made = graph.producers()
    ops: list[Op] = []
    for op in graph.ops:
        if op in found:
            ops += _rebuilt(op, found[op], made)
        elif op not in moved:
            ops.append(op)
    return dce(with_ops(graph, ops))


def _endings(graph: Graph) -> Iterator[_Ending]:
    users, producers = graph.uses(), graph.producers()
    kept = set(graph.outputs)

    def only_for(value: Value, user: Op) -> bool:
        return users[value] == [user] and value not in kept

    for add in graph.ops:
        if add.name != "add" or add.operands[0] not in graph.inputs:
            continue
        accumulator, stack = add.operands
        made, ops = producers.get(stack), [add]
        if made is not None and made.name in CASTS and only_for(stack, add):
            ops = [made, add]
            stack = made.operand
            made = producers.get(stack)
        if made is None or not made.regions:
            continue
        carry = made.results.index(stack)
        writes = _writes(made, carry)
        if only_for(accumulator, add) and only_for(stack, ops[0]) and writes:
            ops += _following(graph, add.result, writes[0])
            yield _Ending(made, carry, tuple(ops), accumulator)
    for value in graph.outputs:
        cast = producers.get(value)
        made = producers.get(cast.operand) if cast is not None and cast.name in CASTS else None
        if cast is None or made is None or not made.regions or value in users:
            continue
        carry = made.results.index(cast.operand)
        if only_for(cast.operand, cast) and _writes(made, carry):
            yield _Ending(made, carry, (cast,), None)


def _following(graph: Graph, value: Value, write: Op) -> list[Op]:
    """What is done to a sum, each op the only reader of the one before, as far as it is the same
    for the slices of `write` as for the whole; nothing where no reduction is among it.
    """
    users, producers = graph.uses(), graph.producers()
    stack, update = (v.type.shape for v in write.operands[:2])
    walked = {d for d, (n, w) in enumerate(zip(stack, update, strict=True)) if n != w}
    ops: list[Op] = []
    while value not in graph.outputs and len(users.get(value, ())) == 1:
        (op,) = users[value]
        others = [producers.get(v) for v in op.operands if v is not value]
        if not _is_local(op, walked) or not all(map(splat, others)):
            break
        ops.append(op)
        value = op.result
    return ops if any(op.name in REDUCTIONS_OF_RANKS for op in ops) else []


def _is_local(op: Op, walked: Collection[int]) -> bool:
    """Whether `op` does to slices along `walked` what it does to the whole."""
    if op.name in REDUCTIONS_OF_RANKS:
        return not is_cross_stage(op) and resized_dim(op) not in walked
    return OPS[op.name].elementwise


def _writes(loop: Op, carry: int) -> list[Op]:
    """What fills a stack of `loop`, whole and slice by slice; none where it is no such stack."""
    return covering_writes(loop.regions[0], carry, loop.attrs.trip, 0, counted(loop))


def _rebuilt(loop: Op, endings: Sequence[_Ending], producers: Mapping[Value, Op]) -> list[Op]:
    """`loop` with the accumulators, and what their sums are reduced to, in the place of the stacks;
    first what that starts with.
    """
    body = loop.regions[0]
    operands, results = list(loop.operands), list(loop.results)
    inputs, outputs = list(body.inputs), list(body.outputs)
    starts: list[Op] = []
    instead: dict[Op, list[Op]] = {}
    for one in endings:
        results[one.carry] = one.result
        now = accumulator = Value(one.result.type)
        if not one.is_in_place:
            zeros = ConstantAttrs.full(0, one.result.type)  # nobody reads them
            starts.append(make_op("constant", (), zeros))
            operands[one.carry] = starts[-1].result
        elif one.accumulator is not None:
            operands[one.carry] = one.accumulator
        if one.accumulator is not None and not one.is_in_place:
            accumulator = Value(one.accumulator.type)
            operands.append(one.accumulator)
            inputs.append(accumulator)
            outputs.append(accumulator)
            results.append(Value(accumulator.type))
        inputs[one.carry] = now
        for write in _writes(loop, one.carry):
            read = now if one.is_in_place else accumulator
            instead[write] = _slice(one, write, read, now, producers)
            now = instead[write][-1].result
        outputs[one.carry] = now
    ops = [op for old in body.ops for op in instead.get(old, (old,))]
    inner = with_ops(body, ops, tuple(outputs), tuple(inputs))
    again = Op(loop.name, tuple(operands), tuple(results), loop.attrs, (inner,), loop.loc)
    return [*starts, again]


def _slice(
    one: _Ending, write: Op, accumulator: Value, stack: Value, producers: Mapping[Value, Op]
) -> list[Op]:
    """What puts into a slice of `stack` what becomes of what `write` puts there."""
    _, update, *starts = write.operands
    ops: list[Op] = []
    now = {one.loop.results[one.carry]: update}
    if one.accumulator is not None:
        attrs = DynamicSliceAttrs(update.type.shape)
        ops.append(make_op("dynamic_slice", (accumulator, *starts), attrs, loc=write.loc))
        now[one.accumulator] = ops[0].result
    for op in one.ops:
        for value in op.operands:
            if value not in now:
                attrs = resized(producers[value], update.type.shape)
                ops.append(make_op("constant", (), attrs))
                now[value] = ops[-1].result
        operands = tuple(now[v] for v in op.operands)
        ops.append(make_op(op.name, operands, op.attrs, loc=op.loc))
        now[op.result] = update = ops[-1].result
    ops.append(make_op("dynamic_update_slice", (stack, update, *starts)))
    return ops
