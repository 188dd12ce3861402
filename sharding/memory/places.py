"""Where in the user's code each named buffer of a step comes from.

What a program writes is placed at the op that makes it, what is given at the first op that computes
with it. Ops that only move, convert or gather say nothing about a buffer and are looked through.
"""

from __future__ import annotations

from functools import cached_property
from heapq import heapify, heappop, heappush

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.traits import UPDATES, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.program import StepPlan

_MOVING = of(
    Kind.IDENTITY, Kind.VIEW, Kind.PART, Kind.CAST, Kind.UPDATE, Kind.RANK, Kind.TRANSFER
) | of(Kind.COLLECTIVE, combines=False)

_GIVEN = ("parameter", "optimizer", "cache", "batch", "rng")


def buffer_places(plan: StepPlan) -> dict[str, Loc]:
    """File and line by buffer, for the buffers that have one."""
    places: dict[str, Loc] = {}
    for program in plan.programs:
        level = _Level(program.graph)
        given = ((n, v) for n, v in program.reads if plan.buffers[n].role in _GIVEN)
        found = {name: _maker(level, value) for name, value in program.writes}
        found |= {name: _reader(level, value) for name, value in given}
        for name, loc in found.items():
            if loc != UNKNOWN_LOC:
                places.setdefault(name, loc)
    return places


class _Level:
    """One graph level: who makes its values, and who reads them at which positions."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = graph.producers()
        self._inside: dict[Op, _Level] = {}

    @cached_property
    def reads(self) -> dict[Value, list[int]]:
        """Positions of the readers of each value."""
        found: dict[Value, list[int]] = {}
        for position, op in enumerate(self.graph.ops):
            for value in op.operands:
                found.setdefault(value, []).append(position)
        return found

    def inside(self, loop: Op) -> _Level:
        """The body of a loop."""
        if loop not in self._inside:
            self._inside[loop] = _Level(loop.regions[0])
        return self._inside[loop]


def _maker(level: _Level, value: Value) -> Loc:
    """The place of the op that computes `value`, in a loop the op of its body."""
    seen, looped = set[Value](), False
    while value not in seen:
        seen.add(value)
        graph, op = level.graph, level.made.get(value)
        if op is None and looped and value in graph.inputs:  # what the last round left
            value = graph.outputs[graph.inputs.index(value)]
        elif op is not None and op.regions:
            level, looped = level.inside(op), True
            value = level.graph.outputs[op.results.index(value)]
        elif op is not None and op.operands and (op.name in _MOVING or _accumulates(op)):
            value = op.operands[op.name in UPDATES or _accumulates(op)]
        else:
            return UNKNOWN_LOC if op is None else op.loc
    return UNKNOWN_LOC


def _accumulates(op: Op) -> bool:
    """True for the sum of micro-batches, which has no place of its own."""
    return op.name == "add" and op.loc == UNKNOWN_LOC


def _reader(level: _Level, value: Value) -> Loc:
    """The place of the first op that computes with `value` or with what it is moved to."""
    moved, todo = {value}, list(level.reads.get(value, ()))
    heapify(todo)
    last = -1
    while todo:
        position = heappop(todo)
        if position == last:
            continue
        op, last = level.graph.ops[position], position
        if op.name in _MOVING:
            for result in op.results:
                moved.add(result)
                for reader in level.reads.get(result, ()):
                    heappush(todo, reader)
        elif op.regions:
            carries = zip(op.operands, op.regions[0].inputs, strict=True)
            inner = (_reader(level.inside(op), v) for given, v in carries if given in moved)
            known = next((loc for loc in inner if loc != UNKNOWN_LOC), None)
            if known is not None:
                return known
        else:
            return op.loc
    return UNKNOWN_LOC
