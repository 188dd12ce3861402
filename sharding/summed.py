"""Sums over micro-batches that are added up where a layer's share is made.

A backward loop over layers writes each layer's gradient into a stack, and behind the loop the whole
stack is added to the accumulator: every gradient is stored, read back and added. Instead the loop
carries the accumulator and adds each layer's gradient to its slice: no stack is held, and half of
the traffic is left. The sums are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConvertAttrs, DynamicSliceAttrs
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.outline.overwritten import covering_writes
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.remat.stacks import counted
from shardwright.compiler.program import StepPlan
from shardwright.sharding import shown

LEAST_BYTES = 2**16
"""Of a layer's gradient in the accumulator's type. Less is added faster with that of all layers
behind the loop: a transfer of NeuronCore-v2 takes 2 us whatever it moves (documented), in which 0.8
MB pass. Our choice between biases of 16 KiB, which lose, and shards of 128 KiB, which win.
"""


@dataclass(frozen=True, slots=True)
class _Sum:
    """`add` of an accumulator and what fills `carry` of `loop`, in the accumulator's type once it
    went through `convert`, where there is one."""

    loop: Op
    carry: int
    convert: Op | None
    add: Op


def summed_in_loops(plan: StepPlan, least_bytes: int = LEAST_BYTES) -> StepPlan:
    """`plan` with the accumulators of gradients in the loops over layers."""
    programs = tuple(replace(p, graph=summed(p.graph, least_bytes)) for p in plan.programs)
    if all(one.graph is other.graph for one, other in zip(programs, plan.programs, strict=True)):
        return plan
    return shown.programs("summed", replace(plan, programs=programs))


def summed(graph: Graph, least_bytes: int = LEAST_BYTES) -> Graph:
    """`graph` with every sum of an input and a stack inside of the loop that fills the stack, where
    an iteration writes `least_bytes` of it and nothing else reads either; the graph itself where
    there is none."""
    found: dict[Op, list[_Sum]] = {}
    for one in _sums(graph):
        if one.add.result.type.num_bytes >= least_bytes * one.loop.attrs.trip:
            found.setdefault(one.loop, []).append(one)
    if not found:
        return graph
    moved = {op for own in found.values() for one in own for op in (one.convert, one.add)}
    ops = [_rebuilt(op, found[op]) if op in found else op for op in graph.ops if op not in moved]
    return dce(Graph(graph.inputs, tuple(ops), graph.outputs, graph.name))


def _sums(graph: Graph) -> Iterator[_Sum]:
    users, producers = graph.uses(), graph.producers()
    kept = set(graph.outputs)

    def only_for(value: Value, user: Op) -> bool:
        return users[value] == [user] and value not in kept

    for add in graph.ops:
        if add.name != "add" or add.operands[0] not in graph.inputs:
            continue
        accumulator, stack = add.operands
        made, convert, reader = producers.get(stack), None, add
        if made is not None and made.name == "convert" and only_for(stack, add):
            convert, stack, reader = made, made.operands[0], made
            made = producers.get(stack)
        if made is None or made.name != "loop":
            continue
        carry = made.results.index(stack)
        if only_for(accumulator, add) and only_for(stack, reader) and _writes(made, carry):
            yield _Sum(made, carry, convert, add)


def _writes(loop: Op, carry: int) -> list[Op]:
    """What fills a stack of `loop`, whole and slice by slice; none where it is no such stack."""
    return covering_writes(loop.regions[0], carry, loop.attrs.trip, 0, counted(loop))


def _rebuilt(loop: Op, sums: Sequence[_Sum]) -> Op:
    """`loop` with the accumulators in the place of the stacks."""
    body = loop.regions[0]
    operands, results = list(loop.operands), list(loop.results)
    inputs, outputs = list(body.inputs), list(body.outputs)
    instead: dict[Op, list[Op]] = {}
    for one in sums:
        operands[one.carry], results[one.carry] = one.add.operands[0], one.add.result
        inputs[one.carry] = now = Value(one.add.result.type)
        for write in _writes(loop, one.carry):
            instead[write] = _added(write, now)
            now = instead[write][-1].result
        outputs[one.carry] = now
    ops = [op for old in body.ops for op in instead.get(old, (old,))]
    inner = Graph(tuple(inputs), tuple(ops), tuple(outputs), body.name)
    return Op(loop.name, tuple(operands), tuple(results), loop.attrs, (inner,), loop.loc)


def _added(write: Op, accumulator: Value) -> list[Op]:
    """What adds to a slice of `accumulator` what `write` puts into a stack."""
    _, update, *starts = write.operands
    ops = [make_op("dynamic_slice", (accumulator, *starts), DynamicSliceAttrs(update.type.shape))]
    wide = accumulator.type.dtype
    if update.type.dtype is not wide:
        ops.append(make_op("convert", (update,), ConvertAttrs(wide)))
        update = ops[-1].result
    ops.append(make_op("add", (ops[0].result, update)))
    ops.append(make_op("dynamic_update_slice", (accumulator, ops[-1].result, *starts)))
    return ops
