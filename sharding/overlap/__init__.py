"""Overlap of communication with layers: collectives move across the borders of layers.

`overlap` rewrites the programs of a step after the cut, so that strategies and partitioning know
nothing of it: `assign.py` decides which ops of a layer loop run early or late, `pipelined.py` makes
a software pipeline of the loop, `streams.py` says what runs beside what. Values stay the same bit
by bit. `deferred.py` comes before the cut: it frees reductions of gradients from loops, so that
they can wait for the last micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.ir.types import Graph, Op, Value
from compiler.passes.dce import dce
from compiler.program import StepPlan
from sharding.overlap.assign import Shifts, delays
from sharding.overlap.deferred import hoisted
from sharding.overlap.pipelined import pipelined
from sharding.overlap.streams import streams_of

__all__ = ["Shifts", "hoisted", "overlap"]


def overlap(step: StepPlan, shifts: Shifts, streams: int = 1) -> StepPlan:
    """`step` with the collectives of its layer loops moved by `shifts`, on so many streams."""
    if shifts != Shifts():
        programs = tuple(replace(p, graph=_shifted(p.graph, shifts)) for p in step.programs)
        step = replace(step, programs=programs)
    return replace(step, streams=streams_of(step, streams))


def _shifted(graph: Graph, shifts: Shifts) -> Graph:
    """The graph of a program with its loops pipelined."""
    ops: list[Op] = []
    now: dict[Value, Value] = {}
    for op in graph.ops:
        operands = tuple(now.get(v, v) for v in op.operands)
        if operands != op.operands:
            op = Op(op.name, operands, op.results, op.attrs, op.regions, op.loc)
        found = delays(op, shifts) if op.name == "loop" and op.attrs.trip else None
        if found is None:
            ops.append(op)
            continue
        made, results = pipelined(found)
        ops += made
        now |= results
    outputs = tuple(now.get(v, v) for v in graph.outputs)
    return dce(Graph(graph.inputs, tuple(ops), outputs, graph.name))
