"""Sums of rows that Scalar makes as it computes what is summed, by `activation_reduce`.

The activation is in the code already when the sum is reached; it gets a second destination, and the
pass of Vector over the tile is not made. Next: `reductions.py` asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.builder import Held, Scope
from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.rates import MIN_CYCLES
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern, Instr, Loop, Space

# What it costs: Scalar reads its accumulator (documented: isa/costs.py, 64 cycles), and where loops
# add more, Vector adds a column, its shortest instruction.
_LEAST_ELEMENTS = 2 * MIN_CYCLES


def in_passing(
    frame: Frame, value: Value, source: Held, target: Held, scope: Scope, looped: bool
) -> bool:
    """Make the sums of rows of `source` those of the activation that wrote it, and add them to
    `target`; False, and nothing is changed, where that is not possible.
    """
    maker = _maker(frame, value, source, target, scope)
    if maker is None:
        return False
    rows, start = frame.rows(scope), scope.zero_when(value.over) if looped else ()
    if start == ():
        return _sum_into(target, maker, rows, scope)
    column = scope.tile("rowsum", rows, 1, DType.F32)
    made = _sum_into(column, maker, rows, scope)
    if made:
        scope.add_up(scope.flat(target, rows, 1), scope.flat(column, rows, 1), start)
    scope.release(column)
    return made


def _maker(frame: Frame, value: Value, source: Held, target: Held, scope: Scope) -> int | None:
    """Where in the body of `scope` an activation makes all that a sum reads by row; or None."""
    read = frame.space[value.inputs[0]]
    free = [a for a in frame.axes if a in read.atoms]
    elements = math.prod(scope.extent(a) for a in free)
    summed = math.prod(scope.extent(a) for a in free if a in value.over)
    fp32 = {frame.builder.dtype(source), frame.builder.dtype(target)} == {DType.F32}
    if value.attrs["kind"] != "add" or not fp32 or summed != elements:
        return None
    if elements <= _LEAST_ELEMENTS:
        return None
    at = _last_writer(scope.body, source.tile)
    item = None if at is None else scope.body[at]
    if not isinstance(item, Instr) or item.opcode != "activation" or item.dst is None:
        return None
    whole = math.prod(item.dst.shape) == elements * frame.rows(scope)
    return at if whole and item.dst.offset == source.offset else None


def _sum_into(column: Held, maker: int, rows: int, scope: Scope) -> bool:
    """Give an activation a second destination, unless that is in use from there on."""
    item = scope.body[maker]
    assert isinstance(item, Instr)
    if any(column.tile in _tiles(i) for i in scope.body[maker:]):
        return False
    sums = scope.flat(column, rows, 1)
    scope.body[maker] = replace(item, opcode="activation_reduce", row_sum=sums)
    return True


def _last_writer(body: Sequence[Instr | Loop], tile: int) -> int | None:
    """The last element of a body that may write a tile."""
    for at in range(len(body) - 1, -1, -1):
        item = body[at]
        if isinstance(item, Loop) or tile in _buffers(item.dsts):
            return at
    return None


def _buffers(patterns: Iterable[AccessPattern]) -> set[int]:
    return {p.buffer for p in patterns if p.space is not Space.HBM}


def _tiles(item: Instr | Loop) -> set[int]:
    """Tiles that an element of a body touches."""
    if isinstance(item, Loop):
        return set().union(*map(_tiles, item.body))
    return _buffers((*item.srcs, *item.dsts))
