"""Operand panels of a contraction in SBUF: [k on the partitions, k tiles, free atoms].

A direct operand arrives in that form by DMA (or is computed in it). A natural one has k innermost
in HBM: its rows arrive with the free atom on the partitions, every 128 x 128 block is transposed on
the tensor engine and copied into place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compiler.codegen.builder import Box, Builder, Held, Scope, merge_dims, pieces
from compiler.codegen.contract_plan import ContractPlan, Operand, needed_by_operand
from compiler.codegen.values import Frame, copy_engine, emit_load
from compiler.isa.program import Engine
from compiler.isa.region import Affine

_GROUP = (
    4  # transposes per copy: four 128-wide blocks fill a PSUM bank, more would only unroll code
)
_COPIERS = (Engine.VECTOR, Engine.SCALAR)


class Panels:
    """Loads panels for one contraction plan."""

    def __init__(self, builder: Builder, plan: ContractPlan) -> None:
        self.builder = builder
        self.plan = plan
        self.space = plan.space
        self.major = plan.depth_split.major  # counts k tiles; -1 when there is one

    def axes(self, operand: Operand) -> tuple[int, ...]:
        """Free axes of a panel: k tiles, then the operand's free atoms."""
        return (self.major, *operand.free) if self.major >= 0 else operand.free

    def empty(self, operand: Operand, scope: Scope, tiles: int, slots: int) -> Held:
        """A panel of `tiles` k tiles and the extents of `scope`; k tiles are the slowest index."""
        width = scope.elements(operand.free)
        name = "stationary" if operand.number == self.plan.stationary.number else "moving"
        rows = self.space.sizes[self.plan.depth]
        tile = scope.tile(name, rows, tiles * width, self.plan.panel_type, slots)
        held = scope.hold(tile, operand.free)
        strides = dict(held.strides)
        step = width
        for atom in (self.major, *reversed(self.plan.along)):
            if atom >= 0:
                strides[atom] = step
                step *= self.tiles_of(atom)
        return Held(tile, strides)

    def tiles_of(self, atom: int) -> int:
        """Places of a looped k atom in a resident panel."""
        made = self.space.splits.get(atom)
        return self.space.sizes[atom] + (1 if made and made.tail else 0)

    def whole(self, scope: Scope) -> Held:
        """A panel for the whole moving operand at `scope`."""
        axes = (*self.plan.across, *self.plan.columns)
        wide = scope.straight({a: Box(Affine(), self.space.sizes[a]) for a in axes})
        tiles = self.tiles_of(self.major) if self.major >= 0 else 1
        tiles *= math.prod(self.tiles_of(a) for a in self.plan.along)
        return self.empty(replace(self.plan.moving, free=axes), wide, tiles, 0)

    def at(self, panel: Held, scope: Scope, free: Sequence[int] = ()) -> Held:
        """The part of a kept panel for the k boxes of `scope`, and for its boxes of `free`."""
        offset = panel.offset
        for atom in (self.major, *self.plan.along, *free):
            if atom >= 0:
                offset = offset + scope.boxes[atom].origin * panel.strides[atom]
        return Held(panel.tile, panel.strides, offset)

    def load(self, operand: Operand, panel: Held, scope: Scope) -> None:
        """Fill `panel` with the part of the operand in the boxes of `scope`."""
        if operand.natural:
            self._load_rows(operand, panel, scope)
        else:
            self._load_direct(operand, panel, scope)

    def _load_direct(self, operand: Operand, panel: Held, scope: Scope) -> None:
        frame = Frame(self.builder, self.space, self.plan.depth, self.axes(operand))
        value = self.space.values[operand.number]
        if value.op == "load":
            assert value.walk is not None
            axes = list(frame.axes)
            emit_load(frame, value.walk, panel, axes, scope)
            return
        held = self._computed(frame, operand.number, scope)
        out, into = scope.patterns(frame.rows(scope), frame.axes, panel, held)
        engine = copy_engine(self.builder.dtype(held), self.plan.panel_type)
        scope.add("tensor_copy", engine, out, (into,))

    def _computed(self, frame: Frame, number: int, scope: Scope) -> Held:
        """An operand that is arithmetic on loads, on the frame's tile."""
        for n in needed_by_operand(self.space, number):
            frame.emit(n, scope)
        return frame.operand(number)

    def _load_rows(self, operand: Operand, panel: Held, scope: Scope) -> None:
        """Blocks of rows: up to 128 of one free atom on the partitions, k and other free atoms
        along the row.
        """
        row = max(operand.free, key=lambda a: (scope.extent(a), a == operand.free[-1]))
        if row == self.plan.row_split.major:
            row = self.plan.row_split.minor
        blocks = [a for a in operand.free if a == self.plan.row_split.major]
        for inner, here in _local(scope, [(a, 1) for a in blocks], {}):
            most = self.builder.limits.transpose_max
            for place, at in _local(inner, [(row, most)], here):
                self._turn(operand, panel, place, row, at)

    def _turn(
        self, operand: Operand, panel: Held, scope: Scope, row: int, here: Mapping[int, Affine]
    ) -> None:
        """Load rows and put their transposed blocks into the panel; `here` is where in the panel we
        are.
        """
        depth = self.plan.depth
        beside = [a for a in operand.free if a != row and a not in here]
        axes = [*beside, *([self.major] if self.major >= 0 else []), depth]
        frame = Frame(self.builder, self.space, row, axes)
        held = self._rows(frame, operand, scope)
        for place, at in _local(scope, [(a, 1) for a in beside], here):
            offset, source = panel.offset, held.offset
            for atom, index in at.items():
                offset = offset + index * panel.strides[atom]
                source = source + index * held.strides.get(atom, 0)
            self._transpose(
                operand,
                Held(panel.tile, panel.strides, offset),
                replace(held, offset=source),
                row,
                place,
            )

    def _transpose(self, operand: Operand, panel: Held, held: Held, row: int, scope: Scope) -> None:
        """The k tiles of one block of rows, several to a PSUM bank and a copy. Vector and Scalar
        take turns copying, so that neither holds up the tensor engine alone.
        """
        rows = scope.extent(row)
        count = scope.extent(self.major) if self.major >= 0 else 1
        most = min(_GROUP, self.builder.limits.moving_max // rows)
        group = max(g for g in range(1, min(count, most) + 1) if count % g == 0)
        turns = len(_COPIERS) if count // group % len(_COPIERS) == 0 else 1
        trip = count // (group * turns)
        inner = scope.loop(trip) if trip > 1 else scope
        first = Affine(0, ((inner.register, group * turns),)) if trip > 1 else Affine()
        start = 0 if turns > 1 or operand is self.plan.stationary else 1
        for turn in range(turns):
            bank = Held(inner.psum("turned", slots=self.plan.turning_slots), {})
            at, engine = first + turn * group, _COPIERS[start + turn]
            self._turn_group(panel, held, bank, row, inner, (at, group), engine)

    def _turn_group(
        self,
        panel: Held,
        held: Held,
        bank: Held,
        row: int,
        scope: Scope,
        part: tuple[Affine, int],
        engine: Engine,
    ) -> None:
        """Transpose k tiles `part` (first, count) into `bank` and copy them into the panel."""
        (first, group), rows, k = part, scope.extent(row), scope.extent(self.plan.depth)
        tile_step, panel_step = held.strides.get(self.major, 0), panel.strides.get(self.major, 0)
        for g in range(group):
            source = scope.on_chip(held, rows, ((1, k),), (first + g) * tile_step)
            block = scope.on_chip(bank, k, ((1, rows),), g * rows)
            scope.add("transpose", Engine.TENSOR, block, (source,))
        into, out = merge_dims([group, rows], [[rows, 1], [panel_step, panel.strides[row]]])
        target = scope.on_chip(panel, k, out, first * panel_step)
        scope.add("tensor_copy", engine, target, (scope.on_chip(bank, k, into),))

    def _rows(self, frame: Frame, operand: Operand, scope: Scope) -> Held:
        value = self.space.values[operand.number]
        if value.op != "load":
            return self._computed(frame, operand.number, scope)
        assert value.walk is not None
        elements = math.prod(scope.extent(a) for a in frame.axes)
        tile = scope.tile("rows", frame.rows(scope), elements, self.plan.panel_type)
        held = scope.hold(tile, frame.axes)
        emit_load(frame, value.walk, held, frame.axes, scope)
        return held


def _local(
    scope: Scope, atoms: Sequence[tuple[int, int]], here: Mapping[int, Affine]
) -> Iterator[tuple[Scope, dict[int, Affine]]]:
    """Loops over blocks of the boxes of `scope`: (body, position of each atom inside its box)."""
    if not atoms:
        yield scope, dict(here)
        return
    (atom, block), rest = atoms[0], atoms[1:]
    base = scope.boxes[atom]
    for piece in pieces(base.extent, min(block, base.extent)):
        inner = scope.loop(piece.trip) if piece.trip > 1 else scope.straight({})
        terms = ((inner.register, piece.extent),) if piece.trip > 1 else ()
        index = Affine(piece.start, terms)
        inner.boxes[atom] = Box(base.origin + index, piece.extent)
        yield from _local(inner, rest, {**here, atom: index})
