"""Collectives and the rank's coordinate, over symbolic mesh axes.

With `group_size` 1 types are global and nothing changes (the partitioned graph); the localizer
sets the real size, and then types are per core. One rank cannot compute them: the multi-rank
runner drives them through `compiler.ir.reference.steps` and the `collectives` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import FIRST, Kind
from shardwright.compiler.ir.ops.reduce import check_reduction
from shardwright.compiler.ir.ops.rules import define, mismatch
from shardwright.compiler.ir.types import Op, TensorType, tensor_type

Parts = tuple[tuple[int, int, int], ...]
"""A bucket: its operand is flat and holds the operands of several collectives one behind the other,
each of (outer, dim, inner) elements; so does the result. Every one moves along its own middle dim.
"""


@dataclass(frozen=True, slots=True)
class AllGatherAttrs:
    """Concatenate the group's shards along `dim`, in group order.

    A collective of `low_priority` gives way to the others (`lower/tokens.py`).
    """

    dim: int
    axes: tuple[str, ...]
    group_size: int = 1
    parts: Parts = ()
    low_priority: bool = False


@dataclass(frozen=True, slots=True)
class ReduceScatterAttrs:
    """Reduce over the group, then keep this rank's slice of `dim`."""

    dim: int
    axes: tuple[str, ...]
    reduction: str = "add"
    group_size: int = 1
    parts: Parts = ()
    low_priority: bool = False


@dataclass(frozen=True, slots=True)
class AllReduceAttrs:
    """Reduce over the group; every rank gets the whole result."""

    axes: tuple[str, ...]
    reduction: str = "add"
    group_size: int = 1
    parts: Parts = ()
    low_priority: bool = False


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


def _scaled(operand: TensorType, dim: int, group_size: int, grow: bool) -> TensorType:
    """`operand` with `dim` multiplied or divided by the group size."""
    if not 0 <= dim < operand.rank:
        raise mismatch(f"a dim below rank {operand.rank}", dim)
    if group_size < 1:
        raise mismatch("a group size of 1 or more", group_size)
    size = operand.shape[dim]
    if not grow and size % group_size:
        raise mismatch(f"dim {dim} divisible by the group of {group_size}", size)
    return operand.resized(dim, size * group_size if grow else size // group_size)


def _infer(
    attrs: Any, operand: TensorType, *, result: Callable[[Any, TensorType], TensorType]
) -> TensorType:
    """The result after the checks every collective shares."""
    if not attrs.axes or len(set(attrs.axes)) != len(attrs.axes):
        raise mismatch("distinct mesh axes", attrs.axes)
    parts = getattr(attrs, "parts", ())
    if parts and operand.shape != (sum(map(math.prod, parts)),):
        raise mismatch(f"a flat operand of the parts {parts}", operand)
    if (kind := getattr(attrs, "reduction", None)) is not None:
        check_reduction(kind, operand.dtype)
    return result(attrs, operand)


def _gathered(attrs: AllGatherAttrs, operand: TensorType) -> TensorType:
    return _scaled(operand, attrs.dim, attrs.group_size, True)


def _sliced(attrs: AllSliceAttrs | ReduceScatterAttrs, operand: TensorType) -> TensorType:
    return _scaled(operand, attrs.dim, attrs.group_size, False)


def _exchanged(attrs: AllToAllAttrs, operand: TensorType) -> TensorType:
    split = _scaled(operand, attrs.split_dim, attrs.group_size, False)
    return _scaled(split, attrs.concat_dim, attrs.group_size, True)


def _permuted(attrs: CollectivePermuteAttrs, operand: TensorType) -> TensorType:
    size = attrs.group_size if attrs.group_size > 1 else len(attrs.pairs)
    for side in zip(*attrs.pairs, strict=True):
        if sorted(side) != list(range(size)):
            needed = f"every rank below {size} once as source and once as target"
            raise mismatch(needed, attrs.pairs)
    return operand


def _reduction_flops(op: Op) -> int:
    """A reduction over n ranks adds n-1 times per operand element, n-1 of n of them elsewhere."""
    size = int(op.attrs.group_size)
    return op.operands[0].type.num_elements * (size - 1) // max(size, 1)


def _no_reference(op: Op, *args: np.ndarray) -> np.ndarray:
    """A rank alone has only its own shard; this is a bug of the caller."""
    raise AssertionError(
        f"{op.name} over {op.attrs.axes} needs all ranks: drive it with compiler.ir.reference.steps"
    )


def _collective(
    name: str,
    attrs: type,
    result: Callable[[Any, TensorType], TensorType],
    kind: Kind = Kind.COLLECTIVE,
    **facts: Any,
) -> None:
    rule = partial(_infer, result=result)
    define(name, kind, attrs, rule, _no_reference, pure=False, linear=(FIRST,), **facts)


_COMBINING: dict[str, Any] = {"combines": True, "flops": _reduction_flops}
_collective("all_gather", AllGatherAttrs, _gathered)
_collective("reduce_scatter", ReduceScatterAttrs, _sliced, **_COMBINING)
_collective("all_reduce", AllReduceAttrs, lambda attrs, operand: operand, **_COMBINING)
_collective("all_to_all", AllToAllAttrs, _exchanged)
_collective("collective_permute", CollectivePermuteAttrs, _permuted)
_collective("all_slice", AllSliceAttrs, _sliced, Kind.RANK)
define(
    "axis_index", Kind.RANK, AxisIndexAttrs, lambda attrs: tensor_type((), DType.I32), _no_reference
)
