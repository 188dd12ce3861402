"""Collectives that a module already holds, over the ranks that `ranks.py` read its groups as.

The command that compiles one file takes them as they are: the module is one partition's program,
its types are per rank. Elsewhere the partitioner makes the collectives, from shardings, and groups
of more than one rank are refused.
"""

from __future__ import annotations

import math

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.process_groups import collective_name
from shardwright.compiler.frontend.rules.ragged import exchange_rows
from shardwright.compiler.frontend.rules.ranks import UNPARTITIONED, Axes, ordered
from shardwright.compiler.frontend.rules.reduce import body_kind
from shardwright.compiler.frontend.rules.registry import Maker, Site, Values, imports, refuse
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllToAllAttrs,
    AxisIndexAttrs,
    ReduceScatterAttrs,
)
from shardwright.compiler.ir.types import Value


def _runs(site: Site, *, any_order: bool = False) -> list[Axes]:
    """The axes of the groups in runs of mesh order, major to minor; none for groups of one rank."""
    ranks = site.importer.ranks
    groups = ranks.groups(site.op)
    if groups is not None and groups.shape[1] == 1:
        return []
    if groups is None or not ranks.axes:
        name = collective_name(site.op).rpartition(".")[2]
        size = "all" if groups is None else groups.shape[1]
        refuse("NCC_EVRF001", f"{name} requires groups of one rank, got {size}", UNPARTITIONED)
    return ranks.runs(ordered(groups) if any_order else groups)


@imports("stablehlo.all_gather")
def all_gather(site: Site) -> Values:
    """One all_gather per operand and run of axes, the minor ones first."""
    ranks, runs = site.importer.ranks, _runs(site)
    values = list(site.operands)
    for axes in reversed(runs):
        attrs = AllGatherAttrs(site.int("all_gather_dim"), axes, ranks.size(axes))
        values = [site.make.op("all_gather", v, attrs=attrs) for v in values]
    return values


@imports("stablehlo.reduce_scatter")
def reduce_scatter(site: Site) -> Values:
    """One reduce_scatter per run of axes, the major ones first."""
    ranks, runs = site.importer.ranks, _runs(site)
    (value,) = site.operands
    for axes in runs:
        dim, kind = site.int("scatter_dimension"), body_kind(site)
        attrs = ReduceScatterAttrs(dim, axes, kind, ranks.size(axes))
        value = site.make.op("reduce_scatter", value, attrs=attrs)
    return (value,)


@imports("stablehlo.all_reduce")
def all_reduce(site: Site) -> Values:
    """One all_reduce per operand; the order of ranks in a group does not matter."""
    runs = _runs(site, any_order=True)
    if not runs:
        return site.operands
    axes = tuple(axis for run in runs for axis in run)
    attrs = AllReduceAttrs(axes, body_kind(site), site.importer.ranks.size(axes))
    return [site.make.op("all_reduce", v, attrs=attrs) for v in site.operands]


@imports("stablehlo.all_to_all")
def all_to_all(site: Site) -> Values:
    """One all_to_all per operand."""
    split, concat = site.int("split_dimension"), site.int("concat_dimension")
    return [_exchange(site, value, split, concat) for value in site.operands]


@imports("mhlo.all_to_all")
def tuple_all_to_all(site: Site) -> Values:
    """HLO's form with one operand per rank: stacked, exchanged, taken apart."""
    shape, make = site.operands[0].type.shape, site.make
    stack = make.concatenate([make.reshape(v, (1, *shape)) for v in site.operands], 0)
    moved = _exchange(site, stack, 0, 0)
    rest = (0,) * len(shape)
    return [
        make.reshape(make.slice(moved, (n, *rest), (n + 1, *shape)), shape)
        for n in range(len(site.operands))
    ]


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
    return site.make.op("all_to_all", value, attrs=attrs)


def ragged_all_to_all(site: Site) -> Values:
    """An all_to_all of chunks, with rows moved on both sides of it."""
    ranks = site.importer.ranks
    size = math.prod(ranks.size(axes) for axes in _runs(site))
    return (exchange_rows(site, size, lambda value: _exchange(site, value, 0, 0)),)


@imports("stablehlo.collective_broadcast")
def collective_broadcast(site: Site) -> Values:
    """An all_gather, of which the first rank's operand stays (the vendor's, SDK 2.29): no
    collective of the machine sends one operand to all.
    """
    ranks, runs, (operand,) = site.importer.ranks, _runs(site), site.operands
    make, shape = site.make, operand.type.shape
    gathered = make.reshape(operand, (1, *shape))
    for axes in reversed(runs):
        attrs = AllGatherAttrs(0, axes, ranks.size(axes))
        gathered = make.op("all_gather", gathered, attrs=attrs)
    return (make.reshape(make.first(gathered, 0, 1), shape) if runs else operand,)


@imports("stablehlo.collective_permute")
def collective_permute(site: Site) -> Values:
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
    idle = ([r for r in range(ranks.count) if r not in side] for side in (sources, targets))
    every = tuple(sorted([*pairs, *zip(*idle, strict=True)]))
    moved = site.make.collective_permute(operand, every, ranks.names, ranks.count)
    if len(targets) == ranks.count:
        return (moved,)
    return (_only_on(site.make, moved, np.isin(np.arange(ranks.count), targets), ranks.names),)


def _only_on(make: Maker, value: Value, receives: np.ndarray, axes: Axes) -> Value:
    """`value` on the ranks over `axes` that received it, zeros on the others."""
    table = make.dense(receives, DType.I32)
    flag = make.reshape(make.dynamic_slice(table, (_number(make, axes),), (1,)), ())
    is_sent = make.compare(flag, make.splat(0, flag.type), "NE")
    spread = make.broadcast(is_sent, value.type.shape)
    return make.op("select", spread, value, make.splat(0, value.type))


def _number(make: Maker, axes: Axes) -> Value:
    """This rank's number over `axes`, i32."""
    return make.op("axis_index", attrs=AxisIndexAttrs(axes))


@imports("stablehlo.partition_id", "stablehlo.replica_id")
def rank(site: Site) -> Values:
    """This rank's partition, or replica; 0 where there is one."""
    axes, make, result = site.importer.ranks.numbered(site.name), site.make, site.result_type()
    if not axes:
        return (make.splat(0, result),)
    return (make.convert(_number(make, axes), result.dtype),)
