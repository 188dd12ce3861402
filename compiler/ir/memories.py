"""Which values of a graph are in the memory of the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from shardwright.compiler.ir.facts import keeps_order
from shardwright.compiler.ir.ops.host import EMPTY, LOAD, STORE
from shardwright.compiler.ir.types import Graph, Op, Value


def host_values(graph: Graph, known: Collection[Value] = ()) -> set[Value]:
    """The values of a graph and its loops that are in host memory, `known` ones among them: what
    transfers reach, what it is written to, and all that only names it otherwise.
    """
    seeds, same = list(known), _Same()
    for op in graph.walk():
        same.note(op)
        if op.name in (EMPTY, STORE):
            seeds.append(op.result)
        elif op.name == LOAD:
            seeds.append(op.operands[0])
    found: set[Value] = set()
    while seeds:
        value = seeds.pop()
        if value not in found:
            found.add(value)
            seeds += same.to.get(value, ())
    return found


class _Same:
    """Which values are in host memory where another one is."""

    def __init__(self) -> None:
        self.to: dict[Value, list[Value]] = {}

    def note(self, op: Op) -> None:
        """What an op says about its operands and results."""
        if op.name == "loop":
            (body,) = op.regions
            carries = zip(op.operands, body.inputs, body.outputs, op.results, strict=True)
            for operand, *inside in carries:
                self.to.setdefault(operand, []).append(inside[0])
                self._tie(inside)
        elif op.name == "optimization_barrier":
            for pair in zip(op.operands, op.results, strict=True):
                self._tie(pair)
        elif op.name in ("dynamic_update_slice", STORE):
            self._tie((op.operands[0], op.result))
            if op.name != STORE:
                self.to.setdefault(op.operands[1], []).append(op.result)
        elif op.name == "dynamic_slice" or keeps_order(op):
            self.to.setdefault(op.operands[0], []).append(op.result)

    def _tie(self, values: Sequence[Value]) -> None:
        for before, after in pairwise(values):
            self.to.setdefault(before, []).append(after)
            self.to.setdefault(after, []).append(before)
