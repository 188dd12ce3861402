"""Resizing of images [N, C, ...], dim by dim. Where a result is a weighted sum of elements of a
dim, a matrix [new, old] of the weights is known: a product with it, whose gradient is a product
too, is what the machine does best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place

Weights = np.ndarray[Any, Any]


def _scale(old: int, new: int, factor: float | None, align: bool) -> float:
    """How far apart in the old dim two elements of the new one are: as a given factor says, or
    the sizes; `align` puts the ends on each other."""
    if align:
        return (old - 1) / (new - 1) if new > 1 else 0.0
    return 1 / factor if factor else old / new


def _sources(old: int, new: int, factor: float | None, align: bool) -> Weights:
    """Where in the old dim the centres of the new one lie, in fp32 as torch computes them."""
    scale, places = np.float32(_scale(old, new, factor, align)), np.arange(new, dtype=np.float32)
    if align:
        return places * scale
    half = np.float32(0.5)
    found: Weights = (places + half) * scale - half
    return found


def _linear(old: int, new: int, factor: float | None, align: bool) -> Weights:
    """Weights between the two nearest."""
    source = np.maximum(_sources(old, new, factor, align), 0)
    low = np.minimum(source.astype(np.int64), old - 1)
    high = np.minimum(low + 1, old - 1)
    part = np.clip(source - low, 0, 1).astype(np.float32)
    found = np.zeros((new, old), np.float32)
    np.add.at(found, (np.arange(new), low), 1 - part)
    np.add.at(found, (np.arange(new), high), part)
    return found


def _cubic(old: int, new: int, factor: float | None, align: bool) -> Weights:
    """Weights of Keys' cubic convolution between the four nearest (a = -0.75)."""
    source = _sources(old, new, factor, align)
    low = np.floor(source)
    part = (source - low).astype(np.float32)
    found = np.zeros((new, old), np.float32)
    for tap in range(-1, 3):
        weight = cubic_kernel(np.abs(part - np.float32(tap)), np.float32(-0.75))
        np.add.at(found, (np.arange(new), np.clip(low + tap, 0, old - 1).astype(int)), weight)
    return found


def cubic_kernel(x: Weights, a: float | np.float32) -> Weights:
    """Keys' cubic kernel at distances x."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    found: Weights = np.where(x <= 1, near, np.where(x < 2, far, 0))
    return found


def _smoothed(kernel: Callable[[Weights], Weights], reach: float) -> Any:
    """Weights of a kernel that is as wide as the new elements are apart (`antialias`)."""

    def weights(old: int, new: int, factor: float | None, align: bool) -> Weights:
        scale = _scale(old, new, factor, align)
        wide, support = max(scale, 1.0), reach * max(scale, 1.0)
        found = np.zeros((new, old), np.float32)
        for place in range(new):
            centre = scale * (place + 0.5)
            low = max(int(centre - support + 0.5), 0)
            high = min(int(centre + support + 0.5), old)
            row = kernel(np.abs((np.arange(low, high) - centre + 0.5) / wide))
            found[place, low:high] = row / row.sum()
        return found

    return weights


def _triangle(x: Weights) -> Weights:
    found: Weights = np.maximum(1 - x, 0)
    return found


def _sharper(x: Weights) -> Weights:
    return cubic_kernel(x, np.float32(-0.5))


def _factors(factors: Any, dims: int) -> tuple[float | None, ...]:
    return tuple(factors) if factors else (None,) * dims


def _interpolated(place: Place, x: Any, weights: Any, align: bool, factors: Any) -> Any:
    """x resized by one matrix per dim; in fp32, as torch adds."""
    n = x.ndim - 2
    y = x.astype(jnp.float32)
    for dim, factor in zip(range(2, x.ndim), _factors(factors, n), strict=True):
        old, new = x.shape[dim], place.shape[dim]
        if old != new or (factor and factor != 1):
            matrix = weights(old, new, factor, align)
            y = jnp.moveaxis(jnp.tensordot(y, matrix, ((dim,), (1,))), -1, dim)
    return y.astype(x.dtype)


_KERNELS = {
    **{f"upsample_{name}": _linear for name in ("linear1d", "bilinear2d", "trilinear3d")},
    "upsample_bicubic2d": _cubic,
    "_upsample_bilinear2d_aa": _smoothed(_triangle, 1.0),
    "_upsample_bicubic2d_aa": _smoothed(_sharper, 2.0),
}


def _row(name: str, weights: Any) -> None:
    @ATEN.row(name, placed=True)
    def sized(place: Place, x: Any, size: Any, align: bool = False, *factors: Any) -> Any:
        given = factors if any(f is not None for f in factors) else None
        return _interpolated(place, x, weights, align, given)

    @ATEN.row(f"{name}.vec", placed=True)
    def of_factors(place: Place, x: Any, size: Any, align: bool, factors: Any) -> Any:
        return _interpolated(place, x, weights, align, factors)


for _name, _weights in _KERNELS.items():
    _row(_name, _weights)


def _nearest(place: Place, x: Any, factors: Any, offset: float) -> Any:
    """Each position is the nearest before it, or (`offset`) the nearest of all."""
    for dim, factor in zip(range(2, x.ndim), _factors(factors, x.ndim - 2), strict=True):
        old, new = x.shape[dim], place.shape[dim]
        scale = np.float32(_scale(old, new, factor, False))
        places = np.floor((np.arange(new, dtype=np.float32) + np.float32(offset)) * scale)
        x = taken(x, dim, np.minimum(places, old - 1).astype(np.int32))
    return x


def taken(x: Any, dim: int, places: Any) -> Any:
    """x at known places of a dim: repeated or sliced where that is what they say."""
    old, new = x.shape[dim], len(places)
    if new % old == 0 and (places == np.arange(new) // (new // old)).all():
        return jnp.repeat(x, new // old, dim) if new != old else x
    steps = set(np.diff(places).tolist()) or {1}
    if len(steps) == 1 and min(steps) > 0:
        first, last = int(places[0]), int(places[-1])
        return jax.lax.slice_in_dim(x, first, last + 1, min(steps), dim)
    return jnp.take(x, places, dim, mode="clip")


def _nearest_row(name: str, offset: float) -> None:
    @ATEN.row(name, placed=True)
    def sized(place: Place, x: Any, size: Any, *factors: Any) -> Any:
        given = factors if any(f is not None for f in factors) else None
        return _nearest(place, x, given, offset)

    @ATEN.row(f"{name}.vec", placed=True)
    def of_factors(place: Place, x: Any, size: Any, factors: Any) -> Any:
        return _nearest(place, x, factors, offset)


for _n in (1, 2, 3):
    _nearest_row(f"upsample_nearest{_n}d", 0.0)
    _nearest_row(f"_upsample_nearest_exact{_n}d", 0.5)
