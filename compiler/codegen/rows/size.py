"""SBUF that a plan of a reduction fusion takes, before any code is made.

An estimate, tile by tile: what belongs to all rows once, what belongs to a group of row tiles twice
when the next group fills its own meanwhile. The allocator has the last word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compiler.codegen.domain import CODELESS
from shardwright.compiler.dtypes import DType
from shardwright.compiler.machine.target import Limits

if TYPE_CHECKING:
    from shardwright.compiler.codegen.rows.passes import Pass
    from shardwright.compiler.codegen.rows.plan import RowPlan

STAGING_BYTES = 4096
"""Rows of a packed tile that wait to be transposed, per partition, when memory is short: two runs
that reach 0.81 of the DMA rate (hardware.json efficiency_by_bytes_per_partition).
"""


@dataclass(slots=True)
class Size:
    """SBUF bytes per partition, and the largest tile of it."""

    total: int = 0
    largest: int = 0
    largest_name: str = ""

    def add(self, name: str, size: int) -> None:
        """Count a tile."""
        self.total += size
        if size > self.largest:
            self.largest, self.largest_name = size, name


def size_of(plan: RowPlan, limits: Limits) -> Size:
    """What the tiles of a plan take, lifetimes not counted."""
    size = Size()
    _of_rows(size, plan, limits)
    _of_packed(size, plan, limits)
    values, slots = plan.domain.values, 1 if plan.single_buffered else 2
    for n in plan.vectors:
        places = 2 if plan.is_blocked(n) else 1
        size.add(f"vector {values[n].op}{n}", places * _width(plan, n) * values[n].dtype.bytes)
    for n in plan.roles.sums:
        spanned = values[n].iter_dims & {*plan.roles.inner, plan.row}
        elements = math.prod(plan.points_of_sum(a) for a in spanned)
        # Only a product, or rows that stay where they are, lie on all partitions.
        flat = values[n].op == "reduce" and plan.row not in spanned
        held = elements if flat else -(-elements // limits.partitions)
        size.add(f"sum {n}", slots * DType.F32.bytes * held)
    size.add("blocks", max((_block_bytes(plan, s, limits) for s in plan.passes), default=0))
    return size


def _of_rows(size: Size, plan: RowPlan, limits: Limits) -> None:
    """A group's tiles, and those the next group fills meanwhile."""
    values = plan.domain.values
    for n in plan.row_buffers:
        held = _width(plan, n) * values[n].dtype.bytes
        size.add(f"row buffer {values[n].op}{n}", held * _tiles(plan, n))
    for n, dtype in plan.transposed.items():
        chunks = -(-_width(plan, n) // limits.partitions)
        name = f"transposed {values[n].op}{n}"
        size.add(name, chunks * limits.partitions * dtype.bytes * _tiles(plan, n))


def _tiles(plan: RowPlan, number: int) -> int:
    """Row tiles that hold a row buffer at a time."""
    if plan.blocked and not plan.is_blocked(number):
        return plan.blocked.tiles
    return plan.in_flight if plan.no_overlap else 2 * plan.in_flight


def _of_packed(size: Size, plan: RowPlan, limits: Limits) -> None:
    """Operands held for all rows: twice for the next one, once for rows not transposed yet."""
    domain, values, counted = plan.domain, plan.domain.values, set[object]()
    if plan.single_buffered:
        size.add("rows to pack", 2 * STAGING_BYTES)
    for n, (tall, other) in plan.roles.packed.items():
        item, depth = plan.operand_type(n).bytes, values[n].over
        elements = math.prod(plan.points(a) for a in values[other].iter_dims & plan.roles.inner)
        held = -(-elements // limits.partitions) * item
        if (other, depth, item) not in counted:
            counted.add((other, depth, item))
            places = 2 if plan.is_blocked(other) else 1
            size.add(f"packed {other}", places * held if plan.single_buffered else 3 * held)
        if tall in plan.whole:
            size.add(f"rows {tall}", 3 * domain.sizes[plan.row] * item)


def _width(plan: RowPlan, number: int) -> int:
    inner = plan.inner(number)
    return 1 if inner is None else plan.points(inner)


def _block_bytes(plan: RowPlan, pass_: Pass, limits: Limits) -> int:
    """Largest number of bytes of a block's values alive at a time, twice for those that rotate."""
    values = plan.domain.values
    last = {i: n for n in pass_.values for i in values[n].inputs}
    tiled = {n for n in pass_.values if values[n].op not in CODELESS}
    alive = peak = 0
    for n in pass_.values:
        if values[n].op in CODELESS:
            continue
        alive += 2 * limits.moving_max * values[n].dtype.bytes
        peak = max(peak, alive)
        ended = [i for i in set(values[n].inputs) & tiled if last[i] == n]
        alive -= sum(2 * limits.moving_max * values[i].dtype.bytes for i in ended)
    return peak
