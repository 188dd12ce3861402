"""Resizing and sampling of images.

Where a result is a weighted sum of elements of a dim, a matrix [new, old] of the weights is known:
a product with it, whose gradient is a product too, is what the machine does best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axes_of
from shardwright.compiler.frontend.onnx.operators.registry import ONNX
from shardwright.compiler.frontend.pytorch.operators.resizing import cubic_kernel, taken

Weights = np.ndarray[Any, Any]
_PLACES = {
    "align_corners": lambda n, old, new, scale: n * (old - 1) / (new - 1) if new > 1 else n * 0,
    "asymmetric": lambda n, old, new, scale: n / scale,
    "half_pixel": lambda n, old, new, scale: (n + 0.5) / scale - 0.5,
    "half_pixel_symmetric": lambda n, old, new, scale: (
        old / 2 * (1 - new / (scale * old)) + (n + 0.5) / scale - 0.5
    ),
    "pytorch_half_pixel": lambda n, old, new, scale: (n + 0.5) / scale - 0.5 if new > 1 else n * 0,
}
"""Where in the old dim element n of the new one lies. Source: the operator's page."""
_NEAREST: dict[str, Callable[[Weights], Weights]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


MOST_WEIGHTS = 1 << 26
"""Elements of the largest matrix of weights (our choice: 8192 pixels from as many)."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a node resizes."""

    mode: str
    places: str
    nearest: str
    steepness: float
    is_inside: bool
    """Weights of elements outside of a dim are left out, not those of its ends."""

    def resized(self, x: Any, axis: int, new: int, scale: float) -> Any:
        """x with one dim resized."""
        old = x.shape[axis]
        if old == new and scale == 1:
            return x
        if old * new > MOST_WEIGHTS:
            raise unfit(f"dims of at most {MOST_WEIGHTS} as old x new", f"{old} x {new}")
        at = np.asarray(_PLACES[self.places](np.arange(new), old, new, scale), np.float64)
        if self.mode == "nearest":
            places = np.clip(_NEAREST[self.nearest](at), 0, old - 1).astype(np.int32)
            return taken(x, axis, places)
        matrix = self._weights(at, old).astype(np.float32)
        wide = x.astype(jnp.float32)
        return jnp.moveaxis(jnp.tensordot(wide, matrix, ((axis,), (1,))), -1, axis).astype(x.dtype)

    def _weights(self, at: Weights, old: int) -> Weights:
        low, found = np.floor(at), np.zeros((len(at), old))
        taps = range(2) if self.mode == "linear" else range(-1, 3)
        for tap in taps:
            reach = np.abs(at - low - tap)
            weight = 1 - reach if self.mode == "linear" else cubic_kernel(reach, self.steepness)
            places = low + tap
            if self.is_inside:
                weight = np.where((places < 0) | (places >= old), 0, weight)
            row = np.clip(places, 0, old - 1).astype(int)
            np.add.at(found, (np.arange(len(at)), row), weight)
        return found / found.sum(1, keepdims=True) if self.is_inside else found


def _way(call: Call) -> _Way:
    if call.integer("antialias"):
        raise NotImplementedError("antialias")
    is_old = call.opset < 11
    mode = call.one_of("mode", "nearest", "nearest", "linear", "cubic")
    usual = "asymmetric" if is_old else "half_pixel"
    places = call.text("coordinate_transformation_mode", usual)
    if places == "tf_crop_and_resize":
        raise NotImplementedError(places)
    nearest = "floor" if is_old else "round_prefer_floor"
    return _Way(
        mode,
        call.one_of("coordinate_transformation_mode", usual, *_PLACES),
        call.one_of("nearest_mode", nearest, *_NEAREST),
        call.number("cubic_coeff_a", -0.75),
        bool(call.integer("exclude_outside")),
    )


def _resized(call: Call, x: Any, axes: Sequence[int], scales: Any, sizes: Any) -> Any:
    """x with dims of a scale or a size each."""
    dims = axes_of(axes, x.ndim)
    old = [x.shape[axis] for axis in dims]
    if sizes is None:
        by = [float(scale) for scale in scales]
        if len(by) != len(dims) or min(by) <= 0:
            raise unfit(f"{len(dims)} scales above 0", str(by))
        new = [math.floor(n * scale) for n, scale in zip(old, by, strict=True)]
    else:
        new, by = _of_sizes(call, old, [int(size) for size in sizes])
    way = _way(call)
    for axis, size, scale in zip(dims, new, by, strict=True):
        x = way.resized(x, axis, size, scale)
    return x


_POLICIES = ("stretch", "not_larger", "not_smaller")


def _of_sizes(
    call: Call, old: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """(sizes, scales) for sizes that are asked for, of one scale where the node says so."""
    by = [size / n for size, n in zip(sizes, old, strict=True)]
    policy = call.one_of("keep_aspect_ratio_policy", "stretch", *_POLICIES)
    if policy == "stretch":
        return list(sizes), by
    scale = min(by) if policy == "not_larger" else max(by)
    return [math.floor(scale * n + 0.5) for n in old], [scale] * len(old)


@ONNX.row("Resize", since=11, static=(1, 2, 3))
def _resize(call: Call, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    axes = call.ints("axes") or range(x.ndim)
    scales = None if scales is None or not scales.size else scales
    if (scales is None) == (sizes is None):
        raise unfit("scales or sizes", "none" if sizes is None else "both")
    return _resized(call, x, axes, scales, sizes)


@ONNX.row("Resize", since=10, static=(1,))
@ONNX.row("Upsample", since=9, static=(1,), until=10)
def _resize_of_scales(call: Call, x: Any, scales: Any) -> Any:
    return _resized(call, x, range(x.ndim), scales, None)


@ONNX.row("Upsample", since=7)
def _upsample_of_attributes(call: Call, x: Any) -> Any:
    return _resized(call, x, range(x.ndim), call.node.attributes.get("scales", ()), None)


_SAMPLED = {"bilinear": "linear", "linear": "linear", "nearest": "nearest"}


@ONNX.row("GridSample", since=16)
def _grid_sample(call: Call, x: Any, grid: Any) -> Any:
    """x [N, C, ...] at places [N, ..., rank] of -1 to 1, the last dim of x first."""
    words = ("bilinear", "linear", "nearest", "bicubic", "cubic")
    mode, edge = call.one_of("mode", words[0], *words), call.text("padding_mode", "zeros")
    if mode not in _SAMPLED or edge not in ("zeros", "border"):
        raise NotImplementedError(f"mode {mode} with padding_mode {edge}")
    sizes, ends = x.shape[2:], call.integer("align_corners")
    at = []
    for n, size in enumerate(sizes):
        place = grid[..., len(sizes) - 1 - n]
        own = (place + 1) / 2 * (size - 1) if ends else ((place + 1) * size - 1) / 2
        at.append(jnp.clip(own, 0, size - 1) if edge == "border" else own)
    if _SAMPLED[mode] == "nearest":
        return _picked(x, [jnp.round(own) for own in at])
    low = [jnp.floor(own) for own in at]
    total: Any = 0
    for taps in product((0, 1), repeat=len(sizes)):
        places = [own + tap for own, tap in zip(low, taps, strict=True)]
        weights = [1 - jnp.abs(own - place) for own, place in zip(at, places, strict=True)]
        total = total + math.prod(weights[1:], start=weights[0])[:, None] * _picked(x, places)
    return total


def _picked(x: Any, places: Sequence[Any]) -> Any:
    """Elements of x at whole places of each sample, 0 outside."""
    inside: Any = True
    for place, size in zip(places, x.shape[2:], strict=True):
        inside = inside & (place >= 0) & (place < size)
    samples = jnp.arange(x.shape[0]).reshape(-1, *[1] * (places[0].ndim - 1))
    at = [jnp.clip(p, 0, n - 1).astype(jnp.int32) for p, n in zip(places, x.shape[2:], strict=True)]
    found = jnp.moveaxis(x, 1, -1)[(samples, *at)]
    return jnp.moveaxis(jnp.where(inside[..., None], found, 0), -1, 1)
