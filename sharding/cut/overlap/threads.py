"""Collectives of weights and gradients give way to those a layer waits for.

In one stream a layer's own collective (tensor, sequence, expert, context parallelism) stands behind
whatever started before it. Marked as yielding, gathers of weights and reductions of gradients start
behind dependency tokens of the layer's collectives; `compiler/lower/tokens.py` hands them out where
a function is compiled.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.ir.rewrite import with_ops, with_regions
from shardwright.compiler.ir.types import Graph, Op
from shardwright.sharding.cut.overlap.streams import moves_state, moves_values


def threaded(graph: Graph) -> Graph:
    """`graph` with collectives marked at every level where a layer has some of its own; the graph
    itself where there are none.
    """
    ops = [with_regions(op, tuple([threaded(region) for region in op.regions])) for op in graph.ops]
    if any(moves_values(op) for op in ops):
        ops = [_yielding(op) if moves_state(op) else op for op in ops]
    return with_ops(graph, ops)


def _yielding(op: Op) -> Op:
    """`op`, giving way."""
    attrs = replace(op.attrs, yields=True)
    return Op(op.name, op.operands, op.results, attrs, op.regions, op.loc)
