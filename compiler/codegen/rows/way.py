"""The code of one row tile: its sweeps, contractions with panels, transposes and sums.

A sweep goes over its inner atom in blocks of columns. Values of a block rotate with the loop over
blocks, strips and transposed operands belong to the row tile. Products are read from PSUM where
their readers can do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compiler.codegen import reductions
from compiler.codegen.builder import Held, Scope, pieces
from compiler.codegen.fusion import SCALED
from compiler.codegen.rows.panels import Panel
from compiler.codegen.rows.plan import RowPlan, Stage
from compiler.codegen.rows.sums import Sums, divided
from compiler.codegen.space import SPLATS, Value
from compiler.codegen.values import ACTIVATIONS, BINARY, UNARY, Frame
from compiler.dtypes import DType
from compiler.isa.program import Engine
from compiler.isa.region import Affine

_FROM_PSUM = ACTIVATIONS | BINARY | UNARY | {"convert", "select", "reduce", SCALED}


class Way(Frame):
    """One row tile on its way through the stages.

    `held` has values of the whole row tile: shared vectors, strips, single columns. Inside a block
    it has those at the block's columns, and the values of the block.
    """

    def __init__(
        self,
        plan: RowPlan,
        scope: Scope,
        panels: Mapping[int, Panel],
        sums: Sums,
        held: dict[int, Held],
    ) -> None:
        super().__init__(scope.builder, plan.space, plan.roles.row, sorted(plan.roles.inner))
        self.plan, self.scope, self.panels, self.sums = plan, scope, panels, sums
        self.held = held
        self.users = plan.space.users((*plan.roles.rows, *plan.roles.sums))
        self.turned: dict[int, Held] = {}
        self.partial: dict[int, Held] = {}
        self.left = self._last_readers()

    def _last_readers(self) -> dict[Stage, list[int]]:
        """Values that stay over several stages, by the stage that reads them last."""
        at = {n: number for number, s in enumerate(self.plan.stages) for n in s.values}
        found: dict[Stage, list[int]] = {}
        for n in at:
            last = max((at[u] for u in self.users.get(n, ()) if u in at), default=-1)
            if last > at[n] and (n in self.plan.strips or n in self.plan.turned):
                found.setdefault(self.plan.stages[last], []).append(n)
        return found

    def new(self, number: int, value: Value, scope: Scope, dtype: DType | None = None) -> Held:
        """Strips have their tile already."""
        if number in self.plan.strips:
            return self.held[number]
        return super().new(number, value, scope, dtype)

    def stage(self, stage: Stage) -> None:
        """All code of one stage."""
        if stage.inner is None:
            self._block(stage, self.scope)
        else:
            self._sweep(stage, stage.inner)
        for n in self.left.get(stage, ()):
            for kept in (self.held, self.turned):
                if n in kept:
                    self.scope.release(kept.pop(n))

    def _sweep(self, stage: Stage, atom: int) -> None:
        """Blocks of columns, tiles of the whole row around them."""
        size = self.space.sizes[atom]
        self._begin(stage, atom)
        for piece in pieces(size, min(size, self.builder.limits.moving_max)):
            self._block(stage, self.scope.enter(atom, piece))
        for n in stage.values:
            if n in self.partial:
                reductions.finish(self, n, self.partial.pop(n), self.scope)

    def _begin(self, stage: Stage, atom: int) -> None:
        for n in stage.values:
            value = self.space.values[n]
            if value.op == "reduce" and n not in self.plan.roles.sums:
                self.partial[n] = reductions.new_accumulator(self, n, self.scope)
            if n in self.plan.strips:
                size = self.space.sizes[atom]
                self.held[n] = Held(self._tile(f"strip{n}", size, value.dtype), {atom: 1})
            if n in self.plan.turned:
                chunks = -(-self.space.sizes[atom] // self._unit(atom))
                size, dtype = chunks * self.rows(self.scope), self.plan.turned[n]
                self.turned[n] = Held(self._tile(f"turned{n}", size, dtype, self._unit(atom)), {})

    def _tile(self, name: str, size: int, dtype: DType, rows: int = 0) -> int:
        slots = self.plan.slots
        return self.scope.tile(name, rows or self.rows(self.scope), size, dtype, slots)

    def _unit(self, atom: int) -> int:
        """Points of an atom in one transposed chunk."""
        return min(self.space.sizes[atom], self.builder.limits.transpose_max)

    def _block(self, stage: Stage, scope: Scope) -> None:
        """The values of a stage in the boxes of `scope`."""
        kept = self.held
        self.held = {n: _at(held, scope) for n, held in kept.items()}
        last = {i: n for n in stage.values for i in self.space.values[n].inputs}
        local = set(stage.values) - self.plan.strips if stage.inner is not None else set()
        for n in stage.values:
            if self.space.values[n].op not in SPLATS:
                self._value(n, scope)
            for i in sorted(local & {*self.space.values[n].inputs}):
                if last[i] == n and i in self.held:
                    scope.release(self.held[i])
        if stage.inner is None:
            kept |= {n: self.held[n] for n in stage.values if n in self.held}
        self.held = kept

    def _value(self, number: int, scope: Scope) -> None:
        value = self.space.values[number]
        if number in self.plan.roles.sums:
            self._sum(number, scope)
        elif number in self.panels:
            self._product(number, value, scope)
        elif value.op == "reduce":
            reductions.accumulate(self, number, self.partial[number], scope, looped=True)
        else:
            self.emit(number, scope)
        if number in self.plan.turned:
            self._turn(number, scope)

    # contractions

    def _product(self, number: int, value: Value, scope: Scope) -> None:
        """One bank of a contraction with a panel: every chunk of the summed atom."""
        panel, (tall, _) = self.panels[number], self.plan.roles.panels[number]
        atom, rows = self.plan.inner(number), self.rows(scope)
        width = scope.extent(atom)
        first = Affine() if atom is None else scope.boxes[atom].origin * panel.column_step
        bank = Held(scope.psum("product"), {} if atom is None else {atom: 1})
        out = scope.on_chip(bank, rows, ((1, width),))

        def multiply(place: Scope, chunk: Affine, depth: int, zero: tuple[int, ...] | None) -> None:
            stationary = place.on_chip(self.turned[tall], depth, ((1, rows),), chunk * rows)
            across = ((panel.column_step, width),)
            moving = place.on_chip(panel.held, depth, across, chunk * panel.chunk_step + first)
            place.add("matmul", Engine.TENSOR, out, (stationary, moving), zero_when=zero)

        if panel.full > 1:
            inner = scope.loop(panel.full)
            step = Affine(0, ((inner.register, 1),))
            multiply(inner, step, panel.height, (inner.register,))
        else:
            multiply(scope, Affine(), panel.height, ())
        if panel.tail:
            multiply(scope, Affine(panel.full), panel.tail, None)
        self._evict(number, value, bank, scope)

    def _evict(self, number: int, value: Value, bank: Held, scope: Scope) -> None:
        """Leave a product in PSUM for readers that can take it there, else copy it to SBUF."""
        if self._stays(number, value):
            self.held[number] = bank
            return
        held = self.new(number, value, scope)
        self.apply(scope, "tensor_copy", Engine.SCALAR, held, (bank,))

    def _stays(self, number: int, value: Value) -> bool:
        users = self.users.get(number, ())
        moved = number in self.plan.strips or number in self.plan.turned
        rounded = value.dtype is not DType.F32 or self.plan.inner(number) is None
        return not moved and not rounded and all(self._reads_psum(u) for u in users)

    def _reads_psum(self, number: int) -> bool:
        """Whether the engine of a reader reaches PSUM: not GpSimd, not a DMA, no operand of the
        tensor engine.
        """
        value = self.space.values[number]
        mixed = [self.space.values[i].dtype for i in value.inputs[value.op == "select" :]]
        floats = all(t.is_float for t in (value.dtype, *mixed))
        return value.op in _FROM_PSUM and floats and number not in self.plan.roles.sums

    def _turn(self, number: int, scope: Scope) -> None:
        """Transpose the columns at hand of a value, several chunks to a bank and a copy."""
        atom = self.plan.inner(number)
        assert atom is not None
        box, unit, rows = scope.boxes[atom], self._unit(atom), self.rows(scope)
        bank, turned = Held(scope.psum("turned"), {}), self.turned[number]
        for start in range(0, box.extent, unit):
            size = min(unit, box.extent - start)
            out = scope.on_chip(bank, size, ((1, rows),), start // unit * rows)
            source = scope.on_chip(self.held[number], rows, ((1, size),), start)
            scope.add("transpose", Engine.TENSOR, out, (source,))
        full, tail = divmod(box.extent, unit)
        first = divided(box.origin, unit)
        for chunk, count, size in ((0, full, unit), (full, 1, tail)):
            if count and size:
                across = ((1, count * rows),)
                out = scope.on_chip(turned, size, across, (first + chunk) * rows)
                source = scope.on_chip(bank, size, across, chunk * rows)
                scope.add("tensor_copy", Engine.VECTOR, out, (source,))

    def _sum(self, number: int, scope: Scope) -> None:
        layout = self.sums.layouts[number]
        operands = [self._typed(i, layout.dtype, scope) for i in (layout.stationary, layout.moving)]
        self.sums.add(number, scope, operands, self.rows(scope))

    def _typed(self, number: int | None, dtype: DType, scope: Scope) -> Held:
        """An operand of the tensor engine in its element type; None stands for ones."""
        if number is None:
            return self.builder.filled(1.0, dtype, 1, part="ones")
        held, value = self.operand(number), self.space.values[number]
        if self.builder.dtype(held) is dtype:
            return held
        typed = self.scratch(value, scope, dtype)
        self.apply(scope, "tensor_copy", Engine.SCALAR, typed, (held,))
        scope.release(typed)
        return typed


def _at(held: Held, scope: Scope) -> Held:
    """A value of the whole row at the columns of `scope`."""
    offset = held.offset
    for atom, step in held.strides.items():
        offset = offset + scope.boxes[atom].origin * step
    return replace(held, offset=offset)
