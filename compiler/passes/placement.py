"""Where ops stand in program order: lifetimes of values follow from it.

A value made long before its first reader waits in memory; what is computed again for one reader is
therefore placed right in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.ir.types import Op, Value


def place_late(ops: Sequence[Op], movable: set[Op]) -> list[Op]:
    """`ops` with those of `movable` right before their first reader, or last without one.

    The others keep their order; no movable op may read what another op makes.
    """
    waiting = {v: op for op in ops if op in movable for v in op.results}
    placed: list[Op] = []
    for op in ops:
        if op not in movable:
            _place(op, waiting, placed)
    while waiting:
        _place(next(iter(waiting.values())), waiting, placed)
    return placed


def _place(op: Op, waiting: dict[Value, Op], placed: list[Op]) -> None:
    """Append `op` after the waiting ops it reads, directly or not."""
    todo = [op]
    while todo:
        missing = [waiting[v] for v in todo[-1].operands if v in waiting]
        if missing:
            todo.append(missing[0])
            continue
        ready = todo.pop()
        placed.append(ready)
        for value in ready.results:
            waiting.pop(value, None)
