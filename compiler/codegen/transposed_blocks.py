"""Blocks of short rows, transposed on the tensor engine as operands arrive and results leave.

Several rows lie on a partition and transposes put them in order; what a block is, and when it pays:
`row_blocks.py` and `contract_plan.py`. Rows of a natural operand run along k: they are transposed
once, as they would be anyway. Rows of a direct operand are counted by k: transposed once their
columns lie on the partitions, transposed twice k does.

A tile of a product may have the innermost index of the result on its partitions, and the rows of
memory along its columns. Where these rows are short but follow each other, they are transposed, so
that a partition holds several of them, one run of HBM. Only plain products are: a transpose spreads
an infinity over its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.builder import (
    Builder,
    Held,
    Scope,
    blocks_within,
    cut,
    merge_dims,
)
from shardwright.compiler.codegen.contract_plan import (
    ContractPlan,
    Operand,
    direct_rows,
    natural_rows,
)
from shardwright.compiler.codegen.domain import AccessMap, Domain, PerDim
from shardwright.compiler.codegen.row_blocks import PSUM_COLUMNS, RowBlock, row_block, spread
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine

_WIDE_RANGE = (DType.F32, DType.BF16)
_ENGINES = (Engine.VECTOR, Engine.SCALAR)


def is_plain(domain: Domain, store: int) -> bool:
    """Whether a store writes a product as it is, in types with the range of fp32 (no new inf)."""
    value = domain[store]
    if value.op != "store":
        return False
    value = domain[value.inputs[0]]
    while value.op == "convert" and value.dtype in _WIDE_RANGE:
        value = domain[value.inputs[0]]
    return value.op == "contract" and value.dtype in _WIDE_RANGE


def transposed_block(
    plan: ContractPlan, access: AccessMap, extents: PerDim, item: int
) -> RowBlock | None:
    """The block in which tiles of `extents` are stored after a transpose; None when the partitions
    are not whole rows of memory, or these are long. `item` is in bytes per element.
    """
    if plan.rates is None or plan.rows is None or access.stride(plan.rows) != 1:
        return None
    points = {a: extents[a] for a in plan.out_axes}
    total = extents[plan.rows] * math.prod(points.values()) * item
    plain = plan.rates.transfer_ns(total, item, extents[plan.rows])
    return row_block(access, extents[plan.rows], points, item, plan.rates, plain)


def store_transposed(frame: Frame, number: int, plan: ContractPlan, scope: Scope) -> bool:
    """Store a row tile of a product in blocks of transposed rows; False where that cannot be."""
    value = frame.domain[number]
    if not is_plain(frame.domain, number) or value.map is None or plan.rows is None:
        return False
    extents = {a: scope.extent(a) for a in (plan.rows, *plan.out_axes)}
    item = frame.builder.tensors[value.map.tensor].dtype.bytes
    block = transposed_block(plan, value.map, extents, item)
    if block is None:
        return False
    held = frame.operand(value.inputs[0])
    for place, at in blocks_within(scope, block.loops(plan.out_axes), {}):
        rows = place.tile("turned", block.partitions, block.run, frame.builder.dtype(held))
        _transpose(block, held.at(at), rows, place)
        target = block.hbm(value.map, place.address(value.map))
        place.store(target, place.flat(rows, block.partitions, block.run))
    return True


def _transpose(block: RowBlock, held: Held, rows: Held, scope: Scope) -> None:
    """Fill `rows`: a transpose takes every `each`-th column, as many as fit share a bank."""
    sizes, strides = block.every(held.strides)
    (columns,) = merge_dims(sizes, [strides])
    several = PSUM_COLUMNS // block.row
    for turn, (low, count) in enumerate(cut(block.each, several)):
        bank = scope.psum("turned")
        for row in range(low, low + count):
            source = scope.on_chip(held, block.row, columns, block.place(row, held.strides))
            into = ((1, block.row),)
            target = scope.on_chip(bank, block.partitions, into, (row - low) * block.row)
            scope.transpose(target, source)
        filled = ((1, count * block.row),)
        out = scope.on_chip(rows, block.partitions, filled, low * block.row)
        source = scope.on_chip(bank, block.partitions, filled)
        scope.copy(_ENGINES[turn % len(_ENGINES)], out, source)


RowsOf = Callable[[ContractPlan, Operand, AccessMap, PerDim, int], tuple[int, RowBlock | None]]


@dataclass(slots=True)
class BlockLoader:
    """Loads operands of one plan; `copiers` take what is transposed out of PSUM, in turn."""

    builder: Builder
    plan: ContractPlan
    copiers: Iterator[Engine]

    def natural(self, operand: Operand, packed: Held, scope: Scope) -> bool:
        """Load a natural operand; False where blocks do not pay, or it is computed."""
        found = self._block(natural_rows, operand, scope)
        if found is None:
            return False
        access, block = found
        k = scope.extent(self.plan.depth)
        inside = {self.plan.depth_split.major} if block.row > k else set()
        loops = [a for a in self._counting(operand) if a not in inside]
        for place, part, rows in self._fetched(access, block, loops, packed, scope):
            for tile in range(block.row // k):
                step = tile * packed.strides.get(self.plan.depth_split.major, 0)
                there = replace(part, offset=part.offset + step)
                self._transpose(block, rows, (tile * k, k), there, place)
        return True

    def direct(self, operand: Operand, packed: Held, scope: Scope) -> bool:
        """Load a direct operand; False where blocks do not pay, or it is computed."""
        found = self._block(direct_rows, operand, scope)
        if found is None:
            return False
        access, block = found
        (inner,) = (a for a in operand.free if access.stride(a) == 1)
        loops = [a for a in self._counting(operand) if a != inner]
        for place, part, rows in self._fetched(access, block, loops, packed, scope):
            count = block.each * block.partitions
            tile = place.tile("columns", block.row, count, self.plan.packed_type)
            steps = (math.prod(block.extents[:at]) for at in range(len(block.iter_dims)))
            across = replace(tile, strides=dict(zip(block.iter_dims, steps, strict=True)))
            self._transpose(block, rows, (0, block.row), across, place)
            self._transpose_back(block, across, part, part.strides[inner], place)
        return True

    def _block(
        self, rows: RowsOf, operand: Operand, scope: Scope
    ) -> tuple[AccessMap, RowBlock] | None:
        """What an operand is loaded from, and the block in which it is loaded here."""
        value = self.plan.domain[operand.number]
        if value.op != "load":
            return None
        extents = {a: scope.extent(a) for a in (self.plan.depth, *self._counting(operand))}
        item = self.builder.tensors[value.access.tensor].dtype.bytes
        _, block = rows(self.plan, operand, value.access, extents, item)
        return None if block is None else (value.access, block)

    def _counting(self, operand: Operand) -> list[int]:
        """Tiles of k, and the free iter dims."""
        return [a for a in (self.plan.depth_split.major, *operand.free) if a >= 0]

    def _fetched(
        self, access: AccessMap, block: RowBlock, dims: Sequence[int], packed: Held, scope: Scope
    ) -> Iterator[tuple[Scope, Held, Held]]:
        """Every block of rows that `dims` count: code, place in the packed tile, rows on chip."""
        for place, at in blocks_within(scope, block.loops(dims), {}):
            rows = place.tile("rows", block.partitions, block.run, self.plan.packed_type)
            target = place.flat(rows, block.partitions, block.run)
            place.load(target, block.hbm(access, place.address(access)))
            yield place, packed.at(at), rows

    def _transpose(
        self, block: RowBlock, rows: Held, columns: tuple[int, int], to: Held, scope: Scope
    ) -> None:
        """Transpose `columns` (first, count) of all rows: those of a partition go to every
        `each`-th column of a bank, which leaves it in the order of the rows.
        """
        first, width = columns
        reach = spread(block.unit * block.each, block.extents)
        assert reach is not None, block
        inner = [math.prod(reach[:at]) for at in range(len(reach))]
        into, out = merge_dims(reach[::-1], [inner[::-1], block.strides(to.strides)[::-1]])
        for low in range(0, block.partitions, block.unit):
            bank = scope.psum("turned", slots=self.plan.transpose_slots)
            for row in range(block.each):
                at = row * block.row + first
                source = scope.flat(rows, block.unit, width, at)
                target = scope.on_chip(bank, width, ((block.each, block.unit),), row)
                scope.transpose(target, replace(source, start=low))
            place = block.place(low * block.each, to.strides)
            target = scope.on_chip(to, width, out, place)
            scope.copy(next(self.copiers), target, scope.on_chip(bank, width, into))

    def _transpose_back(
        self, block: RowBlock, across: Held, packed: Held, step: int, scope: Scope
    ) -> None:
        """Transpose the columns of a block back: k on the partitions, columns `step` apart."""
        k, *outer = block.extents
        points = math.prod(outer)
        fitting = range(1, PSUM_COLUMNS // block.row + 1)
        several = max(n for n in fitting if spread(n, outer) is not None)
        reach = spread(several, outer) or ()
        places = {block.iter_dims[0]: 0, **packed.strides}
        strides = block.strides(places)[1:]
        inner = [math.prod(reach[:at]) * block.row for at in range(len(reach))]
        sizes = [*reach[::-1], block.row]
        into, out = merge_dims(sizes, [[*inner[::-1], 1], [*strides[::-1], step]])
        for low in range(0, points, several):
            bank = scope.psum("turned", slots=self.plan.transpose_slots)
            for point in range(several):
                source = scope.flat(across, block.row, k, (low + point) * k)
                target = scope.flat(bank, k, block.row, point * block.row)
                scope.transpose(target, source)
            place = block.place(low * k, places)
            target = scope.on_chip(packed, k, out, place)
            scope.copy(next(self.copiers), target, scope.on_chip(bank, k, into))
