"""Short loops that only work element by element become straight-line code.

Between iterations, carries pass through memory; the rounds of a random-bit generator are a handful
of integer operations on values as large as a dropout mask. Written out, they are one chain that
needs no memory, and their counters and keys fold away.
"""

from __future__ import annotations

from shardwright.compiler.ir.analysis import is_light
from shardwright.compiler.ir.build import cloned
from shardwright.compiler.ir.rewrite import Level, with_regions
from shardwright.compiler.ir.types import Graph, Op, Value

MAX_OPS = 1024
"""Ops a loop may become: threefry takes 5 iterations of about 60 (our choice)."""


def unroll(graph: Graph) -> Graph:
    """`graph` with short elementwise loops written out, innermost first."""
    if not any(op.regions for op in graph.ops):
        return graph
    level = Level()
    for op in graph.ops:
        op = level.update(with_regions(op, tuple(unroll(region) for region in op.regions)))
        if op.regions and _is_short(op):
            level.replace(op.results, _written_out(level, op))
        else:
            level.ops.append(op)
    return level.finish(graph)


def _is_short(loop: Op) -> bool:
    """True for a body of light ops that stays short when written out."""
    body = loop.regions[0].ops
    return all(map(is_light, body)) and loop.attrs.trip * len(body) <= MAX_OPS


def _written_out(level: Level, loop: Op) -> tuple[Value, ...]:
    """The values of the carries after the last iteration."""
    body, carries = loop.regions[0], list(loop.operands)
    for _ in range(loop.attrs.trip):
        now = dict(zip(body.inputs, carries, strict=True))
        for op in body.ops:
            level.ops.append(cloned(op, now))
        carries = [now[v] for v in body.outputs]
    return tuple(carries)
