"""Questions about a graph: its arithmetic, what is known of its values, and how long they live.

All of them read only. Positions count the ops of one level, so an interval inside a loop body is
about the body.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Graph, Op, Value

_REARRANGING = of(Kind.LITERAL, Kind.VIEW) | {"slice"}


def is_light(op: Op) -> bool:
    """Whether an op costs at most one pass over its elements: others may repeat it."""
    return op.name in _REARRANGING or OPS[op.name].elementwise


def flops(graph: Graph, only: Collection[str] = ()) -> int:
    """Useful arithmetic of one execution, loop bodies counted once per iteration; of the op names
    in `only`, if given.
    """
    total = 0
    for op in graph.ops:
        if op.regions:
            total += op.attrs.trip * sum(flops(region, only) for region in op.regions)
        elif not only or op.name in only:
            total += OPS[op.name].flops(op)
    return total


MAX_EVALUATED = 1 << 20  # elements up to which values made of constants are looked at
_EVALUATED = _REARRANGING | {"concatenate"}


def known_elements(made: Mapping[Value, Op], value: Value) -> np.ndarray | None:
    """The elements of a value made of constants and counts alone, None for others and large ones.

    `made` are the producers of the level.
    """
    known: dict[Value, np.ndarray | None] = {}
    todo = [value]  # no recursion: chains may be long
    while todo:
        one = todo[-1]
        op = made.get(one)
        if one in known:
            todo.pop()
        elif op is None or not _is_evaluated(op, one):
            known[one] = None
        elif missing := [v for v in op.operands if v not in known]:
            todo += missing
        else:
            arguments = [a for v in op.operands if (a := known[v]) is not None]
            complete = len(arguments) == len(op.operands)
            known[one] = OPS[op.name].reference(op, arguments)[0] if complete else None
    return known[value]


def _is_evaluated(op: Op, value: Value) -> bool:
    small = value.type.num_elements <= MAX_EVALUATED
    return small and (op.name in _EVALUATED or OPS[op.name].elementwise)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value is defined by op `start` (-1 for inputs) and last read by op `end`.

    `end` is the number of ops for graph outputs; a value nothing reads ends where it starts.
    """

    start: int
    end: int


def liveness(graph: Graph) -> dict[Value, Interval]:
    """Live interval of every value of this level, in positions of `graph.ops`."""
    start: dict[Value, int] = dict.fromkeys(graph.inputs, -1)
    end: dict[Value, int] = dict.fromkeys(graph.inputs, -1)
    for position, op in enumerate(graph.ops):
        for value in op.operands:
            end[value] = position
        for value in op.results:
            start[value] = end[value] = position
    for value in graph.outputs:
        end[value] = len(graph.ops)
    return {value: Interval(begin, end[value]) for value, begin in start.items()}


def structure(graph: Graph) -> Hashable:
    """A key that two graphs share when their bytes without locations are equal (`serialize.dump`);
    many times cheaper where graphs are compared and not stored.
    """
    number = {v: i for i, v in enumerate(graph.inputs)}
    rows = []
    for op in graph.ops:
        read = tuple([number[v] for v in op.operands])
        regions = tuple([structure(region) for region in op.regions])
        rows.append((op.name, op.attrs, read, tuple([v.type for v in op.results]), regions))
        for value in op.results:
            number[value] = len(number)
    given = tuple([v.type for v in graph.inputs])
    return graph.name, given, tuple(rows), tuple([number[v] for v in graph.outputs])


def invariant_carries(loop: Op) -> tuple[int, ...]:
    """Carries that the body passes through unchanged (loop invariants)."""
    body = loop.regions[0]
    pairs = zip(body.inputs, body.outputs, strict=True)
    return tuple(i for i, (before, after) in enumerate(pairs) if before is after)


def count_ops(graph: Graph) -> dict[str, int]:
    """Static number of ops by name, regions included, most frequent first."""
    counts: dict[str, int] = {}
    for op in graph.walk():
        counts[op.name] = counts.get(op.name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
