"""Reductions: along free dims by `tensor_reduce`, over loops by accumulation, over partitions by
the tensor engine.

A sum over partitions is a matmul with ones on both sides, which leaves the total on every
partition; maximum and minimum transpose, reduce and transpose back. So a reduced value is held like
any value that does not span the partition iter dim. Sums of rows are those of the activation that
computes what is summed, where it can: it is in the code already, gets a second destination
(`activation_reduce`), and the pass of Vector over the tile is not made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.builder import Box, Dims, Held, Scope, merge_dims, pieces
from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.planning import MIN_CYCLES
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Loop, Space

_COLUMN = -7  # a private iter dim number for "columns of a flat tile"


def accumulator_type(value: Value) -> DType:
    """Partial results of floats are fp32."""
    return DType.F32 if value.dtype.is_float else value.dtype


def over_partitions(frame: Frame, value: Value) -> bool:
    """Whether the partition iter dim is reduced."""
    return frame.partition in value.over


def new_accumulator(frame: Frame, number: int, scope: Scope) -> Held:
    """A tile for partial results of reduce `number`, laid out as its result."""
    value = frame.domain[number]
    return frame.scratch(value, scope, accumulator_type(value), number)


def accumulate(frame: Frame, number: int, target: Held, scope: Scope, looped: bool) -> None:
    """One `tensor_reduce` of the tile at hand into `target`; `looped` when loops add more to it.
    Sums of rows are those of the activation that made them where that is so.
    """
    value = frame.domain[number]
    (source,) = (frame.operand(i) for i in value.inputs)
    if frame.sums_in_passing(number) and in_passing(frame, value, source, target, scope, looped):
        return
    axes = [a for a in frame.axes if a in frame.domain[value.inputs[0]].iter_dims]
    kept = [a for a in axes if a in value.iter_dims]
    reduced = [a for a in axes if a in value.over]
    rows = frame.rows(scope)
    out, into = _dims(scope, kept, target, source)
    (folded,) = merge_dims(
        [scope.extent(a) for a in reduced], [[source.strides[a] for a in reduced]]
    )
    kind = value.attrs["kind"]
    scope.add(
        "tensor_reduce",
        frame.engine(source, target),
        scope.on_chip(target, rows, out),
        (scope.on_chip(source, rows, (*into, *folded)),),
        op=ELEMENTWISE_OF[kind],
        num_reduced=len(folded),
        zero_when=scope.zero_when(value.over) if looped else (),
    )


def _dims(scope: Scope, axes: list[int], *held: Held) -> list[Dims]:
    return merge_dims(
        [scope.extent(a) for a in axes], [[h.strides.get(a, 0) for a in axes] for h in held]
    )


def finish(frame: Frame, number: int, partial: Held, scope: Scope) -> None:
    """Turn partial results into the value of reduce `number`."""
    value = frame.domain[number]
    if over_partitions(frame, value):
        result = _own(frame, number, value, scope)
        if value.attrs["kind"] == "add":
            _sum_partitions(frame, partial, result, scope)
        else:
            _extreme_of_partitions(frame, value, partial, result, scope)
        scope.release(partial)
        _settle(frame, number, scope)
    elif frame.builder.dtype(partial) is value.dtype:
        frame.held[number] = partial
        _settle(frame, number, scope)
    else:
        result = frame.new(number, value, scope)
        frame.copy(scope, Engine.VECTOR, result, partial)
        scope.release(partial)


def _own(frame: Frame, number: int, value: Value, scope: Scope) -> Held:
    """A dense tile for a reduced value, also for one that becomes part of a join."""
    if number in frame.joining:
        frame.held[number] = frame.scratch(value, scope, value.dtype, number)
        return frame.held[number]
    return frame.new(number, value, scope)


def _settle(frame: Frame, number: int, scope: Scope) -> None:
    """Put a value that is part of a join in its place."""
    if number in frame.joining:
        own = frame.held[number]
        part = frame.new(number, frame.domain[number], scope)
        frame.copy(scope, frame.engine(own), part, own)
        scope.release(own)


def emit_reduce(frame: Frame, number: int, scope: Scope) -> None:
    """A reduction that needs no loop: one instruction, and the partition step if there is one."""
    value = frame.domain[number]
    if over_partitions(frame, value):
        partial = new_accumulator(frame, number, scope)
        accumulate(frame, number, partial, scope, looped=False)
        finish(frame, number, partial, scope)
    else:
        accumulate(frame, number, frame.new(number, value, scope), scope, looped=False)


def columns(scope: Scope, total: int, width: int) -> list[tuple[Scope, Affine, int]]:
    """(scope, first column, columns) for blocks of a flat tile of `total` columns."""
    found = []
    base = scope.straight({_COLUMN: Box(Affine(), width)})
    for piece in pieces(total, min(width, total)):
        inner = base.enter(_COLUMN, piece)
        found.append((inner, inner.boxes[_COLUMN].origin, piece.extent))
    return found


def _width(frame: Frame, held: Held) -> int:
    return frame.builder.tiles[held.tile].elements


def _sum_partitions(frame: Frame, partial: Held, result: Held, scope: Scope) -> None:
    limits, rows = frame.builder.limits, frame.rows(scope)
    ones = frame.builder.filled(1.0, DType.F32, limits.partitions, part="ones")
    for inner, first, width in columns(scope, _width(frame, partial), limits.moving_max):
        bank = inner.psum("total")
        dims = ((1, width),)
        total = inner.on_chip(bank, rows, dims)
        stationary = inner.flat(ones, rows, rows)
        moving = inner.on_chip(partial, rows, dims, first)
        inner.matmul(total, (stationary, moving), ())
        target = inner.on_chip(result, rows, dims, first)
        inner.copy(Engine.VECTOR, target, total)


def _extreme_of_partitions(
    frame: Frame, value: Value, partial: Held, result: Held, scope: Scope
) -> None:
    limits, rows = frame.builder.limits, frame.rows(scope)
    for inner, first, width in columns(scope, _width(frame, partial), limits.transpose_max):
        transposed = inner.psum("turned")
        across = inner.flat(transposed, width, rows)
        inner.transpose(across, inner.flat(partial, rows, width, first))
        best = inner.tile("best", width, 1, DType.F32)
        spread = inner.tile("spread", width, rows, DType.F32)
        column = inner.flat(best, width, 1)
        attrs = {"op": ELEMENTWISE_OF[value.attrs["kind"]], "num_reduced": 1, "zero_when": ()}
        source = inner.on_chip(transposed, width, ((1, 1), (1, rows)))
        inner.add("tensor_reduce", Engine.VECTOR, column, (source,), **attrs)
        wide = inner.flat(spread, width, rows)
        inner.copy(Engine.VECTOR, wide, inner.on_chip(best, width, ((0, rows),)))
        back = inner.flat(inner.psum("back"), rows, width)
        inner.transpose(back, wide)
        inner.copy(Engine.VECTOR, inner.flat(result, rows, width, first), back)


# What it costs: Scalar reads its accumulator (documented: isa/costs.py, 64 cycles), and where loops
# add more, Vector adds a column, its shortest instruction.
_LEAST_ELEMENTS = 2 * MIN_CYCLES


def in_passing(
    frame: Frame, value: Value, source: Held, target: Held, scope: Scope, looped: bool
) -> bool:
    """Add the sums of rows of `source` as its activation makes them; False where it cannot."""
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
    read = frame.domain[value.inputs[0]]
    free = [a for a in frame.axes if a in read.iter_dims]
    elements = scope.elements(free)
    summed = scope.elements(a for a in free if a in value.over)
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
