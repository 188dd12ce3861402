"""What a tiling of a contraction is estimated to take, so that only the best ones are generated.

The tensor engine, DMA and the copies out of PSUM overlap; the longest of them shows, and a part of
the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.codegen.contract_plan import (
    ContractPlan,
    Operand,
    direct_rows,
    natural_rows,
)
from shardwright.compiler.codegen.domain import Walk
from shardwright.compiler.codegen.rates import MIN_CYCLES
from shardwright.compiler.codegen.search import Room
from shardwright.compiler.codegen.space import contiguous_run
from shardwright.compiler.codegen.turned_store import turned_block
from shardwright.compiler.codegen.whole_panel import fetch_ns, whole_elements
from shardwright.compiler.isa.program import Engine

_OVERLAP = 0.1  # part of the shorter work that shows beside the longest (inferred)


def nanoseconds(
    plan: ContractPlan,
    walks: Sequence[Walk | None],
    stores: Sequence[tuple[Walk, bool]],
    room: Room,
) -> float:
    """Estimated time of a plan; `walks` are those of its operands in HBM, `stores` those of every
    place its result goes to, true where that is the product itself.
    """
    size, tensors, rates = plan.space.sizes, room.tensors, room.rates
    blocks = math.ceil(size.get(plan.row_split.major, 1) / plan.block)
    groups = {a: math.ceil(size[a] / plan.extents.get(a, 1)) for a in plan.outer}
    row_blocks = blocks * math.prod(groups.values())
    panels = plan.space.points(plan.across)
    panels *= math.prod(math.ceil(size[a] / plan.extents[a]) for a in plan.columns)
    depth_tiles = plan.depth_tiles
    width = math.prod(plan.extents[a] for a in plan.columns)
    height = 1 if plan.rows is None else size[plan.rows]
    rows = plan.block * height
    once = math.prod(groups[a] for a in plan.shared)
    points, beside = plan.points, math.prod(plan.extents[a] for a in plan.beside)
    turns = beside + (plan.lines.tail if plan.beside else 0)
    passes = row_blocks * (1 if plan.resident else panels)
    loads = (
        (plan.stationary, walks[0], passes, rows * points * beside),
        (plan.moving, walks[1], (once if plan.held else row_blocks) * panels, width * points),
    )
    turned = moved = 0.0
    for operand, walk, runs, free in loads:
        if plan.whole and operand is plan.stationary and walk is not None:
            fetched = math.prod(groups.values())
            taken, columns = fetch_ns(plan, walk, tensors[walk.tensor].dtype.bytes)
            moved += fetched * taken
            turned += fetched * columns * whole_elements(plan)
            continue
        elements = runs * depth_tiles * size[plan.depth] * free
        if walk is None:
            turned += elements / size[plan.depth] * operand.natural
            continue
        item = tensors[walk.tensor].dtype.bytes
        run, partitions, columns = _loaded(plan, operand, walk, item)
        turned += elements * columns
        moved += rates.transfer_ns(elements * item, run, partitions)
    total = row_blocks * rows * panels * width * points * beside
    for out, plain in stores:
        taken, columns = _stored_ns(plan, out, plain, total, room)
        moved, turned = moved + taken, turned + columns
    issued = row_blocks * plan.block * panels * points * turns * max(width, MIN_CYCLES)
    evicted = row_blocks * plan.block * panels * max(width * points * turns, MIN_CYCLES)
    products = rates.engine_ns(Engine.TENSOR, (issued * depth_tiles + turned) * plan.passes)
    # The queue of the tensor engine waits for copies of what it transposes: half on each engine.
    products += rates.engine_ns(Engine.VECTOR, turned / plan.turning_slots)
    if plan.accumulator_slots == 1:  # and for accumulators that are all in use
        products += rates.engine_ns(Engine.VECTOR, evicted)
    copies = evicted * (plan.sums if plan.staged else 1) + turned / 2
    copied = rates.engine_ns(Engine.VECTOR, copies)
    shown = (products, moved, copied)
    return max(shown) + _OVERLAP * (sum(shown) - max(shown))


def _stored_ns(
    plan: ContractPlan, out: Walk, plain: bool, total: int, room: Room
) -> tuple[float, float]:
    """(time to store `total` elements of a result in a place, columns transposed before)."""
    item, height = room.tensors[out.tensor].dtype.bytes, 1
    extents = plan.extents
    if plan.rows is not None:
        height = plan.space.sizes[plan.rows]
        extents = {**extents, plan.rows: height}
    block = turned_block(plan, out, extents, item) if plain else None
    if block is not None:
        taken = room.rates.transfer_ns(total * item, block.run * item, block.partitions)
        return taken, total / block.partitions
    run = contiguous_run(plan.space, out, plan.out_axes, plan.extents) * item
    return room.rates.transfer_ns(total * item, run, height), 0.0


def _loaded(plan: ContractPlan, operand: Operand, walk: Walk, item: int) -> tuple[int, int, float]:
    """(bytes of a run, partitions, transposed columns per element) of a panel load."""
    size, depth = plan.space.sizes, plan.space.sizes[plan.depth]
    extents = dict(plan.extents) | {plan.row_split.major: plan.block, plan.depth: depth}
    if plan.rows is not None:
        extents[plan.rows] = size[plan.rows]
    extents = {a: extents[a] for a in (plan.depth, *operand.free)}
    extents |= {a: plan.chunk for a in (plan.depth_split.major,) if a >= 0}
    rows = natural_rows if operand.natural else direct_rows
    run, block = rows(plan, operand, walk, extents, item)
    if block is None or plan.space[operand.number].op != "load":
        return run * item, depth, operand.natural / depth
    columns = 1 / depth if operand.natural else 1 / block.row + 1 / depth
    return block.run * item, block.partitions, columns
