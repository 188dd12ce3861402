"""Windows whose channels are kept: the gradient of a filter, summed over images and positions.

Lines lie on the partitions on both sides, so every position is one product per tap, and taps along
a line are views. Taps along the line dim need lines moved to other partitions: a product with a
matrix of zeros and ones, which also leaves zeros where lines lie outside of the operand. An
infinity in a line so becomes NaN in the same channel of the sum, which it makes infinite anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from shardwright.compiler.codegen.builder import (
    Builder,
    Held,
    Piece,
    Scope,
    by_numbers,
    cut,
    merge_dims,
    pieces,
)
from shardwright.compiler.codegen.domain import AccessMap, PerDim
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.windows import lines as raw
from shardwright.compiler.codegen.windows.form import Form, points
from shardwright.compiler.codegen.windows.gradient_plan import GradientPlan, GradientPlanner, Part
from shardwright.compiler.codegen.windows.lines import Extent
from shardwright.compiler.codegen.windows.runs import Item, Run, runs_of
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine, Space

_BANKS = 3  # of PSUM for the sums of a pass, twice: one pass is added up while the next begins
_FEW_BANKS = 2  # of sums: then two banks per engine are left for lines that move
_UNROLLED = 96  # products of a position in a row (our choice)


def gradient_candidates(form: Form, roots: Sequence[int], room: Room) -> list[Candidate]:
    """Tilings of a contraction whose windows keep their channels."""
    nest = GradientPlanner(form, roots, room)
    plan = nest.plan()
    return [] if plan is None else [Candidate(plan.cost, partial(_emit, nest, plan), plan=plan)]


def _emit(nest: GradientPlanner, plan: GradientPlan, builder: Builder) -> None:
    whole = {a: nest.sizes[a] for a in (*nest.columns, *nest.form.groups)}
    scope = builder.scope(dict.fromkeys(nest.sizes, 1) | whole)
    for place in scope.nested(nest.sizes, {nest.wide: plan.columns}):
        _Sums(nest, plan, place).emit()


class _Sums:
    """The sums of one tile of columns."""

    def __init__(self, nest: GradientPlanner, plan: GradientPlan, scope: Scope) -> None:
        self.nest, self.plan, self.scope, self.form = nest, plan, scope, nest.form
        self.width = scope.elements(nest.columns)
        most = max(len(list(run)) for _, run in groupby(nest.parts, lambda p: p.line))
        self.per_bank = max(1, scope.builder.limits.moving_max // self.width)
        self.at_once = min(_UNROLLED, self.per_bank * _BANKS)  # parts of a pass
        self.banks = min(_BANKS, math.ceil(most / self.per_bank))
        elements = len(nest.parts) * self.width
        self.sums = scope.tile("sums", nest.most, elements, DType.F32, 1)
        self.matrices: dict[tuple[int, int, int, raw.Piece], Held] = {}

    def emit(self) -> None:
        plan, nest = self.plan, self.nest
        lines = range(0, nest.length, plan.height)
        positions = range(0, nest.form.domain.size(nest.inner[0]), plan.width)
        starts = list(product(lines, positions))
        for first, _ in starts:  # matrices are the same for all images
            self._matrices(first)
        images = {a: 1 for a in self.form.images} | {nest.image: plan.images}
        for place in self.scope.nested(nest.sizes, images):
            depths = tuple(s for d in self.form.depths for s in d.summed)
            for (first, start), (index, _) in product(starts, list(points(nest.sizes, depths))):
                block = place
                for iter_dim, at, count in (
                    *((a, i, 1) for a, i in index.items()),
                    (nest.line[0], first, plan.height),
                    (nest.inner[0], start, plan.width),
                ):
                    if iter_dim is not None:
                        left = nest.sizes[iter_dim] - at
                        block = block.enter(iter_dim, Piece(at, min(count, left)))
                self._block(block, index, first, start)
        self._finish()

    def _pieces(self, images: int, first: int) -> tuple[list[raw.Piece], int]:
        nest = self.nest
        low, high = nest.reach()
        height = min(self.plan.height, nest.length - first)
        top, count = first * nest.stride + low, (height - 1) * nest.stride + high - low
        return nest.lines.pieces(images, top, top + count, nest.most), height

    def _matrices(self, first: int) -> None:
        """What moves lines to the partitions of the lines of the other operand that meet them."""
        sizes = {self.plan.images}
        if self.nest.image is not None and self.nest.sizes[self.nest.image] % self.plan.images:
            sizes.add(self.nest.sizes[self.nest.image] % self.plan.images)
        for images in sizes:
            found, height = self._pieces(images, first)
            for piece, line in product(found, self.nest.shifts()):
                self.matrices.setdefault(
                    (first, line, images, piece), self._matrix(piece, images, first, height, line)
                )

    def _matrix(self, piece: raw.Piece, images: int, first: int, height: int, line: int) -> Held:
        """[lines, lines of the other operand]: 1 where they meet."""
        scope, nest = self.scope, self.nest
        most, stride = images * height, nest.stride
        ramp = scope.tile("ramp", piece.count, most, DType.F32, 1)
        square = scope.on_chip(ramp, piece.count, ((height, images), (1, height)))
        apart = piece.last - piece.first
        attrs = {"partition_step": 1, "steps": (-apart, -stride)}
        start = Affine(piece.first - first * stride - line)
        scope.add("iota", Engine.GPSIMD, square, (), start=start, **attrs)
        matrix = scope.tile("matrix", piece.count, most, self.form.packed_type, 1)
        out, source = (scope.flat(h, piece.count, most) for h in (matrix, ramp))
        scope.add("tensor_scalar", Engine.VECTOR, out, (source,), **by_numbers(("EQ", 0.0)))
        scope.release(ramp)
        there = [(first + h) * stride + line for h in range(height)]
        for inside, run in groupby(range(height), lambda h: piece.first <= there[h] < piece.last):
            columns = list(run)
            if not inside:
                dims = ((height, images), (1, len(columns)))
                scope.fill(scope.on_chip(matrix, piece.count, dims, columns[0]), 0.0)
        return matrix

    def _block(self, scope: Scope, index: PerDim, first: int, start: int) -> None:
        """One tile of lines on both sides, all parts."""
        nest, form = self.nest, self.form
        images = scope.extent(nest.image)
        found, height = self._pieces(images, first)
        width = scope.extent(nest.inner[0])
        other = self._other(scope, images, height, width)
        extent = nest.extent(start, width)
        for depths, parts in groupby(nest.parts, lambda p: p.depths):
            there = {
                d: at + sum(index.get(a, 0) * s for a, s in form.depths[d].summed)
                for d, at in enumerate(depths)
            }
            tiles = []
            for piece in found:
                tile = nest.lines.tile(scope, piece, extent)
                nest.lines.load(scope, tile, piece, extent, there)
                tiles.append((piece, tile))
            count = images * height
            lines = {line: list(some) for line, some in groupby(parts, lambda p: p.line)}
            order = sorted(lines, key=lambda n: not self._is_there(tiles, first, n, count, images))
            moved: dict[int, Held] = {}
            for number, line in enumerate(order):  # the next lines move while these are summed
                for ahead in order[: number + 2]:
                    if ahead not in moved:
                        where = (first, ahead, images, count)
                        moved[ahead] = self._moved(scope, tiles, extent, where)
                # As many parts at a time as PSUM holds.
                for low in range(0, len(lines[line]), self.at_once):
                    some = lines[line][low : low + self.at_once]
                    self._pass(scope, some, moved[line], other, extent, count)

    def _other(self, scope: Scope, images: int, height: int, width: int) -> Held:
        """[lines, positions, groups, columns] of the other operand."""
        nest, access = self.nest, self.form.weights
        axes = sorted(
            (a for a in (nest.inner[0], *self.form.groups, *nest.columns) if a is not None),
            key=lambda a: -abs(access.stride(a)),
        )
        held = scope.spanning(axes, "other", images * height, self.form.packed_type)
        sizes = [scope.extent(a) for a in axes]
        strides = [[access.stride(a) for a in axes], [held.strides[a] for a in axes]]
        hbm, chip = merge_dims(sizes, strides)
        lines = nest.line[0] if nest.line[0] is not None else nest.image
        step = (access.stride(lines), images * height)
        source = scope.hbm(access, (step, *hbm))
        scope.load(scope.on_chip(held, images * height, chip), source)
        return held

    def _is_there(
        self,
        tiles: Sequence[tuple[raw.Piece, Held]],
        first: int,
        line: int,
        count: int,
        images: int,
    ) -> bool:
        """Whether lines lie on the partitions of those of the other operand that meet them."""
        (piece, _), *more = tiles
        same = piece.first == first * self.nest.stride + line and self.nest.stride == 1
        length = piece.last - piece.first
        return same and not more and piece.count == count and length == count // images

    def _moved(
        self,
        scope: Scope,
        tiles: Sequence[tuple[raw.Piece, Held]],
        extent: Extent,
        where: tuple[int, int, int, int],
    ) -> Held:
        """Lines on the partitions of those of the other operand that meet them at `where`."""
        first, line, images, count = where
        pixel = self.form.pixel
        tile = tiles[0][1]
        if self._is_there(tiles, first, line, count, images):
            return tile
        elements = extent.elements(pixel)
        moved = scope.tile("moved", count, elements, self.form.packed_type)
        held = replace(moved, strides=tile.strides)
        bank = scope.builder.limits.moving_max
        matrices = [
            (some, self.matrices[(first, line, images, some)], source) for some, source in tiles
        ]
        for part in pieces(elements, min(elements, 2 * bank)):
            inner, at = scope.repeat(part)
            for low, count_here in cut(part.extent, bank):
                columns = (at + low, count_here)
                engine = Engine.SCALAR if low else Engine.VECTOR
                self._move(inner, matrices, held, count, columns, engine)
        return held

    def _move(
        self,
        scope: Scope,
        matrices: Sequence[tuple[raw.Piece, Held, Held]],
        held: Held,
        count: int,
        columns: tuple[Affine, int],
        engine: Engine,
    ) -> None:
        """A bank of columns to other partitions."""
        at, width = columns
        across = ((1, width),)
        bank = scope.psum("moved", 1, 1 if self.banks > _FEW_BANKS else 2)
        out = scope.on_chip(bank, count, across)
        for n, (piece, matrix, source) in enumerate(matrices):
            left = scope.flat(matrix, piece.count, count)
            right = scope.on_chip(source, piece.count, across, at)
            scope.matmul(out, (left, right), None if n else ())
        scope.copy(engine, scope.on_chip(held, count, across, at), out)

    def _pass(
        self,
        scope: Scope,
        parts: Sequence[Part],
        lines: Held,
        other: Held,
        extent: Extent,
        count: int,
    ) -> None:
        """Products of all positions with some parts."""
        nest, form = self.nest, self.form
        per_bank, size = self.per_bank, scope.builder.limits.moving_max
        total = scope.psum("sums", math.ceil(len(parts) / per_bank), 2)
        iter_dim, step = nest.inner
        inner, at = scope.counted(scope.extent(iter_dim))
        start = 0 if iter_dim is None else scope.boxes[iter_dim].origin.const * step
        columns = [other.strides[a] for a in nest.columns]
        (across,) = merge_dims([scope.extent(a) for a in nest.columns], [columns])
        groups = list(points(nest.sizes, tuple((a, other.strides[a]) for a in form.groups)))
        along = at * other.strides.get(-1 if iter_dim is None else iter_dim, 0)
        for n, part in enumerate(parts):
            place = part.position + start - extent.positions[0]
            offset = (part.row - extent.rows[0]) * lines.strides[raw.ROW]
            offset += place * form.pixel + part.first
            steps = [lines.strides[raw.ROW], form.pixel, 1]
            (dims,) = merge_dims([part.rows, part.positions, part.count], [steps])
            left = inner.on_chip(lines, count, dims, at * (step * form.pixel) + offset)
            right = inner.on_chip(other, count, across, along + groups[part.group][1])
            into = n // per_bank * size + n % per_bank * self.width
            out = inner.flat(total, part.partitions, self.width, into)
            first = at.terms[0][:1] if at.terms else ()
            inner.matmul(out, (left, right), first)
        self._add(scope, parts, total)

    def _add(self, scope: Scope, parts: Sequence[Part], total: Held) -> None:
        """The sums in PSUM to those in SBUF."""
        width, size = self.width, scope.builder.limits.moving_max
        for n, low in enumerate(range(0, len(parts), self.per_bank)):
            some = parts[low : low + self.per_bank]
            for rows, run in groupby(enumerate(some), lambda p: p[1].partitions):
                found = list(run)
                count = len(found) * width
                at = self.nest.parts.index(found[0][1]) * width
                into = n * size + found[0][0] * width
                source = scope.on_chip(total, rows, ((1, count), (1, 1)), into)
                out = scope.flat(self.sums, rows, count, at)
                scope.add_up(out, source, scope.zero_when(self.form.over))

    def _finish(self) -> None:
        """Store the sums, rounded as the values behind the contraction want."""
        nest = self.nest
        for types, access in nest.stores:
            held = self.sums
            for wanted in types:
                if wanted is not self.scope.builder.dtype(held):
                    held = self._rounded(held, wanted)
            items = [self._item(part, access) for part in nest.parts]
            for run in runs_of(items):
                self._store(held, run, items[run.item].column, access)

    def _rounded(self, held: Held, dtype: DType) -> Held:
        scope, nest = self.scope, self.nest
        made = scope.tile("rounded", nest.most, len(nest.parts) * self.width, dtype, 1)
        alike = groupby(enumerate(nest.parts), lambda p: p[1].partitions)
        for turn, (rows, run) in enumerate(alike):
            found = list(run)
            at, count = found[0][0] * self.width, len(found) * self.width
            out, source = (scope.flat(h, rows, count, at) for h in (made, held))
            scope.copy(Engine.SCALAR if turn % 2 else Engine.VECTOR, out, source)
        return made

    def _item(self, part: Part, access: AccessMap) -> Item:
        """Where the sums of a part go."""
        channels = [a for a in self.form.channels if a not in self.form.groups]
        blocks = tuple(sum(i * access.stride(a) for a, i in tap.items()) for tap in part.taps)
        return Item(blocks, part.count, access.stride(channels[-1]) if channels else 0)

    def _store(self, held: Held, run: Run, column: int, access: AccessMap) -> None:
        """The sums of parts that move alike."""
        scope, axes = self.scope, self.nest.columns
        on_chip = scope.hold(held, axes).strides
        hbm, chip = merge_dims(
            [run.count, *(scope.extent(a) for a in axes)],
            [
                [run.delta, *(access.stride(a) for a in axes)],
                [self.width, *(on_chip[a] for a in axes)],
            ],
        )
        address = scope.address_of(access.offset, access, axes) + run.address
        target = AccessPattern(Space.HBM, access.tensor, address, ((column, run.rows), *hbm))
        source = scope.on_chip(held, run.rows, chip, run.item * self.width)
        scope.store(target, replace(source, start=run.start))
