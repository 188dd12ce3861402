"""Rows whose longest inner atom is walked in segments: what of it is loaded for all rows comes one
segment at a time, for a band of row tiles.

for bands of row tiles: for passes: for segments: load panels and vectors; for groups of row tiles:
the stages of the pass. Masked segments are left out band by band. What a row tile adds up over the
atom stays with the band until the pass ends. A segment that lies around all rows (`nest.py`) is
loaded in front of the bands. Next: `group.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.codegen.builder import Box, Held, Piece, Scope, divided, pieces
from shardwright.compiler.codegen.domain import CODELESS
from shardwright.compiler.codegen.rows.columns import Around
from shardwright.compiler.codegen.rows.group import (
    BAND_TILE,
    SIDE_BY_SIDE,
    Band,
    Group,
    bands,
    in_stages,
)
from shardwright.compiler.codegen.rows.levels import Pass
from shardwright.compiler.codegen.rows.panels import Panel, load_panel
from shardwright.compiler.codegen.rows.plan import RowPlan, Streamed
from shardwright.compiler.codegen.rows.products import Shared
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.isa.region import Affine


@dataclass(frozen=True, slots=True)
class Streams:
    """Code for all rows of a parallel point; `height` rows to a tile."""

    plan: RowPlan
    streamed: Streamed
    shared: Shared
    height: int

    def emit(self, scope: Scope, around: Around) -> None:
        """Band after band, of the segment `around` them all if there is one."""
        atom, row, shared = self.streamed.atom, self.plan.row, self.shared
        if around:
            made = {n for one in self.plan.passes if one.streamed for s in one.stages
                    for n in s.values}  # fmt: skip
            shared = self._loaded(made, scope)
        for at, (piece, rows) in enumerate(self.bands()):
            if not around:
                self._band(scope.enter(row, piece), rows)
            elif around[at]:
                band = scope.enter(row, piece)
                self._whole(band, rows, replace(shared, segments={atom: around[at]}))

    def bands(self) -> list[tuple[Piece, tuple[int, int]]]:
        """Pieces of the rows, and the rows (first, end) of each."""
        step = min(self.plan.space.sizes[self.plan.row], self.streamed.tiles * self.height)
        found = bands(self.plan, self.shared.columns, step)
        return [(p, (p.start, p.start + p.trip * p.extent)) for p in found]

    def _whole(self, scope: Scope, rows: tuple[int, int], shared: Shared) -> None:
        """One band with the segment that is there."""
        band = self._kept(scope)
        for one in self.plan.passes:
            self._tiles(one, scope, band, rows, shared)

    def _kept(self, scope: Scope) -> Band:
        return Band(scope, -(-scope.extent(self.plan.row) // self.height))

    def _band(self, scope: Scope, rows: tuple[int, int]) -> None:
        """One band, that only ever has the rows (first, end)."""
        atom, band = self.streamed.atom, self._kept(scope)
        segments = self.shared.columns.segments(atom, rows, self.streamed.length)
        for one in self.plan.passes:
            if not one.streamed:
                self._tiles(one, scope, band, rows, self.shared)
                continue
            if one.running:
                self._open(one, scope, band, rows)
            for at, segment in enumerate(segments):
                place = scope.within(atom, segment.piece, at == 0 and not one.running)
                shared = self._loaded({n for s in one.stages for n in s.values}, place)
                here = replace(shared, segments={atom: segment.runs})
                self._tiles(one, place, band, rows, here)

    def _open(self, one: Pass, scope: Scope, band: Band, rows: tuple[int, int]) -> None:
        """What a pass with running columns begins with."""
        place = scope.straight({BAND_TILE: Box(Affine(), 1)})
        first = Group(self.plan, place, self.shared, self.height, rows, band)
        first.open(n for s in one.stages for n in s.values if self.plan.carries(n))
        columns = tuple(s for s in one.stages if s.inner is None)
        if columns:
            self._tiles(replace(one, stages=columns, running=()), scope, band, rows, self.shared)

    def _loaded(self, made: set[int], scope: Scope) -> Shared:
        """Panels and vectors of the segment of `scope` that the values `made` take."""
        plan, panels, loaded = self.plan, dict(self.shared.panels), dict[object, Panel]()
        for n, (_, panel) in plan.roles.panels.items():
            if n in made and plan.streams(panel):
                key = (panel, plan.space[n].over, plan.operand_type(n))
                if key not in loaded:
                    loaded[key] = load_panel(plan, n, 1, scope)
                panels[n] = loaded[key]
        held = {**self.shared.held, **self._vectors(made, scope)}
        return replace(self.shared, panels=panels, held=held)

    def _vectors(self, made: set[int], scope: Scope) -> dict[int, Held]:
        """Values without rows that the values `made` of a segment read."""
        plan, atom = self.plan, self.streamed.atom
        frame = Frame(scope.builder, plan.space, plan.row, sorted(plan.roles.inner))
        frame.held = dict(self.shared.held)
        scope = scope.straight({plan.row: Box(Affine(), self.height)})
        needed = set(plan.space.slice(made))
        found: dict[int, Held] = {}
        for n in plan.vectors:
            value = plan.space[n]
            if n in needed and plan.streams(n) and value.op not in CODELESS:
                frame.emit(n, scope)
                held = frame.held[n]
                back = scope.boxes[atom].origin * -held.strides.get(atom, 0)
                found[n] = replace(held, offset=held.offset + back)
        return found

    def _tiles(
        self, one: Pass, scope: Scope, band: Band, rows: tuple[int, int], shared: Shared
    ) -> None:
        """The stages of a pass for all row tiles of a band."""
        row, step = self.plan.row, self.height * self.plan.ways
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
            in_stages(groups, one.stages, self.plan)
