"""`gather` and `scatter` with StableHLO's full dimension numbers.

Both walk windows of one operand whose starts come from an index tensor. A gather clamps its starts
so that the window stays inside; a scatter drops every window that would leave the operand.
`scatter` names its update instead of carrying a region.

Where a rank holds a part of the operand, its op has the index vectors of the whole operand as one
more operand: they say which indices are wrong. Others only name what another rank holds. An operand
that was padded says where it ended before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from shardwright.compiler.ir.combinations import REDUCTIONS
from shardwright.compiler.ir.factors import Factor, FactorKind, Place, along
from shardwright.compiler.ir.opdef import FIRST, LATER, Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.types import Op, TensorType, Value, tensor_type

LAST_STARTS = "shardwright.last_starts"
"""The attribute of a printed gather or scatter whose operand was padded."""
SCATTER_KINDS = ("add", "replace", "multiply", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherAttrs:
    """StableHLO's gather dimension numbers and slice sizes.

    `last_starts`: the last start of a window along each dim of the index map, in the operand as its
    user has it: not padded, and whole where the op has the index vectors of the whole; none where
    the shape says it. `replicated`: mesh axes whose ranks all have the same indices, which count
    once.
    """

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()
    start_index_map: tuple[int, ...]
    index_vector_dim: int
    slice_sizes: tuple[int, ...]
    last_starts: tuple[int, ...] = field(default=(), metadata=LATER)
    replicated: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterAttrs:
    """StableHLO's scatter dimension numbers; `kind` is one of `SCATTER_KINDS`.

    `unique` promises that no element is written twice. Without it, updates of one element are
    applied in the order of the index tensor (row-major). `last_starts` and `replicated` are those
    of `GatherAttrs`.
    """

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    input_batching_dims: tuple[int, ...] = ()
    scatter_indices_batching_dims: tuple[int, ...] = ()
    scatter_dims_to_operand_dims: tuple[int, ...]
    index_vector_dim: int
    kind: str
    unique: bool = False
    last_starts: tuple[int, ...] = field(default=(), metadata=LATER)
    replicated: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True, slots=True)
class Windows:
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

    def walked(self, rank: int) -> dict[int, int]:
        """Operand dim that the window keeps -> dim of the moving tensor that walks it."""
        return dict(zip(self.window_dims(rank), self.moving_dims, strict=True))

    def batch_shape(self, indices: Sequence[int]) -> list[int]:
        """Index dims without the index vector."""
        return [n for d, n in enumerate(indices) if d != self.vector_dim]


def windows_of(attrs: GatherAttrs | ScatterAttrs) -> Windows:
    """Both name them in the same order."""
    first = fields(attrs)[: len(fields(Windows))]
    return Windows(*(getattr(attrs, field.name) for field in first))


def watched(op: Op) -> Value | None:
    """The index vectors of a whole operand, in a gather or scatter that has a part of it."""
    own = {GatherAttrs: 2, ScatterAttrs: 3}.get(type(op.attrs), len(op.operands))
    return op.operands[own] if len(op.operands) > own else None


def window_sizes(op: Op) -> tuple[int, ...]:
    """The size of a window per dim of the operand of a gather or scatter."""
    if isinstance(op.attrs, GatherAttrs):
        return op.attrs.slice_sizes
    rank, update = op.operands[0].type.rank, op.operands[2].type.shape
    walked = windows_of(op.attrs).walked(rank)
    return tuple(update[walked[d]] if d in walked else 1 for d in range(rank))


def last_starts(op: Op) -> tuple[int, ...]:
    """The last start of a window along each dim of the index map, for the own indices of an op."""
    if op.attrs.last_starts and watched(op) is None:
        found: tuple[int, ...] = op.attrs.last_starts
        return found
    shape, sizes = op.operands[0].type.shape, window_sizes(op)
    return tuple(shape[d] - sizes[d] for d in windows_of(op.attrs).index_map)


def _check_windows(w: Windows, operand: TensorType, indices: TensorType) -> None:
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


def _check_watched(
    attrs: GatherAttrs | ScatterAttrs, indices: TensorType, watched: Sequence[TensorType]
) -> None:
    """Refuse index vectors of a whole operand that are no others of the same places."""
    if any(not t.dtype.is_integer or t.shape != indices.shape for t in watched[:1]) or watched[1:]:
        raise mismatch(f"one tensor {indices} of watched indices", " and ".join(map(str, watched)))
    most = len(windows_of(attrs).index_map)
    if len(attrs.last_starts) != most and (watched or attrs.last_starts):
        raise mismatch("a last start per dim of the index map", attrs.last_starts)


def _infer_gather(
    attrs: GatherAttrs, operand: TensorType, indices: TensorType, *watched: TensorType
) -> TensorType:
    windows = windows_of(attrs)
    _check_windows(windows, operand, indices)
    _check_watched(attrs, indices, watched)
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
    attrs: ScatterAttrs,
    operand: TensorType,
    indices: TensorType,
    updates: TensorType,
    *watched: TensorType,
) -> TensorType:
    windows = windows_of(attrs)
    _check_windows(windows, operand, indices)
    _check_watched(attrs, indices, watched)
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
    w: Windows, operand: Sequence[int], indices: np.ndarray, moving: Sequence[int]
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
    for d, m in w.walked(len(operand)).items():
        offsets[d] = _count(rank, m, moving)
    return starts, offsets


def _count(rank: int, dim: int, shape: Sequence[int]) -> np.ndarray:
    """0, 1, ... along `dim`, size 1 elsewhere."""
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(rank)])


def _gather_reference(
    op: Op, operand: np.ndarray, indices: np.ndarray, *watched: np.ndarray
) -> np.ndarray:
    sizes, windows = op.attrs.slice_sizes, windows_of(op.attrs)
    starts, offsets = _positions(windows, operand.shape, indices, op.result.type.shape)
    last = dict(zip(windows.index_map, last_starts(op), strict=True))
    index = [
        np.clip(start, 0, last.get(d, n - size)) + offset
        for d, (start, offset, n, size) in enumerate(
            zip(starts, offsets, operand.shape, sizes, strict=True)
        )
    ]
    return np.broadcast_to(operand[tuple(index)], op.result.type.shape)


def _scatter_reference(
    op: Op, operand: np.ndarray, indices: np.ndarray, updates: np.ndarray, *watched: np.ndarray
) -> np.ndarray:
    windows, shape = windows_of(op.attrs), operand.shape
    starts, offsets = _positions(windows, shape, indices, updates.shape)
    keep: np.ndarray = np.ones((), np.bool_)
    flat: np.ndarray = np.zeros((), np.int64)
    last = dict(zip(windows.index_map, last_starts(op), strict=True))
    for d, (start, offset, n) in enumerate(zip(starts, offsets, shape, strict=True)):
        keep = keep & (start >= 0) & (start <= last.get(d, n)) & (start + offset.max(initial=0) < n)
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


def _gather_factors(op: Op) -> list[Factor]:
    walked = [Factor(places) for places in _walked(op)]
    return walked + [
        along((0,), d, FactorKind.LOOKED_UP) for d in windows_of(op.attrs).dropped_dims
    ]


def _scatter_factors(op: Op) -> list[Factor]:
    """Parts of the updates give partial results, and parts of the operand have parts of them."""
    result = len(op.operands)
    tied: list[Factor] = []
    for places in _walked(op):
        of_operand = tuple((result, d) for n, d in places if n == 0)
        tied.append(
            Factor(places + of_operand) if of_operand else Factor(places, FactorKind.COMBINED)
        )
    known, rows = {f.of(result) for f in tied}, windows_of(op.attrs).dropped_dims
    rest = (d for d in range(op.result.type.rank) if d not in known)
    return tied + [
        along((0, result), d, FactorKind.LOOKED_UP if d in rows else FactorKind.LINKED)
        for d in rest
    ]


def _walked(op: Op) -> list[tuple[Place, ...]]:
    """Dims that walk together: of the indices with those of what is moved (the result of a gather,
    the updates of a scatter), and of the operand along batching dims and in windows that are moved
    whole.
    """
    w, values = windows_of(op.attrs), (*op.operands, *op.results)
    own = 3 if isinstance(op.attrs, ScatterAttrs) else 2  # operands before watched indices
    m_at = 2 if own == 3 else len(op.operands)
    operand, indices, moved = values[0], values[1], values[m_at]
    lookups = (1, *range(own, len(op.operands)))
    batch_of = dict(zip(w.indices_batching, w.operand_batching, strict=True))
    steps = (i for i in range(indices.type.rank) if i != w.vector_dim)
    targets = (d for d in range(moved.type.rank) if d not in w.moving_dims)
    found: list[tuple[Place, ...]] = []
    for i, d in zip(steps, targets, strict=True):
        batch = ((0, batch_of[i]),) if i in batch_of else ()
        found.append((*((n, i) for n in lookups), (m_at, d), *batch))
    for d, m in w.walked(operand.type.rank).items():
        if operand.type.shape[d] == moved.type.shape[m]:
            found.append(((0, d), (m_at, m)))
    return found


def _resize_gather(op: Op, shape: tuple[int, ...]) -> GatherAttrs:
    """Windows as large as the result has them."""
    attrs: GatherAttrs = op.attrs
    kept = windows_of(attrs).window_dims(len(attrs.slice_sizes))
    size_of = {d: shape[o] for d, o in zip(kept, sorted(attrs.offset_dims), strict=True)}
    sizes = (size_of.get(d, size) for d, size in enumerate(attrs.slice_sizes))
    return replace(attrs, slice_sizes=tuple(sizes))


define(
    "gather",
    Kind.INDEXED,
    GatherAttrs,
    _infer_gather,
    _gather_reference,
    passes=FIRST,
    factors=_gather_factors,
    resize=_resize_gather,
)
define(
    "scatter",
    Kind.INDEXED,
    ScatterAttrs,
    _infer_scatter,
    _scatter_reference,
    combines=True,
    flops=_scatter_flops,
    linear=(slice(0, 3, 2),),
    factors=_scatter_factors,
)
