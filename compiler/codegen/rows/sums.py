"""Sums over rows: accumulators that row tiles add to, and what follows from them.

A sum is a product of two row tiles on the tensor engine that contracts the partitions (a reduction
multiplies by ones). Row tiles that take turns in a block add up theirs in PSUM; from there they go
to fp32 in SBUF, where blocks of other row tiles are added. A sum over parallel points only keeps
its rows on the partitions and needs no product. When all rows are done, values that follow run with
an iter dim of the sum on the partitions. Of a blocked iter dim, a sum has the tile it began at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.compiler.codegen.builder import Box, Builder, Held, Scope, cut, divided, pieces
from shardwright.compiler.codegen.domain import CODELESS, Value
from shardwright.compiler.codegen.normalise import split
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.codegen.rows.roles import inner_of
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import STORES, Affine
from shardwright.compiler.isa.program import Engine


@dataclass(frozen=True, slots=True)
class Layout:
    """How a sum lies in SBUF; None where it lacks such an iter dim."""

    tall: int | None  # in chunks on the partitions
    wide: int | None  # along the row
    stationary: int | None  # operand, None for ones (with `row` as `tall`: for no product)
    moving: int | None  # operand
    dtype: DType


class Block(NamedTuple):
    """A bank of a sum: `rows` of its iter dim `tall` in chunks by `columns` of `wide`."""

    row: int
    rows: int
    column: int
    columns: int


class Sums:
    """Accumulators of one kernel."""

    def __init__(self, builder: Builder, plan: RowPlan) -> None:
        self.builder, self.plan, self.domain = builder, plan, plan.domain
        self.layouts = {n: self._layout(n) for n in plan.roles.sums}
        self.held: dict[int, Held] = {}
        self.home: dict[int, Scope] = {}  # where a sum began, with the boxes it spans

    def _layout(self, number: int) -> Layout:
        value, row = self.domain[number], self.plan.row
        if value.op == "reduce":
            wide = inner_of(self.plan.roles, value)
            tall = row if row in value.iter_dims else None
            return Layout(tall, wide, None, value.inputs[0], DType.F32)
        a, b = value.inputs
        iter_dims = [self._own(n, value) for n in (a, b)]
        if self._is_innermost(number, iter_dims[0]) or iter_dims[0] is None:
            a, b, iter_dims = b, a, iter_dims[::-1]
        return Layout(iter_dims[0], iter_dims[1], a, b, self.plan.operand_type(number))

    def _own(self, operand: int, value: Value) -> int | None:
        iter_dims = self.domain[operand].iter_dims & value.iter_dims & self.plan.roles.inner
        return next(iter(iter_dims), None)

    def _is_innermost(self, number: int, iter_dim: int | None) -> bool:
        """Whether the first store that follows walks `iter_dim` one element at a time."""
        users = self.domain.users()
        work, seen = deque([number]), {number}
        while work:
            n = work.popleft()
            access = self.domain[n].map
            if self.domain[n].op == "store" and access:
                return abs(access.stride(iter_dim)) == 1
            following = [u for u in users.get(n, ()) if u not in seen]
            seen.update(following)
            work += following
        return False

    def height(self, number: int) -> int:
        """Partitions of a full chunk."""
        size = self.domain.size(self.layouts[number].tall)
        return min(self.builder.limits.stationary_max, size)

    def width(self, number: int) -> int:
        """Elements of a row."""
        return self._whole(number, self.layouts[number].wide).extent

    def begin(self, number: int, scope: Scope) -> None:
        """A cleared accumulator for the boxes of `scope`."""
        self.home[number] = scope
        height, width = self.height(number), self.width(number)
        chunks = -(-self._whole(number, self.layouts[number].tall).extent // height)
        slots = 1 if self.plan.single_buffered else 0
        self.held[number] = scope.tile(f"sum{number}", height, chunks * width, DType.F32, slots)
        scope.fill(scope.flat(self.held[number], height, chunks * width), 0.0)

    def blocks(self, number: int, scope: Scope) -> list[Block]:
        """The sum's part in the boxes of `scope`, PSUM bank by bank."""
        layout, most = self.layouts[number], self.builder.limits.moving_max
        tall, wide = (scope.box(a).extent for a in (layout.tall, layout.wide))
        found = []
        for column, columns in cut(wide, most):
            each = self.height(number) * max(1, most // columns)
            found += [Block(row, rows, column, columns) for row, rows in cut(tall, each)]
        return found

    def add(
        self,
        number: int,
        scope: Scope,
        block: Block,
        operands: tuple[Held, Held],
        bank: Held,
        begins: bool,
    ) -> None:
        """Multiply columns of (stationary, moving) into a bank, fresh where the sum `begins`."""
        depth, zero = scope.extent(self.plan.row), () if begins else None
        moving = scope.flat(operands[1], depth, block.columns, block.column)
        for beside, (chunk, size) in enumerate(cut(block.rows, self.height(number))):
            out = scope.flat(bank, size, block.columns, beside * block.columns)
            stationary = scope.flat(operands[0], depth, size, block.row + chunk)
            scope.matmul(out, (stationary, moving), zero)

    def collect(self, number: int, scope: Scope, block: Block, bank: Held) -> None:
        """Add what a bank holds to the sum at the boxes of `scope`."""
        layout, height = self.layouts[number], self.height(number)
        tall, wide = (self._place(number, a, scope).origin for a in (layout.tall, layout.wide))
        full, tail = divmod(block.rows, height)
        chunk = divided(tall + block.row, height)
        columns = Box(wide + block.column, block.columns)
        self._collect(number, scope, bank, (height, full), chunk, columns)
        if tail:
            rest = Held(bank.tile, {}, Affine(full * block.columns))
            self._collect(number, scope, rest, (tail, 1), chunk + full, columns)

    def add_rows(self, number: int, scope: Scope, operand: Held, rows: int) -> None:
        """Add the columns of `operand` in the boxes of `scope` to the same rows of the sum."""
        chunk = divided(scope.boxes[self.plan.row].origin, self.height(number))
        wide = self._place(number, self.layouts[number].wide, scope)
        self._collect(number, scope, operand, (rows, 1), chunk, wide)

    def _place(self, number: int, iter_dim: int | None, scope: Scope) -> Box:
        """The box of an iter dim, counted from the first point the sum spans."""
        box, first = scope.box(iter_dim), self._whole(number, iter_dim).origin
        return Box(box.origin + first * -1, box.extent)

    def _whole(self, number: int, iter_dim: int | None) -> Box:
        """All points of an iter dim that a sum spans."""
        if iter_dim == self.plan.row:
            return Box(Affine(), self.domain.sizes[iter_dim])
        return self.home[number].box(iter_dim)

    def _collect(
        self,
        number: int,
        scope: Scope,
        bank: Held,
        shape: tuple[int, int],
        chunk: Affine,
        wide: Box,
    ) -> None:
        """Add `shape` = (partitions, chunks) of a bank to the accumulator from `chunk` on."""
        (rows, count), width = shape, self.width(number)
        if not count:
            return
        target = ((width, count), (1, wide.extent))
        source = ((wide.extent, count), (1, wide.extent), (1, 1))
        out = scope.on_chip(self.held[number], rows, target, chunk * width + wide.origin)
        scope.add_up(out, scope.on_chip(bank, rows, source), None)

    # what follows

    def finish(self, numbers: Iterable[int], scope: Scope) -> None:
        """Values that follow from the finished sums `numbers`, up to their stores."""
        groups: dict[tuple[int | None, int | None], list[int]] = {}
        for n in numbers:
            groups.setdefault((self.layouts[n].tall, self.layouts[n].wide), []).append(n)
        for (tall, wide), group in groups.items():
            self._follow(group, tall, wide, scope)

    def _follow(
        self, group: Sequence[int], tall: int | None, wide: int | None, scope: Scope
    ) -> None:
        """The same of sums that lie alike."""
        axes = [] if wide is None else [wide]
        if tall is None:
            self._values(group, Frame(self.builder, self.domain, None, axes), scope, Affine())
            return
        height = self.height(group[0])
        domain, made = split(self.domain, tall, height)
        frame = Frame(self.builder, domain, tall, axes)
        inner = scope.straight({tall: Box(Affine(), domain.sizes[tall])})
        if made.major < 0:
            self._values(group, frame, inner, Affine())
            return
        here = self._whole(group[0], tall)
        first, (full, tail) = divided(here.origin, height), divmod(here.extent, height)
        inner.boxes[made.major] = Box(first, 1)
        for piece in pieces(full, 1, made if tail else None):
            place = inner.within(made.major, piece, begins=True)
            self._values(group, frame, place, place.boxes[made.major].origin + first * -1)

    def _values(self, group: Sequence[int], frame: Frame, scope: Scope, chunk: Affine) -> None:
        """One chunk of a group of sums."""
        wide = self.layouts[group[0]].wide
        strides = {} if wide is None else {wide: 1}
        for n in group:
            total = Held(self.held[n].tile, strides, chunk * self.width(n))
            frame.held[n] = total
            if frame.domain[n].dtype is not DType.F32:
                rounded = frame.new(n, frame.domain[n], scope)
                frame.copy(scope, Engine.VECTOR, rounded, total)
        for n in self._after(group):
            if n not in group and frame.domain[n].op not in CODELESS:
                frame.emit(n, scope)

    def _after(self, group: Sequence[int]) -> list[int]:
        """Stores that follow from the group and no other sum, and what they need beside it."""
        others = set(self.plan.roles.sums) - {*group}
        roots = [n for n in self.plan.roles.late if self.domain[n].op in STORES]
        mine = [n for n in roots if others.isdisjoint(self.domain.slice([n]))]
        return self.domain.slice(mine, given=group)
