"""The loops around row tiles: parallel points, packed tiles and vectors they share, groups of row
tiles, sums over all of them.

for parallel: load packed tiles and shared vectors; for groups of row tiles: the passes of the plan,
every group one pass behind the group before it, so that engines work on one while another waits;
then what follows from the sums.

Where the longest inner iter dim is walked in column tiles, what of it is loaded for all rows comes
one tile at a time, for a row panel: for panels: for loops: for column tiles: load packed tiles and
vectors; for groups of row tiles: the passes of the loop. Masked column tiles are left out panel by
panel. What a row tile adds up over the iter dim stays with the panel until the loop ends. A column
tile may lie around the loops that a sum over rows takes: it is loaded in front of the panels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwright.compiler.codegen.builder import Box, Builder, Held, Piece, Scope, divided, pieces
from shardwright.compiler.codegen.domain import CODELESS, Domain
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.rows.columns import Around, Columns
from shardwright.compiler.codegen.rows.group import (
    PANEL_TILE,
    SIDE_BY_SIDE,
    Group,
    RowPanel,
    in_passes,
    panels,
)
from shardwright.compiler.codegen.rows.interval_analysis import Range
from shardwright.compiler.codegen.rows.packing import Packed, pack
from shardwright.compiler.codegen.rows.passes import BlockLoop
from shardwright.compiler.codegen.rows.plan import Blocking, RowPlan, plan_rows, sum_depth
from shardwright.compiler.codegen.rows.products import Shared
from shardwright.compiler.codegen.rows.sums import Sums
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.isa.kernel import Affine

# Plans that are generated to be timed, and up to how many values: larger ones take long (our
# choice).
_TRIES, _TRIED_VALUES = 2, 20


def reduction_candidates(domain: Domain, roots: list[int], room: Room) -> list[Candidate]:
    """Ways to tile a reduction fusion. Raises CompileError (is none), CapacityError (none fits)."""

    def emit(plan: RowPlan, builder: Builder) -> None:
        Nest(builder, plan).emit()

    plans, others = plan_rows(domain, roots, room), list[RowPlan]()
    if len(plans[0].run) > _TRIED_VALUES:
        plans = plans[:1]
    elif any(plan.engines.by_product for plan in plans[:_TRIES]):
        others = plan_rows(domain, roots, replace(room, passing=False))
    # No estimate tells them apart, so every effort that times at all times all of them.
    kinds = [(p, False) for p in plans[:_TRIES]] + [(p, True) for p in others[:_TRIES]]
    return [Candidate(1.0, partial(emit, p), variant, _note(p), p) for p, variant in kinds]


def _note(plan: RowPlan) -> str:
    """What a user may want to know of a plan."""
    if not plan.blocked:
        return ""
    count = sum(one.blocked for one in plan.loops)
    passes = "online, one pass" if plan.online and count == 1 else f"{count} passes"
    return f"rows blocked, {plan.blocked.length} columns at a time, {passes}"


class Nest:
    """Recursion over the parallel loops of one plan."""

    def __init__(self, builder: Builder, plan: RowPlan) -> None:
        self.builder, self.plan, self.domain = builder, plan, plan.domain
        self.height = min(builder.limits.partitions, self.domain.sizes[plan.row])
        self.packed: dict[int, Packed] = {}
        self.whole: dict[int, Packed] = {}
        self.sums = Sums(builder, plan)
        limits = builder.limits
        self.columns = Columns(plan, limits.transpose_max, limits.moving_max)
        axes = sorted(plan.roles.inner)
        self.shared = Frame(builder, self.domain, plan.row, axes)

    def emit(self) -> None:
        """Everything, into the builder's body."""
        roles, sizes = self.plan.roles, self.domain.sizes
        extents = {a: sizes[a] for a in roles.inner} | dict.fromkeys(roles.parallel, 1)
        self._level(0, self.builder.scope(extents | {roles.row: self.height}), ())

    def _level(self, depth: int, scope: Scope, runs: Around) -> None:
        """Code inside `depth` parallel loops, and of a column tile around them (`runs`)."""
        self._prepare(depth, scope)
        order = self.plan.order
        own = [n for n in self.plan.roles.sums if sum_depth(order, self.domain[n]) == depth]
        blocked = self.plan.blocked
        if not (own and blocked and blocked.outside):
            self._inside(own, depth, scope, runs)
            return
        panels = [rows for _, rows in self._blocked_rows(blocked).panels()]
        for piece, here in self.columns.around(blocked.iter_dim, panels, blocked.length):
            self._inside(own, depth, scope.within(blocked.iter_dim, piece, begins=True), here)

    def _inside(self, sums: Sequence[int], depth: int, scope: Scope, runs: Around) -> None:
        """The loops from `depth` on, with sums that begin and end here."""
        order = self.plan.order
        for n in sums:
            self.sums.begin(n, scope)
        if depth == len(order):
            self._groups(scope, runs)
        else:
            for piece in pieces(self.domain.sizes[order[depth]], 1):
                self._level(depth + 1, scope.enter(order[depth], piece), runs)
        if sums:
            self.sums.finish(sums, scope)

    def _depth_of(self, numbers: Iterable[int]) -> int:
        """Parallel loops that choose the points of some values."""
        order = self.plan.order
        iter_dims = {a for n in numbers for a in self.domain[n].iter_dims}
        return max((order.index(a) + 1 for a in iter_dims if a in order), default=0)

    def _prepare(self, depth: int, scope: Scope) -> None:
        """Packed tiles and vectors that the loops so far choose."""
        for n in self.plan.vectors:
            value = self.domain[n]
            here = self._depth_of(self.domain.slice([n])) == depth and not self.plan.is_blocked(n)
            if value.op not in CODELESS and here:
                self.shared.emit(n, scope)
        loaded: dict[object, Packed] = {}
        for n, operands in self.plan.roles.packed.items():
            for side, into in ((1, self.packed), (0, self.whole)):
                operand = operands[side]
                key = (operand, self.domain[n].over, self.plan.operand_type(n))
                if (side == 0 and operand not in self.plan.whole) or self.plan.is_blocked(operand):
                    continue
                if self._depth_of(self.domain.slice([operand])) == depth:
                    if key not in loaded:
                        loaded[key] = pack(self.plan, n, side, scope)
                    into[n] = loaded[key]

    # rows

    def _groups(self, scope: Scope, runs: Around) -> None:
        """All row tiles: straight panels together, panels with a loop each on their own."""
        if self.plan.blocked:
            self._blocked_rows(self.plan.blocked).emit(scope, runs)
            return
        row, straight = self.plan.row, list[Group]()
        for panel in self._panels():
            inner = scope.enter(row, panel)
            step = self.height * self.plan.in_flight
            groups = [self._group(inner, panel, s, step) for s in range(0, panel.extent, step)]
            if panel.trip == 1:
                straight += groups
            else:
                in_passes(groups, self.plan.passes, self.plan)
        in_passes(straight, self.plan.passes, self.plan)

    def _panels(self) -> list[Piece]:
        """Pieces of the rows, several where masks decide which columns are needed."""
        step = self.height * self.plan.in_flight
        beside = SIDE_BY_SIDE if self.plan.in_flight > 1 else 1  # a single tile is straight code
        return panels(self.plan, self.columns, step, beside)

    def _group(self, scope: Scope, panel: Piece, start: int, step: int) -> Group:
        row, rows = self.plan.row, min(step, panel.extent - start)
        box = Box(scope.boxes[row].origin + start, rows)
        first = panel.start + start
        span = (first, first + (panel.trip - 1) * panel.extent + rows)
        return Group(self.plan, scope.straight({row: box}), self._shared(), self.height, span)

    def _blocked_rows(self, blocked: Blocking) -> BlockedRows:
        return BlockedRows(self.plan, blocked, self._shared(), self.height)

    def _shared(self) -> Shared:
        held = self.shared.held
        return Shared(self.packed, self.whole, self.sums, self.columns, held, {})


@dataclass(frozen=True, slots=True)
class BlockedRows:
    """Code for all rows of a parallel point; `height` rows to a tile."""

    plan: RowPlan
    blocked: Blocking
    shared: Shared
    height: int

    def emit(self, scope: Scope, around: Around) -> None:
        """Panel after panel, of the column tile `around` them all if there is one."""
        iter_dim, row, shared = self.blocked.iter_dim, self.plan.row, self.shared
        if around:
            made = {n for one in self.plan.loops if one.blocked for s in one.passes
                    for n in s.values}  # fmt: skip
            shared = self._loaded(made, scope)
        for at, (piece, rows) in enumerate(self.panels()):
            if not around:
                self._panel(scope.enter(row, piece), rows)
            elif around[at]:
                panel = scope.enter(row, piece)
                self._whole(panel, rows, replace(shared, column_tiles={iter_dim: around[at]}))

    def panels(self) -> list[tuple[Piece, Range]]:
        """Pieces of the rows, and the rows (first, end) of each."""
        step = min(self.plan.domain.sizes[self.plan.row], self.blocked.tiles * self.height)
        found = panels(self.plan, self.shared.columns, step)
        return [(p, (p.start, p.start + p.trip * p.extent)) for p in found]

    def _whole(self, scope: Scope, rows: Range, shared: Shared) -> None:
        """One panel with the column tile that is there."""
        panel = self._kept(scope)
        for one in self.plan.loops:
            self._tiles(one, scope, panel, rows, shared)

    def _kept(self, scope: Scope) -> RowPanel:
        return RowPanel(scope, -(-scope.extent(self.plan.row) // self.height))

    def _panel(self, scope: Scope, rows: Range) -> None:
        """One panel, that only ever has the rows (first, end)."""
        iter_dim, panel = self.blocked.iter_dim, self._kept(scope)
        column_tiles = self.shared.columns.column_tiles(iter_dim, rows, self.blocked.length)
        for one in self.plan.loops:
            if not one.blocked:
                self._tiles(one, scope, panel, rows, self.shared)
                continue
            if one.running:
                self._open(one, scope, panel, rows)
            for at, column_tile in enumerate(column_tiles):
                place = scope.within(iter_dim, column_tile.piece, at == 0 and not one.running)
                shared = self._loaded({n for s in one.passes for n in s.values}, place)
                here = replace(shared, column_tiles={iter_dim: column_tile.runs})
                self._tiles(one, place, panel, rows, here)

    def _open(self, one: BlockLoop, scope: Scope, panel: RowPanel, rows: Range) -> None:
        """What a loop with running columns begins with."""
        place = scope.straight({PANEL_TILE: Box(Affine(), 1)})
        first = Group(self.plan, place, self.shared, self.height, rows, panel)
        first.open(n for s in one.passes for n in s.values if self.plan.carries(n))
        columns = tuple(s for s in one.passes if s.inner is None)
        if columns:
            self._tiles(replace(one, passes=columns, running=()), scope, panel, rows, self.shared)

    def _loaded(self, made: set[int], scope: Scope) -> Shared:
        """Packed tiles and vectors of the column tile of `scope` that the values `made` take."""
        plan, packed, loaded = self.plan, dict(self.shared.packed), dict[object, Packed]()
        for n, (_, other) in plan.roles.packed.items():
            if n in made and plan.is_blocked(other):
                key = (other, plan.domain[n].over, plan.operand_type(n))
                if key not in loaded:
                    loaded[key] = pack(plan, n, 1, scope)
                packed[n] = loaded[key]
        held = {**self.shared.held, **self._vectors(made, scope)}
        return replace(self.shared, packed=packed, held=held)

    def _vectors(self, made: set[int], scope: Scope) -> dict[int, Held]:
        """Values without rows that the values `made` of a column tile read."""
        plan, iter_dim = self.plan, self.blocked.iter_dim
        frame = Frame(scope.builder, plan.domain, plan.row, sorted(plan.roles.inner))
        frame.held = dict(self.shared.held)
        scope = scope.straight({plan.row: Box(Affine(), self.height)})
        needed = set(plan.domain.slice(made))
        found: dict[int, Held] = {}
        for n in plan.vectors:
            value = plan.domain[n]
            if n in needed and plan.is_blocked(n) and value.op not in CODELESS:
                frame.emit(n, scope)
                held = frame.held[n]
                back = scope.boxes[iter_dim].origin * -held.strides.get(iter_dim, 0)
                found[n] = replace(held, offset=held.offset + back)
        return found

    def _tiles(
        self, one: BlockLoop, scope: Scope, panel: RowPanel, rows: Range, shared: Shared
    ) -> None:
        """The passes of a loop for all row tiles of a panel."""
        row, step = self.plan.row, self.height * self.plan.in_flight
        extent = scope.extent(row)
        for piece in pieces(extent, min(extent, step * SIDE_BY_SIDE)):
            inner, at = scope.repeat(piece)
            groups = []
            for start in range(0, piece.extent, step):
                first = at + start
                box = Box(scope.boxes[row].origin + first, min(step, piece.extent - start))
                tile = Box(divided(first, self.height), 1)
                place = inner.straight({row: box, PANEL_TILE: tile})
                group = Group(self.plan, place, shared, self.height, rows, panel, one.running)
                groups.append(group)
            in_passes(groups, one.passes, self.plan)
