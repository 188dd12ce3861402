"""The code of a group of row tiles: its sweeps, contractions with panels, transposes and sums.

Every stage is a loop over the tiles of the group, and a sweep goes over its inner atom in blocks of
columns. Values of a block rotate with the loop over blocks; strips, single columns and transposed
operands belong to the group and lie side by side for its tiles. Products are read from PSUM where
their readers can do that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.codegen.builder import Box, Held, Piece, Scope, pieces
from compiler.codegen.fusion import SCALED, is_product
from compiler.codegen.reductions import accumulate, accumulator_type
from compiler.codegen.rows.balance import Copy
from compiler.codegen.rows.columns import Columns, Run
from compiler.codegen.rows.levels import Stage
from compiler.codegen.rows.panels import Panel
from compiler.codegen.rows.plan import RowPlan
from compiler.codegen.rows.skew import Flight, Places, Step, crossing, in_phases
from compiler.codegen.rows.sums import Sums, divided
from compiler.codegen.space import SINKS, SPLATS, Value
from compiler.codegen.values import ACTIVATIONS, BINARY, UNARY, Frame
from compiler.dtypes import DType
from compiler.isa.program import Engine, Space
from compiler.isa.region import Affine

TILE = -9  # a private atom number for "row tile of the group"
_FROM_PSUM = ACTIVATIONS | BINARY | UNARY | {"convert", "select", "reduce", SCALED}


@dataclass(frozen=True, slots=True)
class Shared:
    """What the row tiles of a parallel point have in common."""

    panels: Mapping[int, Panel]
    whole: Mapping[int, Panel]
    sums: Sums
    columns: Columns
    held: Mapping[int, Held]


class Group(Frame):
    """Row tiles on their way through the stages.

    `held` has the values of the whole group: shared vectors, strips, single columns. Inside a block
    it has those at the block's rows and columns, and the values of the block. `rows` (first, end)
    are all rows that this code ever works on.
    """

    def __init__(
        self, plan: RowPlan, scope: Scope, shared: Shared, height: int, rows: tuple[int, int]
    ) -> None:
        super().__init__(scope.builder, plan.space, plan.roles.row, sorted(plan.roles.inner))
        self.plan, self.scope, self.span, self.height = plan, scope, rows, height
        self.panels, self.whole = shared.panels, shared.whole
        self.sums, self.columns = shared.sums, shared.columns
        self.held = dict(shared.held)
        self.parts = pieces(scope.extent(plan.roles.row), height)
        self.count = sum(p.trip for p in self.parts)
        self.users = plan.space.users((*plan.roles.rows, *plan.roles.sums))
        self.turned: dict[int, Held] = {}
        self.partial: dict[int, Held] = {}
        self.same: dict[int, int] = {}  # values that are their reader here: a decided select
        self.flight: Flight | None = None  # of the block at hand, in a skewed sweep
        self.reducer: Engine | None = None
        self.stage_of = {n: number for number, s in enumerate(plan.stages) for n in s.values}
        self.left = self._last_readers()

    def _last_readers(self) -> dict[Stage, list[int]]:
        """Values that stay over several stages, by the stage that reads them last."""
        at = self.stage_of
        found: dict[Stage, list[int]] = {}
        for n in at:
            last = max((at[u] for u in self.users.get(n, ()) if u in at), default=at[n])
            found.setdefault(self.plan.stages[last], []).append(n)
        return found

    def new(self, number: int, value: Value, scope: Scope, dtype: DType | None = None) -> Held:
        """Values of the whole group have their tile already."""
        reader = self.same.get(number, number)
        if self._is_kept(reader):
            self.held[number] = self.held[reader]
            return self.held[number]
        if self.flight is None or number not in self.flight.crossing:
            return super().new(number, value, scope, dtype)
        places = self.flight.places
        if number not in places.tiles:
            places.tiles[number] = super().new(number, value, places.home, dtype)
        self.held[number] = places.tiles[number]
        return self.held[number]

    def _is_kept(self, number: int) -> bool:
        """Whether a value belongs to the group: strips and single columns."""
        return number in self.plan.strips or (
            number in self.plan.run and self.plan.inner(number) is None
        )

    def engine(self, *held: Held) -> Engine:
        """GpSimd also takes reductions that the plan moved there, where they do not read PSUM."""
        chip = all(self.builder.tiles[h.tile].space is Space.SBUF for h in held)
        return self.reducer if self.reducer and chip else super().engine(*held)

    def stage(self, stage: Stage) -> None:
        """All code of one stage."""
        for n in stage.values:
            self._begin(n, self.space.values[n])
        for part in self.parts:
            place = self._enter(part)
            if stage.inner is None:
                self._block(stage, place)
            else:
                self._sweep(stage, place, stage.inner)
        for n in self.left.get(stage, ()):
            for kept in (self.held, self.turned, self.partial):
                if n in kept:
                    self.scope.release(kept.pop(n))

    def _enter(self, part: Piece) -> Scope:
        """The code for tiles of the group that have `part.extent` rows."""
        row = self.plan.roles.row
        scope = self.scope.loop(part.trip) if part.trip > 1 else self.scope.straight({})
        terms = ((scope.register, 1),) if part.trip > 1 else ()
        tile = Affine(part.start // self.height, terms)
        origin = self.scope.boxes[row].origin + tile * self.height
        scope.boxes |= {row: Box(origin, part.extent), TILE: Box(tile, 1)}
        return scope

    def _begin(self, number: int, value: Value) -> None:
        """Tiles of the group for a value its stage makes."""
        plan, atom = self.plan, self.plan.inner(number)
        if number in plan.roles.sums or value.op in (*SINKS, *SPLATS):
            return
        if value.op == "reduce":
            self.partial[number] = self._tile(f"partial{number}", 1, accumulator_type(value), {})
        if value.op == "reduce" and accumulator_type(value) is value.dtype:
            self.held[number] = self.partial.pop(number)
        elif self._is_kept(number):
            size = 1 if atom is None else self.space.sizes[atom]
            strides = {} if atom is None else {atom: 1}
            self.held[number] = self._tile(f"{value.op}{number}", size, value.dtype, strides)
        if number in plan.turned and atom is not None:
            unit = self._unit(atom)
            size = -(-self.space.sizes[atom] // unit) * self.height
            name, dtype = f"turned{number}", plan.turned[number]
            self.turned[number] = self._tile(name, size, dtype, {}, unit)

    def _tile(
        self, name: str, size: int, dtype: DType, strides: dict[int, int], rows: int = 0
    ) -> Held:
        """A tile of `size` elements for each row tile of the group."""
        rows = rows or min(self.height, self.scope.extent(self.plan.roles.row))
        tile = self.scope.tile(name, rows, size * self.count, dtype, 1)
        return Held(tile, {**strides, TILE: size})

    def _unit(self, atom: int) -> int:
        """Points of an atom in one transposed chunk."""
        return min(self.space.sizes[atom], self.builder.limits.transpose_max)

    def _sweep(self, stage: Stage, place: Scope, atom: int) -> None:
        """Blocks of columns of one row tile."""
        runs = self.columns.runs(atom, self.span)
        if self._returns(stage) and sum(run.piece.trip for run in runs) > 1:
            self._skewed(stage, place, atom, runs)
        else:
            self._in_turn(stage, place, atom, runs)
        for n in stage.values:
            if n in self.partial:
                total, rounded = (_at(h, place) for h in (self.partial[n], self.held[n]))
                self.apply(place, "tensor_copy", Engine.VECTOR, rounded, (total,))

    def _in_turn(self, stage: Stage, place: Scope, atom: int, runs: Sequence[Run]) -> None:
        """One block after the other."""
        for at, run in enumerate(runs):
            block = place.enter(atom, run.piece)
            start = (block.register,) if run.piece.trip > 1 else ()
            block.first = {**block.first, atom: start if at == 0 else None}
            self._block(stage, block, run.true)

    def _returns(self, stage: Stage) -> bool:
        """Whether blocks go from the tensor engine to other engines and back."""
        phases = {self._phase(step) for n in stage.values for step in self._steps_of(n)}
        return {0, 2} <= phases and any(n in self.panels for n in stage.values)

    def _skewed(self, stage: Stage, place: Scope, atom: int, runs: Sequence[Run]) -> None:
        """Blocks of columns with the phases of several under way."""
        home = place.straight({atom: Box(Affine(), max(run.piece.extent for run in runs))})
        places = [Places(home) for _ in range(2)]
        banks = sum(self._phase(s) != 1 for n in stage.values for s in self._steps_of(n))
        if 2 * banks > self.builder.limits.psum_banks:
            places[1] = replace(places[1], banks=places[0].banks)
        flights = []
        for run in runs:
            inputs = {n: self._inputs(n, run.true) for n in stage.values}
            needed = self._needed(stage, inputs)
            phases = {s: self._phase(s) for n in needed for s in self._steps_of(n)}
            flights.append([Flight(phases, crossing(phases, inputs), p) for p in places])
        for at, scope, self.flight in in_phases(place, atom, runs, flights):
            self._block(stage, scope, runs[at].true)
        self.flight = None
        for held in (h for p in places for h in p.tiles.values()):
            place.release(held)

    def _steps_of(self, number: int) -> tuple[Step, ...]:
        turned = number in self.plan.turned
        return (Step(number), Step(number, turns=True)) if turned else (Step(number),)

    def _phase(self, step: Step) -> int:
        """0: products and loads, 1: arithmetic on them, 2: what the tensor engine does with it."""
        if step.turns or step.number in self.plan.roles.sums:
            return 2
        return int(step.number not in self.panels and self.space.values[step.number].op != "load")

    def _block(self, stage: Stage, scope: Scope, true: frozenset[int] = frozenset()) -> None:
        """The values of a stage in the boxes of `scope`, where the selects `true` are decided; in a
        skewed sweep those of one phase.
        """
        kept, flight = self.held, self.flight
        self.held = {n: _at(held, scope) for n, held in kept.items()}
        self.held |= flight.held if flight else {}
        inputs = {n: self._inputs(n, true) for n in stage.values}
        self.same = {inputs[n][0]: n for n in stage.values if n in true}
        last = {i: n for n in stage.values for i in inputs[n]}
        for step in (s for n in self._needed(stage, inputs) for s in self._steps_of(n)):
            if flight and flight.phases[step] != flight.phase:
                continue
            n = step.number
            self._step(step, true, scope)
            for i in inputs[n] if step == self._steps_of(n)[-1] else ():
                if last[i] == n and i in stage.values and n not in true:
                    self._release(i, stage, scope)
        if flight:
            flight.held |= {n: h for n, h in self.held.items() if n in flight.crossing}
        self.held, self.same = kept, {}

    def _step(self, step: Step, true: frozenset[int], scope: Scope) -> None:
        """One step; a select in `true` is its first branch."""
        n, definition = step.number, self._definition(step.number, true)
        if step.turns:
            self._turn(n, scope)
        elif n in true:
            self.held[n] = self.held[definition.inputs[1]]
        elif definition.op not in SPLATS:
            self._value(n, definition, scope)

    def _inputs(self, number: int, true: frozenset[int]) -> tuple[int, ...]:
        inputs = self._definition(number, true).inputs
        return (inputs[1],) if number in true else tuple(dict.fromkeys(inputs))

    def _definition(self, number: int, true: frozenset[int]) -> Value:
        """What a value is where the selects `true` are decided: func(x * 1 + bias) of a select that
        is a product takes over its scale.
        """
        values = self.space.values
        value = values[number]
        if value.op != SCALED or value.attrs["scale"] != 1.0 or value.inputs[0] not in true:
            return value
        source = values[value.inputs[0]].inputs[1]
        given = values[source]
        if not is_product(given) or self.stage_of[source] != self.stage_of[number]:
            return value
        attrs = {**value.attrs, "scale": given.attrs["scale"]}
        return replace(value, inputs=(*given.inputs, *value.inputs[1:]), attrs=attrs)

    def _needed(self, stage: Stage, inputs: Mapping[int, tuple[int, ...]]) -> list[int]:
        """Values of a stage that have an effect here or are read by one that has."""
        wanted = {n for n in stage.values if self._has_effect(n, stage)}
        for n in reversed(stage.values):
            if n in wanted:
                wanted.update(inputs[n])
        return [n for n in stage.values if n in wanted]

    def _has_effect(self, number: int, stage: Stage) -> bool:
        op, plan = self.space.values[number].op, self.plan
        kept = number in plan.strips or number in plan.turned or number in plan.roles.sums
        return kept or op in (*SINKS, "reduce") or stage.inner is None

    def _release(self, number: int, stage: Stage, scope: Scope) -> None:
        """Give back the tile of a block's value."""
        kept = self._is_kept(number) or self._is_kept(self.same.get(number, number))
        kept = kept or (self.flight is not None and number in self.flight.crossing)
        if stage.inner is not None and not kept and number in self.held:
            scope.release(self.held[number])

    def _value(self, number: int, value: Value, scope: Scope) -> None:
        if number in self.plan.roles.sums:
            self._sum(number, scope)
        elif number in self.panels:
            self._product(number, value, scope)
        elif value.op == "reduce":
            total = self.partial.get(number)
            target = self.held[number] if total is None else _at(total, scope)
            self.reducer = Engine.GPSIMD if number in self.plan.gpsimd else None
            accumulate(self, number, target, scope, looped=True)
            self.reducer = None
        else:
            self.emit(number, scope, value)

    # contractions

    def _product(self, number: int, value: Value, scope: Scope) -> None:
        """One bank of a contraction with a panel: every chunk of the summed atom."""
        panel, (tall, _) = self.panels[number], self.plan.roles.panels[number]
        atom, rows = self.plan.inner(number), self.rows(scope)
        width = scope.extent(atom)
        first = Affine() if atom is None else scope.boxes[atom].origin * panel.column_step
        turned, step, between = self._stationary(number, tall, scope)
        bank = self._bank(number, value, scope)
        out = scope.on_chip(bank, rows, ((1, width),))

        def multiply(place: Scope, chunk: Affine, depth: int, zero: tuple[int, ...] | None) -> None:
            stationary = place.on_chip(turned, depth, ((between, rows),), chunk * step)
            across = ((panel.column_step, width),)
            moving = place.on_chip(panel.held, depth, across, chunk * panel.chunk_step + first)
            place.add("matmul", Engine.TENSOR, out, (stationary, moving), zero_when=zero)

        first_range = True
        for start, count in self._chunks(number, panel):
            if count > 1:
                inner = scope.loop(count)
                chunk = Affine(start, ((inner.register, 1),))
                zero = (inner.register,) if first_range else None
                multiply(inner, chunk, panel.height, zero)
            else:
                depth = panel.tail if start == panel.full else panel.height
                multiply(scope, Affine(start), depth, () if first_range else None)
            first_range = False
        self._evict(number, value, bank, scope)

    def _bank(self, number: int, value: Value, scope: Scope) -> Held:
        """PSUM for a product; what a later phase reads there belongs to its flight."""
        atom, flight = self.plan.inner(number), self.flight
        strides = {} if atom is None else {atom: 1}
        kept = flight and number in flight.crossing and self._stays(number, value)
        return replace(self.psum("kept" if kept else "product", number, scope), strides=strides)

    def psum(self, name: str, number: int, scope: Scope) -> Held:
        """A PSUM bank for value `number`; blocks of a skewed sweep use the same ones in turn."""
        if self.flight is None:
            return Held(scope.psum(name), {})
        places = self.flight.places
        banks = places.kept if name == "kept" else places.banks
        if (name, number) not in banks:
            banks[name, number] = Held(places.home.psum(name, slots=1), {})
        return banks[name, number]

    def _stationary(self, number: int, tall: int, scope: Scope) -> tuple[Held, int, int]:
        """The transposed operand of a product: (where, elements between chunks, between rows)."""
        if number in self.whole:
            panel = self.whole[number]
            row = {self.plan.roles.row: panel.column_step}
            held = _at(Held(panel.held.tile, row, panel.held.offset), scope)
            return held, panel.chunk_step, panel.column_step
        return _at(self.turned[tall], scope), self.rows(scope), 1

    def _chunks(self, number: int, panel: Panel) -> list[tuple[int, int]]:
        """(first chunk, number of chunks) of the summed atom that were computed; a short last chunk
        stands alone.
        """
        (over,) = self.space.values[number].over
        found: list[tuple[int, int]] = []
        for run in self.columns.runs(over, self.span):
            end = run.piece.start + run.piece.extent * run.piece.trip
            first, last = run.piece.start // panel.height, end // panel.height
            if last > first and found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], last - found[-1][0])
            elif last > first:
                found.append((first, last - first))
            if end % panel.height:
                found.append((panel.full, 1))
        return found

    def _evict(self, number: int, value: Value, bank: Held, scope: Scope) -> None:
        """Leave a product in PSUM for readers that can take it there, else copy it to SBUF."""
        if self._stays(number, value):
            self.held[number] = bank
            return
        held = self.new(number, value, scope)
        self.apply(scope, "tensor_copy", self._copier(Copy(number)), held, (bank,))

    def _copier(self, copy: Copy) -> Engine:
        return Engine.VECTOR if copy in self.plan.vector_copies else Engine.SCALAR

    def _stays(self, number: int, value: Value) -> bool:
        if number in self.same:
            reader = self.same[number]
            return self._stays(reader, value)
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
        bank, turned = self.psum("turned", number, scope), _at(self.turned[number], scope)
        fold, engine = self.plan.fold.get(atom, 1), self._copier(Copy(number, turned=True))
        for chunk in range(-(-box.extent // unit)):
            size = min(unit, box.extent - chunk * unit)
            start = chunk // fold * fold * unit + chunk % fold
            out = scope.on_chip(bank, size, ((1, rows),), chunk * rows)
            source = scope.on_chip(self.held[number], rows, ((fold, size),), start)
            scope.add("transpose", Engine.TENSOR, out, (source,))
        full, tail = divmod(box.extent, unit)
        first = divided(box.origin, unit)
        for chunk, count, size in ((0, full, unit), (full, 1, tail)):
            if count and size:
                across = ((1, count * rows),)
                out = scope.on_chip(turned, size, across, (first + chunk) * rows)
                source = scope.on_chip(bank, size, across, chunk * rows)
                scope.add("tensor_copy", engine, out, (source,))

    def _sum(self, number: int, scope: Scope) -> None:
        layout = self.sums.layouts[number]
        if layout.tall == self.plan.roles.row:
            moving = self.operand(self.space.values[number].inputs[0])
            self.sums.add_rows(number, scope, moving, self.rows(scope))
            return
        operands = [self._typed(i, layout.dtype, scope) for i in (layout.stationary, layout.moving)]

        def bank() -> Held:
            return self.psum("part", number, scope)

        self.sums.add(number, scope, operands, self.rows(scope), bank)

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
    """A value of the group at the row tile and columns of `scope`."""
    offset = held.offset
    for atom, step in held.strides.items():
        offset = offset + scope.boxes[atom].origin * step
    return replace(held, offset=offset)
