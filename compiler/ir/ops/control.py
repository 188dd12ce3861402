"""Control: the counted loop, code of one rank among whole values, the barrier of rematerialisation,
and the user's sharding constraint.

A loop's operands, results, region inputs and region outputs correspond one to one (its carries);
one carry counts the iterations. Barriers and constraints are identities that only mean something
before partitioning and CSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.ops.rules import Types, define, mismatch
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op, TensorType


@dataclass(frozen=True, slots=True)
class LoopAttrs:
    """`trip` iterations; carry number `induction` is a scalar integer that counts 0 .. trip-1.

    What repeats in the body of a `whole` loop is not cut into functions of its own.
    """

    trip: int
    induction: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ShardingConstraintAttrs:
    """Per dim the mesh axes that shard it, major to minor; `open_dims` may be sharded further."""

    spec: tuple[tuple[str, ...], ...]
    open_dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManualRegionAttrs:
    """Region `number` of a module file: code of one rank among whole values. Its results are of
    types `results`, each laid out as in `specs`, per dim the mesh axes, major to minor.
    """

    number: int
    results: tuple[TensorType, ...]
    specs: tuple[tuple[tuple[str, ...], ...], ...]


def _infer_loop(
    attrs: LoopAttrs, *types: TensorType, regions: Sequence[Graph]
) -> tuple[TensorType, ...]:
    if len(regions) != 1:
        raise mismatch("one region", len(regions))
    _check_carries("region inputs", types, [v.type for v in regions[0].inputs])
    _check_carries("region outputs", types, [v.type for v in regions[0].outputs])
    if attrs.trip < 0:
        raise mismatch("a trip count of 0 or more", attrs.trip)
    if not 0 <= attrs.induction < len(types):
        raise mismatch(f"an induction carry below {len(types)}", attrs.induction)
    counter = types[attrs.induction]
    if counter.rank or not counter.dtype.is_integer:
        raise mismatch("a scalar integer induction carry", counter)
    return types


def _check_carries(what: str, types: Types, given: Types) -> None:
    """Refuse a region whose signature is not that of the carries."""
    if len(types) != len(given):
        raise mismatch(f"{len(types)} {what}", len(given))
    for i, (want, have) in enumerate(zip(types, given, strict=True)):
        if want != have:
            raise mismatch(f"{what} of the carries' types ({i}: {want})", have)


def _loop_flops(op: Op) -> int:
    body = sum(OPS[o.name].flops(o) for o in op.regions[0].ops)
    return int(op.attrs.trip) * body


def _loop_reference(op: Op, *carries: np.ndarray) -> tuple[np.ndarray, ...]:
    for _ in range(op.attrs.trip):
        carries = tuple(evaluate(op.regions[0], carries))
    return carries


def _infer_constraint(attrs: ShardingConstraintAttrs, operand: TensorType) -> TensorType:
    if len(attrs.spec) != operand.rank:
        raise mismatch(f"a spec of {operand.rank} dims for {operand}", attrs.spec)
    return operand


def _infer_region(
    attrs: ManualRegionAttrs, *types: TensorType, regions: Sequence[Graph]
) -> tuple[TensorType, ...]:
    ranks, given = [r.rank for r in attrs.results], [len(spec) for spec in attrs.specs]
    if ranks != given:
        raise mismatch(f"specs of {ranks} dims", given)
    return attrs.results


def _no_reference(op: Op, *args: np.ndarray) -> np.ndarray:
    """Code of one rank means nothing for whole values; this is a bug of the caller."""
    raise AssertionError(f"{op.name} {op.attrs.number} requires a partitioned graph")


define("loop", Kind.CONTROL, LoopAttrs, _infer_loop, _loop_reference, flops=_loop_flops)
define("manual_region", Kind.CONTROL, ManualRegionAttrs, _infer_region, _no_reference, pure=False)
define(
    "optimization_barrier",
    Kind.IDENTITY,
    None,
    lambda attrs, *types: types,
    lambda op, *args: args,
    pure=False,
)
define(
    "sharding_constraint",
    Kind.IDENTITY,
    ShardingConstraintAttrs,
    _infer_constraint,
    lambda op, x: x,
    elementwise=True,
    pure=False,
)
