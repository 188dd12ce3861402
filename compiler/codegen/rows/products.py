"""Contractions with packed tiles, and transposes, of row tiles on their way.

A product leaves PSUM at once, unless all its readers reach it there. Transposes of several chunks
share a bank and a copy. Next: `group.py` calls them in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.builder import Held, Scope, ZeroWhen, divided
from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.rows.columns import Columns, Run
from shardwright.compiler.codegen.rows.decided import Decided
from shardwright.compiler.codegen.rows.engines import READ_PSUM, Copy
from shardwright.compiler.codegen.rows.interval_analysis import Range
from shardwright.compiler.codegen.rows.packing import Packed
from shardwright.compiler.codegen.rows.pipelining import Iteration
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.codegen.rows.sums import Sums
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import Engine


@dataclass(frozen=True, slots=True)
class Shared:
    """What row tiles of a parallel point share; `column_tiles`: runs of blocked iter dims."""

    packed: Mapping[int, Packed]
    whole: Mapping[int, Packed]
    sums: Sums
    columns: Columns
    held: Mapping[int, Held]
    column_tiles: Mapping[int, tuple[Run, ...]]


class Products(Frame):
    """The tensor engine's part of the code of a group of row tiles.

    `held` has the values of the group or of the block at hand, `transposed` what is transposed.
    `rows` (first, end) are all rows that this code ever works on.
    """

    def __init__(self, plan: RowPlan, scope: Scope, shared: Shared, rows: Range) -> None:
        super().__init__(scope.builder, plan.domain, plan.row, sorted(plan.roles.inner))
        self.plan, self.scope, self.span = plan, scope, rows
        self.packed, self.whole = shared.packed, shared.whole
        self.sums, self.columns = shared.sums, shared.columns
        self.column_tiles = shared.column_tiles
        self.held = dict(shared.held)
        self.users = plan.domain.users((*plan.roles.rows, *plan.roles.sums))
        self.transposed: dict[int, Held] = {}
        self.decided = Decided()  # of the block at hand
        self.iteration: Iteration | None = None  # of the block at hand, in a pipelined pass

    def unit(self, iter_dim: int) -> int:
        """Points of an iter dim in one transposed chunk."""
        return min(self.domain.sizes[iter_dim], self.builder.limits.transpose_max)

    def runs(self, iter_dim: int) -> tuple[Run, ...]:
        """Runs of blocks of an iter dim, counted from the first point that is on chip."""
        found = self.column_tiles.get(iter_dim)
        return self.columns.runs(iter_dim, self.span) if found is None else found

    def position(self, iter_dim: int | None, scope: Scope) -> Affine:
        """Where `scope` is among the points of an iter dim that are on chip."""
        return scope.box(iter_dim).origin + self.scope.box(iter_dim).origin * -1

    def product(self, number: int, value: Value, scope: Scope) -> None:
        """One bank of a contraction with a packed tile: every chunk of the summed iter dim."""
        packed, (tall, _) = self.packed[number], self.plan.roles.packed[number]
        iter_dim, rows = self.plan.inner(number), self.rows(scope)
        width = scope.extent(iter_dim)
        first = self.position(iter_dim, scope) * packed.column_step
        transposed, step, between = self._stationary(number, tall, scope)
        bank = self._bank(number, value, scope)
        out = scope.flat(bank, rows, width)

        def multiply(place: Scope, chunk: Affine, depth: int, zero: ZeroWhen) -> None:
            stationary = place.on_chip(transposed, depth, ((between, rows),), chunk * step)
            across = ((packed.column_step, width),)
            moving = place.on_chip(packed.held, depth, across, chunk * packed.chunk_step + first)
            place.matmul(out, (stationary, moving), zero)

        first_range = True
        for start, count in self._chunks(number, packed):
            if count > 1:
                inner = scope.loop(count)
                chunk = Affine(start, ((inner.register, 1),))
                zero = (inner.register,) if first_range else None
                multiply(inner, chunk, packed.height, zero)
            else:
                depth = packed.tail if start == packed.full else packed.height
                multiply(scope, Affine(start), depth, () if first_range else None)
            first_range = False
        self._evict(number, value, bank, scope)

    def _bank(self, number: int, value: Value, scope: Scope) -> Held:
        """PSUM for a product; what a later phase reads there belongs to its iteration."""
        iter_dim, iteration = self.plan.inner(number), self.iteration
        strides = {} if iter_dim is None else {iter_dim: 1}
        kept = iteration and number in iteration.crossing and self._stays(number, value)
        return replace(self.psum("kept" if kept else "product", number, scope), strides=strides)

    def psum(self, name: str, number: int, scope: Scope) -> Held:
        """A PSUM bank for value `number`; blocks of a pipelined pass use the same ones in turn."""
        if self.iteration is None:
            return scope.psum(name)
        places = self.iteration.places
        banks = places.kept if name == "kept" else places.banks
        if (name, number) not in banks:
            banks[name, number] = places.home.psum(name, slots=1)
        return banks[name, number]

    def _stationary(self, number: int, tall: int, scope: Scope) -> tuple[Held, int, int]:
        """The transposed operand of a product: (where, elements between chunks, between rows)."""
        if number in self.whole:
            packed = self.whole[number]
            row = {self.plan.row: packed.column_step}
            held = placed(Held(packed.held.tile, row, packed.held.offset), scope)
            return held, packed.chunk_step, packed.column_step
        return placed(self.transposed[tall], scope), self.rows(scope), 1

    def _chunks(self, number: int, packed: Packed) -> list[tuple[int, int]]:
        """(first chunk, how many) of the summed iter dim that are computed, a short last alone."""
        (over,) = self.domain[number].over
        found: list[tuple[int, int]] = []
        for run in self.runs(over):
            end = run.piece.start + run.piece.extent * run.piece.trip
            first, last = run.piece.start // packed.height, end // packed.height
            if last > first and found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], last - found[-1][0])
            elif last > first:
                found.append((first, last - first))
            if end % packed.height:
                found.append((packed.full, 1))
        return found

    def _evict(self, number: int, value: Value, bank: Held, scope: Scope) -> None:
        """Leave a product in PSUM for readers that can take it there, else copy it to SBUF."""
        if self._stays(number, value):
            self.held[number] = bank
            return
        if self.plan.carries(number):
            self._carry(number, bank, scope)
            return
        held = self.new(number, value, scope)
        self.copy(scope, self._copier(Copy(number)), held, bank)

    def _carry(self, number: int, bank: Held, scope: Scope) -> None:
        """Add what a column tile contributes to a product."""
        rows, width = self.rows(scope), scope.extent(self.plan.inner(number))
        out = scope.flat(self.held[number], rows, width)
        given = scope.on_chip(bank, rows, ((1, width), (1, 1)))
        scope.add_up(out, given, scope.zero_when(self.domain[number].over))

    def _copier(self, copy: Copy) -> Engine:
        return Engine.VECTOR if copy in self.plan.engines.vector_copies else Engine.SCALAR

    def _stays(self, number: int, value: Value) -> bool:
        """Whether all that reads a value in PSUM reaches it there, in the columns at hand."""
        if self.plan.carries(number):
            return False
        here = self.decided.sharing(number)
        users = {u for n in here for u in self.users.get(n, ())}.difference(here)
        moved = any(n in self.plan.row_buffers or n in self.plan.transposed for n in here)
        rounded = value.dtype is not DType.F32 or self.plan.inner(number) is None
        return not moved and not rounded and all(self._reads_psum(u) for u in users)

    def _reads_psum(self, number: int) -> bool:
        """Whether the engine of a reader reaches PSUM: Vector and Scalar do, for floats."""
        value = self.domain[number]
        mixed = [self.domain[i].dtype for i in value.inputs[value.op == "select" :]]
        floats = all(t.is_float for t in (value.dtype, *mixed))
        return value.op in READ_PSUM and floats and number not in self.plan.roles.sums

    def transpose(self, number: int, scope: Scope) -> None:
        """Transpose the columns at hand of a value, several chunks to a bank and a copy."""
        iter_dim = self.plan.inner(number)
        assert iter_dim is not None
        box, unit, rows = scope.boxes[iter_dim], self.unit(iter_dim), self.rows(scope)
        bank = self.psum("turned", number, scope)
        transposed = placed(self.transposed[number], scope)
        fold, engine = self.plan.fold.get(iter_dim, 1), self._copier(Copy(number, transposed=True))
        for chunk in range(-(-box.extent // unit)):
            size = min(unit, box.extent - chunk * unit)
            start = chunk // fold * fold * unit + chunk % fold
            out = scope.flat(bank, size, rows, chunk * rows)
            source = scope.on_chip(self.held[number], rows, ((fold, size),), start)
            scope.transpose(out, source)
        full, tail = divmod(box.extent, unit)
        first = divided(self.position(iter_dim, scope), unit)
        for chunk, count, size in ((0, full, unit), (full, 1, tail)):
            if count and size:
                across = ((1, count * rows),)
                out = scope.on_chip(transposed, size, across, (first + chunk) * rows)
                source = scope.on_chip(bank, size, across, chunk * rows)
                scope.copy(engine, out, source)


def placed(held: Held, scope: Scope) -> Held:
    """A value of the group at the row tile and columns of `scope`."""
    return held.at(scope.origins(held.strides))
