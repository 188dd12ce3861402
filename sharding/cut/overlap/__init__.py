"""Overlap of communication with layers: collectives move across the borders of layers.

`overlap` rewrites the programs of a step after the cut, so that strategies and partitioning know
nothing of it: `groups.py` makes one iteration of several layers, `buckets.py` one collective of
several, `assign.py` decides which ops of a
layer loop run early or late, `pipelined.py` makes a software pipeline of the loop, `threads.py`
lets what a layer waits for go first, `streams.py` says what runs beside what. Values stay the same
bit by bit. `deferred.py` comes before the cut: it frees reductions of gradients from loops, so that
they can wait for the last micro-batch, whose backward program `last.py` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.program import StepPlan
from shardwright.sharding import shown
from shardwright.sharding.cut.overlap.assign import Shifts, delays
from shardwright.sharding.cut.overlap.buckets import UNLIMITED, bucketed
from shardwright.sharding.cut.overlap.deferred import hoisted
from shardwright.sharding.cut.overlap.groups import grouped
from shardwright.sharding.cut.overlap.idle import idle_shifts, idle_streams, note, waiting_layers
from shardwright.sharding.cut.overlap.last import reduced_in_last
from shardwright.sharding.cut.overlap.pipelined import pipelined
from shardwright.sharding.cut.overlap.streams import streams_of
from shardwright.sharding.cut.overlap.threads import threaded

__all__ = ["Shifts", "hoisted", "overlap", "reduced_in_last"]


def overlap(
    step: StepPlan,
    shifts: Shifts,
    streams: int = 1,
    bucket_bytes: int = 0,
    tokens: bool = False,
    group: int = 0,
) -> StepPlan:
    """`step` with layers in groups of `group`, collectives in buckets, those of its layer loops
    moved by `shifts` iterations, behind tokens of a layer's own, on so many streams;
    `metadata["findings"]` says which of that finds nothing to change.
    """
    notes: list[Diagnostic] = []
    if group:
        whole, limit = step, bucket_bytes or UNLIMITED
        step = _with_graphs(step, "grouped", lambda graph: grouped(graph, group, limit))
        if not _differ(step, whole):
            why = "no loop over layers gathers weights or reduces gradients"
            notes.append(note("layers_per_group", group, why))
    if bucket_bytes:
        whole = step
        step = _with_graphs(step, "bucketed", lambda graph: bucketed(graph, bucket_bytes))
        if not _differ(step, whole):
            why = "no two collectives over data axes are ready together and fit"
            notes.append(note("bucket_mb", bucket_bytes >> 20, why))
    notes += idle_shifts(step, shifts)
    step = _with_graphs(step, "shifted", lambda graph: shifted(graph, shifts))
    if tokens:
        whole = step
        step = _with_graphs(step, "threaded", threaded)
        if not _differ(step, whole):
            why = "no layer has collectives of its own beside those of weights and gradients"
            notes.append(note("dependency_tokens", "true", why))
        elif not shifts.gather:
            notes.append(waiting_layers())
    found = streams_of(step, streams)
    notes += idle_streams(found, streams)
    findings = step.metadata.get("findings", ())
    assert isinstance(findings, tuple)
    return replace(step, streams=found, metadata={**step.metadata, "findings": (*findings, *notes)})


def _differ(step: StepPlan, other: StepPlan) -> bool:
    """True when a program has another graph."""
    pairs = zip(step.programs, other.programs, strict=True)
    return any(a.graph is not b.graph for a, b in pairs)


def _with_graphs(step: StepPlan, name: str, change: Callable[[Graph], Graph]) -> StepPlan:
    """`step` with the graphs of its programs changed, itself where none is."""
    programs = tuple(replace(p, graph=change(p.graph)) for p in step.programs)
    changed = replace(step, programs=programs)
    return shown.programs(name, changed) if _differ(changed, step) else step


def shifted(graph: Graph, shifts: Shifts) -> Graph:
    """The graph of a program with its loops pipelined; the graph itself where nothing moves."""
    ops: list[Op] = []
    now: dict[Value, Value] = {}
    for op in graph.ops:
        operands = tuple(now.get(v, v) for v in op.operands)
        if operands != op.operands:
            op = Op(op.name, operands, op.results, op.attrs, op.regions, op.loc)
        found = delays(op, shifts) if op.regions and op.attrs.trip else None
        if found is None:
            ops.append(op)
            continue
        made, results = pipelined(found)
        ops += made
        now |= results
    if not now:
        return graph
    outputs = tuple(now.get(v, v) for v in graph.outputs)
    return dce(with_ops(graph, ops, outputs))
