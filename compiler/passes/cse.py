"""Common subexpression elimination: equal pure ops on equal operands become one, the first in
program order.

Barriers and collectives are never merged, so what a rematerialised block recomputes behind its
barrier stays a recomputation. Loop bodies are levels of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.rewrite import Level, with_ops, with_regions
from shardwright.compiler.ir.types import Graph, Op, Value


def cse(graph: Graph) -> Graph:
    """`graph` with every pure computation done once per level."""
    return _cse_level(graph, {})


def _cse_level(graph: Graph, duplicates: Mapping[Value, Value]) -> Graph:
    """CSE of one level whose `duplicates` are inputs known to equal another input."""
    level = Level()
    level.replace(list(duplicates), list(duplicates.values()))
    seen: dict[Hashable, tuple[Value, ...]] = {}
    for op in graph.ops:
        op = level.update(op)
        if op.regions:
            level.ops.append(_loop(level, op))
            continue
        key = key_of(op)
        if key in seen:
            level.replace(op.results, seen[key])
            continue
        if key is not None:
            seen[key] = op.results
        level.ops.append(op)
    outputs = tuple(v if v in duplicates else level.now(v) for v in graph.outputs)
    return with_ops(graph, level.ops, outputs)


def _loop(level: Level, op: Op) -> Op:
    """`op` with CSE in its body, where equal carries are read through the first of them, or the
    counter: those that start from one operand and, as long as they are equal, go on equally.

    The other carries stay; nothing reads them any more, so that `dce` drops them.
    """
    body = op.regions[0]
    classes: Sequence[Hashable] = op.operands
    while True:
        first: dict[Hashable, int] = {}
        for i in (op.attrs.induction, *range(len(classes))):
            first.setdefault(classes[i], i)
        leaders = [first[one] for one in classes]
        equal = [i for i, leader in enumerate(leaders) if leader != i]
        duplicates = {body.inputs[i]: body.inputs[leaders[i]] for i in equal}
        made = _cse_level(body, duplicates)
        after = [duplicates.get(value, value) for value in made.outputs]
        if all(after[i] is after[leaders[i]] for i in equal):
            break
        classes = list(zip(leaders, after, strict=True))
    level.replace([op.results[i] for i in equal], [op.results[leaders[i]] for i in equal])
    return with_regions(op, (made,))


def key_of(op: Op) -> Hashable | None:
    """What makes two ops the same; None for ops that are never merged."""
    known = OPS[op.name]
    if not known.pure:
        return None
    operands = op.operands
    if known.commutes:  # gradients of x * x write both orders
        operands = tuple(sorted(operands, key=id))
    return op.name, operands, op.attrs
