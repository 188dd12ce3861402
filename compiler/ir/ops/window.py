"""Sliding windows: `unfold` (windows as dims of their own), `reduce_window`, `select_and_scatter`.

`unfold` is what the compiler makes of the others: a view that reads elements as often as windows
hold them; no front end writes it. As for `reduce`, the start value is the identity of the
reduction, and what pads a `reduce_window` is that identity too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType, strided
from shardwright.compiler.ir.factors import Factor, along
from shardwright.compiler.ir.opdef import FIRST, SECOND, Kind
from shardwright.compiler.ir.ops.reduce import check_reduction, identity, reduce_array
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.ops.shape import pad_array
from shardwright.compiler.ir.types import Op, TensorType, tensor_type

Dims = tuple[int, ...]

SELECTIONS = {"GE": "max", "GT": "max", "LE": "min", "LT": "min"}
"""Reduction whose result a window's selected element equals, per comparison (selected, current)."""


@dataclass(frozen=True, slots=True)
class UnfoldAttrs:
    """Windows along `dims`, one entry of every field per dim.

    Dim `dims[i]` becomes `counts[i]` windows, and a new dim at the end holds the `sizes[i]`
    elements of each: element k of window o is operand element starts + o * strides + k * dilations.
    `padded` windows may leave the operand, where they read zeros.
    """

    dims: Dims
    starts: Dims
    counts: Dims
    strides: Dims
    sizes: Dims
    dilations: Dims
    padded: bool = False

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(dim, first element, end) of all windows along each dim."""
        steps = zip(self.counts, self.strides, self.sizes, self.dilations, strict=True)
        for d, start, (count, stride, size, gap) in zip(self.dims, self.starts, steps, strict=True):
            yield d, start, start + (count - 1) * stride + (size - 1) * gap + 1


@dataclass(frozen=True, slots=True)
class ReduceWindowAttrs:
    """`kind` as in `ReduceAttrs`; per dim of the operand: window size, stride and padding."""

    kind: str
    sizes: Dims
    strides: Dims
    low: Dims
    high: Dims


@dataclass(frozen=True, slots=True)
class SelectAndScatterAttrs:
    """Per window of the first operand, the element that `select` keeps gets the window's source.

    `select` is the direction of compare(selected, current) that keeps the selected element: GE
    takes the first maximum, GT the last, LE and LT the same of minima. Sources add up. Padding is
    never selected.
    """

    select: str
    sizes: Dims
    strides: Dims
    low: Dims
    high: Dims


def window_count(length: int, size: int, stride: int, dilation: int = 1) -> int:
    """Windows of `size` elements that fit in `length`."""
    span = (size - 1) * dilation + 1
    return max(0, (length - span) // stride + 1) if size else 0


def window_array(
    x: np.ndarray,
    dims: Dims,
    starts: Dims,
    counts: Dims,
    strides: Dims,
    sizes: Dims,
    dilations: Dims,
) -> np.ndarray:
    """The windows of `x` as `UnfoldAttrs` describes them, a read-only view."""
    shape, step = list(x.shape), list(x.strides)
    begin = [0] * x.ndim
    for d, start, count, stride in zip(dims, starts, counts, strides, strict=True):
        shape[d], step[d], begin[d] = count, x.strides[d] * stride, start
    inner = tuple(x.strides[d] * k for d, k in zip(dims, dilations, strict=True))
    first = x[tuple(slice(b, None) for b in begin)]
    return strided(first, (*shape, *sizes), (*step, *inner))


def _infer_unfold(attrs: UnfoldAttrs, operand: TensorType) -> TensorType:
    check_dims("dims", attrs.dims, operand.rank)
    shape = list(operand.shape)
    steps = zip(attrs.counts, attrs.sizes, attrs.strides, attrs.dilations, strict=True)
    for (d, start, end), (count, size, *gaps) in zip(attrs.spans(), steps, strict=True):
        leaves = start < 0 or end > shape[d]
        if min(count, size, *gaps) < 1 or (leaves and not attrs.padded):
            raise mismatch(f"windows inside of {shape[d]}", (start, count, size))
        shape[d] = count
    return tensor_type((*shape, *attrs.sizes), operand.dtype)


def _unfold_reference(op: Op, x: np.ndarray) -> np.ndarray:
    a, starts = op.attrs, op.attrs.starts
    if a.padded:
        sides = [(0, 0)] * x.ndim
        for d, start, end in a.spans():
            sides[d] = (max(0, -start), max(0, end - x.shape[d]))
        x = np.pad(x, sides)
        starts = tuple(max(0, s) for s in a.starts)
    return np.array(window_array(x, a.dims, starts, a.counts, a.strides, a.sizes, a.dilations))


def _windowed(operand: TensorType, attrs: Any) -> tuple[int, ...]:
    """Windows per dim. Refuses attributes that do not fit the operand."""
    per_dim = (attrs.sizes, attrs.strides, attrs.low, attrs.high)
    if any(len(given) != operand.rank for given in per_dim):
        raise mismatch(f"{operand.rank} window sizes, strides and paddings", per_dim)
    if min((*attrs.sizes, *attrs.strides), default=1) < 1:
        raise mismatch("window sizes and strides of 1 or more", per_dim)
    rows = zip(operand.shape, *per_dim, strict=True)
    return tuple(window_count(n + low + high, size, step) for n, size, step, low, high in rows)


def _infer_reduce(attrs: ReduceWindowAttrs, operand: TensorType) -> TensorType:
    check_reduction(attrs.kind, operand.dtype)
    return tensor_type(_windowed(operand, attrs), operand.dtype)


def _padded_windows(x: np.ndarray, value: Any, attrs: Any, counts: Dims) -> np.ndarray:
    """All windows of the padded array: [*counts, *sizes]."""
    none = (0,) * x.ndim
    padded = pad_array(x, value, attrs.low, attrs.high, none)
    ones = (1,) * x.ndim
    dims = tuple(range(x.ndim))
    return window_array(padded, dims, none, counts, attrs.strides, attrs.sizes, ones)


def _reduce_reference(op: Op, operand: np.ndarray) -> np.ndarray:
    attrs, x = op.attrs, widen(operand)
    start = identity(attrs.kind, DType.from_numpy(x.dtype))[()]
    windows = _padded_windows(x, start, attrs, op.result.type.shape)
    folded = reduce_array(attrs.kind, windows, tuple(range(x.ndim, 2 * x.ndim)))
    return folded.astype(operand.dtype, copy=False)


def _infer_scatter(
    attrs: SelectAndScatterAttrs, operand: TensorType, source: TensorType
) -> TensorType:
    if attrs.select not in SELECTIONS:
        raise mismatch(f"a selection of {' '.join(SELECTIONS)}", attrs.select)
    expected = tensor_type(_windowed(operand, attrs), operand.dtype)
    if source != expected:
        raise mismatch(f"a source of {expected}", source)
    return operand


def _scatter_reference(op: Op, operand: np.ndarray, source: np.ndarray) -> np.ndarray:
    attrs, x, source = op.attrs, widen(operand), widen(source)
    kind = SELECTIONS[attrs.select]
    worst = identity(kind, DType.from_numpy(x.dtype))[()]
    windows = _padded_windows(x, worst, attrs, source.shape)
    inside = _padded_windows(np.ones(x.shape, bool), False, attrs, source.shape)
    dims = tuple(range(x.ndim, 2 * x.ndim))
    best = reduce_array(kind, windows, dims).reshape(*source.shape, *(1,) * x.ndim)
    hit = ((windows == best) & inside).reshape(*source.shape, -1)
    if "E" not in attrs.select:
        hit = hit[..., ::-1]
    first = np.argmax(hit, axis=-1)
    if "E" not in attrs.select:
        first = hit.shape[-1] - 1 - first
    before = tuple(max(low, 0) for low in attrs.low)
    room = zip(x.shape, before, attrs.high, strict=True)
    out = np.zeros([n + low + max(high, 0) for n, low, high in room], x.dtype)
    crop = tuple(min(low, 0) for low in attrs.low)
    for at in product(*map(range, source.shape)):
        offset = np.unravel_index(first[at], attrs.sizes)
        steps = zip(at, attrs.strides, offset, crop, strict=True)
        if hit[at].any():
            out[tuple(o * s + int(k) - c for o, s, k, c in steps)] += source[at]
    kept = tuple(slice(low, low + n) for n, low in zip(x.shape, before, strict=True))
    return out[kept].astype(operand.dtype, copy=False)


def _flops(op: Op) -> int:
    """Elements of all windows."""
    windows = op.operands[-1] if op.name == "select_and_scatter" else op.result
    return int(windows.type.num_elements * math.prod(op.attrs.sizes))


def _factors(op: Op) -> list[Factor]:
    """Dims that no window spans."""
    a, numbers = op.attrs, range(len(op.operands) + 1)
    rows = zip(a.sizes, a.strides, a.low, a.high, strict=True)
    return [along(numbers, d) for d, row in enumerate(rows) if row == (1, 1, 0, 0)]


define("unfold", Kind.PART, UnfoldAttrs, _infer_unfold, _unfold_reference)
define(
    "reduce_window",
    Kind.WINDOW,
    ReduceWindowAttrs,
    _infer_reduce,
    _reduce_reference,
    combines=True,
    flops=_flops,
    linear=(FIRST,),
    factors=_factors,
)
define(
    "select_and_scatter",
    Kind.WINDOW,
    SelectAndScatterAttrs,
    _infer_scatter,
    _scatter_reference,
    flops=_flops,
    linear=(SECOND,),
    factors=_factors,
)
