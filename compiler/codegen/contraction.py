"""The loop nest of a contraction: stationary blocks, moving packed tiles, chunks of k, accumulators
in PSUM, epilogue.

for outer: for row block: [load all of k]  for packed tile: for chunk of k: load, multiply   then
per row tile: epilogue. A held moving operand is loaded in front of the loops that do not move it.
Staged plans collect the products of a packed tile in SBUF.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from shardwright.compiler.codegen import eviction
from shardwright.compiler.codegen.builder import NO_DIM, Box, Builder, Held, Scope, pieces
from shardwright.compiler.codegen.contract_plan import ContractPlan, even_tile
from shardwright.compiler.codegen.contract_tiling import plan_contraction
from shardwright.compiler.codegen.domain import CODELESS, Domain
from shardwright.compiler.codegen.packing import Packer
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.transposed_blocks import store_transposed
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.codegen.whole_operand import WholeLoader
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern

Body = Callable[[Scope], None]
Collect = Callable[[Scope, AccessPattern, Affine], None]


def contraction_candidates(domain: Domain, roots: list[int], room: Room) -> Sequence[Candidate]:
    """Tilings of the contraction all `roots` depend on, with its epilogue."""
    (number,) = (n for n in domain.slice(roots) if domain[n].op == "contract")

    def emit(plan: ContractPlan, builder: Builder) -> None:
        _Nest(builder, *eviction.fused(plan, roots)).emit()

    plans = plan_contraction(domain, number, roots, room)
    return [Candidate(p.cost, partial(emit, p), p.variant, plan=p) for p in plans]


class _Nest:
    """Recursion over the loops of one plan."""

    def __init__(self, builder: Builder, plan: ContractPlan, epilogue: list[int]) -> None:
        self.builder = builder
        self.plan = plan
        self.domain = plan.domain
        self.epilogue = epilogue
        self.taker = eviction.taker(plan.domain, plan.number, epilogue)
        self.packer = Packer(builder, plan)
        self.blocks = plan.row_split.major  # counts row tiles; -1 when there is one
        # What is passed row by row, or its partitions and those of a tail.
        self.counted = plan.rows if plan.beside and plan.rows is not None else self.blocks
        self.chunks = plan.depth_split.major
        self.depths = (*plan.along, self.chunks)  # loops over k
        self.bank = builder.limits.psum_bank_bytes // DType.F32.bytes
        self.resident: Held | None = None
        self.kept: Held | None = None  # the stationary operand of all row blocks
        self.moving: Held | None = None  # the whole moving operand, when it is held

        extents = dict.fromkeys((*plan.outer, *plan.across, *plan.along), 1) | {**plan.extents}
        extents |= {a: self.domain.sizes[a] for a in (plan.rows, plan.depth) if a is not None}
        self.extents = extents | {self.blocks: plan.block, self.chunks: plan.chunk}

    def emit(self) -> None:
        """Everything, into the builder's body."""
        scope = self.builder.scope(self.extents)
        shared = self.plan.shared if self.plan.held else ()
        rest = [a for a in self.plan.outer if a not in shared]

        def blocks(inner: Scope) -> None:
            if self.plan.held:
                self._hold(inner)
            self._loops(inner, rest, self._row_tiles)

        self._loops(scope, shared, blocks)

    def _hold(self, scope: Scope) -> None:
        """Load the whole moving operand."""
        plan, packer = self.plan, self.packer
        free = (*plan.across, *plan.columns)
        whole = self.moving = packer.whole(scope)
        self._loops(
            scope,
            [*self.depths, *free],
            lambda s: packer.load(plan.moving, packer.at(whole, s, free), s),
        )

    def _loops(self, scope: Scope, iter_dims: Sequence[int], body: Body) -> None:
        """`body` for every combination of pieces of `iter_dims`, first iter dim outermost."""
        if not iter_dims:
            body(scope)
            return
        iter_dim, rest = iter_dims[0], iter_dims[1:]
        if iter_dim == NO_DIM:
            self._loops(scope, rest, body)
            return
        splits = self.domain.splits
        for piece in pieces(
            self.domain.sizes[iter_dim], self.extents[iter_dim], splits.get(iter_dim)
        ):
            self._loops(scope.enter(iter_dim, piece), rest, body)

    def _row_tiles(self, scope: Scope) -> None:
        """All row blocks of a point of the outer loops."""
        if self.plan.whole:
            access = self.domain[self.plan.stationary.number].access
            item = self.builder.tensors[access.tensor].dtype.bytes
            self.kept = WholeLoader(self.plan, self.packer.in_turn(), item).load(scope)
        self._loops(scope, [self.counted], self._block)

    def _block(self, scope: Scope) -> None:
        """One stationary block: load it if it stays, then pass all packed tiles by."""
        plan, packer = self.plan, self.packer
        if self.kept is not None:
            self.resident = self.kept.at(scope.origins([self.counted]))
        elif plan.resident:
            tiles = math.prod(map(packer.tiles_of, self.depths))
            whole = self.resident = packer.empty(
                plan.stationary, scope, tiles, plan.stationary_slots
            )
            self._loops(
                scope, self.depths, lambda s: packer.load(plan.stationary, packer.at(whole, s), s)
            )
        self._loops(scope, [*plan.across, *plan.columns], self._product)

    def _product(self, scope: Scope) -> None:
        """One row block by one tile of columns: multiply over all of k, then the epilogue."""
        rows = scope.extent(self.blocks)
        if self.plan.staged:
            self._staged_product(scope, rows)
            return
        banks = self._banks(scope.elements(self.plan.columns))
        total = scope.psum("product", rows * banks, self.plan.accumulator_slots)
        self._loops(scope, self.depths, lambda s: self._multiply(s, *self._operands(s), total))
        self._finish(scope, total, rows, banks * self.bank)

    def _operands(self, scope: Scope) -> tuple[Held, Held]:
        """A chunk of k of both packed operands: loaded, or part of what is kept."""
        plan, packer = self.plan, self.packer
        count = scope.extent(self.chunks)
        if self.resident is not None:
            stationary = packer.at(self.resident, scope)
        else:
            stationary = packer.empty(plan.stationary, scope, count, 0)
            packer.load(plan.stationary, stationary, scope)
        if self.moving is not None:
            return stationary, packer.at(self.moving, scope, (*plan.across, *plan.columns))
        moving = packer.empty(plan.moving, scope, count, 0)
        packer.load(plan.moving, moving, scope)
        return stationary, moving

    # products collected in SBUF

    def _staged_product(self, scope: Scope, rows: int) -> None:
        if self.plan.sums == 1:
            self._loops(scope, self.depths, lambda s: self._rows_at_once(s, rows))
            return
        height, width = scope.extent(self.plan.rows), scope.elements(self.plan.out_axes)
        total = scope.tile("sums", height, rows * width, DType.F32, 1)
        self._loops(scope, self.depths, lambda s: self._add_chunk(s, total, rows))
        self._finish(scope, total, rows, width)

    def _rows_at_once(self, scope: Scope, rows: int) -> None:
        """All of k is at hand: products of a row tile go to one SBUF tile, then its epilogue."""
        stationary, moving = self._operands(scope)
        frame, late = self._begin(scope)
        inner, row = scope.counted(rows)
        self._at_row(inner, scope, row)
        made, done = self._made(frame, late, inner)
        frame.held[made] = inner.spanning(
            self.plan.out_axes, "staged", frame.rows(inner), self.domain[made].dtype
        )
        collect = self._collector(frame, made, inner)
        self._bank_products(inner, row, stationary, moving, collect)
        self._emit_late(frame, late, inner, {*done, made})

    def _made(self, frame: Frame, late: Sequence[int], scope: Scope) -> tuple[int, set[int]]:
        """(what leaves PSUM: the taker of the product, or itself; values computed for that)."""
        if self.taker is None:
            return self.plan.number, set()
        others = [i for i in self.domain[self.taker].inputs if i != self.plan.number]
        ahead = [n for n in self.domain.slice(others) if n in late]
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
        """Add the products of a chunk of k to the sums of the packed tile."""
        stationary, moving = self._operands(scope)
        inner, row = scope.counted(rows)
        width = inner.elements(self.plan.out_axes)
        first = scope.zero_when(self.depths)

        def collect(place: Scope, bank: AccessPattern, column: Affine) -> None:
            out = place.on_chip(total, bank.shape[0], bank.dims[1:], row * width + column)
            single = replace(bank, dims=(*bank.dims, (1, 1)))
            place.add_up(out, single, first)

        self._bank_products(inner, row, stationary, moving, collect)

    def _bank_products(
        self, by_row: Scope, row: Affine, stationary: Held, moving: Held, collect: Collect
    ) -> None:
        """One row tile by all columns: columns, points or rows of a partition fill each bank."""
        plan = self.plan
        if not plan.beside:
            self._banks_along(by_row, row, plan.group, (stationary, moving), collect)
            return
        wide = by_row.elements((*plan.beside, *plan.columns))
        by_group, point = by_row.counted(by_row.elements(plan.group))
        a, b = (packed.at(dict.fromkeys(plan.group, point)) for packed in (stationary, moving))

        def behind(place: Scope, bank: AccessPattern, column: Affine) -> None:
            collect(place, bank, point * wide + column)

        self._banks_along(by_group, row, plan.beside, (a, b), behind)

    def _banks_along(
        self,
        by_row: Scope,
        row: Affine,
        iter_dims: Sequence[int],
        operands: tuple[Held, Held],
        collect: Collect,
    ) -> None:
        """The same for the points of `iter_dims`, at most one, in one bank where they fit."""
        stationary, moving = operands
        most = self.builder.limits.moving_max
        width = by_row.elements(self.plan.columns)
        points = by_row.elements(iter_dims)
        for several in pieces(points, even_tile(points, max(1, most // width))):
            by_point, point = by_row.repeat(several)
            for piece in pieces(width, even_tile(width, most)):
                place, column = by_point.repeat(piece)
                bank = place.psum("product", 1, self.plan.accumulator_slots)
                for at in range(several.extent):
                    here = dict.fromkeys(iter_dims, point + at)
                    sides = stationary.at({self.blocks: row, **here}), moving.at(here)
                    into = replace(bank, offset=Affine(at * piece.extent))
                    self._add_tiles(place, into, sides, column, piece.extent)
                elements = several.extent * piece.extent
                out = place.flat(bank, place.extent(self.plan.rows), elements)
                collect(place, out, point * width + column)

    def _add_tiles(
        self, scope: Scope, bank: Held, sides: tuple[Held, Held], column: Affine, width: int
    ) -> None:
        """Products of all k tiles at hand into `bank`, of `width` columns from `column` on."""
        height, depth = scope.extent(self.plan.rows), scope.extent(self.plan.depth)
        inner, tile = scope.counted(scope.extent(self.chunks))
        stationary, moving = (packed.at({self.chunks: tile}) for packed in sides)
        step = stationary.strides[self.plan.rows] if self.plan.beside and self.plan.rows else 1
        rows = inner.on_chip(stationary, depth, ((step, height),))
        columns = inner.flat(moving, depth, width, column)
        first = (inner.register,) if scope.extent(self.chunks) > 1 else ()
        inner.matmul(inner.flat(bank, height, width), (rows, columns), first)

    # products added up in PSUM

    def _multiply(self, scope: Scope, stationary: Held, moving: Held, total: Held) -> None:
        """Products of all row tiles and k tiles at hand, added up in PSUM."""
        height, depth = scope.extent(self.plan.rows), scope.extent(self.plan.depth)
        count, width = scope.extent(self.chunks), scope.elements(self.plan.columns)
        by_row, row = scope.counted(scope.extent(self.blocks))
        into_row = row * (self._banks(width) * self.bank)
        for piece in pieces(width, min(width, self.builder.limits.moving_max)):
            by_column, column = by_row.repeat(piece)
            inner, tile = by_column.counted(count)
            first = scope.zero_when(self.depths)
            if first is not None and count > 1:
                first = (*first, inner.register)
            rows = stationary.at({self.blocks: row, self.chunks: tile})
            columns = moving.at({self.chunks: tile})
            out = inner.flat(total, height, piece.extent, into_row + column)
            sides = (
                inner.flat(rows, depth, height),
                inner.flat(columns, depth, piece.extent, column),
            )
            inner.matmul(out, sides, first)

    def _banks(self, width: int) -> int:
        """PSUM banks a row tile of `width` columns takes."""
        return -(-width // self.bank)

    # epilogue

    def _finish(self, scope: Scope, total: Held, rows: int, step: int) -> None:
        """What follows, one row tile at a time; `step` elements of `total` are a row tile."""
        frame, late = self._begin(scope)
        inner, row = scope.counted(rows)
        self._at_row(inner, scope, row)
        product = replace(scope.hold(total, self.plan.out_axes), offset=row * step)
        self._evict(frame, product, inner)
        self._emit_late(frame, late, inner)

    def _begin(self, scope: Scope) -> tuple[Frame, list[int]]:
        """Code for what all row tiles share, and the values that are left for each."""
        frame = Frame(self.builder, self.domain, self.plan.rows, self.plan.out_axes)
        early = [n for n in self.epilogue if self._is_row_free(n)]
        for n in early:
            frame.emit(n, scope)
        return frame, [n for n in self.epilogue if n not in early]

    def _at_row(self, inner: Scope, scope: Scope, row: Affine) -> None:
        if self.blocks != NO_DIM:
            inner.boxes[self.blocks] = Box(scope.boxes[self.blocks].origin + row, 1)

    def _emit_late(
        self, frame: Frame, late: list[int], scope: Scope, done: Collection[int] = ()
    ) -> None:
        """Values of one row tile but those `done`, their tiles given back after the last use."""
        number = self.plan.number
        last = {i: n for n in late for i in self.domain[n].inputs}
        for n in late:
            if n not in done and not store_transposed(frame, n, self.plan, scope):
                frame.emit(n, scope)
            for i in {*self.domain[n].inputs}:
                if last[i] == n and (i in late or i == number) and i in frame.held:
                    scope.release(frame.held[i])

    def _is_row_free(self, number: int) -> bool:
        """Whether a value of the epilogue is the same for all row tiles, without the product."""
        value = self.domain[number]
        needs = self.domain.slice([number])
        moves = {self.plan.rows, self.blocks} & value.iter_dims
        return value.op not in CODELESS and not moves and self.plan.number not in needs

    def _evict(self, frame: Frame, product: Held, scope: Scope) -> None:
        """Leave the product in PSUM for a reader that can take it there, else copy it to SBUF."""
        number = self.plan.number
        if self.taker is not None:
            frame.held[number] = product
            return
        held = frame.new(number, self.domain[number], scope)
        engine = eviction.copier(self.plan, self.epilogue)
        frame.copy(scope, engine, held, product)
