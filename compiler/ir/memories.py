"""Which values of a graph are in the memory of the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise

from shardwright.compiler.ir.facts import keeps_order
from shardwright.compiler.ir.ops.host import EMPTY, LOAD, STORE
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value


def host_values(graph: Graph, known: Collection[Value] = ()) -> set[Value]:
    """The values of a graph and its loops that are in host memory, `known` ones among them: what
    transfers reach, what it is written to, and all that only names it otherwise.
    """
    seeds, same = list(known), defaultdict[Value, list[Value]](list)
    for op in graph.walk():
        for before, after, is_one in _named(op):
            same[before].append(after)
            if is_one:
                same[after].append(before)
        if op.name in (EMPTY, STORE):
            seeds.append(op.result)
        elif op.name == LOAD:
            seeds.append(op.operands[0])
    found: set[Value] = set()
    while seeds:
        value = seeds.pop()
        if value not in found:
            found.add(value)
            seeds += same[value]
    return found


def _named(op: Op) -> Iterator[tuple[Value, Value, bool]]:
    """Values of which the second is in host memory where the first is, and whether that holds the
    other way round too.
    """
    if op.regions:
        (body,) = op.regions
        for carry in zip(op.operands, body.inputs, body.outputs, op.results, strict=True):
            for number, (before, after) in enumerate(pairwise(carry)):
                yield before, after, number > 0
    elif op.name in IDENTITIES:
        for operand, result in zip(op.operands, op.results, strict=True):
            yield operand, result, True
    elif op.name in ("dynamic_update_slice", STORE):
        yield op.operands[0], op.result, True
        if op.name != STORE:
            yield op.operands[1], op.result, False
    elif op.name == "dynamic_slice" or keeps_order(op):
        yield op.operands[0], op.result, False
