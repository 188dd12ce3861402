"""Results whose rows in memory lie across the tile: turned on the tensor engine, stored in blocks.

A tile of a product may have the innermost index of the result on its partitions, and the rows of
memory along its columns. Where these rows are short but follow each other, they are transposed, so
that a partition holds several of them, one run of HBM (`row_blocks.py`). Only plain products are:
a transpose spreads an infinity over its block.
"""

from __future__ import annotations

import math

from shardwright.compiler.codegen.builder import Held, Scope, blocks_within, merge_dims
from shardwright.compiler.codegen.contract_plan import ContractPlan
from shardwright.compiler.codegen.domain import PerAtom, Space, Walk
from shardwright.compiler.codegen.row_blocks import PSUM_COLUMNS, RowBlock, row_block
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine

_WIDE_RANGE = (DType.F32, DType.BF16)
_ENGINES = (Engine.VECTOR, Engine.SCALAR)


def is_plain(space: Space, store: int) -> bool:
    """Whether a store writes a product as it is, at most converted, in a type with the range of
    fp32: a product that fp16 or fp8 cannot hold is an infinity.
    """
    value = space[store]
    if value.op != "store":
        return False
    value = space[value.inputs[0]]
    while value.op == "convert" and value.dtype in _WIDE_RANGE:
        value = space[value.inputs[0]]
    return value.op == "contract" and value.dtype in _WIDE_RANGE


def turned_block(plan: ContractPlan, walk: Walk, extents: PerAtom, item: int) -> RowBlock | None:
    """The block in which tiles of `extents` are stored after a transpose; None when the partitions
    are not whole rows of memory, or these are long. `item` is in bytes per element.
    """
    if plan.rates is None or plan.rows is None or walk.stride(plan.rows) != 1:
        return None
    points = {a: extents[a] for a in plan.out_axes}
    total = extents[plan.rows] * math.prod(points.values()) * item
    plain = plan.rates.transfer_ns(total, item, extents[plan.rows])
    return row_block(walk, extents[plan.rows], points, item, plan.rates, plain)


def store_turned(frame: Frame, number: int, plan: ContractPlan, scope: Scope) -> bool:
    """Store a row tile of a product in blocks of turned rows; False where that does not apply."""
    value = frame.space[number]
    if not is_plain(frame.space, number) or value.walk is None or plan.rows is None:
        return False
    extents = {a: scope.extent(a) for a in (plan.rows, *plan.out_axes)}
    item = frame.builder.tensors[value.walk.tensor].dtype.bytes
    block = turned_block(plan, value.walk, extents, item)
    if block is None:
        return False
    held = frame.operand(value.inputs[0])
    for place, at in blocks_within(scope, block.loops(plan.out_axes), {}):
        rows = place.tile("turned", block.partitions, block.run, frame.builder.dtype(held))
        _turn(block, held.at(at), rows, place)
        target = block.hbm(value.walk, place.address(value.walk))
        place.store(target, place.flat(rows, block.partitions, block.run))
    return True


def _turn(block: RowBlock, held: Held, rows: Held, scope: Scope) -> None:
    """Fill `rows`: a transpose takes every `each`-th column, as many as fit share a bank."""
    sizes, strides = block.every(held.strides)
    (columns,) = merge_dims(sizes, [strides])
    several = PSUM_COLUMNS // block.row
    for turn, low in enumerate(range(0, block.each, several)):
        bank = scope.psum("turned")
        count = min(several, block.each - low)
        for row in range(low, low + count):
            source = scope.on_chip(held, block.row, columns, block.place(row, held.strides))
            into = ((1, block.row),)
            target = scope.on_chip(bank, block.partitions, into, (row - low) * block.row)
            scope.transpose(target, source)
        filled = ((1, count * block.row),)
        out = scope.on_chip(rows, block.partitions, filled, low * block.row)
        source = scope.on_chip(bank, block.partitions, filled)
        scope.copy(_ENGINES[turn % len(_ENGINES)], out, source)
