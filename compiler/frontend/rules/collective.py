"""Collectives that a module already holds, over the ranks that `ranks.py` read its groups as.

The command that compiles one file takes them as they are: the module is one partition's program,
its types are per rank. Elsewhere the partitioner makes the collectives, from shardings, and groups
of more than one rank are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.bits import constant, convert, splat
from shardwright.compiler.frontend.rules.ranks import UNPARTITIONED, Axes, ordered
from shardwright.compiler.frontend.rules.reduce import body_kind
from shardwright.compiler.frontend.rules.registry import imports, refuse
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllToAllAttrs,
    AxisIndexAttrs,
    BroadcastInDimAttrs,
    CollectivePermuteAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    DynamicSliceAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.types import Value, tensor_type

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


def _runs(site: Site, *, any_order: bool = False) -> list[Axes]:
    """The axes of the groups in runs of mesh order, major to minor; none for groups of one rank."""
    ranks = site.importer.ranks
    groups = ranks.groups(site.op)
    if groups is not None and groups.shape[1] == 1:
        return []
    if groups is None or not ranks.axes:
        name = site.name.partition(".")[2]
        size = "all" if groups is None else groups.shape[1]
        refuse("NCC_EVRF001", f"{name} requires groups of one rank, got {size}", UNPARTITIONED)
    return ranks.runs(ordered(groups) if any_order else groups)


@imports("stablehlo.all_gather")
def all_gather(site: Site) -> Sequence[Value]:
    """One all_gather per operand and run of axes, the minor ones first."""
    ranks, runs = site.importer.ranks, _runs(site)
    values = list(site.operands)
    for axes in reversed(runs):
        attrs = AllGatherAttrs(site.int("all_gather_dim"), axes, ranks.size(axes))
        values = [site.emit("all_gather", (v,), attrs).result for v in values]
    return values


@imports("stablehlo.reduce_scatter")
def reduce_scatter(site: Site) -> Sequence[Value]:
    """One reduce_scatter per run of axes, the major ones first."""
    ranks, runs = site.importer.ranks, _runs(site)
    (value,) = site.operands
    for axes in runs:
        dim, kind = site.int("scatter_dimension"), body_kind(site)
        attrs = ReduceScatterAttrs(dim, axes, kind, ranks.size(axes))
        value = site.emit("reduce_scatter", (value,), attrs).result
    return (value,)


@imports("stablehlo.all_reduce")
def all_reduce(site: Site) -> Sequence[Value]:
    """One all_reduce per operand; the order of ranks in a group does not matter."""
    runs = _runs(site, any_order=True)
    if not runs:
        return site.operands
    axes = tuple(axis for run in runs for axis in run)
    attrs = AllReduceAttrs(axes, body_kind(site), site.importer.ranks.size(axes))
    return [site.emit("all_reduce", (v,), attrs).result for v in site.operands]


@imports("stablehlo.all_to_all")
def all_to_all(site: Site) -> Sequence[Value]:
    """One all_to_all per operand."""
    split, concat = site.int("split_dimension"), site.int("concat_dimension")
    return [_exchange(site, value, split, concat) for value in site.operands]


@imports("mhlo.all_to_all")
def tuple_all_to_all(site: Site) -> Sequence[Value]:
    """HLO's form with one operand per rank: stacked, exchanged, taken apart."""
    shape, count = site.operands[0].type.shape, len(site.operands)
    rows = [site.emit("reshape", (v,), ReshapeAttrs((1, *shape))).result for v in site.operands]
    stack = site.emit("concatenate", rows, ConcatenateAttrs(0)).result
    moved = _exchange(site, stack, 0, 0)
    ones = (1,) * (1 + len(shape))
    return [_row(site, moved, n, (count, *shape), ones) for n in range(count)]


def _row(site: Site, stack: Value, n: int, shape: Sequence[int], strides: Sequence[int]) -> Value:
    starts = (n, *(0 for _ in shape[1:]))
    row = site.emit("slice", (stack,), SliceAttrs(starts, (n + 1, *shape[1:]), tuple(strides)))
    return site.emit("reshape", (row.result,), ReshapeAttrs(tuple(shape[1:]))).result


def _exchange(site: Site, value: Value, split: int, concat: int) -> Value:
    runs = _runs(site)
    if not runs:
        return value
    if len(runs) > 1:
        refuse(
            "SW_REPLICA_GROUPS",
            "all_to_all requires the ranks of a group in the order of their mesh, got axes"
            f" {', then '.join('+'.join(run) for run in runs)}",
            "order the axes of the exchange as the mesh does",
        )
    attrs = AllToAllAttrs(split, concat, runs[0], site.importer.ranks.size(runs[0]))
    return site.emit("all_to_all", (value,), attrs).result


@imports("stablehlo.collective_broadcast")
def collective_broadcast(site: Site) -> Sequence[Value]:
    """Groups of one rank pass their operand on; others have no collective of the machine."""
    if _runs(site):
        refuse(
            "NCC_EVRF001",
            "collective_broadcast requires groups of one rank",
            "mask the operand of the other ranks with zeros and add with all_reduce",
        )
    return site.operands


@imports("stablehlo.collective_permute")
def collective_permute(site: Site) -> Sequence[Value]:
    """A permute over all ranks; who receives nothing has zeros."""
    ranks, (operand,) = site.importer.ranks, site.operands
    pairs = ranks.moves(site.op)
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    if sources == targets and len(pairs) == ranks.grid.count:
        return (operand,)
    if not ranks.axes:
        refuse(
            "NCC_EVRF001",
            f"collective_permute requires the pair (0, 0), got {pairs}",
            UNPARTITIONED,
        )
    rest = zip(
        *([r for r in range(ranks.count) if r not in side] for side in (sources, targets)),
        strict=True,
    )
    attrs = CollectivePermuteAttrs(ranks.names, tuple(sorted([*pairs, *rest])), ranks.count)
    moved = site.emit("collective_permute", (operand,), attrs).result
    return (_only_on(site, moved, targets),)


def _only_on(site: Site, value: Value, receivers: Sequence[int]) -> Value:
    """`value` on the ranks that received it, zeros on the others."""
    count = site.importer.ranks.count
    if len(receivers) == count:
        return value
    flags = np.isin(np.arange(count), receivers).astype(np.int32)
    kind = tensor_type((count,), DType.I32)
    table = site.emit("constant", (), ConstantAttrs(flags.tobytes(), kind)).result
    number = _number(site, site.importer.ranks.names)
    own = site.emit("dynamic_slice", (table, number), DynamicSliceAttrs((1,))).result
    flag = site.emit("reshape", (own,), ReshapeAttrs(())).result
    zero = constant(site, 0, flag.type)
    is_sent = site.emit("compare", (flag, zero), CompareAttrs("NE")).result
    attrs = BroadcastInDimAttrs((), value.type.shape)
    spread = site.emit("broadcast_in_dim", (is_sent,), attrs).result
    return site.emit("select", (spread, value, splat(site, 0, value))).result


def _number(site: Site, axes: Axes) -> Value:
    """This rank's number over `axes`, i32."""
    return site.emit("axis_index", (), AxisIndexAttrs(axes)).result


@imports("stablehlo.partition_id", "stablehlo.replica_id")
def rank(site: Site) -> Sequence[Value]:
    """This rank's partition, or replica; 0 where there is one."""
    axes = site.importer.ranks.numbered(site.name)
    if not axes:
        return (constant(site, 0, site.result_type()),)
    return (convert(site, _number(site, axes), site.result_type().dtype),)
