"""Types of the values of a graph: what they are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

HALVES = (np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.int4))
"""Types of which a byte holds two elements, the first in its low bits."""
_NARROWED = {
    np.dtype(np.int64): np.int32,
    np.dtype(np.uint64): np.uint32,
    np.dtype(np.float64): np.float32,
    HALVES[0]: np.uint8,
    HALVES[1]: np.int8,
}
"""Types that are computed in another: no engine has 64 bits, nor 4 (docs/op-types.md)."""


_WIDE: ContextVar[bool] = ContextVar("wide", default=False)


@contextmanager
def on_host() -> Iterator[None]:
    """Compute in the types of the file meanwhile, 64 bits among them, as a host does."""
    import jax

    token = _WIDE.set(True)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _WIDE.reset(token)


def computed_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that values of a type are computed in."""
    if _WIDE.get() and dtype not in HALVES:
        return dtype
    return np.dtype(_NARROWED.get(dtype, dtype))


def narrowed(array: Array) -> Array:
    """Known values in the type that they are computed in; integers become the nearest there."""
    dtype = computed_type(array.dtype)
    if dtype == array.dtype:
        return array
    if dtype.kind in "iu" and array.dtype not in HALVES:
        limits = np.iinfo(dtype)
        array = np.clip(array, limits.min, limits.max)
    return array.astype(dtype)
