"""Which stream of a core's collective engine every collective runs on, and its priority there.

A stream serves its collectives one after the other. What a layer itself waits for (tensor, sequence
and expert parallelism) keeps stream 0; gathers of weights, reductions of gradients and their sums
over copies are given streams of their own as far as there are any.

In one stream a layer's own collective stands behind whatever started before it. With low priority
the others start behind dependency tokens of the layer's collectives (`compiler/lower/tokens.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.compiler.ir.rewrite import with_ops, with_regions
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS, TRAFFIC
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.program import StepPlan
from shardwright.sharding.cut.overlap.assign import COLLECTIVES, COPIES, GATHER, SHARDS

Route = tuple[str, tuple[str, ...]]  # kind of collective, mesh axes


def streams_of(step: StepPlan, count: int) -> Mapping[Route, int]:
    """The stream of every kind of collective in `step`, when there are `count` streams; where there
    are too few, what is there closes up and the last ones share.
    """
    routes = sorted({r for p in step.programs for r in _routes(p.graph)})
    wanted = {route: _wanted(*route) for route in routes}
    there = sorted(set(wanted.values()))
    place = there if max(there, default=0) < count else range(len(there))
    stream = {want: min(at, count - 1) for want, at in zip(there, place, strict=True)}
    return {route: stream[want] for route, want in wanted.items()}


def _wanted(kind: str, axes: tuple[str, ...]) -> int:
    """The stream of a kind when there are enough."""
    if SHARDS in axes:
        return 1 if kind == GATHER else 2
    return 3 if COPIES in axes else 0


def moves_state(op: Op) -> bool:
    """True for gathers of weights and reductions of gradients: collectives over data axes."""
    named = op.name == GATHER or op.name in REDUCTIONS_OF_RANKS
    return named and bool({SHARDS, COPIES} & {*op.attrs.axes})


def is_layer_loop(op: Op) -> bool:
    """True for a loop whose body moves weights or gradients: one over layers."""
    return bool(op.regions and op.attrs.trip and any(map(moves_state, op.regions[0].ops)))


def moves_values(op: Op) -> bool:
    """True for collectives of a layer's own values: those over other axes."""
    return op.name in TRAFFIC and not {SHARDS, COPIES} & {*op.attrs.axes}


def _routes(graph: Graph) -> Iterator[Route]:
    for op in graph.walk():
        if op.name in COLLECTIVES:
            yield op.name, op.attrs.axes


def prioritised(graph: Graph) -> Graph:
    """`graph` with low priority for what moves state, at every level where a layer has collectives
    of its own; the graph itself where there are none.
    """
    ops = [with_regions(op, tuple(map(prioritised, op.regions))) for op in graph.ops]
    if any(moves_values(op) for op in ops):
        ops = [with_low_priority(op) if moves_state(op) else op for op in ops]
    return with_ops(graph, ops)


def with_low_priority(op: Op) -> Op:
    """`op`, behind those that a layer waits for."""
    attrs = replace(op.attrs, low_priority=True)
    return Op(op.name, op.operands, op.results, attrs, op.regions, op.loc)
