"""Collectives whose result is stored as a whole land where it is stored: no copy moves it there.

A layer loop that keeps gathered weights writes each to a row of a stack. Who reads such a weight
reads the row, so that nothing but the stack needs what the collective brings, and it arrives there
(`body.py`, `land`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from shardwright.compiler.ir.facts import keeps_order
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import DynamicSliceAttrs, ReshapeAttrs
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.traits import TRAFFIC, UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value

Users = Mapping[Value, Sequence[Op]]


def landed(graph: Graph) -> Graph:
    """`graph` (loop-free) in which results of collectives that are stored are read from there."""
    users = graph.uses()
    place = {op: at for at, op in enumerate(graph.ops)}
    stores = set[Op]()
    row_of: dict[Value, Value] = {}
    for op in graph.ops:
        path = _to_memory(op.result, users, graph) if op.name in TRAFFIC else []
        if path and len(users[op.result]) > 1:
            rows = list(_row(op.result, path[-1]))
            row_of[op.result] = rows[-1].result
            stores |= {*path}
            place |= dict.fromkeys((*path, *rows), place[op])
    if not row_of:
        return graph
    return _ordered(graph, stores, row_of, place)


def _to_memory(value: Value, users: Users, graph: Graph) -> list[Op]:
    """The views that end in an update of an input by all of `value` in one run, and the update;
    nothing where there is none.
    """
    if value in graph.outputs:
        return []
    for user in users.get(value, ()):
        path: list[Op] = []
        if user.name in UPDATES:
            path = [user] if _fills_a_run(user, value, users, graph) else []
        elif keeps_order(user) and len(users.get(user.result, ())) == 1:
            rest = _to_memory(user.result, users, graph)
            path = [user, *rest] if rest else []
        if path:
            return path
    return []


def _fills_a_run(update: Op, value: Value, users: Users, graph: Graph) -> bool:
    """Whether an update writes `value` into a run of an input that nobody else has to do with."""
    target, part = update.operands[:2]
    if part is not value or not is_run(part.type.shape, target.type.shape):
        return False
    return users[target] == [update] and target in graph.inputs and target not in graph.outputs


def is_run(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a part lies in one run: one element in front of the last dim that is cut."""
    cut = [d for d, (size, length) in enumerate(zip(part, whole, strict=True)) if size < length]
    return not cut or all(size == 1 for size in part[: cut[-1]])


def _row(value: Value, update: Op) -> Iterator[Op]:
    """What reads `value` back from where `update` has put it."""
    _, part, *starts = update.operands
    attrs = DynamicSliceAttrs(part.type.shape)
    yield (taken := make_op("dynamic_slice", (update.result, *starts), attrs, loc=update.loc))
    yield make_op("reshape", (taken.result,), ReshapeAttrs(value.type.shape), loc=update.loc)


def _ordered(
    graph: Graph, stores: Collection[Op], row_of: Mapping[Value, Value], place: Mapping[Op, int]
) -> Graph:
    """`graph` with the ops of `place`, of which all but `stores` read rows instead of values."""
    made = {
        op if op in stores else with_operands(op, tuple(row_of.get(v, v) for v in op.operands)): at
        for op, at in place.items()
    }
    producers = {result: op for op in made for result in op.results}
    before = {op: [producers[v] for v in op.operands if v in producers] for op in made}
    return with_ops(graph, topological(before, made.__getitem__))
