"""The loop nest of a contraction: stationary blocks, moving panels, chunks of k, accumulators in
PSUM, epilogue.

for outer: for row block: [load all of k]  for panel: for chunk of k: load, multiply   then per row
tile: epilogue
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.codegen.builder import Box, Builder, Held, Scope, pieces
from compiler.codegen.contract_plan import ContractPlan, needed_by_epilogue, plan_contraction
from compiler.codegen.panels import Panels
from compiler.codegen.space import SPLATS, Space
from compiler.codegen.values import ACTIVATIONS, BINARY, UNARY, Frame
from compiler.dtypes import DType
from compiler.isa.program import Engine
from compiler.isa.region import Affine

Body = Callable[[Scope], None]
_FROM_PSUM = ACTIVATIONS | BINARY | UNARY | {"convert"}


def emit_contraction(builder: Builder, space: Space, sinks: list[int], budget: int) -> None:
    """Append the code of the contraction all `sinks` depend on, with its epilogue."""
    (number,) = (n for n in space.slice(sinks) if space.values[n].op == "contract")
    plan = plan_contraction(space, number, sinks, builder.limits, builder.tensors, budget)
    _Nest(builder, plan, needed_by_epilogue(plan.space, number, sinks)).emit()


class _Nest:
    """Recursion over the loops of one plan."""

    def __init__(self, builder: Builder, plan: ContractPlan, epilogue: list[int]) -> None:
        self.builder = builder
        self.plan = plan
        self.space = plan.space
        self.epilogue = epilogue
        self.panels = Panels(builder, plan)
        self.blocks = plan.row_split.major  # counts row tiles; -1 when there is one
        self.chunks = plan.depth_split.major
        self.bank = builder.limits.psum_bank_bytes // DType.F32.bytes
        self.resident: Held | None = None

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
        self._loops(scope, self.plan.outer, extents, lambda s: self._block_loop(s, extents))

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

    def _block_loop(self, scope: Scope, extents: dict[int, int]) -> None:
        self._loops(scope, [self.blocks], extents, lambda s: self._block(s, extents))

    def _block(self, scope: Scope, extents: dict[int, int]) -> None:
        """One stationary block: load it if it stays, then pass all panels by."""
        plan = self.plan
        depths = [*plan.along, self.chunks]
        if plan.resident:
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
        banks = rows * self._banks(scope.elements(self.plan.columns))
        total = Held(scope.psum("product", banks, self.plan.accumulator_slots), {})
        self._loops(
            scope, [*self.plan.along, self.chunks], extents, lambda s: self._chunk(s, total)
        )
        self._finish(scope, total, rows)

    def _chunk(self, scope: Scope, total: Held) -> None:
        """Load a chunk of the moving panel (and of the stationary one) and multiply."""
        plan, panels = self.plan, self.panels
        count = scope.extent(self.chunks) if self.chunks >= 0 else 1
        if self.resident is not None:
            stationary = panels.at(self.resident, scope)
        else:
            stationary = panels.empty(plan.stationary, scope, count, 0)
            panels.load(plan.stationary, stationary, scope)
        moving = panels.empty(plan.moving, scope, count, 0)
        panels.load(plan.moving, moving, scope)
        self._multiply(scope, stationary, moving, total, count)

    def _multiply(
        self, scope: Scope, stationary: Held, moving: Held, total: Held, count: int
    ) -> None:
        """Products of all row tiles and k tiles at hand, added up in PSUM."""
        plan = self.plan
        height, depth = scope.extent(plan.rows), scope.extent(plan.depth)
        rows = scope.extent(self.blocks) if self.blocks >= 0 else 1
        by_row, row = _counted(scope, rows)
        width = scope.elements(plan.columns)
        row_step = stationary.strides.get(self.blocks, 0)
        into_row = row * (self._banks(width) * self.bank)
        for piece in pieces(width, min(width, self.builder.limits.moving_max)):
            by_column, turn = _counted(by_row, piece.trip)
            column = turn * piece.extent + piece.start
            inner, tile = _counted(by_column, count)
            first = scope.zero_when((*plan.along, self.chunks))
            if first is not None and count > 1:
                first = (*first, inner.register)
            a = row * row_step + tile * stationary.strides.get(self.chunks, 0)
            b = column + tile * moving.strides.get(self.chunks, 0)
            across = ((1, piece.extent),)
            inner.add(
                "matmul",
                Engine.TENSOR,
                inner.on_chip(total, height, across, into_row + column),
                (
                    inner.on_chip(stationary, depth, ((1, height),), a),
                    inner.on_chip(moving, depth, across, b),
                ),
                zero_when=first,
            )

    def _banks(self, width: int) -> int:
        """PSUM banks a row tile of `width` columns takes."""
        return -(-width // self.bank)

    # epilogue

    def _finish(self, scope: Scope, total: Held, rows: int) -> None:
        """Evict the accumulators and run what follows the contraction, one row tile at a time."""
        frame = Frame(self.builder, self.space, self.plan.rows, self.plan.columns)
        early = [n for n in self.epilogue if self._is_row_free(n)]
        for n in early:
            frame.emit(n, scope)
        inner, row = _counted(scope, rows)
        if self.blocks >= 0:
            inner.boxes[self.blocks] = Box(scope.boxes[self.blocks].origin + row, 1)
        strides = scope.hold(total.tile, self.plan.columns).strides
        step = self._banks(scope.elements(self.plan.columns)) * self.bank
        product = Held(total.tile, strides, total.offset + row * step)
        self._evict(frame, product, inner)
        late = [n for n in self.epilogue if n not in early]
        self._emit_late(frame, late, inner)

    def _emit_late(self, frame: Frame, late: list[int], scope: Scope) -> None:
        """Values of one row tile, their tiles given back after the last use."""
        number = self.plan.number
        last = {i: n for n in late for i in self.space.values[n].inputs}
        for n in late:
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
        return value.op not in SPLATS and not moves and self.plan.number not in needs

    def _evict(self, frame: Frame, product: Held, scope: Scope) -> None:
        """Leave the product in PSUM for a single reader that can take it there, else copy it to
        SBUF.
        """
        number = self.plan.number
        value = self.space.values[number]
        readers = [n for n in self.epilogue if number in self.space.values[n].inputs]
        single = len(readers) == 1 and self.space.values[readers[0]].op in _FROM_PSUM
        if single and value.dtype is DType.F32:
            frame.held[number] = product
            return
        held = frame.new(number, value, scope)
        busy = any(self.space.values[n].op in BINARY for n in self.epilogue)
        engine = Engine.SCALAR if busy else Engine.VECTOR
        frame.apply(scope, "tensor_copy", engine, held, (product,))


def _counted(scope: Scope, count: int) -> tuple[Scope, Affine]:
    """(body, index) of a loop of `count` iterations; the scope itself when there is one."""
    if count == 1:
        return scope.straight({}), Affine()
    inner = scope.loop(count)
    return inner, Affine(0, ((inner.register, 1),))
