"""Rows picked by an index: gathers, and scatters that settle rows picked more than once.

All work on tiles of up to 128 indices on the partitions, tiles in order. A scatter whose rows may
repeat compares the indices of a tile with each other: additions are merged by a matmul with the
equality matrix, of replacements only the last of equal ones writes, and other combinations run one
round per repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.codegen.builder import Held, Scope, by_numbers
from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.reductions import columns
from shardwright.compiler.codegen.values import Frame, copy_engine
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space

# fp32 holds every integer up to here exactly (IEEE 754); indices are compared in fp32 after a
# transpose, larger ones in two parts.
_EXACT_BITS = 24
_HALF_BITS = 16
_ONE = ((1, 1),)


def emit_gather(frame: Frame, number: int, scope: Scope) -> None:
    """dst[p, ...] = row index[p] of the view."""
    value = frame.domain[number]
    index = _index(frame, value.inputs[0], scope)
    held = frame.new(number, value, scope)
    axes = frame.free_axes(value)
    mode = value.attrs.get("mode", "clamp")
    _gather(frame, value, held, index, axes, scope, mode)


def _index(frame: Frame, number: int, scope: Scope) -> Held:
    """The index as one int32 per partition."""
    held = frame.operand(number)
    given = frame.builder.dtype(held)
    if given is DType.I32:
        return held
    result = frame.scratch(frame.domain[number], scope, DType.I32)
    frame.copy(scope, copy_engine(given, DType.I32), result, held)
    return result


def _gather(
    frame: Frame,
    value: Value,
    held: Held,
    index: Held,
    axes: Sequence[int],
    scope: Scope,
    mode: str,
) -> None:
    target, source = _rows(frame, value, held, axes, scope)
    picked = scope.on_chip(index, frame.rows(scope), _ONE)
    attrs = {"row_stride": value.attrs["stride"], "rows": value.attrs["rows"], "mode": mode}
    scope.add("dma_gather", Engine.DMA_IN, target, (source, picked), **attrs)


def _rows(
    frame: Frame, value: Value, held: Held, axes: Sequence[int], scope: Scope
) -> tuple[AccessPattern, AccessPattern]:
    """(on-chip pattern, HBM pattern of one row) for an indexed transfer."""
    strides = {a: s for a, s in value.access.strides.items() if a != frame.partition}
    free = replace(value.access, strides=strides, bounds=())
    hbm, chip = scope.transfer(free, held, frame.rows(scope), None, axes)
    return chip, hbm


def emit_scatter(frame: Frame, number: int, scope: Scope) -> None:
    """rows[index[p]] = value[p], or combined with it, for one tile of indices."""
    _Scatter(frame, frame.domain[number], scope).emit()


class _Scatter:
    """One tile of an indexed store: the index, the data as dense rows, and where they go."""

    def __init__(self, frame: Frame, value: Value, scope: Scope) -> None:
        source, index_number = value.inputs
        self.frame, self.value, self.scope = frame, value, scope
        self.kind: str = value.attrs["kind"]
        self.index = _index(frame, index_number, scope)
        self.axes = [a for a in frame.axes if value.access.stride(a)]
        self.data = _dense(frame, source, self.axes, scope)
        self.rows = frame.rows(scope)
        self.width = scope.elements(self.axes)

    def emit(self) -> None:
        """The tile, in the way its kind and the promise of unique rows allow."""
        if self.value.attrs["unique"] or self.rows == 1:
            self._write(self.index, self.scope)
            return
        equal = self._equality()
        if self.kind == "replace":
            later = self._count(equal, "GT")
            self._write(self._where(later, "GT", self._zero(), self.scope), self.scope)
        elif self.kind == "add":
            self._add_merged(equal)
        else:
            self._rounds(self._count(equal, "LT"))

    def _zero(self) -> Held:
        return self.frame.builder.filled(0.0, DType.F32)

    def _write(self, target: Held, scope: Scope) -> None:
        """Write the data, combined with the rows as they are, to the rows named by `target`."""
        if self.kind == "replace":
            self._store(self.data, target, scope)
            return
        old = self._old(target, scope)
        self._combine(old, self.data, scope)
        self._store(old, target, scope)

    def _old(self, index: Held, scope: Scope) -> Held:
        """The rows as they are in HBM; zeros for rows out of range."""
        dtype = self.frame.builder.tensors[self.value.access.tensor].dtype
        old = scope.spanning(self.axes, "rows", self.rows, dtype)
        _gather(self.frame, self.value, old, index, self.axes, scope, "fill")
        return old

    def _combine(self, old: Held, data: Held, scope: Scope) -> None:
        dims = ((1, self.width),)
        out, given = (scope.on_chip(h, self.rows, dims) for h in (old, data))
        engine = self.frame.engine(old, data)
        scope.add("tensor_tensor", engine, out, (out, given), op=ELEMENTWISE_OF[self.kind])

    def _store(self, data: Held, target: Held, scope: Scope) -> None:
        chip, hbm = _rows(self.frame, self.value, data, self.axes, scope)
        picked = scope.on_chip(target, self.rows, _ONE)
        attrs = {"row_stride": self.value.attrs["stride"], "rows": self.value.attrs["rows"]}
        scope.add("dma_scatter", Engine.DMA_OUT, hbm, (chip, picked), **attrs)

    # rows picked more than once

    def _tile(self, name: str, elements: int, dtype: DType) -> Held:
        return self.scope.tile(name, self.rows, elements, dtype)

    def _apply(self, opcode: str, engine: Engine, out: Held, *srcs: Held, **attrs: object) -> None:
        """One instruction over the [rows, rows] matrices or [rows, 1] vectors given."""
        tiles = self.frame.builder.tiles
        dims = ((1, min(tiles[out.tile].elements, self.rows)),)
        patterns = [self.scope.on_chip(h, self.rows, dims) for h in (out, *srcs)]
        self.scope.add(opcode, engine, patterns[0], patterns[1:], **attrs)

    def _equality(self) -> Held:
        """[rows, rows] fp32: 1 where two indices are equal."""
        if self.value.attrs["rows"] <= 1 << _EXACT_BITS:
            return self._equal_parts(self.index)
        low, high = (self._tile(n, 1, DType.I32) for n in ("low", "high"))
        mask = (1 << _HALF_BITS) - 1
        for part, op, scalar in ((low, "and", mask), (high, "shift_right_arithmetic", _HALF_BITS)):
            attrs = by_numbers((op, scalar))
            self._apply("tensor_scalar", Engine.GPSIMD, part, self.index, **attrs)
        equal = self._equal_parts(low)
        self._apply(
            "tensor_tensor", Engine.VECTOR, equal, equal, self._equal_parts(high), op="multiply"
        )
        return equal

    def _equal_parts(self, index: Held) -> Held:
        """[rows, rows] fp32: 1 where two entries of a [rows, 1] vector are equal."""
        scope, square = self.scope, ((1, self.rows),)
        wide, equal = (self._tile(n, self.rows, DType.F32) for n in ("wide", "equal"))
        spread = scope.on_chip(index, self.rows, ((0, self.rows),))
        across = scope.on_chip(wide, self.rows, square)
        scope.copy(Engine.VECTOR, across, spread)
        transposed = scope.psum("turned")
        scope.transpose(scope.on_chip(transposed, self.rows, square), across)
        out = scope.on_chip(equal, self.rows, square)
        both = (across, scope.on_chip(transposed, self.rows, square))
        scope.add("tensor_tensor", Engine.VECTOR, out, both, op="EQ")
        return equal

    def _count(self, equal: Held, side: str) -> Held:
        """[rows, 1] fp32: how many equal indices come earlier (LT) or later (GT) in the tile."""
        scope = self.scope
        among, count = self._tile("among", self.rows, DType.F32), self._tile("count", 1, DType.F32)
        order = _triangle(self.frame, side)
        self._apply("tensor_tensor", Engine.VECTOR, among, equal, order, op="multiply")
        source = scope.on_chip(among, self.rows, ((1, 1), (1, self.rows)))
        out = scope.on_chip(count, self.rows, _ONE)
        scope.add_up(out, source, ())
        return count

    def _where(self, count: Held, op: str, other: Held, scope: Scope) -> Held:
        """The index, with -1 (no row) where `count op other`."""
        rows = self.rows
        moved = scope.tile("moved", rows, 1, DType.PRED)
        target = scope.tile("target", rows, 1, DType.I32)
        nowhere = self.frame.builder.filled(-1, DType.I32)
        pred, out, left, right, none, index = (
            scope.on_chip(h, rows, _ONE) for h in (moved, target, count, other, nowhere, self.index)
        )
        scope.add("tensor_tensor", Engine.VECTOR, pred, (left, right), op=op)
        scope.add("select", Engine.GPSIMD, out, (pred, none, index))
        return target

    def _add_merged(self, equal: Held) -> None:
        """rows += equal^T @ data, in blocks of the moving width; the first of equal ones writes."""
        scope, rows = self.scope, self.rows
        if not self.frame.builder.dtype(self.data).is_float:
            raise CompileError(
                "SW_CODEGEN_SCATTER",
                f"kernel {self.frame.domain.name}: a scatter that adds rows which may repeat"
                f" requires floats, got {self.frame.builder.dtype(self.data).value}",
            )
        target = self._where(self._count(equal, "LT"), "GT", self._zero(), scope)
        old = self._old(self.index, scope)
        dtype = self.frame.builder.dtype(self.data)
        if dtype is not DType.F32:
            narrow = self._tile("narrow", rows, dtype)
            self._apply("tensor_copy", Engine.VECTOR, narrow, equal)
            equal = narrow
        for inner, first, count in columns(scope, self.width, self.frame.builder.limits.moving_max):
            sums = inner.flat(inner.psum("merged"), rows, count)
            moving = inner.flat(self.data, rows, count, first)
            stationary = inner.flat(equal, rows, rows)
            inner.matmul(sums, (stationary, moving), ())
            out = inner.flat(old, rows, count, first)
            inner.add("tensor_tensor", Engine.VECTOR, out, (out, sums), op="add")
        self._store(old, target, scope)

    def _rounds(self, earlier: Held) -> None:
        """Round r combines the rows that have r equal ones before them, so that none repeats."""
        inner, at = self.scope.counted(self.rows)
        number = inner.tile("round", self.rows, 1, DType.F32)
        attrs = {"start": at, "partition_step": 0, "steps": (0,)}
        inner.add("iota", Engine.GPSIMD, inner.on_chip(number, self.rows, _ONE), (), **attrs)
        self._write(self._where(earlier, "NE", number, inner), inner)


def _dense(frame: Frame, number: int, axes: Sequence[int], scope: Scope) -> Held:
    """The data with an element at every point of `axes`, in that order, as the matmul reads it."""
    held, value = frame.operand(number), frame.domain[number]
    wanted = scope.hold(held, axes).strides
    moving = [a for a in axes if scope.extent(a) > 1]
    if number in frame.held and all(held.strides.get(a) == wanted[a] for a in moving):
        return held
    full = scope.spanning(axes, "dense", frame.rows(scope), value.dtype)
    frame.copy(scope, frame.engine(held), full, held)
    return full


def _triangle(frame: Frame, side: str) -> Held:
    """[P, P] fp32: 1 where column - partition < 0 (LT) or > 0 (GT). Made once per kernel."""
    builder = frame.builder
    size = builder.limits.partitions
    held = builder.filled(0.0, DType.F32, size, part=f"triangle {side}")
    made = ("made", held.tile)
    if made not in builder.once:
        builder.once.add(made)
        out = AccessPattern(Space.SBUF, held.tile, Affine(), ((1, size), (1, size)))
        ramp = {"start": Affine(), "partition_step": -1, "steps": (1,)}
        builder.prefix.append(Instr("iota", Engine.GPSIMD, out, (), ramp))
        test = by_numbers((side, 0.0))
        builder.prefix.append(Instr("tensor_scalar", Engine.VECTOR, out, (out,), test))
    return held
