"""The code of a group of row tiles: its passes, the steps of their blocks, and sums over rows.

Every pass is a loop over the tiles of the group, and most go over an inner iter dim in
blocks of columns. Values of a block rotate with the loop over blocks; row buffers, single columns
and transposed operands belong to the group and lie side by side for its tiles. Blocks of a pass
follow each other or are pipelined (`pipelining.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.compiler.codegen.builder import Box, Held, Piece, Scope, pieces
from shardwright.compiler.codegen.domain import CODELESS, Value
from shardwright.compiler.codegen.reductions import accumulate, accumulator_type
from shardwright.compiler.codegen.rows import pipelining
from shardwright.compiler.codegen.rows.columns import Choices, Columns, Run
from shardwright.compiler.codegen.rows.decided import Decided, decided
from shardwright.compiler.codegen.rows.interval_analysis import Range
from shardwright.compiler.codegen.rows.online import Running, copied, rescale, start_of
from shardwright.compiler.codegen.rows.passes import Pass
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.codegen.rows.products import Products, Shared, placed
from shardwright.compiler.codegen.rows.sums import Block
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import STORES, Affine
from shardwright.compiler.isa.program import Engine, Space

# Private iter dim numbers for "row tile of the group" and "row tile of the panel".
TILE, PANEL_TILE = -9, -10
# Groups of row tiles in one body of a loop (our choice: enough to hide how a loop runs dry).
SIDE_BY_SIDE = 4


class Kept(NamedTuple):
    """Where a value of several blocks or passes lies, its transposes, and what is added up."""

    held: Held | None = None
    transposed: Held | None = None
    partial: Held | None = None


@dataclass(frozen=True, slots=True)
class RowPanel:
    """`count` row tiles that share column tiles, and what they carry from one to the next."""

    scope: Scope
    count: int
    kept: dict[int, Kept] = field(default_factory=dict)


class Group(Products):
    """Row tiles on their way through the passes.

    `held` has the values of the whole group: shared vectors, row buffers, single columns. Inside a
    block it has those at the block's rows and columns, and the values of the block. What does not
    span a blocked iter dim belongs to the panel.
    """

    def __init__(
        self,
        plan: RowPlan,
        scope: Scope,
        shared: Shared,
        height: int,
        rows: Range,
        panel: RowPanel | None = None,
        running: tuple[Running, ...] = (),
    ) -> None:
        super().__init__(plan, scope, shared, rows)
        self.height = height
        self.parts = pieces(scope.extent(plan.row), height)
        self.count = sum(p.trip for p in self.parts)
        self.partial: dict[int, Held] = {}
        self.reducer: Engine | None = None
        self.ends = (True, True)  # whether the row tile at hand begins a block, and ends it
        self.holds = False  # whether PSUM holds all blocks of sums until they leave it
        self.banks: dict[tuple[int, Block], Held] = {}  # of the block at hand, by sum
        self.pass_of = {n: number for number, s in enumerate(plan.passes) for n in s.values}
        self.left = self._last_readers()
        self.panel, self.running = panel, running
        for n, kept in (panel.kept if panel else {}).items():
            self._take(n, kept)

    def _last_readers(self) -> dict[Pass, list[int]]:
        """Values that stay over several passes, by the pass that reads them last."""
        at = self.pass_of
        found: dict[Pass, list[int]] = {}
        for n in at:
            last = max((at[u] for u in self.users.get(n, ()) if u in at), default=at[n])
            found.setdefault(self.plan.passes[last], []).append(n)
        return found

    def new(self, number: int, value: Value, scope: Scope, dtype: DType | None = None) -> Held:
        """Values of the whole group have their tile already."""
        home = self.decided.home.get(number, number)
        if self._is_kept(home):
            self.held[number] = self.held[home]
            return self.held[number]
        product = self.held.get(self.plan.bank_of.get(home, -1))
        in_psum = product and self.builder.tiles[product.tile].space is Space.PSUM
        if product and in_psum and self._stays(number, value):
            self.held[number] = product
            return product
        if self.iteration is None or number not in self.iteration.crossing:
            return super().new(number, value, scope, dtype)
        places = self.iteration.places
        if number not in places.tiles:
            places.tiles[number] = super().new(number, value, places.home, dtype)
        self.held[number] = places.tiles[number]
        return self.held[number]

    def _is_kept(self, number: int) -> bool:
        """Whether a value belongs to the group: row buffers and single columns."""
        return number in self.plan.row_buffers or (
            number in self.plan.run and self.plan.inner(number) is None
        )

    def engine(self, *held: Held) -> Engine:
        """GpSimd also takes reductions that the plan moved there, where they do not read PSUM."""
        chip = all(self.builder.tiles[h.tile].space is Space.SBUF for h in held)
        return self.reducer if self.reducer and chip else super().engine(*held)

    def sums_in_passing(self, number: int) -> bool:
        """What the plan gave to Scalar."""
        return number in self.plan.engines.by_product

    def emit_pass(self, pass_: Pass) -> None:
        """All code of one pass."""
        for n in pass_.values:
            self._begin(n, self.domain[n])
        if pass_.inner is not None and self._takes_turns(pass_):
            tiles = [
                self._enter(Piece(p.start + at * p.extent, p.extent))
                for p in self.parts
                for at in range(p.trip)
            ]
            self._over_blocks(pass_, tiles, pass_.inner)
        else:
            for part in self.parts:
                self._tiles_of(pass_, self._enter(part))
        carried = self.panel.kept if self.panel else {}
        for n in (n for n in self.left.get(pass_, ()) if n not in carried):
            for kept in (self.held, self.transposed, self.partial):
                if n in kept:
                    self.scope.release(kept.pop(n))

    def _tiles_of(self, pass_: Pass, place: Scope) -> None:
        """A pass of the row tiles of `place`, one after the other."""
        moving = [r for r in self.running if r.column in pass_.values]
        before = [copied(self, r, placed(self.held[r.column], place), place) for r in moving]
        if pass_.inner is None:
            self._block(pass_, place)
        else:
            self._over_blocks(pass_, [place], pass_.inner)
        for r, held in zip(moving, before, strict=True):
            moved = (held, placed(self.held[r.column], place))
            rescale(self, r, moved, [self._carried(n, place) for n in r.folds], place)

    def _takes_turns(self, pass_: Pass) -> bool:
        """Whether row tiles take turns in every block, so that a sum over them leaves PSUM once."""
        adds_up = any(self._is_product_sum(n) for n in pass_.values)
        return self.count > 1 and adds_up and self._holds(pass_)

    def _holds(self, pass_: Pass) -> bool:
        """Whether PSUM has a place for each block of each sum beside what else a pass needs."""
        kept, others = self._banks(pass_)
        return 2 * kept + others <= self.builder.limits.psum_banks

    def _banks(self, pass_: Pass) -> tuple[int, int]:
        """PSUM banks of a block: of products, and of transposes and sums."""
        assert pass_.inner is not None
        box = self.scope.boxes[pass_.inner]
        width = min(box.extent, self.builder.limits.moving_max)
        block = self.scope.straight({pass_.inner: replace(box, extent=width)})
        sums = [n for n in pass_.values if self._is_product_sum(n)]
        transposed = sum(n in self.plan.transposed for n in pass_.values)
        kept = sum(n in self.packed for n in pass_.values)
        return kept, transposed + sum(len(self.sums.blocks(n, block)) for n in sums)

    def _is_product_sum(self, number: int) -> bool:
        """Whether a value is a sum over rows, and not one that keeps them."""
        mine = number in self.plan.roles.sums
        return mine and self.sums.layouts[number].tall != self.plan.row

    def _enter(self, part: Piece) -> Scope:
        """The code for tiles of the group that have `part.extent` rows."""
        row = self.plan.row
        scope, tile = self.scope.repeat(Piece(part.start // self.height, 1, part.trip))
        origin = self.scope.boxes[row].origin + tile * self.height
        scope.boxes |= {row: Box(origin, part.extent), TILE: Box(tile, 1)}
        if self.panel:
            scope.boxes[PANEL_TILE] = Box(self.scope.boxes[PANEL_TILE].origin + tile, 1)
        return scope

    def _carried(self, number: int, place: Scope) -> tuple[Held, int]:
        """Where a row tile adds up a fold, and its columns."""
        held = self.partial.get(number, self.held[number])
        return placed(held, place), self.domain.size(self.plan.inner(number))

    def open(self, folds: Iterable[int]) -> None:
        """What running loops begin with: `folds` of all row tiles of the panel."""
        for n in folds:
            value = self.domain[n]
            self._begin(n, value)
            for held in (self.held.get(n), self.partial.get(n)):
                if held is not None:
                    tile, whole = self.builder.tiles[held.tile], Held(held.tile, {})
                    out = self.scope.flat(whole, tile.partitions, tile.elements)
                    self.scope.fill(out, start_of(value))

    def _begin(self, number: int, value: Value) -> None:
        """Tiles for a value its pass makes: of the group, or of the panel that has them already."""
        plan, panel = self.plan, self.panel
        if number in plan.roles.sums or value.op in (*STORES, *CODELESS):
            return
        if panel is None or plan.is_blocked(number):
            self._take(number, self._tiles(number, value))
            return
        if number not in panel.kept:
            panel.kept[number] = self._tiles(number, value, panel)
        self._take(number, panel.kept[number])

    def _take(self, number: int, kept: Kept) -> None:
        for into, held in zip((self.held, self.transposed, self.partial), kept, strict=True):
            if held is not None:
                into[number] = held

    def _tiles(self, number: int, value: Value, panel: RowPanel | None = None) -> Kept:
        """What a value needs beyond a block."""
        plan, iter_dim = self.plan, self.plan.inner(number)
        held = transposed = partial = None
        if value.op == "reduce":
            partial = self._tile(f"partial{number}", 1, accumulator_type(value), panel)
        if value.op == "reduce" and accumulator_type(value) is value.dtype:
            held, partial = partial, None
        elif self._is_kept(number):
            size, loaded = self.scope.extent(iter_dim), value.op in ("load", "load_indexed")
            held = self._tile(f"{value.op}{number}", size, value.dtype, panel, loaded=loaded)
            if iter_dim is not None:
                first = self.scope.boxes[iter_dim].origin * -1
                held = Held(held.tile, {**held.strides, iter_dim: 1}, first)
        if number in plan.transposed and iter_dim is not None:
            unit = self.unit(iter_dim)
            size = -(-self.scope.extent(iter_dim) // unit) * self.height
            transposed = self._tile(f"turned{number}", size, plan.transposed[number], panel, unit)
        return Kept(held, transposed, partial)

    def _tile(
        self,
        name: str,
        size: int,
        dtype: DType,
        panel: RowPanel | None,
        rows: int = 0,
        loaded: bool = False,
    ) -> Held:
        """A tile of `size` elements for each row tile of the group, or of the panel."""
        home, count, tiles = (
            (panel.scope, panel.count, PANEL_TILE) if panel else (self.scope, self.count, TILE)
        )
        rows = rows or min(self.height, home.extent(self.plan.row))
        return replace(home.tile(name, rows, size * count, dtype, 1, loaded), strides={tiles: size})

    def _over_blocks(self, pass_: Pass, tiles: Sequence[Scope], iter_dim: int) -> None:
        """Blocks of columns of row tiles that take turns in each."""
        runs, self.holds = self.runs(iter_dim), self._holds(pass_)
        if self._returns(pass_) and len(tiles) * sum(run.piece.trip for run in runs) > 1:
            self._pipelined(pass_, tiles, iter_dim, runs)
        else:
            self._in_turn(pass_, tiles, iter_dim, runs)
        for n in (n for n in pass_.values if n in self.partial):
            for place in tiles:
                total, rounded = (placed(h, place) for h in (self.partial[n], self.held[n]))
                self.copy(place, Engine.VECTOR, rounded, total)
        self.ends, self.holds = (True, True), False

    def _in_turn(
        self, pass_: Pass, tiles: Sequence[Scope], iter_dim: int, runs: Sequence[Run]
    ) -> None:
        """One block after the other."""
        for at, run in enumerate(runs):
            block = tiles[0].within(iter_dim, run.piece, at == 0)
            for number, tile in enumerate(tiles):
                self.ends = (number == 0, number == len(tiles) - 1)
                scope = block.straight({**tile.boxes, iter_dim: block.boxes[iter_dim]})
                self._block(pass_, scope, run.decided)

    def _returns(self, pass_: Pass) -> bool:
        """Whether blocks go from the tensor engine to other engines and back."""
        phases = {self._phase(step) for n in pass_.values for step in self._steps_of(n)}
        return {0, 2} <= phases and any(n in self.packed for n in pass_.values)

    def _pipelined(
        self, pass_: Pass, tiles: Sequence[Scope], iter_dim: int, runs: Sequence[Run]
    ) -> None:
        """Blocks of columns with the phases of several under way."""
        home = tiles[0].straight({iter_dim: Box(Affine(), max(run.piece.extent for run in runs))})
        places = [pipelining.Places(home) for _ in range(2)]
        if 2 * sum(self._banks(pass_)) > self.builder.limits.psum_banks:
            places[1] = replace(places[1], banks=places[0].banks)
        made, orders = [], set()
        for run in runs:
            here = self._decided(pass_, run.decided)
            needed = self._needed(pass_, here)
            phases = {s: self._phase(s) for n in needed for s in self._steps_of(n)}
            reads = {n: here.inputs(n) for n in pass_.values}
            moving = pipelining.crossing(phases, reads)
            moving |= {here.owner(n) for n in moving}
            orders.add(pipelining.order(phases, reads))
            made.append([pipelining.Iteration(phases, moving, p) for p in places])
        for turn, scope, self.iteration in pipelining.pipelined(
            tiles, iter_dim, runs, made, max(orders)
        ):
            self.ends = (turn.tile == 0, turn.tile == len(tiles) - 1)
            self._block(pass_, scope, runs[turn.run].decided)
        self.iteration = None
        for held in (h for p in places for h in p.tiles.values()):
            home.release(held)

    def _steps_of(self, number: int) -> tuple[pipelining.Step, ...]:
        found = [pipelining.Step(number)]
        if number in self.plan.transposed:
            found.append(pipelining.Step(number, transposes=True))
        if self._is_product_sum(number):
            found.append(pipelining.Step(number, leaves=True))
        return tuple(found)

    def _phase(self, step: pipelining.Step) -> int:
        """0: products and loads, 1: arithmetic, 2: the tensor engine on that, 3: out of PSUM."""
        if step.leaves:
            return 3
        if step.transposes or step.number in self.plan.roles.sums:
            return 2
        return int(step.number not in self.packed and self.domain[step.number].op != "load")

    def _block(self, pass_: Pass, scope: Scope, choices: Choices = frozenset()) -> None:
        """The values of a pass in the boxes of `scope`; when pipelined those of one phase."""
        kept, iteration = self.held, self.iteration
        self.held = {n: placed(held, scope) for n, held in kept.items()}
        self.held |= iteration.held if iteration else {}
        self.decided = here = self._decided(pass_, choices)
        needed = self._needed(pass_, here)
        last = {here.owner(i): n for n in needed if self._reads(n) for i in here.inputs(n)}
        for n in needed:
            steps = self._steps_of(n)
            mine = [s for s in steps if not iteration or iteration.phases[s] == iteration.phase]
            for step in mine:
                self._step(step, scope)
            if mine:
                read = dict.fromkeys(here.owner(i) for i in here.inputs(n))
                self._release((i for i in read if last.get(i) == n), pass_, scope)
        if iteration:
            iteration.held |= {n: h for n, h in self.held.items() if n in iteration.crossing}
        self.held, self.decided = kept, Decided()

    def _decided(self, pass_: Pass, choices: Choices) -> Decided:
        """The pass where the selects of `choices` are decided."""
        return decided(self.plan, pass_, dict(choices), self._is_kept)

    def _reads(self, number: int) -> bool:
        """Whether a value has code that reads its inputs."""
        return number not in self.decided.same or number in self.plan.transposed

    def _step(self, step: pipelining.Step, scope: Scope) -> None:
        """One step; what lies in the tile of another value is there already."""
        n, value = step.number, self.decided.values[step.number]
        if step.transposes:
            self.transpose(n, scope)
        elif step.leaves:
            self._leave(n, scope)
        elif n in self.decided.same:
            self.held[n] = self.held[value.inputs[0]]
        elif value.op not in CODELESS:
            self._value(n, value, scope)

    def _needed(self, pass_: Pass, here: Decided) -> list[int]:
        """Values of a pass that have an effect here or are read by one that has."""
        wanted = {n for n in pass_.values if self._has_effect(n, pass_)}
        for n in reversed(pass_.values):
            if n in wanted:
                wanted.update(here.inputs(n))
        return [n for n in pass_.values if n in wanted]

    def _has_effect(self, number: int, pass_: Pass) -> bool:
        op, plan = self.domain[number].op, self.plan
        kept = number in plan.row_buffers or number in plan.transposed or number in plan.roles.sums
        return kept or op in (*STORES, "reduce") or pass_.inner is None

    def _release(self, numbers: Iterable[int], pass_: Pass, scope: Scope) -> None:
        """Give back the tiles of a block's values."""
        crossing = self.iteration.crossing if self.iteration else ()
        for n in numbers:
            mine = n in pass_.values and not self._is_kept(self.decided.home.get(n, n))
            if pass_.inner is not None and mine and n not in crossing and n in self.held:
                scope.release(self.held[n])

    def _value(self, number: int, value: Value, scope: Scope) -> None:
        if number in self.plan.roles.sums:
            self._sum(number, scope)
        elif number in self.packed:
            self.product(number, value, scope)
        elif value.op == "reduce":
            total = self.partial.get(number)
            target = self.held[number] if total is None else placed(total, scope)
            self.reducer = Engine.GPSIMD if number in self.plan.engines.gpsimd else None
            accumulate(self, number, target, scope, looped=True)
            self.reducer = None
        else:
            self.emit(number, scope, value)

    def _sum(self, number: int, scope: Scope) -> None:
        layout = self.sums.layouts[number]
        if layout.tall == self.plan.row:
            moving = self.operand(self.domain[number].inputs[0])
            self.sums.add_rows(number, scope, moving, self.rows(scope))
            return
        stationary, moving = (
            self._typed(i, layout.dtype, scope) for i in (layout.stationary, layout.moving)
        )
        for at, block in enumerate(self.sums.blocks(number, scope)):
            key = number, block
            if self.ends[0]:
                self.banks[key] = self.psum(f"part{at}" if self.holds else "part", number, scope)
            bank = self.banks[key]
            self.sums.add(number, scope, block, (stationary, moving), bank, self.ends[0])
            if not self.holds:
                self.sums.collect(number, scope, block, bank)

    def _leave(self, number: int, scope: Scope) -> None:
        """Take a sum out of PSUM where the last row tile has added to it."""
        if self.holds and self.ends[1]:
            for block in self.sums.blocks(number, scope):
                self.sums.collect(number, scope, block, self.banks[number, block])

    def _typed(self, number: int | None, dtype: DType, scope: Scope) -> Held:
        """An operand of the tensor engine in its element type; None stands for ones."""
        if number is None:
            return self.builder.filled(1.0, dtype, 1, part="ones")
        held, value = self.operand(number), self.domain[number]
        if self.builder.dtype(held) is dtype:
            return held
        typed = self.scratch(value, scope, dtype)
        self.copy(scope, Engine.SCALAR, typed, held)
        scope.release(typed)
        return typed


def panels(plan: RowPlan, columns: Columns, step: int, beside: int = 1) -> list[Piece]:
    """Pieces of the rows, `step` rows each that repeat, up to `beside` of them in one body; where
    masks decide which columns are needed, several, so that each has its own.
    """
    size = plan.domain.sizes[plan.row]
    count = size // step
    each = max(1, -(-count // (plan.most_panels if columns.masked else 1)))
    found = []
    for first in range(0, count, each):
        some = min(each, count - first)
        found += [
            Piece((first + part.start) * step, part.extent * step, part.trip)
            for part in pieces(some, min(some, beside))
        ]
    rest = size % step
    return [*found, Piece(size - rest, rest)] if rest else found


def in_passes(groups: Sequence[Group], passes: Sequence[Pass], plan: RowPlan) -> None:
    """Emit every group one pass behind the group before it, so that what a pass waits for was
    issued a pass ago and engines have other groups to work on; groups without overlap follow
    each other. The oldest comes first, as it frees tiles that newer ones fill, or the newest, as
    engines wait longest for its products.
    """
    behind = len(passes) if plan.no_overlap else 1
    for time in range((len(groups) - 1) * behind + len(passes)):
        under_way = [at for at in range(len(groups)) if 0 <= time - at * behind < len(passes)]
        first = under_way[-1:] if plan.newest_first else []
        for at in dict.fromkeys([*first, *under_way]):
            groups[at].emit_pass(passes[time - at * behind])
