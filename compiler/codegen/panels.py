"""Operand panels of a contraction in SBUF: [k on the partitions, k tiles, free atoms].

A direct operand arrives in that form by DMA (or is computed in it). A natural one has k innermost
in HBM: its rows arrive with the free atom on the partitions, every 128 x 128 block is transposed on
the tensor engine and copied into place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
            self._load_rows(operand, panel, scope, operand.free, ())
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

    def _load_rows(
        self,
        operand: Operand,
        panel: Held,
        scope: Scope,
        left: Sequence[int],
        local: tuple[tuple[int, Affine], ...],
    ) -> None:
        """Loops over the free atoms, then rows of up to 128 on the partitions; `local` is where in
        the panel we are.
        """
        row = max(
            operand.free,
            key=lambda a: (scope.extent(a) > 1, a == operand.free[-1], scope.extent(a)),
        )
        rest = [a for a in left if a != row]
        atom = rest[0] if rest else row
        block = 1 if rest else self.builder.limits.transpose_max
        base = scope.boxes[atom]
        for piece in pieces(base.extent, min(block, base.extent)):
            inner = scope.loop(piece.trip) if piece.trip > 1 else scope.straight({})
            terms = ((inner.register, piece.extent),) if piece.trip > 1 else ()
            here = Affine(piece.start, terms)
            inner.boxes[atom] = Box(base.origin + here, piece.extent)
            inside = (*local, (atom, here))
            if rest:
                self._load_rows(operand, panel, inner, [a for a in left if a != atom], inside)
            else:
                self._turn(operand, panel, inner, row, inside)

    def _turn(
        self,
        operand: Operand,
        panel: Held,
        scope: Scope,
        row: int,
        local: tuple[tuple[int, Affine], ...],
    ) -> None:
        """Load rows with k along the free dim and put their transposed blocks into the panel."""
        depth = self.plan.depth
        axes = (self.major, depth) if self.major >= 0 else (depth,)
        frame = Frame(self.builder, self.space, row, axes)
        held = self._rows(frame, operand, scope)
        offset = panel.offset
        for atom, here in local:
            offset = offset + here * panel.strides[atom]
        rows, k = scope.extent(row), scope.extent(depth)
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
        target = inner.on_chip(Held(panel.tile, {}, offset), k, out, first * panel_step)
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
