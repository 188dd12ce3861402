"""Resizing of images [N, C, H, W]: products with matrices of weights, which are known."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.graphs.windows import convolved_back
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET

MOST_WEIGHTS = 1 << 26
"""Elements of the largest matrix of weights (our choice: 8192 pixels from as many)."""
_SAMPLED = ("nearest", "bilinear")


@MXNET.row("UpSampling")
def _up_sampling(call: Call, x: Any, *others: Any) -> Any:
    scale = call.integer("scale", 1)
    if scale < 1:
        raise unfit("a scale from 1", str(scale))
    if call.one_of("sample_type", "nearest", *_SAMPLED) == "bilinear":
        return _bilinear(x, scale, *others)
    size = x.shape[2] * scale, x.shape[3] * scale
    images = []
    for image in (x, *others):
        up, across = size[0] // image.shape[2], size[1] // image.shape[3]
        images.append(jnp.repeat(jnp.repeat(image, up, 2), across, 3))
    if call.one_of("multi_input_mode", "concat", "concat", "sum") == "sum":
        return sum(images[1:], start=images[0])
    return jnp.concatenate(images, 1) if len(images) > 1 else images[0]


def _bilinear(x: Any, scale: int, weight: Any) -> Any:
    """A deconvolution of each channel by a weight of the file."""
    kernel, pad = 2 * scale - scale % 2, -(-(scale - 1) // 2)
    edge = kernel - 1 - pad
    edges = [(edge, edge)] * 2
    return convolved_back(x, weight, (scale, scale), (1, 1), edges, x.shape[1])


@MXNET.row("_contrib_BilinearResize2D")
def _bilinear_resize(call: Call, x: Any, like: Any = None) -> Any:
    mode = call.one_of("mode", "size", "size", "like", "odd_scale", "to_even_down", "to_even_up")
    if mode not in ("size", "like"):
        raise NotImplementedError(f"mode {mode}")
    sizes = [call.integer("height", 1), call.integer("width", 1)]
    for n, name in enumerate(("scale_height", "scale_width")):
        if call.node.attributes.get(name):
            sizes[n] = int(x.shape[2 + n] * call.number(name))
    sizes = sizes if like is None else list(like.shape[2:])
    for axis, size in zip((2, 3), sizes, strict=True):
        x = _resized(x, axis, size, call.flag("align_corners", True))
    return x


def _resized(x: Any, axis: int, new: int, has_ends: bool) -> Any:
    """x with a dim of another size, its ends on each other or half an element from them."""
    old = x.shape[axis]
    if new < 1 or old * new > MOST_WEIGHTS:
        raise unfit(f"a size from 1, and {MOST_WEIGHTS} as old x new", f"{old} x {new}")
    if has_ends:
        at = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        at = np.maximum((np.arange(new) + 0.5) * old / new - 0.5, 0)
    low = np.minimum(np.floor(at).astype(int), old - 1)
    high, part = np.minimum(low + 1, old - 1), at - low
    matrix = np.zeros((new, old), np.float32)
    rows = np.arange(new)
    np.add.at(matrix, (rows, low), 1 - part)
    np.add.at(matrix, (rows, high), part)
    return jnp.moveaxis(jnp.tensordot(x, matrix, ((axis,), (1,))), -1, axis).astype(x.dtype)
