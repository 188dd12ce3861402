"""The loop nest of a contraction: stationary blocks, moving panels, chunks of k, accumulators in
PSUM, epilogue.

for outer: for row block: [load all of k]  for panel: for chunk of k: load, multiply   then per row
tile: epilogue. A held moving operand is loaded in front of the loops that do not move it. Staged
plans collect the products of a panel in SBUF.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from shardwright.compiler.codegen import eviction
from shardwright.compiler.codegen.builder import Box, Builder, Held, Scope, pieces
from shardwright.compiler.codegen.contract_plan import ContractPlan, even_tile
from shardwright.compiler.codegen.contract_tiling import plan_contraction
from shardwright.compiler.codegen.domain import CODELESS, Space
from shardwright.compiler.codegen.panels import Panels
from shardwright.compiler.codegen.search import Candidate, Room
from shardwright.compiler.codegen.turned_store import store_turned
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.codegen.whole_panel import WholeLoader
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern
from shardwright.compiler.isa.region import Affine

Body = Callable[[Scope], None]
Collect = Callable[[Scope, AccessPattern, Affine], None]


def contraction_candidates(space: Space, sinks: list[int], room: Room) -> Sequence[Candidate]:
    """Tilings of the contraction all `sinks` depend on, with its epilogue."""
    (number,) = (n for n in space.slice(sinks) if space.values[n].op == "contract")

    def emit(plan: ContractPlan, builder: Builder) -> None:
        _Nest(builder, *eviction.fused(plan, sinks)).emit()

    plans = plan_contraction(space, number, sinks, room)
    return [Candidate(p.cost, partial(emit, p), p.variant, plan=p) for p in plans]


class _Nest:
    """Recursion over the loops of one plan."""

    def __init__(self, builder: Builder, plan: ContractPlan, epilogue: list[int]) -> None:
        self.builder = builder
        self.plan = plan
        self.space = plan.space
        self.epilogue = epilogue
        self.taker = eviction.taker(plan.space, plan.number, epilogue)
        self.panels = Panels(builder, plan)
        self.blocks = plan.row_split.major  # counts row tiles; -1 when there is one
        # What is passed row by row, or its partitions and those of a tail.
        self.counted = plan.rows if plan.beside and plan.rows is not None else self.blocks
        self.chunks = plan.depth_split.major
        self.bank = builder.limits.psum_bank_bytes // DType.F32.bytes
        self.resident: Held | None = None
        self.kept: Held | None = None  # the stationary operand of all row blocks
        self.moving: Held | None = None  # the whole moving operand, when it is held

    def emit(self) -> None:
        """Everything, into the builder's body."""
        extents = dict.fromkeys((*self.plan.outer, *self.plan.across, *self.plan.along), 1)
        extents |= self.plan.extents
        for atom in (self.plan.rows, self.plan.depth):
            if atom is not None:
                extents[atom] = self.space.sizes[atom]
        extents |= {a: e for a, e in self._blocked().items() if a >= 0}
        boxes = {a: Box(Affine(), e) for a, e in extents.items()}
        scope = Scope(self.builder, self.builder.body, boxes)
        shared = self.plan.shared if self.plan.held else ()
        rest = [a for a in self.plan.outer if a not in shared]

        def blocks(inner: Scope) -> None:
            if self.plan.held:
                self._hold(inner, extents)
            self._loops(inner, rest, extents, lambda s: self._row_tiles(s, extents))

        self._loops(scope, shared, extents, blocks)

    def _hold(self, scope: Scope, extents: dict[int, int]) -> None:
        """Load the whole moving operand."""
        plan, panels = self.plan, self.panels
        free = (*plan.across, *plan.columns)
        whole = self.moving = panels.whole(scope)
        self._loops(
            scope,
            [*plan.along, self.chunks, *plan.across, *plan.columns],
            extents,
            lambda s: panels.load(plan.moving, panels.at(whole, s, free), s),
        )

    def _blocked(self) -> dict[int, int]:
        return {self.blocks: self.plan.block, self.chunks: self.plan.chunk}

    def _loops(
        self, scope: Scope, atoms: Sequence[int], extents: dict[int, int], body: Body
    ) -> None:
        """`body` for every combination of pieces of `atoms`, first atom outermost."""
        if not atoms:
            body(scope)
            return
        atom, rest = atoms[0], atoms[1:]
        if atom < 0:
            self._loops(scope, rest, extents, body)
            return
        parts = pieces(self.space.sizes[atom], extents[atom], self.space.splits.get(atom))
        for piece in parts:
            self._loops(scope.enter(atom, piece), rest, extents, body)

    def _row_tiles(self, scope: Scope, extents: dict[int, int]) -> None:
        """All row blocks of a point of the outer loops."""
        if self.plan.whole:
            walk = self.space.values[self.plan.stationary.number].access
            item = self.builder.tensors[walk.tensor].dtype.bytes
            self.kept = WholeLoader(self.plan, self.panels.copiers, item).load(scope)
        self._loops(scope, [self.counted], extents, lambda s: self._block(s, extents))

    def _block(self, scope: Scope, extents: dict[int, int]) -> None:
        """One stationary block: load it if it stays, then pass all panels by."""
        plan = self.plan
        depths = [*plan.along, self.chunks]
        if self.kept is not None:
            at = scope.boxes[self.counted].origin if self.counted >= 0 else Affine()
            step = self.kept.strides[self.counted]
            self.resident = replace(self.kept, offset=self.kept.offset + at * step)
        elif plan.resident:
            tiles = 1
            for atom in depths:
                tiles *= self.panels.tiles_of(atom) if atom >= 0 else 1
            whole = self.panels.empty(plan.stationary, scope, tiles, plan.stationary_slots)
            self.resident = whole
            self._loops(
                scope,
                depths,
                extents,
                lambda s: self.panels.load(plan.stationary, self.panels.at(whole, s), s),
            )
        self._loops(
            scope, [*plan.across, *plan.columns], extents, lambda s: self._panel(s, extents)
        )

    def _panel(self, scope: Scope, extents: dict[int, int]) -> None:
        """One row block by one panel of columns: multiply over all of k, then the epilogue."""
        rows = scope.extent(self.blocks) if self.blocks >= 0 else 1
        if self.plan.staged:
            self._staged_panel(scope, extents, rows)
            return
        width = scope.elements(self.plan.columns)
        banks = rows * self._banks(width)
        total = scope.psum("product", banks, self.plan.accumulator_slots)
        self._chunks(scope, extents, lambda s: self._multiply(s, *self._operands(s), total))
        self._finish(scope, total, rows, self._banks(width) * self.bank)

    def _chunks(self, scope: Scope, extents: dict[int, int], body: Body) -> None:
        self._loops(scope, [*self.plan.along, self.chunks], extents, body)

    def _operands(self, scope: Scope) -> tuple[Held, Held]:
        """A chunk of the stationary and of the moving panel: loaded, or part of what is kept."""
        plan, panels = self.plan, self.panels
        count = self._count(scope)
        if self.resident is not None:
            stationary = panels.at(self.resident, scope)
        else:
            stationary = panels.empty(plan.stationary, scope, count, 0)
            panels.load(plan.stationary, stationary, scope)
        if self.moving is not None:
            return stationary, panels.at(self.moving, scope, (*plan.across, *plan.columns))
        moving = panels.empty(plan.moving, scope, count, 0)
        panels.load(plan.moving, moving, scope)
        return stationary, moving

    def _count(self, scope: Scope) -> int:
        """k tiles of a chunk."""
        return scope.extent(self.chunks) if self.chunks >= 0 else 1

    # products collected in SBUF

    def _staged_panel(self, scope: Scope, extents: dict[int, int], rows: int) -> None:
        if self.plan.sums == 1:
            self._chunks(scope, extents, lambda s: self._rows_at_once(s, rows))
            return
        height, width = scope.extent(self.plan.rows), scope.elements(self.plan.out_axes)
        total = scope.tile("sums", height, rows * width, DType.F32, 1)
        self._chunks(scope, extents, lambda s: self._add_chunk(s, total, rows))
        self._finish(scope, total, rows, width)

    def _rows_at_once(self, scope: Scope, rows: int) -> None:
        """All of k is at hand: products of a row tile go to one SBUF tile, as what their reader
        makes of them where it can, then its epilogue.
        """
        stationary, moving = self._operands(scope)
        frame, late = self._begin(scope)
        inner, row = scope.counted(rows)
        self._at_row(inner, scope, row)
        made, done = self._made(frame, late, inner)
        frame.held[made] = inner.spanning(
            self.plan.out_axes, "staged", frame.rows(inner), self.space.values[made].dtype
        )
        collect = self._collector(frame, made, inner)
        self._bank_products(inner, row, stationary, moving, collect)
        self._emit_late(frame, late, inner, {*done, made})

    def _made(self, frame: Frame, late: Sequence[int], scope: Scope) -> tuple[int, set[int]]:
        """(what leaves PSUM, the value that takes the product there or the product itself; values
        that were computed for it).
        """
        if self.taker is None:
            return self.plan.number, set()
        others = [i for i in self.space.values[self.taker].inputs if i != self.plan.number]
        ahead = [n for n in self.space.slice(others) if n in late]
        for n in ahead:
            frame.emit(n, scope)
        runs = eviction.is_run(frame, others, scope)
        return (self.taker if runs else self.plan.number), {*ahead}

    def _collector(self, frame: Frame, made: int, scope: Scope) -> Collect:
        """How value `made` leaves a bank."""
        if made != self.plan.number:
            return eviction.Columns(frame, made, self.plan.number, scope).take
        held, engine = frame.held[made], eviction.copier(self.plan, self.epilogue)

        def copied(place: Scope, bank: AccessPattern, column: Affine) -> None:
            out = place.on_chip(held, bank.shape[0], bank.dims[1:], column)
            place.copy(engine, out, bank)

        return copied

    def _add_chunk(self, scope: Scope, total: Held, rows: int) -> None:
        """Add the products of a chunk of k to the sums of the panel."""
        stationary, moving = self._operands(scope)
        inner, row = scope.counted(rows)
        width = inner.elements(self.plan.out_axes)
        first = scope.zero_when((*self.plan.along, self.chunks))

        def collect(place: Scope, bank: AccessPattern, column: Affine) -> None:
            out = place.on_chip(total, bank.shape[0], bank.dims[1:], row * width + column)
            single = replace(bank, dims=(*bank.dims, (1, 1)))
            place.add_up(out, single, first)

        self._bank_products(inner, row, stationary, moving, collect)

    def _bank_products(
        self, by_row: Scope, row: Affine, stationary: Held, moving: Held, collect: Collect
    ) -> None:
        """One row tile by all columns of the panel, a PSUM bank at a time: some columns of a batch
        point, or several points, or several rows of a partition.
        """
        plan = self.plan
        if not plan.beside:
            self._banks_along(by_row, row, plan.group, (stationary, moving), collect)
            return
        wide = by_row.elements((*plan.beside, *plan.columns))
        by_group, point = by_row.counted(by_row.elements(plan.group))
        a, b = (
            (
                replace(panel, offset=panel.offset + point * panel.strides[atom])
                for panel in (stationary, moving)
                for atom in plan.group
            )
            if plan.group
            else (stationary, moving)
        )

        def behind(place: Scope, bank: AccessPattern, column: Affine) -> None:
            collect(place, bank, point * wide + column)

        self._banks_along(by_group, row, plan.beside, (a, b), behind)

    def _banks_along(
        self,
        by_row: Scope,
        row: Affine,
        atoms: Sequence[int],
        panels: tuple[Held, Held],
        collect: Collect,
    ) -> None:
        """The same for the points of `atoms`, at most one, which share a bank where they fit."""
        stationary, moving = panels
        most = self.builder.limits.moving_max
        width = by_row.elements(self.plan.columns)
        points = by_row.elements(atoms)
        for several in pieces(points, even_tile(points, max(1, most // width))):
            by_point, turn = by_row.counted(several.trip)
            point = turn * several.extent + several.start
            for piece in pieces(width, even_tile(width, most)):
                place, turn = by_point.counted(piece.trip)
                column = turn * piece.extent + piece.start
                bank = place.psum("product", 1, self.plan.accumulator_slots)
                for at in range(several.extent):
                    a = row * stationary.strides.get(self.blocks, 0)
                    b = column
                    for atom in atoms:
                        a = a + (point + at) * stationary.strides[atom]
                        b = b + (point + at) * moving.strides.get(atom, 0)
                    into = replace(bank, offset=Affine(at * piece.extent))
                    self._add_tiles(place, into, (stationary, a), (moving, b), piece.extent)
                elements = ((1, several.extent * piece.extent),)
                out = place.on_chip(bank, place.extent(self.plan.rows), elements)
                collect(place, out, point * width + column)

    def _add_tiles(
        self,
        scope: Scope,
        bank: Held,
        stationary: tuple[Held, Affine],
        moving: tuple[Held, Affine],
        width: int,
    ) -> None:
        """Products of all k tiles at hand into `bank`; operands are panels and elements in them."""
        height, depth = scope.extent(self.plan.rows), scope.extent(self.plan.depth)
        inner, tile = scope.counted(self._count(scope))
        step = stationary[0].strides[self.plan.rows] if self.plan.beside and self.plan.rows else 1
        sources = [
            inner.on_chip(panel, depth, dims, at + tile * panel.strides.get(self.chunks, 0))
            for (panel, at), dims in (
                (stationary, ((step, height),)),
                (moving, ((1, width),)),
            )
        ]
        first = (inner.register,) if self._count(scope) > 1 else ()
        out = inner.flat(bank, height, width)
        inner.matmul(out, sources, first)

    # products added up in PSUM

    def _multiply(self, scope: Scope, stationary: Held, moving: Held, total: Held) -> None:
        """Products of all row tiles and k tiles at hand, added up in PSUM."""
        plan, count = self.plan, self._count(scope)
        height, depth = scope.extent(plan.rows), scope.extent(plan.depth)
        rows = scope.extent(self.blocks) if self.blocks >= 0 else 1
        by_row, row = scope.counted(rows)
        width = scope.elements(plan.columns)
        row_step = stationary.strides.get(self.blocks, 0)
        into_row = row * (self._banks(width) * self.bank)
        for piece in pieces(width, min(width, self.builder.limits.moving_max)):
            by_column, turn = by_row.counted(piece.trip)
            column = turn * piece.extent + piece.start
            inner, tile = by_column.counted(count)
            first = scope.zero_when((*plan.along, self.chunks))
            if first is not None and count > 1:
                first = (*first, inner.register)
            a = row * row_step + tile * stationary.strides.get(self.chunks, 0)
            b = column + tile * moving.strides.get(self.chunks, 0)
            across = ((1, piece.extent),)
            inner.matmul(
                inner.on_chip(total, height, across, into_row + column),
                (
                    inner.flat(stationary, depth, height, a),
                    inner.on_chip(moving, depth, across, b),
                ),
                first,
            )

    def _banks(self, width: int) -> int:
        """PSUM banks a row tile of `width` columns takes."""
        return -(-width // self.bank)

    # epilogue

    def _finish(self, scope: Scope, total: Held, rows: int, step: int) -> None:
        """Run what follows the contraction, one row tile at a time; `step` elements of `total` are
        a row tile.
        """
        frame, late = self._begin(scope)
        inner, row = scope.counted(rows)
        self._at_row(inner, scope, row)
        product = replace(scope.hold(total, self.plan.out_axes), offset=row * step)
        self._evict(frame, product, inner)
        self._emit_late(frame, late, inner)

    def _begin(self, scope: Scope) -> tuple[Frame, list[int]]:
        """Code for what all row tiles share, and the values that are left for each."""
        frame = Frame(self.builder, self.space, self.plan.rows, self.plan.out_axes)
        early = [n for n in self.epilogue if self._is_row_free(n)]
        for n in early:
            frame.emit(n, scope)
        return frame, [n for n in self.epilogue if n not in early]

    def _at_row(self, inner: Scope, scope: Scope, row: Affine) -> None:
        if self.blocks >= 0:
            inner.boxes[self.blocks] = Box(scope.boxes[self.blocks].origin + row, 1)

    def _emit_late(
        self, frame: Frame, late: list[int], scope: Scope, done: Collection[int] = ()
    ) -> None:
        """Values of one row tile but those `done`, their tiles given back after the last use."""
        number = self.plan.number
        last = {i: n for n in late for i in self.space.values[n].inputs}
        for n in late:
            if n not in done and not store_turned(frame, n, self.plan, scope):
                frame.emit(n, scope)
            for i in {*self.space.values[n].inputs}:
                if last[i] == n and (i in late or i == number) and i in frame.held:
                    scope.release(frame.held[i])

    def _is_row_free(self, number: int) -> bool:
        """A value of the epilogue that is the same for all row tiles and does not need the
        product.
        """
        value = self.space.values[number]
        needs = self.space.slice([number])
        moves = {self.plan.rows, self.blocks} & value.atoms
        return value.op not in CODELESS and not moves and self.plan.number not in needs

    def _evict(self, frame: Frame, product: Held, scope: Scope) -> None:
        """Leave the product in PSUM for a reader that can take it there, else copy it to SBUF."""
        number = self.plan.number
        if self.taker is not None:
            frame.held[number] = product
            return
        held = frame.new(number, self.space.values[number], scope)
        engine = eviction.copier(self.plan, self.epilogue)
        frame.copy(scope, engine, held, product)
