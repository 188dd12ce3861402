"""Dead code elimination: ops nothing reads, loop carries nothing needs, barrier operands nothing
needs.

No op of the IR has a side effect. A dead collective goes too, since the ranks of its groups run the
same program, so that it is dead on all of them; one over pipeline stages, which run programs of
their own, stays. The graph's signature stays.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.rewrite import with_ops, with_results
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value


def dce(graph: Graph) -> Graph:
    """`graph` without what its outputs do not need."""
    ops, _ = _sweep(graph, set(graph.outputs))
    return with_ops(graph, ops)


def _sweep(graph: Graph, needed: set[Value]) -> tuple[list[Op], set[Value]]:
    """The live ops for the needed values, and all values needed in the end."""
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if is_cross_stage(op) or any(v in needed for v in op.results):
            op = _narrow(op, needed)
            needed.update(op.operands)
            ops.append(op)
    return ops[::-1], needed


def _narrow(op: Op, needed: set[Value]) -> Op:
    """A live op without the results that are dead."""
    if op.name in IDENTITIES:
        keep = [i for i, v in enumerate(op.results) if v in needed]
        return op if len(keep) == len(op.results) else with_results(op, keep, op.attrs, ())
    if op.regions:
        return _narrow_loop(op, needed)
    return op


def _narrow_loop(op: Op, needed: set[Value]) -> Op:
    """A loop with the carries its needed results depend on, across iterations, and the counter."""
    body = op.regions[0]
    kept = {i for i, v in enumerate(op.results) if v in needed} | {op.attrs.induction}
    while True:
        ops, used = _sweep(body, {body.outputs[i] for i in kept})
        grown = kept | {i for i, v in enumerate(body.inputs) if v in used}
        if grown == kept:
            break
        kept = grown
    keep = sorted(kept)
    region = with_ops(
        body, ops, tuple(body.outputs[i] for i in keep), tuple(body.inputs[i] for i in keep)
    )
    attrs = replace(op.attrs, induction=keep.index(op.attrs.induction))
    return with_results(op, keep, attrs, (region,))
