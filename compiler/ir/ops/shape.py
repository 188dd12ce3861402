"""Shape ops: broadcast, reshape, transpose, slices, pad, concatenate, and the tensors that come
from nowhere.

None of them computes; `constant` and `iota` carry their result type, because they have no operand
to infer it from. Dynamic slices clamp their start so that the slice stays inside, as StableHLO
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from shardwright.compiler.ir.factors import (
    Factor,
    FactorKind,
    along,
    in_pairs,
    repeated,
    where_equal,
)
from shardwright.compiler.ir.opdef import LATER, Kind
from shardwright.compiler.ir.ops.rules import Types, check_dims, define, mismatch
from shardwright.compiler.ir.roles import DIM, DIMS, PLACES, SIZES, per_dim
from shardwright.compiler.ir.types import Op, TensorType, tensor_type


@dataclass(frozen=True, slots=True)
class BroadcastInDimAttrs:
    """Operand dim i becomes result dim `dims[i]`; size-1 dims and all other result dims repeat."""

    dims: tuple[int, ...] = field(metadata=PLACES)
    shape: tuple[int, ...] = field(metadata=SIZES)


@dataclass(frozen=True, slots=True)
class ReshapeAttrs:
    """The result shape; element order is row-major."""

    shape: tuple[int, ...] = field(metadata=SIZES)


@dataclass(frozen=True, slots=True)
class TransposeAttrs:
    """Result dim i is operand dim `permutation[i]`."""

    permutation: tuple[int, ...] = field(metadata=PLACES)


@dataclass(frozen=True, slots=True)
class SliceAttrs:
    """Per dim: first index, index after the last, step."""

    start: tuple[int, ...] = field(metadata=per_dim(0))
    limit: tuple[int, ...] = field(metadata=SIZES)
    stride: tuple[int, ...] = field(metadata=per_dim(1))

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, first: int, end: int) -> SliceAttrs:
        """All of a tensor of `shape`, but from `first` to `end` along one dim."""
        start = tuple(first if d == dim else 0 for d in range(len(shape)))
        limit = tuple(end if d == dim else n for d, n in enumerate(shape))
        return cls(start, limit, (1,) * len(shape))

    def moved(self, dim: int, by: int) -> SliceAttrs:
        """The same slice of what lies `by` elements further along a dim."""
        start, limit = (
            (*places[:dim], places[dim] + by, *places[dim + 1 :])
            for places in (self.start, self.limit)
        )
        return replace(self, start=start, limit=limit)


@dataclass(frozen=True, slots=True)
class ConcatenateAttrs:
    """The dim along which the operands follow each other."""

    dim: int = field(metadata=DIM)


@dataclass(frozen=True, slots=True)
class PadAttrs:
    """Per dim: padding before and after (negative crops), and between neighbouring elements."""

    low: tuple[int, ...] = field(metadata=per_dim(0))
    high: tuple[int, ...] = field(metadata=per_dim(0))
    interior: tuple[int, ...] = field(metadata=per_dim(0))

    @property
    def only_dim(self) -> int | None:
        """The one dim that it makes longer, at its ends; None when it does anything else."""
        dims = [d for d, ends in enumerate(zip(self.low, self.high, strict=True)) if any(ends)]
        if len(dims) != 1 or any(self.interior) or min(*self.low, *self.high) < 0:
            return None
        return dims[0]


@dataclass(frozen=True, slots=True)
class ReverseAttrs:
    """The dims whose order is reversed."""

    dims: tuple[int, ...] = field(metadata=DIMS)


@dataclass(frozen=True, slots=True)
class IotaAttrs:
    """A tensor of `type` that counts 0, 1, ... along `dim`."""

    dim: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class ConstantAttrs:
    """Little-endian row-major `data` of `type`; a splat stores one element."""

    data: bytes
    type: TensorType

    @classmethod
    def full(cls, number: Any, type: TensorType) -> ConstantAttrs:
        """`number` for every element of `type`."""
        return cls(np.asarray(number).astype(type.dtype.numpy).tobytes(), type)

    @property
    def is_splat(self) -> bool:
        """True when one stored element stands for all."""
        return len(self.data) == self.type.dtype.bytes

    @property
    def element(self) -> Any:
        """The first element: of a splat, all of them."""
        return np.frombuffer(self.data, self.type.dtype.numpy, 1)[0]

    def array(self) -> np.ndarray:
        """The values, read-only; a splat is a broadcast view of its element."""
        flat = np.frombuffer(self.data, dtype=self.type.dtype.numpy)
        if self.is_splat:
            return np.broadcast_to(flat[0], self.type.shape)
        return flat.reshape(self.type.shape)


@dataclass(frozen=True, slots=True)
class DynamicSliceAttrs:
    """Sizes of the slice; operands are the tensor and one scalar start per dim.

    `looked_up`: the slice is the window of a gather, whose start counts as out of bounds where it
    is clamped, once over the mesh axes `replicated`. Of other slices clamping is the meaning.
    """

    sizes: tuple[int, ...]
    looked_up: bool = field(default=False, metadata=LATER)
    replicated: tuple[str, ...] = field(default=(), metadata=LATER)


def _infer_broadcast(attrs: BroadcastInDimAttrs, operand: TensorType) -> TensorType:
    if len(attrs.dims) != operand.rank:
        raise mismatch(f"{operand.rank} dims for {operand}", attrs.dims)
    check_dims("dims", attrs.dims, len(attrs.shape))
    for i, d in enumerate(attrs.dims):
        if operand.shape[i] not in (1, attrs.shape[d]):
            raise mismatch(f"operand dim {i} of size 1 or {attrs.shape[d]}", operand.shape[i])
    return tensor_type(attrs.shape, operand.dtype)


def _broadcast_reference(op: Op, x: np.ndarray) -> np.ndarray:
    attrs = op.attrs
    placed = [1] * len(attrs.shape)
    for i, d in enumerate(attrs.dims):
        placed[d] = x.shape[i]
    order = sorted(range(x.ndim), key=lambda i: attrs.dims[i])
    return np.broadcast_to(x.transpose(order).reshape(placed), attrs.shape)


def _infer_reshape(attrs: ReshapeAttrs, operand: TensorType) -> TensorType:
    result = tensor_type(attrs.shape, operand.dtype)
    if result.num_elements != operand.num_elements or min(attrs.shape, default=1) < 0:
        raise mismatch(f"{operand.num_elements} elements", f"shape {attrs.shape}")
    return result


def _infer_transpose(attrs: TransposeAttrs, operand: TensorType) -> TensorType:
    if sorted(attrs.permutation) != list(range(operand.rank)):
        raise mismatch(f"a permutation of {operand.rank} dims", attrs.permutation)
    return tensor_type(tuple(operand.shape[d] for d in attrs.permutation), operand.dtype)


def _infer_slice(attrs: SliceAttrs, operand: TensorType) -> TensorType:
    for what in (attrs.start, attrs.limit, attrs.stride):
        if len(what) != operand.rank:
            raise mismatch(f"{operand.rank} starts, limits and strides", what)
    bounds = list(zip(attrs.start, attrs.limit, attrs.stride, strict=True))
    for size, (start, limit, stride) in zip(operand.shape, bounds, strict=True):
        if not 0 <= start <= limit <= size or stride < 1:
            raise mismatch(f"bounds inside of {size}", f"{start}:{limit}:{stride}")
    shape = tuple((limit - start + stride - 1) // stride for start, limit, stride in bounds)
    return tensor_type(shape, operand.dtype)


def _slice_reference(op: Op, x: np.ndarray) -> np.ndarray:
    attrs = op.attrs
    return x[tuple(map(slice, attrs.start, attrs.limit, attrs.stride))]


def _infer_concatenate(attrs: ConcatenateAttrs, *types: TensorType) -> TensorType:
    if not types:
        raise mismatch("at least one operand", 0)
    first, dim = types[0], attrs.dim
    if not 0 <= dim < first.rank:
        raise mismatch(f"a dim below rank {first.rank}", dim)
    for t in types:
        if t.resized(dim, 0) is not first.resized(dim, 0):
            raise mismatch(f"operands that differ from {first} only in dim {dim}", t)
    return first.resized(dim, sum(t.shape[dim] for t in types))


def _infer_pad(attrs: PadAttrs, operand: TensorType, value: TensorType) -> TensorType:
    if value != tensor_type((), operand.dtype):
        raise mismatch(f"a scalar padding value of {operand.dtype.value}", value)
    for what in (attrs.low, attrs.high, attrs.interior):
        if len(what) != operand.rank:
            raise mismatch(f"{operand.rank} paddings", what)
    rows = zip(operand.shape, attrs.low, attrs.high, attrs.interior, strict=True)
    shape = tuple(n + max(n - 1, 0) * inner + low + high for n, low, high, inner in rows)
    if min(shape, default=0) < 0 or min(attrs.interior, default=0) < 0:
        raise mismatch("padding that leaves no dim below 0", shape)
    return tensor_type(shape, operand.dtype)


def _pad_reference(op: Op, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    return pad_array(x, value, op.attrs.low, op.attrs.high, op.attrs.interior)


def pad_array(
    x: np.ndarray, value: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int]
) -> np.ndarray:
    """`x` with `value` around it and between its elements; a negative padding crops."""
    rows = zip(x.shape, low, high, interior, strict=True)
    shape = [n + max(n - 1, 0) * inner + before + after for n, before, after, inner in rows]
    out = np.full(shape, value, dtype=x.dtype)
    target, source = [], []
    for d, n in enumerate(x.shape):
        step = interior[d] + 1
        first = max(0, -(low[d] // step)) if low[d] < 0 else 0
        last = min(n, -((low[d] - shape[d]) // step))
        begin = low[d] + first * step
        target.append(slice(begin, begin + (last - first) * step, step))
        source.append(slice(first, last))
        if last <= first:
            return out
    out[tuple(target)] = x[tuple(source)]
    return out


def _infer_reverse(attrs: ReverseAttrs, operand: TensorType) -> TensorType:
    check_dims("dims", attrs.dims, operand.rank)
    return operand


def _infer_iota(attrs: IotaAttrs) -> TensorType:
    if not 0 <= attrs.dim < attrs.type.rank:
        raise mismatch(f"a dim below rank {attrs.type.rank}", attrs.dim)
    return attrs.type


def _iota_reference(op: Op) -> np.ndarray:
    dim, shape = op.attrs.dim, op.attrs.type.shape
    column = [n if d == dim else 1 for d, n in enumerate(shape)]
    count = np.arange(shape[dim]).astype(op.attrs.type.dtype.numpy)
    return np.broadcast_to(count.reshape(column), shape)


def _infer_constant(attrs: ConstantAttrs) -> TensorType:
    width = attrs.type.dtype.bytes
    if len(attrs.data) not in (width, width * attrs.type.num_elements):
        need = f"{attrs.type.num_bytes} bytes for {attrs.type}, or one element"
        raise mismatch(need, f"{len(attrs.data)} bytes")
    return attrs.type


def _check_starts(operand: TensorType, starts: Types) -> None:
    """Refuse start operands that are not one integer scalar per dim."""
    if len(starts) != operand.rank:
        raise mismatch(f"{operand.rank} start indices", len(starts))
    for start in starts:
        if start.rank or not start.dtype.is_integer:
            raise mismatch("scalar integer start indices", start)


def infer_dynamic_slice(
    attrs: DynamicSliceAttrs, operand: TensorType, *starts: TensorType
) -> TensorType:
    """Any attributes with `sizes` do."""
    _check_starts(operand, starts)
    fits = len(attrs.sizes) == operand.rank
    if not fits or any(not 0 <= s <= n for s, n in zip(attrs.sizes, operand.shape, strict=True)):
        raise mismatch(f"sizes within {operand.shape}", attrs.sizes)
    return tensor_type(attrs.sizes, operand.dtype)


def infer_dynamic_update(attrs: None, *types: TensorType) -> TensorType:
    """The type of what is written to."""
    if len(types) < 2:
        raise mismatch("2 or more operands", len(types))
    operand, update, *starts = types
    _check_starts(operand, starts)
    fits = update.rank == operand.rank and update.dtype is operand.dtype
    if not fits or any(u > n for u, n in zip(update.shape, operand.shape, strict=True)):
        raise mismatch(f"an update within {operand}", update)
    return operand


def _window(starts: Sequence[np.ndarray], sizes: Sequence[int], shape: Sequence[int]) -> Any:
    """The index of a slice of `sizes` whose start is clamped so that it stays inside of `shape`."""
    begin = [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(b, b + k) for b, k in zip(begin, sizes, strict=True))


def sliced_at(op: Op, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    """The meaning of `dynamic_slice`."""
    return np.asarray(x[_window(starts, op.attrs.sizes, x.shape)])


def updated_at(op: Op, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    """The meaning of `dynamic_update_slice`."""
    out = np.array(x)
    out[_window(starts, update.shape, out.shape)] = update
    return out


def _of_limit(op: Op, shape: tuple[int, ...]) -> Any:
    """A part that begins where it did."""
    rows = zip(op.attrs.limit, op.attrs.stride, op.result.type.shape, shape, strict=True)
    limit = tuple(end + (after - before) * step for end, step, before, after in rows)
    return replace(op.attrs, limit=limit)


def _of_type(op: Op, shape: tuple[int, ...]) -> Any:
    return replace(op.attrs, type=tensor_type(shape, op.attrs.type.dtype))


def _spread(op: Op) -> list[Factor]:
    """Dims that are new or stretched repeat."""
    a, shape = op.attrs, op.operands[0].type.shape
    kept = [i for i, d in enumerate(a.dims) if shape[i] == a.shape[d]]
    places = [a.dims[i] for i in kept]
    return in_pairs(0, kept, 1, places) + repeated(
        1, (d for d in range(len(a.shape)) if d not in places)
    )


def _regrouped(op: Op) -> list[Factor]:
    """Dims that begin at the same element stride from the front; the smaller is the major part of
    the larger. Dims of size 1 (one sample) are told apart as long as all in front is equal.
    """
    x, y = op.operands[0].type.shape, op.attrs.shape
    left, right = _starts(x), _starts(y)
    pairs = [(left[p], right[p]) for p in left if p in right]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(x, y, strict=False))
    ones = [along((0, 1), d) for d, (size, _) in enumerate(same) if size == 1]
    return [
        Factor(((0, i), (1, j)), FactorKind.PASSED if x[i] == y[j] else FactorKind.LINKED)
        for i, j in pairs
        if _nested(x[i], y[j])
    ] + ones


def _starts(shape: Sequence[int]) -> dict[int, int]:
    """Product of the dims in front -> dim; of dims with equal product the one larger than 1."""
    starts: dict[int, int] = {}
    front = 1
    for dim, size in enumerate(shape):
        if front not in starts or size > 1:
            starts[front] = dim
        front *= size
    return starts


def _nested(a: int, b: int) -> bool:
    """True when one size is a multiple of the other."""
    return a == b or (min(a, b) > 1 and max(a, b) % min(a, b) == 0)


def _permuted(op: Op) -> list[Factor]:
    order = op.attrs.permutation
    return in_pairs(0, order, 1, range(len(order)))


def _taken(op: Op) -> list[Factor]:
    """Dims of which all is taken."""
    return where_equal(op, 0, len(op.operands))


def _joined(op: Op) -> list[Factor]:
    dims = (d for d in range(op.result.type.rank) if d != op.attrs.dim)
    return [along(range(len(op.operands) + 1), d) for d in dims]


def _padded(op: Op) -> list[Factor]:
    a = op.attrs
    rows = enumerate(zip(a.low, a.high, a.interior, strict=True))
    return [along((0, 2), d) for d, row in rows if not any(row)]


def _in_order(op: Op) -> list[Factor]:
    """Dims that are not reversed."""
    return [along((0, 1), d) for d in range(op.result.type.rank) if d not in op.attrs.dims]


def _updated(op: Op) -> list[Factor]:
    """Dims that the update has whole; of others the result has those of the operand."""
    result, rank = len(op.operands), op.result.type.rank
    whole = {f.of(1) for f in where_equal(op, 1, result)}
    return [
        along((0, 1, result), d) if d in whole else along((0, result), d, FactorKind.LINKED)
        for d in range(rank)
    ]


def _alike(op: Op) -> list[Factor]:
    """A constant of one number."""
    return repeated(0, range(op.result.type.rank)) if op.attrs.is_splat else []


def _counted(op: Op) -> list[Factor]:
    """What counts along one dim is the same along the others."""
    return repeated(0, (d for d in range(op.result.type.rank) if d != op.attrs.dim))


def _of_shape(op: Op, shape: tuple[int, ...]) -> Any:
    return replace(op.attrs, shape=shape)


define(
    "broadcast_in_dim",
    Kind.VIEW,
    BroadcastInDimAttrs,
    _infer_broadcast,
    _broadcast_reference,
    factors=_spread,
    resize=_of_shape,
)
define(
    "reshape",
    Kind.VIEW,
    ReshapeAttrs,
    _infer_reshape,
    lambda op, x: x.reshape(op.attrs.shape),
    factors=_regrouped,
    resize=_of_shape,
)
define(
    "transpose",
    Kind.VIEW,
    TransposeAttrs,
    _infer_transpose,
    lambda op, x: x.transpose(op.attrs.permutation),
    factors=_permuted,
)
define(
    "slice",
    Kind.PART,
    SliceAttrs,
    _infer_slice,
    _slice_reference,
    factors=_taken,
    resize=_of_limit,
)
define(
    "concatenate",
    Kind.JOIN,
    ConcatenateAttrs,
    _infer_concatenate,
    lambda op, *parts: np.concatenate(parts, axis=op.attrs.dim),
    factors=_joined,
)
define("pad", Kind.JOIN, PadAttrs, _infer_pad, _pad_reference, factors=_padded)
define(
    "reverse",
    Kind.PART,
    ReverseAttrs,
    _infer_reverse,
    lambda op, x: np.flip(x, op.attrs.dims),
    factors=_in_order,
)
define(
    "iota",
    Kind.LITERAL,
    IotaAttrs,
    _infer_iota,
    _iota_reference,
    factors=_counted,
    resize=_of_type,
)
define(
    "constant",
    Kind.LITERAL,
    ConstantAttrs,
    _infer_constant,
    lambda op: op.attrs.array(),
    factors=_alike,
    resize=_of_type,
)
define(
    "dynamic_slice",
    Kind.PART,
    DynamicSliceAttrs,
    infer_dynamic_slice,
    sliced_at,
    factors=_taken,
    resize=lambda op, shape: replace(op.attrs, sizes=shape),
)
define(
    "dynamic_update_slice", Kind.UPDATE, None, infer_dynamic_update, updated_at, factors=_updated
)
