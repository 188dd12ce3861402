"""Collectives and the rank's coordinate, over symbolic mesh axes.

With `group_size` 1 types are global and nothing changes (the partitioned graph); the localizer
sets the real size, and then types are per core. One rank cannot compute them: the multi-rank
runner drives them through `compiler.ir.reference.steps` and the `collectives` package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import FIRST, Kind, OpDef, define
from shardwright.compiler.ir.ops.reduce import check_reduction
from shardwright.compiler.ir.ops.rules import (
    Regions,
    Types,
    check_arity,
    check_attrs,
    mismatch,
    no_flops,
)
from shardwright.compiler.ir.reference import RANK_OPS
from shardwright.compiler.ir.types import Op, TensorType, tensor_type

COLLECTIVES = tuple(sorted(RANK_OPS - {"axis_index"}))

Parts = tuple[tuple[int, int, int], ...]
"""A bucket: its operand is flat and holds the operands of several collectives one behind the other,
each of (outer, dim, inner) elements; so does the result. Every one moves along its own middle dim.
"""


@dataclass(frozen=True, slots=True)
class AllGatherAttrs:
    """Concatenate the group's shards along `dim`, in group order.

    A collective that `yields` gives way to those that do not (`lower/tokens.py`).
    """

    dim: int
    axes: tuple[str, ...]
    group_size: int = 1
    parts: Parts = ()
    yields: bool = False


@dataclass(frozen=True, slots=True)
class ReduceScatterAttrs:
    """Reduce over the group, then keep this rank's slice of `dim`."""

    dim: int
    axes: tuple[str, ...]
    reduction: str = "add"
    group_size: int = 1
    parts: Parts = ()
    yields: bool = False


@dataclass(frozen=True, slots=True)
class AllReduceAttrs:
    """Reduce over the group; every rank gets the whole result."""

    axes: tuple[str, ...]
    reduction: str = "add"
    group_size: int = 1
    parts: Parts = ()
    yields: bool = False


@dataclass(frozen=True, slots=True)
class AllToAllAttrs:
    """Split `split_dim` over the group and concatenate what arrives along `concat_dim`."""

    split_dim: int
    concat_dim: int
    axes: tuple[str, ...]
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class CollectivePermuteAttrs:
    """Rank `s` of the group sends its whole operand to rank `t`, for every (s, t) of `pairs`.

    Every rank sends once and receives once, so that the result is never zeros.
    """

    axes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class AllSliceAttrs:
    """Keep this rank's slice of `dim`; no traffic."""

    dim: int
    axes: tuple[str, ...]
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class AxisIndexAttrs:
    """This rank's row-major position over `axes`, an i32 scalar."""

    axes: tuple[str, ...]


def _scaled(name: str, operand: TensorType, dim: int, group_size: int, grow: bool) -> TensorType:
    """`operand` with `dim` multiplied or divided by the group size."""
    if not 0 <= dim < operand.rank:
        raise mismatch(name, f"a dim below rank {operand.rank}", dim)
    if group_size < 1:
        raise mismatch(name, "a group size of 1 or more", group_size)
    size = operand.shape[dim]
    if not grow and size % group_size:
        raise mismatch(name, f"dim {dim} divisible by the group of {group_size}", size)
    new = size * group_size if grow else size // group_size
    return tensor_type((*operand.shape[:dim], new, *operand.shape[dim + 1 :]), operand.dtype)


def _check(name: str, types: Types, attrs: Any, kind: type) -> TensorType:
    """The operand, after the checks every collective shares."""
    check_attrs(name, attrs, kind)
    check_arity(name, types, 1)
    if not attrs.axes or len(set(attrs.axes)) != len(attrs.axes):
        raise mismatch(name, "distinct mesh axes", attrs.axes)
    parts = getattr(attrs, "parts", ())
    if parts and types[0].shape != (sum(map(math.prod, parts)),):
        raise mismatch(name, f"a flat operand of the parts {parts}", types[0])
    return types[0]


def _infer_all_gather(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("all_gather", types, attrs, AllGatherAttrs)
    return (_scaled("all_gather", operand, attrs.dim, attrs.group_size, True),)


def _infer_all_slice(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("all_slice", types, attrs, AllSliceAttrs)
    return (_scaled("all_slice", operand, attrs.dim, attrs.group_size, False),)


def _infer_reduce_scatter(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("reduce_scatter", types, attrs, ReduceScatterAttrs)
    check_reduction("reduce_scatter", attrs.reduction, operand.dtype)
    return (_scaled("reduce_scatter", operand, attrs.dim, attrs.group_size, False),)


def _infer_all_reduce(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("all_reduce", types, attrs, AllReduceAttrs)
    check_reduction("all_reduce", attrs.reduction, operand.dtype)
    return (operand,)


def _infer_all_to_all(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("all_to_all", types, attrs, AllToAllAttrs)
    split = _scaled("all_to_all", operand, attrs.split_dim, attrs.group_size, False)
    return (_scaled("all_to_all", split, attrs.concat_dim, attrs.group_size, True),)


def _infer_collective_permute(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    operand = _check("collective_permute", types, attrs, CollectivePermuteAttrs)
    size = attrs.group_size if attrs.group_size > 1 else len(attrs.pairs)
    for side in zip(*attrs.pairs, strict=True):
        if sorted(side) != list(range(size)):
            needed = f"every rank below {size} once as source and once as target"
            raise mismatch("collective_permute", needed, attrs.pairs)
    return (operand,)


def _infer_axis_index(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs("axis_index", attrs, AxisIndexAttrs)
    check_arity("axis_index", types, 0)
    return (tensor_type((), DType.I32),)


def _reduction_flops(op: Op) -> int:
    """A reduction over n ranks adds n-1 times per operand element, n-1 of n of them elsewhere."""
    size = int(op.attrs.group_size)
    return op.operands[0].type.num_elements * (size - 1) // max(size, 1)


def _no_reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """A rank alone has only its own shard; this is a bug of the caller."""
    raise AssertionError(
        f"{op.name} over {op.attrs.axes} needs all ranks: drive it with compiler.ir.reference.steps"
    )


def _collective(
    name: str, attrs: type, infer: Any, kind: Kind = Kind.COLLECTIVE, combines: bool = False
) -> None:
    define(
        OpDef(
            name=name,
            kind=kind,
            combines=combines,
            attrs=attrs,
            infer=infer,
            flops=_reduction_flops if combines else no_flops,
            reference=_no_reference,
            linear=(FIRST,),
            pure=False,
        )
    )


_collective("all_gather", AllGatherAttrs, _infer_all_gather)
_collective("reduce_scatter", ReduceScatterAttrs, _infer_reduce_scatter, combines=True)
_collective("all_reduce", AllReduceAttrs, _infer_all_reduce, combines=True)
_collective("all_to_all", AllToAllAttrs, _infer_all_to_all)
_collective("collective_permute", CollectivePermuteAttrs, _infer_collective_permute)
_collective("all_slice", AllSliceAttrs, _infer_all_slice, Kind.RANK)
define(
    OpDef(
        name="axis_index",
        kind=Kind.RANK,
        attrs=AxisIndexAttrs,
        infer=_infer_axis_index,
        flops=no_flops,
        reference=_no_reference,
    )
)
