"""Packed operands of a contraction in SBUF: [k on the partitions, k tiles, free iter dims].

A direct operand arrives in that form by DMA (or is computed in it). A natural one has k innermost
in HBM: its rows arrive with the free iter dim on the partitions, every 128 x 128 block is
transposed on the tensor engine and copied into place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from shardwright.compiler.codegen.builder import (
    NO_DIM,
    Box,
    Builder,
    Held,
    Scope,
    blocks_within,
    cut,
    divided,
    merge_dims,
    pieces,
)
from shardwright.compiler.codegen.contract_plan import (
    ContractPlan,
    Operand,
    even_tile,
    needed_by_operand,
    row_iter_dim,
)
from shardwright.compiler.codegen.domain import IterDims
from shardwright.compiler.codegen.transposed_blocks import BlockLoader
from shardwright.compiler.codegen.values import Frame, copy_engine, emit_load
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import Engine

# Transposes per copy: four 128-wide blocks fill a PSUM bank, more would only unroll code.
_GROUP = 4


class Packer:
    """Loads packed tiles for one contraction plan."""

    def __init__(self, builder: Builder, plan: ContractPlan) -> None:
        self.builder = builder
        self.plan = plan
        self.domain = plan.domain
        self.major = plan.depth_split.major  # counts k tiles; -1 when there is one
        # Who copies transposed blocks, in turn; sums in SBUF keep Vector busy.
        sums = plan.staged and plan.sums > 1
        self.copiers = (Engine.SCALAR,) if sums else (Engine.VECTOR, Engine.SCALAR)
        self.blocks = BlockLoader(builder, plan, self.in_turn())

    def in_turn(self) -> Iterator[Engine]:
        """Copiers one after the other, Scalar first."""
        return cycle(self.copiers[::-1])

    def axes(self, operand: Operand) -> IterDims:
        """Free axes of a packed tile: k tiles, then the operand's free iter dims."""
        return (self.major, *operand.free) if self.major >= 0 else operand.free

    def empty(self, operand: Operand, scope: Scope, tiles: int, slots: int) -> Held:
        """Room for `tiles` k tiles and the extents of `scope`; k tiles are the slowest index."""
        width = scope.elements(operand.free)
        name = "stationary" if operand.number == self.plan.stationary.number else "moving"
        rows = self.domain.sizes[self.plan.depth]
        tile = scope.tile(name, rows, tiles * width, self.plan.packed_type, slots)
        strides, step = dict(scope.hold(tile, operand.free).strides), width
        for iter_dim in (self.major, *reversed(self.plan.along)):
            strides[iter_dim] = step
            step *= self.tiles_of(iter_dim)
        return replace(tile, strides=strides)

    def tiles_of(self, iter_dim: int) -> int:
        """Places of a looped k iter dim in a resident packed tile; one for no iter dim."""
        if iter_dim == NO_DIM:
            return 1
        made = self.domain.splits.get(iter_dim)
        return self.domain.sizes[iter_dim] + (1 if made and made.tail else 0)

    def whole(self, scope: Scope, slots: int = 0) -> Held:
        """A packed tile for the whole moving operand at `scope`."""
        axes = (*self.plan.across, *self.plan.columns)
        wide = scope.straight({a: Box(Affine(), self.domain.sizes[a]) for a in axes})
        axes = (*self.plan.group, *axes)
        tiles = math.prod(map(self.tiles_of, (self.major, *self.plan.along)))
        return self.empty(replace(self.plan.moving, free=axes), wide, tiles, slots)

    def at(self, packed: Held, scope: Scope, free: Sequence[int] = ()) -> Held:
        """The part of a kept `packed` tile for the k boxes of `scope`, and its boxes of `free`."""
        return packed.at(scope.origins((self.major, *self.plan.along, *free)))

    def load(self, operand: Operand, packed: Held, scope: Scope) -> None:
        """Fill `packed` with the part of the operand in the boxes of `scope`."""
        if operand.natural:
            if not self.blocks.natural(operand, packed, scope):
                self._load_rows(operand, packed, scope)
        elif not self.blocks.direct(operand, packed, scope):
            self._load_direct(operand, packed, scope)

    def _load_direct(self, operand: Operand, packed: Held, scope: Scope) -> None:
        frame = Frame(self.builder, self.domain, self.plan.depth, self.axes(operand))
        value = self.domain[operand.number]
        if value.op == "load":
            emit_load(frame, value.access, packed, frame.axes, scope)
            return
        held = self._computed(frame, operand.number, scope)
        out, into = scope.patterns(frame.rows(scope), frame.axes, packed, held)
        engine = copy_engine(self.builder.dtype(held), self.plan.packed_type)
        scope.copy(engine, out, into)

    def _computed(self, frame: Frame, number: int, scope: Scope) -> Held:
        """An operand that is arithmetic on loads, on the frame's tile."""
        for n in needed_by_operand(self.domain, number):
            frame.emit(n, scope)
        return frame.operand(number)

    def _load_rows(self, operand: Operand, packed: Held, scope: Scope) -> None:
        """Blocks of rows: up to 128 of one free iter dim on partitions, the rest along the row."""
        row = row_iter_dim(self.plan, operand, {a: scope.extent(a) for a in operand.free})
        most = self.builder.limits.transpose_max
        iter_dims = [(a, 1) for a in operand.free if a == self.plan.row_split.major] + [(row, most)]
        frame = self._row_frame(operand, row)
        if self.domain[operand.number].op != "load":
            for place, at in blocks_within(scope, iter_dims, {}):
                held = self._computed(frame, operand.number, place)
                self._transpose_rows(operand, packed, held, place, row, at)
            return
        rows = self._raw_rows(frame, scope, iter_dims)
        for place, at in blocks_within(scope, iter_dims, {}):
            access = self.domain[operand.number].access
            emit_load(frame, access, rows.part(at), frame.axes, place)
        for place, at in blocks_within(scope, iter_dims, {}):
            self._transpose_rows(operand, packed, rows.part(at), place, row, at)

    def _row_frame(self, operand: Operand, row: int) -> Frame:
        beside = [a for a in operand.free if a not in (row, self.plan.row_split.major)]
        depths = [self.major, self.plan.depth] if self.major >= 0 else [self.plan.depth]
        return Frame(self.builder, self.domain, row, [*beside, *depths])

    def _raw_rows(self, frame: Frame, scope: Scope, iter_dims: Sequence[tuple[int, int]]) -> _Rows:
        """A tile for all rows to pack: the next ones arrive while these are transposed."""
        step = scope.elements(frame.axes)
        steps, blocks = {}, 1
        for iter_dim, size in reversed(iter_dims):
            steps[iter_dim] = (blocks * step, size)
            blocks *= math.ceil(scope.extent(iter_dim) / size)
        rows = min(scope.extent(frame.partition), iter_dims[-1][1])
        tile = scope.tile("rows", rows, blocks * step, self.plan.packed_type)
        return _Rows(scope.hold(tile, frame.axes), steps)

    def _transpose_rows(
        self,
        operand: Operand,
        packed: Held,
        rows: Held,
        scope: Scope,
        row: int,
        here: Mapping[int, Affine],
    ) -> None:
        """Put transposed blocks of `rows` into `packed`; `here` is where in it we are."""
        beside = [a for a in operand.free if a != row and a not in here]
        for place, at in blocks_within(scope, [(a, 1) for a in beside], here):
            transposed = rows.at({a: at[a] for a in beside})
            self._transpose(operand, packed.at(at), transposed, row, place)

    def _transpose(self, operand: Operand, into: Held, held: Held, row: int, scope: Scope) -> None:
        """The k tiles of a block of rows, several to a bank; copiers take turns, none is enough."""
        rows = scope.extent(row)
        count = scope.extent(self.major)
        most = min(_GROUP, self.builder.limits.moving_max // rows)
        most = most if len(self.copiers) == 1 else min(most, max(1, count // 2))
        group = even_tile(count, most)
        turns = len(self.copiers) if count >= 2 * group else 1
        start = 0 if turns > 1 or operand is self.plan.stationary else -1
        for piece in pieces(count, min(count, group * turns)):
            inner, at = scope.repeat(piece)
            for turn, (low, some) in enumerate(cut(piece.extent, group)):
                bank = inner.psum("turned", slots=self.plan.transpose_slots)
                part = (at + low, some)
                copier = self.copiers[(start + turn) % len(self.copiers)]
                self._transpose_group(into, held, bank, row, inner, part, copier)

    def _transpose_group(
        self,
        packed: Held,
        held: Held,
        bank: Held,
        row: int,
        scope: Scope,
        part: tuple[Affine, int],
        engine: Engine,
    ) -> None:
        """Transpose k tiles `part` (first, count) into `bank` and copy them into `packed`."""
        (first, group), rows, k = part, scope.extent(row), scope.extent(self.plan.depth)
        tile_step, packed_step = held.strides.get(self.major, 0), packed.strides.get(self.major, 0)
        for g in range(group):
            source = scope.flat(held, rows, k, (first + g) * tile_step)
            block = scope.flat(bank, k, rows, g * rows)
            scope.transpose(block, source)
        into, out = merge_dims([group, rows], [[rows, 1], [packed_step, packed.strides[row]]])
        target = scope.on_chip(packed, k, out, first * packed_step)
        scope.copy(engine, target, scope.on_chip(bank, k, into))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that wait: a block, and per looped iter dim (elements between blocks, points of one)."""

    first: Held
    steps: Mapping[int, tuple[int, int]]

    def part(self, here: Mapping[int, Affine]) -> Held:
        """The block at position `here`."""
        offset = self.first.offset
        for iter_dim, at in here.items():
            step, size = self.steps[iter_dim]
            offset = offset + divided(at, size) * step
        return replace(self.first, offset=offset)
