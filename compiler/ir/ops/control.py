"""Control: the counted loop, the barrier of rematerialisation, and the user's sharding constraint.

A loop's operands, results, region inputs and region outputs correspond one to one (its carries);
one carry counts the iterations. Barriers and constraints are identities that only mean something
before partitioning and CSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.ir.opdef import OPS, Kind, OpDef, define
from shardwright.compiler.ir.ops.rules import (
    Regions,
    Types,
    check_arity,
    check_attrs,
    mismatch,
    no_flops,
)
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Op, TensorType


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


def _infer_loop(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs("loop", attrs, LoopAttrs)
    if len(regions) != 1:
        raise mismatch("loop", "one region", len(regions))
    _check_carries("region inputs", types, [v.type for v in regions[0].inputs])
    _check_carries("region outputs", types, [v.type for v in regions[0].outputs])
    if attrs.trip < 0:
        raise mismatch("loop", "a trip count of 0 or more", attrs.trip)
    if not 0 <= attrs.induction < len(types):
        raise mismatch("loop", f"an induction carry below {len(types)}", attrs.induction)
    counter = types[attrs.induction]
    if counter.rank or not counter.dtype.is_integer:
        raise mismatch("loop", "a scalar integer induction carry", counter)
    return tuple(types)


def _check_carries(what: str, types: Types, given: Types) -> None:
    """Refuse a region whose signature is not that of the carries."""
    if len(types) != len(given):
        raise mismatch("loop", f"{len(types)} {what}", len(given))
    for i, (want, have) in enumerate(zip(types, given, strict=True)):
        if want != have:
            raise mismatch("loop", f"{what} of the carries' types ({i}: {want})", have)


def _loop_flops(op: Op) -> int:
    body = sum(OPS[o.name].flops(o) for o in op.regions[0].ops)
    return int(op.attrs.trip) * body


def _loop_reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    carries = list(args)
    for _ in range(op.attrs.trip):
        carries = evaluate(op.regions[0], carries)
    return tuple(carries)


def _infer_barrier(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    return tuple(types)


def _infer_constraint(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs("sharding_constraint", attrs, ShardingConstraintAttrs)
    check_arity("sharding_constraint", types, 1)
    if len(attrs.spec) != types[0].rank:
        raise mismatch(
            "sharding_constraint", f"a spec of {types[0].rank} dims for {types[0]}", attrs.spec
        )
    return (types[0],)


def _identity_reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(args)


define(
    OpDef(
        name="loop",
        kind=Kind.CONTROL,
        attrs=LoopAttrs,
        infer=_infer_loop,
        flops=_loop_flops,
        reference=_loop_reference,
    )
)
define(
    OpDef(
        name="optimization_barrier",
        kind=Kind.IDENTITY,
        attrs=None,
        infer=_infer_barrier,
        flops=no_flops,
        reference=_identity_reference,
        pure=False,
    )
)
define(
    OpDef(
        name="sharding_constraint",
        kind=Kind.IDENTITY,
        attrs=ShardingConstraintAttrs,
        infer=_infer_constraint,
        flops=no_flops,
        reference=_identity_reference,
        elementwise=True,
        pure=False,
    )
)
