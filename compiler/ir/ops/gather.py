"""`gather` and `scatter` with StableHLO's full dimension numbers.

Both walk windows of one operand whose starts come from an index tensor. A gather clamps its starts
so that the window stays inside; a scatter drops every window that would leave the operand.
`scatter` names its update instead of carrying a region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardwright.compiler.ir.combinations import REDUCTIONS
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.types import Op, TensorType, tensor_type

SCATTER_KINDS = ("add", "replace", "multiply", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherAttrs:
    """StableHLO's gather dimension numbers and slice sizes."""

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()
    start_index_map: tuple[int, ...]
    index_vector_dim: int
    slice_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterAttrs:
    """StableHLO's scatter dimension numbers; `kind` is one of `SCATTER_KINDS`.

    `unique` promises that no element is written twice. Without it, updates of one element are
    applied in the order of the index tensor (row-major).
    """

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    input_batching_dims: tuple[int, ...] = ()
    scatter_indices_batching_dims: tuple[int, ...] = ()
    scatter_dims_to_operand_dims: tuple[int, ...]
    index_vector_dim: int
    kind: str
    unique: bool = False


@dataclass(frozen=True, slots=True)
class _Windows:
    """What gather and scatter share: how window positions and index entries address the operand.

    `moving_dims` are the dims of the moving tensor (gather result, scatter update) that walk a
    window; the others walk the index tensor.
    """

    moving_dims: tuple[int, ...]
    dropped_dims: tuple[int, ...]
    operand_batching: tuple[int, ...]
    indices_batching: tuple[int, ...]
    index_map: tuple[int, ...]
    vector_dim: int

    def window_dims(self, rank: int) -> list[int]:
        """Operand dims that the window keeps, ascending."""
        gone = self.dropped_dims + self.operand_batching
        return [d for d in range(rank) if d not in gone]

    def batch_shape(self, indices: Sequence[int]) -> list[int]:
        """Index dims without the index vector."""
        return [n for d, n in enumerate(indices) if d != self.vector_dim]


def _windows(attrs: GatherAttrs | ScatterAttrs) -> _Windows:
    """Both name them in the same order."""
    first = fields(attrs)[: len(fields(_Windows))]
    return _Windows(*(getattr(attrs, field.name) for field in first))


def _check_windows(w: _Windows, operand: TensorType, indices: TensorType) -> None:
    """Refuse dimension numbers that do not fit operand and index shapes."""
    if not indices.dtype.is_integer:
        raise mismatch("integer indices", indices)
    if not 0 <= w.vector_dim <= indices.rank:
        raise mismatch(f"an index vector dim up to {indices.rank}", w.vector_dim)
    length = indices.shape[w.vector_dim] if w.vector_dim < indices.rank else 1
    if len(w.index_map) != length:
        raise mismatch(f"an index map of {length} dims", w.index_map)
    check_dims("index map dims", w.index_map + w.operand_batching, operand.rank)
    check_dims("dropped dims", w.dropped_dims + w.operand_batching, operand.rank)
    check_dims("index batching dims", w.indices_batching, indices.rank)
    left = [operand.shape[d] for d in w.operand_batching]
    right = [indices.shape[d] for d in w.indices_batching]
    if left != right or w.vector_dim in w.indices_batching:
        raise mismatch(f"index batching dims of sizes {left}", right)
    if len(w.moving_dims) != len(w.window_dims(operand.rank)):
        need = f"{len(w.window_dims(operand.rank))} window dims"
        raise mismatch(need, w.moving_dims)


def _infer_gather(attrs: GatherAttrs, operand: TensorType, indices: TensorType) -> TensorType:
    windows = _windows(attrs)
    _check_windows(windows, operand, indices)
    sizes = attrs.slice_sizes
    fits = len(sizes) == operand.rank
    if not fits or any(not 0 <= s <= n for s, n in zip(sizes, operand.shape, strict=True)):
        raise mismatch(f"slice sizes within {operand.shape}", sizes)
    if any(sizes[d] != 1 for d in attrs.collapsed_slice_dims + attrs.operand_batching_dims):
        raise mismatch("slices of size 1 in collapsed and batching dims", sizes)
    batch = iter(windows.batch_shape(indices.shape))
    kept = iter([sizes[d] for d in windows.window_dims(operand.rank)])
    rank = len(windows.batch_shape(indices.shape)) + len(attrs.offset_dims)
    check_dims("offset dims", attrs.offset_dims, rank)
    shape = tuple(next(kept) if d in attrs.offset_dims else next(batch) for d in range(rank))
    return tensor_type(shape, operand.dtype)


def _infer_scatter(
    attrs: ScatterAttrs, operand: TensorType, indices: TensorType, updates: TensorType
) -> TensorType:
    windows = _windows(attrs)
    _check_windows(windows, operand, indices)
    if attrs.kind not in SCATTER_KINDS:
        raise mismatch(f"a kind of {' '.join(SCATTER_KINDS)}", attrs.kind)
    if updates.dtype is not operand.dtype:
        raise mismatch(f"updates of {operand.dtype.value}", updates)
    check_dims("update window dims", attrs.update_window_dims, updates.rank)
    batch = [n for d, n in enumerate(updates.shape) if d not in attrs.update_window_dims]
    if batch != windows.batch_shape(indices.shape):
        raise mismatch(f"batch dims {windows.batch_shape(indices.shape)}", batch)
    window = [updates.shape[d] for d in attrs.update_window_dims]
    limits = [operand.shape[d] for d in windows.window_dims(operand.rank)]
    if any(n > limit for n, limit in zip(window, limits, strict=True)):
        raise mismatch(f"update windows within {limits}", window)
    return operand


def _positions(
    w: _Windows, operand: Sequence[int], indices: np.ndarray, moving: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Starts and offsets per operand dim, each broadcastable to the shape of the moving tensor."""
    rank = len(moving)
    batch_dims = [d for d in range(rank) if d not in w.moving_dims]
    starts = [np.zeros([1] * rank, np.int64) for _ in operand]
    offsets = [np.zeros([1] * rank, np.int64) for _ in operand]
    vectors = indices if w.vector_dim < indices.ndim else indices[..., None]
    vectors = np.moveaxis(vectors, w.vector_dim, -1).astype(np.int64)
    placed = [moving[d] if d in batch_dims else 1 for d in range(rank)]
    for k, d in enumerate(w.index_map):
        starts[d] = vectors[..., k].reshape(placed)
    for d, i in zip(w.operand_batching, w.indices_batching, strict=True):
        starts[d] = _count(rank, batch_dims[i - (i > w.vector_dim)], moving)
    for d, m in zip(w.window_dims(len(operand)), w.moving_dims, strict=True):
        offsets[d] = _count(rank, m, moving)
    return starts, offsets


def _count(rank: int, dim: int, shape: Sequence[int]) -> np.ndarray:
    """0, 1, ... along `dim`, size 1 elsewhere."""
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(rank)])


def _gather_reference(op: Op, operand: np.ndarray, indices: np.ndarray) -> np.ndarray:
    sizes, windows = op.attrs.slice_sizes, _windows(op.attrs)
    starts, offsets = _positions(windows, operand.shape, indices, op.result.type.shape)
    index = [
        np.clip(start, 0, n - size) + offset
        for start, offset, n, size in zip(starts, offsets, operand.shape, sizes, strict=True)
    ]
    return np.broadcast_to(operand[tuple(index)], op.result.type.shape)


def _scatter_reference(
    op: Op, operand: np.ndarray, indices: np.ndarray, updates: np.ndarray
) -> np.ndarray:
    windows, shape = _windows(op.attrs), operand.shape
    starts, offsets = _positions(windows, shape, indices, updates.shape)
    keep: np.ndarray = np.ones((), np.bool_)
    flat: np.ndarray = np.zeros((), np.int64)
    for start, offset, n in zip(starts, offsets, shape, strict=True):
        keep = keep & (start >= 0) & (start + offset.max(initial=0) < n)
        flat = flat * n + (start + offset)
    window = op.attrs.update_window_dims
    order = [*(d for d in range(updates.ndim) if d not in window), *window]
    keep, flat = (np.broadcast_to(a, updates.shape).transpose(order) for a in (keep, flat))
    flat, values = flat[keep], updates.transpose(order)[keep]
    out = np.array(widen(operand)).reshape(-1)
    if op.attrs.kind == "replace":
        out[flat] = values
    else:
        REDUCTIONS[op.attrs.kind].at(out, flat, widen(values))
    return out.reshape(shape).astype(operand.dtype, copy=False)


def _scatter_flops(op: Op) -> int:
    return 0 if op.attrs.kind == "replace" else op.operands[2].type.num_elements


define("gather", Kind.INDEXED, GatherAttrs, _infer_gather, _gather_reference, passes=slice(0, 1))
define(
    "scatter",
    Kind.INDEXED,
    ScatterAttrs,
    _infer_scatter,
    _scatter_reference,
    combines=True,
    flops=_scatter_flops,
)
