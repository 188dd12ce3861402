"""The loops around row tiles: parallel points, packed tiles and vectors they share, groups of row
tiles, sums over all of them.

for parallel: load packed tiles and shared vectors; for groups of row tiles: the passes of the plan,
every group one pass behind the group before it, so that engines work on one while another waits;
then what follows from the sums.

Where the longest inner iter dim is walked in segments, what of it is loaded for all rows comes one
segment at a time, for a band of row tiles: for bands: for loops: for segments: load packed tiles
and vectors; for groups of row tiles: the passes of the loop. Masked segments are left out band by
band. What a row tile adds up over the iter dim stays with the band until the loop ends. A segment
may lie around the loops that a sum over rows takes: it is loaded in front of the bands.
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
    BAND_TILE,
    SIDE_BY_SIDE,
    Band,
    Group,
    bands,
    in_passes,
)
from shardwright.compiler.codegen.rows.interval_analysis import Range
from shardwright.compiler.codegen.rows.packing import Packed, pack
from shardwright.compiler.codegen.rows.passes import BlockLoop
from shardwright.compiler.codegen.rows.plan import RowPlan, Streamed, plan_rows, sum_depth
from shardwright.compiler.codegen.rows.products import Shared
from shardwright.compiler.codegen.rows.sums import Sums
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.isa.kernel import Affine

# Plans that are generated to be timed, and up to how many values: larger ones take long (our
# choice).
_TRIES, _TRIED_VALUES = 2, 20


def row_candidates(domain: Domain, roots: list[int], room: Room) -> list[Candidate]:
    """Ways to tile a row kernel. Raises CompileError (no row kernel), CapacityError (none fits)."""

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
    if not plan.streamed:
        return ""
    count = sum(one.streamed for one in plan.loops)
    passes = "online, one pass" if plan.online and count == 1 else f"{count} passes"
    return f"rows streamed, {plan.streamed.length} columns at a time, {passes}"


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
        """Code inside `depth` parallel loops, and of a segment around them (`runs`)."""
        self._prepare(depth, scope)
        order = self.plan.order
        own = [n for n in self.plan.roles.sums if sum_depth(order, self.domain[n]) == depth]
        streamed = self.plan.streamed
        if not (own and streamed and streamed.outside):
            self._inside(own, depth, scope, runs)
            return
        bands = [rows for _, rows in self._streams(streamed).bands()]
        for piece, here in self.columns.around(streamed.iter_dim, bands, streamed.length):
            self._inside(own, depth, scope.within(streamed.iter_dim, piece, begins=True), here)

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
            here = self._depth_of(self.domain.slice([n])) == depth and not self.plan.streams(n)
            if value.op not in CODELESS and here:
                self.shared.emit(n, scope)
        loaded: dict[object, Packed] = {}
        for n, operands in self.plan.roles.packed.items():
            for side, into in ((1, self.packed), (0, self.whole)):
                operand = operands[side]
                key = (operand, self.domain[n].over, self.plan.operand_type(n))
                if (side == 0 and operand not in self.plan.whole) or self.plan.streams(operand):
                    continue
                if self._depth_of(self.domain.slice([operand])) == depth:
                    if key not in loaded:
                        loaded[key] = pack(self.plan, n, side, scope)
                    into[n] = loaded[key]

    # rows

    def _groups(self, scope: Scope, runs: Around) -> None:
        """All row tiles: straight bands together, bands with a loop each on their own."""
        if self.plan.streamed:
            self._streams(self.plan.streamed).emit(scope, runs)
            return
        row, straight = self.plan.row, list[Group]()
        for band in self._bands():
            inner = scope.enter(row, band)
            step = self.height * self.plan.in_flight
            groups = [self._group(inner, band, s, step) for s in range(0, band.extent, step)]
            if band.trip == 1:
                straight += groups
            else:
                in_passes(groups, self.plan.passes, self.plan)
        in_passes(straight, self.plan.passes, self.plan)

    def _bands(self) -> list[Piece]:
        """Pieces of the rows, several where masks decide which columns are needed."""
        step = self.height * self.plan.in_flight
        beside = SIDE_BY_SIDE if self.plan.in_flight > 1 else 1  # a single tile is straight code
        return bands(self.plan, self.columns, step, beside)

    def _group(self, scope: Scope, band: Piece, start: int, step: int) -> Group:
        row, rows = self.plan.row, min(step, band.extent - start)
        box = Box(scope.boxes[row].origin + start, rows)
        first = band.start + start
        span = (first, first + (band.trip - 1) * band.extent + rows)
        return Group(self.plan, scope.straight({row: box}), self._shared(), self.height, span)

    def _streams(self, streamed: Streamed) -> Streams:
        return Streams(self.plan, streamed, self._shared(), self.height)

    def _shared(self) -> Shared:
        held = self.shared.held
        return Shared(self.packed, self.whole, self.sums, self.columns, held, {})


@dataclass(frozen=True, slots=True)
class Streams:
    """Code for all rows of a parallel point; `height` rows to a tile."""

    plan: RowPlan
    streamed: Streamed
    shared: Shared
    height: int

    def emit(self, scope: Scope, around: Around) -> None:
        """Band after band, of the segment `around` them all if there is one."""
        iter_dim, row, shared = self.streamed.iter_dim, self.plan.row, self.shared
        if around:
            made = {n for one in self.plan.loops if one.streamed for s in one.passes
                    for n in s.values}  # fmt: skip
            shared = self._loaded(made, scope)
        for at, (piece, rows) in enumerate(self.bands()):
            if not around:
                self._band(scope.enter(row, piece), rows)
            elif around[at]:
                band = scope.enter(row, piece)
                self._whole(band, rows, replace(shared, segments={iter_dim: around[at]}))

    def bands(self) -> list[tuple[Piece, Range]]:
        """Pieces of the rows, and the rows (first, end) of each."""
        step = min(self.plan.domain.sizes[self.plan.row], self.streamed.tiles * self.height)
        found = bands(self.plan, self.shared.columns, step)
        return [(p, (p.start, p.start + p.trip * p.extent)) for p in found]

    def _whole(self, scope: Scope, rows: Range, shared: Shared) -> None:
        """One band with the segment that is there."""
        band = self._kept(scope)
        for one in self.plan.loops:
            self._tiles(one, scope, band, rows, shared)

    def _kept(self, scope: Scope) -> Band:
        return Band(scope, -(-scope.extent(self.plan.row) // self.height))

    def _band(self, scope: Scope, rows: Range) -> None:
        """One band, that only ever has the rows (first, end)."""
        iter_dim, band = self.streamed.iter_dim, self._kept(scope)
        segments = self.shared.columns.segments(iter_dim, rows, self.streamed.length)
        for one in self.plan.loops:
            if not one.streamed:
                self._tiles(one, scope, band, rows, self.shared)
                continue
            if one.running:
                self._open(one, scope, band, rows)
            for at, segment in enumerate(segments):
                place = scope.within(iter_dim, segment.piece, at == 0 and not one.running)
                shared = self._loaded({n for s in one.passes for n in s.values}, place)
                here = replace(shared, segments={iter_dim: segment.runs})
                self._tiles(one, place, band, rows, here)

    def _open(self, one: BlockLoop, scope: Scope, band: Band, rows: Range) -> None:
        """What a loop with running columns begins with."""
        place = scope.straight({BAND_TILE: Box(Affine(), 1)})
        first = Group(self.plan, place, self.shared, self.height, rows, band)
        first.open(n for s in one.passes for n in s.values if self.plan.carries(n))
        columns = tuple(s for s in one.passes if s.inner is None)
        if columns:
            self._tiles(replace(one, passes=columns, running=()), scope, band, rows, self.shared)

    def _loaded(self, made: set[int], scope: Scope) -> Shared:
        """Packed tiles and vectors of the segment of `scope` that the values `made` take."""
        plan, packed, loaded = self.plan, dict(self.shared.packed), dict[object, Packed]()
        for n, (_, other) in plan.roles.packed.items():
            if n in made and plan.streams(other):
                key = (other, plan.domain[n].over, plan.operand_type(n))
                if key not in loaded:
                    loaded[key] = pack(plan, n, 1, scope)
                packed[n] = loaded[key]
        held = {**self.shared.held, **self._vectors(made, scope)}
        return replace(self.shared, packed=packed, held=held)

    def _vectors(self, made: set[int], scope: Scope) -> dict[int, Held]:
        """Values without rows that the values `made` of a segment read."""
        plan, iter_dim = self.plan, self.streamed.iter_dim
        frame = Frame(scope.builder, plan.domain, plan.row, sorted(plan.roles.inner))
        frame.held = dict(self.shared.held)
        scope = scope.straight({plan.row: Box(Affine(), self.height)})
        needed = set(plan.domain.slice(made))
        found: dict[int, Held] = {}
        for n in plan.vectors:
            value = plan.domain[n]
            if n in needed and plan.streams(n) and value.op not in CODELESS:
                frame.emit(n, scope)
                held = frame.held[n]
                back = scope.boxes[iter_dim].origin * -held.strides.get(iter_dim, 0)
                found[n] = replace(held, offset=held.offset + back)
        return found

    def _tiles(self, one: BlockLoop, scope: Scope, band: Band, rows: Range, shared: Shared) -> None:
        """The passes of a loop for all row tiles of a band."""
        row, step = self.plan.row, self.height * self.plan.in_flight
        extent = scope.extent(row)
        for piece in pieces(extent, min(extent, step * SIDE_BY_SIDE)):
            inner, at = scope.repeat(piece)
            groups = []
            for start in range(0, piece.extent, step):
                first = at + start
                box = Box(scope.boxes[row].origin + first, min(step, piece.extent - start))
                tile = Box(divided(first, self.height), 1)
                place = inner.straight({row: box, BAND_TILE: tile})
                group = Group(self.plan, place, shared, self.height, rows, band, one.running)
                groups.append(group)
            in_passes(groups, one.passes, self.plan)
