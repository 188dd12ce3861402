"""Loads and stores of a kernel that pick rows by an index value.

Both work on one strided window: the leading axis runs over the legal rows, the others over the
iter dims the view moves along. Views that also move along iter dims of the index are handled by
explicit addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shardwright.collectives.values.execute import REDUCTIONS


def split_iter_dims(
    sizes: Sequence[int], strides: Sequence[int], iter_dims: Sequence[int], index: Sequence[int]
) -> bool:
    """True when no iter dim of the index moves the view: rows can be picked as whole slices."""
    return all(strides[a] == 0 or sizes[a] == 1 for a in index if a in iter_dims)


def legal_rows(index: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(index clamped to 0..rows-1, mask of the legal ones or None when all are)."""
    clamped = np.clip(index, 0, rows - 1).astype(np.int64)
    if np.array_equal(clamped, index):
        return clamped, None
    return clamped, clamped == index


def window(
    array: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Strided view of a flat array; offset and strides in elements. Raises ValueError or TypeError
    out of bounds."""
    item = array.itemsize
    return np.ndarray(shape, array.dtype, array, offset * item, tuple(s * item for s in strides))


def grid(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Element offset of every point of a strided window."""
    lines = np.ogrid[tuple(map(slice, shape))]
    return sum((n * s for n, s in zip(lines, strides, strict=True)), np.zeros(shape, np.int64))


def _combine_rows(
    target: np.ndarray, rows: np.ndarray, values: np.ndarray, combine: np.ufunc
) -> None:
    """target[rows[t]] = combine(target[rows[t]], values[t]); equal rows combine before they are
    rounded once.

    Shapes: target [R, ...], rows [T], values [T, ...].
    """
    order = np.argsort(rows, kind="stable")
    unique, starts = np.unique(rows[order], return_index=True)
    joined = combine.reduceat(values[order], starts, axis=0)
    target[unique] = combine(target[unique].astype(values.dtype), joined)


def _replace_rows(target: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """target[rows[t]] = values[t]; the last of equal rows stays. Shapes as in `_combine_rows`."""
    _, last = np.unique(rows[::-1], return_index=True)
    kept = len(rows) - 1 - last
    target[rows[kept]] = values[kept]


PUT_ROWS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], None]] = {
    kind: partial(_combine_rows, combine=ufunc) for kind, ufunc in REDUCTIONS.items()
} | {"replace": _replace_rows}
"""How an indexed store of each kind writes rows: (target, row numbers, values)."""
