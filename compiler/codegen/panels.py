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
        name = "stationary" if operand is self.plan.stationary else "moving"
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

    def at(self, panel: Held, scope: Scope) -> Held:
        """The part of a resident panel for the k boxes of `scope`."""
        offset = panel.offset
        for atom in (self.major, *self.plan.along):
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
        """The k tiles of one block of rows, several to a PSUM bank and a copy."""
        rows, k = scope.extent(row), scope.extent(self.plan.depth)
        count = scope.extent(self.major) if self.major >= 0 else 1
        most = min(_GROUP, self.builder.limits.moving_max // rows)
        group = max(g for g in range(1, min(count, most) + 1) if count % g == 0)
        inner = scope.loop(count // group) if count > group else scope
        first = Affine(0, ((inner.register, group),)) if count > group else Affine()
        bank = Held(inner.psum("turned"), {})
        tile_step, panel_step = held.strides.get(self.major, 0), panel.strides.get(self.major, 0)
        for g in range(group):
            source = inner.on_chip(held, rows, ((1, k),), (first + g) * tile_step)
            block = inner.on_chip(bank, k, ((1, rows),), g * rows)
            inner.add("transpose", Engine.TENSOR, block, (source,))
        into, out = merge_dims([group, rows], [[rows, 1], [panel_step, panel.strides[row]]])
        target = inner.on_chip(panel, k, out, first * panel_step)
        engine = Engine.VECTOR if operand is self.plan.stationary else Engine.SCALAR
        inner.add("tensor_copy", engine, target, (inner.on_chip(bank, k, into),))

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
