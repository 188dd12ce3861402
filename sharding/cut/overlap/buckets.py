"""Buckets: gathers of weights and reductions of gradients that are ready together become one.

What shares a bucket has one kind, group, type and *moment*: the number of such collectives before
it, so that none waits for another of its bucket, and no loop between their readers. The bucket is
flat and each tensor moves along its own dim in it (`collectives/values/buckets.py`): values and
bytes stay, launches are saved. What makes its parts fills it, and what comes out are views of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shardwright.compiler.ir.cross_stage import consecutive, is_cross_stage
from shardwright.compiler.ir.facts import resized_dim
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import (
    ConcatenateAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.rewrite import with_ops, with_regions
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.overlap.streams import moves_state

Key = tuple[object, ...]

UNLIMITED = sys.maxsize
"""Bytes of a bucket that takes all that is ready together."""


def bucketed(graph: Graph, most_bytes: int) -> Graph:
    """`graph` with collectives over data axes in buckets of up to `most_bytes` of the larger side,
    at every level; a larger one stays alone. Without a bound `graph` is a unit, whose loops (a
    ring) part nothing. The graph itself when nothing shares a bucket.
    """
    inside = partial(bucketed, most_bytes=most_bytes)
    ops = [with_regions(op, tuple(map(inside, op.regions))) for op in graph.ops]
    is_unit = most_bytes == UNLIMITED
    stretches = dict.fromkeys(ops, 0) if is_unit else _stretches(ops)
    buckets = _buckets(ops, most_bytes, stretches)
    return with_ops(graph, _ordered(ops, buckets) if buckets else ops)


def bucketed_outside(graph: Graph, *, across_loops: bool) -> Graph:
    """`graph` with the collectives that stand in no loop in buckets without a bound: those between
    two loops together, or all `across_loops`. The graph itself when nothing shares a bucket.
    """
    stretches = dict.fromkeys(graph.ops, 0) if across_loops else _stretches(graph.ops)
    buckets = _buckets(graph.ops, UNLIMITED, stretches)
    return with_ops(graph, _ordered(graph.ops, buckets)) if buckets else graph


SMALL_BYTES = 1 << 20
"""Of reductions that the compiler of a file joins. Inferred: up to 1 MiB a collective of trn2 is
one of latency (intra-node collectives page: the mesh algorithm); no page gives the size."""


def coalesced(graph: Graph) -> Graph:
    """`graph`, the program of one rank as a file has it, with small reduce_scatters that follow
    each other, without a product or loop between them, in one. The graph itself where there are
    none.

    Source: neuronx-cc coalesces ordered reduce-scatters (release notes of SDK 2.30).
    """
    ops = [with_regions(op, tuple(map(coalesced, op.regions))) for op in graph.ops]
    buckets = _buckets(ops, SMALL_BYTES, _between_products(ops), _is_scatter)
    return with_ops(graph, _ordered(ops, buckets) if buckets else ops)


def _is_scatter(op: Op) -> bool:
    return isinstance(op.attrs, ReduceScatterAttrs)


def _between_products(ops: Sequence[Op]) -> Mapping[Op, int]:
    """Per op, how many products and loops stand before it."""
    found: dict[Op, int] = {}
    passed = 0
    for op in ops:
        found[op] = passed
        passed += bool(op.regions) or OPS[op.name].kind is Kind.CONTRACTION
    return found


def _buckets(
    ops: Sequence[Op],
    most_bytes: int,
    stretches: Mapping[Op, int],
    shares: Callable[[Op], bool] = moves_state,
) -> list[list[Op]]:
    """What becomes one, in program order."""
    sharing = {op for op in ops if shares(op) and _can_share(op, most_bytes)}
    moments = dict(_moments(ops, sharing))
    if most_bytes == UNLIMITED:
        moments |= _last_moments(ops, sharing)
    filling: dict[Key, list[Op]] = {}
    found: list[list[Op]] = []
    for op in filter(sharing.__contains__, ops):
        key = (moments[op], stretches[op], *_kind(op))
        held = filling.setdefault(key, [])
        if sum(map(_bytes, held)) + _bytes(op) > most_bytes:
            found.append(held)
            filling[key] = held = []
        held.append(op)
    return [bucket for bucket in (*found, *filling.values()) if len(bucket) > 1]


def _can_share(op: Op, most_bytes: int) -> bool:
    """True for collectives of whole tensors that leave room for another."""
    if is_cross_stage(op) or op.attrs.parts:
        return False
    return bool(op.attrs.group_size > 1 and _bytes(op) < most_bytes)


def _kind(op: Op) -> Key:
    """What all of a bucket have in common besides their moment."""
    reduction = getattr(op.attrs, "reduction", "")
    return op.name, op.attrs.axes, op.attrs.group_size, reduction, op.result.type.dtype


def _bytes(op: Op) -> int:
    """Bytes of the larger side (the nccom convention)."""
    return max(op.operands[0].type.num_bytes, op.result.type.num_bytes)


def _moments(ops: Sequence[Op], sharing: Collection[Op]) -> Mapping[Op, int]:
    """Per op, how many of those that may share a bucket stand before it, one behind the other."""
    made: dict[Value, int] = {}
    found: dict[Op, int] = {}
    crossed = 0
    for op in ops:
        before = [made.get(v, 0) for v in op.operands]
        found[op] = max([*before, crossed if is_cross_stage(op) else 0], default=0)
        after = found[op] + (op in sharing)
        crossed = after if is_cross_stage(op) else crossed
        made.update(dict.fromkeys(op.results, after))
    return found


def _last_moments(ops: Sequence[Op], sharing: Collection[Op]) -> dict[Op, int]:
    """Other moments of reductions that no gather waits for: below 0, by how many such follow them.

    A bucket without a bound waits for all gradients of its unit, as PyTorch's does; of what is
    reduced last nothing else is needed, so that none of its bucket waits for another.
    """
    behind: dict[Value, int] = {}  # sharing ops on the longest way to the end
    gathers: set[Value] = set()  # that some gather waits for
    crossed, is_crossed_by_gather = 0, False
    found: dict[Op, int] = {}
    for op in reversed(ops):
        follow = max((behind.get(v, 0) for v in op.results), default=0)
        waited = any(v in gathers for v in op.results)
        if is_cross_stage(op):  # these keep their order
            follow, waited = max(follow, crossed), waited or is_crossed_by_gather
        if op in sharing:
            waited = waited or op.name not in REDUCTIONS_OF_RANKS
            follow += 1
            if not waited:
                found[op] = -follow
        if is_cross_stage(op):
            crossed, is_crossed_by_gather = follow, waited
        for value in op.operands:
            behind[value] = max(behind.get(value, 0), follow)
        gathers.update(op.operands if waited else ())
    return found


def _stretches(ops: Sequence[Op]) -> Mapping[Op, int]:
    """Per op, how many loops stand before the first op that reads its result: what different
    stretches of code need would only lie in memory while the loop between them runs.
    """
    found: dict[Op, int] = {}
    made: dict[Value, Op] = {}
    loops = 0
    for op in ops:
        for value in op.operands:
            if value in made:
                found.setdefault(made[value], loops)
        made.update(dict.fromkeys(op.results, op))
        loops += bool(op.regions)
    return {op: found.get(op, loops) for op in ops}


def _bucket(members: Sequence[Op]) -> list[Op]:
    """One collective for all of `members`, with what fills and empties it; it makes their
    results.
    """
    first = members[0]
    ops = [_flat(op) for op in members]
    ops.append(make_op("concatenate", [op.result for op in ops], ConcatenateAttrs(0)))
    attrs = replace(first.attrs, parts=tuple(map(_part, members)))
    if resized_dim(first) is not None:
        attrs = replace(attrs, dim=0)
    ops.append(make_op(first.name, (ops[-1].result,), attrs, loc=first.loc))
    whole, start = ops[-1].result, 0
    for op in members:
        end = start + op.result.type.num_elements
        ops.append(make_op("slice", (whole,), SliceAttrs((start,), (end,), (1,)), loc=op.loc))
        shaped = ReshapeAttrs(op.result.type.shape)
        ops.append(Op("reshape", (ops[-1].result,), op.results, shaped, (), op.loc))
        start = end
    return ops


def _flat(op: Op) -> Op:
    """What `op` sends, as one dim."""
    (source,) = op.operands
    return make_op("reshape", (source,), ReshapeAttrs((source.type.num_elements,)), loc=op.loc)


def _part(op: Op) -> tuple[int, int, int]:
    """What `op` sends as (outer, dim, inner)."""
    shape = op.operands[0].type.shape
    dim = resized_dim(op)
    if dim is None:
        return 1, math.prod(shape), 1
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _ordered(ops: Sequence[Op], buckets: Sequence[Sequence[Op]]) -> tuple[Op, ...]:
    """All ops with buckets in the place of their members: in program order, as far as what fills a
    bucket allows it. Moments rise from one bucket to the next, so that there is an order.
    """
    bucket_of = {op: number for number, bucket in enumerate(buckets) for op in bucket}
    units = [[op] for op in ops if op not in bucket_of] + [_bucket(b) for b in buckets]
    position = {op: at for at, op in enumerate(ops)}
    places = [position[op] for op in ops if op not in bucket_of]
    places += [position[bucket[-1]] for bucket in buckets]
    made = {v: n for n, unit in enumerate(units) for op in unit for v in op.results}
    unit_of = {op: n for n, unit in enumerate(units) for op in unit}
    before = [
        {made[v] for op in unit for v in op.operands if v in made} - {n}
        for n, unit in enumerate(units)
    ]
    for first, then in consecutive(ops):
        before[unit_of[then]].add(unit_of[first])
    order = topological(dict(enumerate(before)), places.__getitem__)
    assert len(order) == len(units), "buckets wait for each other"
    return tuple(op for n in order for op in units[n])
