"""Resampling of images: the custom calls `ResizeNearest`, `ResizeBilinear`, `ResizeNearestGrad`.

Forms as PyTorch/XLA emits them: NHWC, `backend_config` two digits, align_corners and
half_pixel_centers; sampling points are those of TensorFlow's image resize, in fp32. Both image dims
are resampled one after the other: nearest picks rows, the others multiply by a constant matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.mlir import call_target, text_of
from shardwright.compiler.frontend.rules.registry import Site, Values, refuse
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.types import Value

_ROWS, _COLUMNS = 1, 2  # dims of the image in NHWC
_CONFIGS = {"00": (False, False), "01": (False, True), "10": (True, False)}


def nearest(site: Site) -> Values:
    """Every output pixel is the input pixel its sampling point falls on."""
    image, (corners, centers) = _image(site, any_type=True)
    shape = site.result_type().shape
    for dim in (_ROWS, _COLUMNS):
        index = _nearest_index(image.type.shape[dim], shape[dim], corners, centers)
        image = _picked(site, image, dim, index)
    return (image,)


def nearest_grad(site: Site) -> Values:
    """Every input pixel gets the sum over the output pixels it went to."""
    grad, (corners, centers) = _image(site)
    shape = site.result_type().shape
    matrices = []
    for dim in (_ROWS, _COLUMNS):
        index = _nearest_index(shape[dim], grad.type.shape[dim], corners, centers)
        matrices.append((np.arange(shape[dim])[:, None] == index[None, :]).astype(np.float32))
    return (_multiplied(site, grad, matrices),)


def bilinear(site: Site) -> Values:
    """Every output pixel is the mean of its neighbours, weighted by 1 - distance."""
    image, (corners, centers) = _image(site)
    shape = site.result_type().shape
    matrices = [
        _triangle(image.type.shape[dim], shape[dim], corners, centers) for dim in (_ROWS, _COLUMNS)
    ]
    return (_multiplied(site, image, matrices),)


def _image(site: Site, any_type: bool = False) -> tuple[Value, tuple[bool, bool]]:
    """The operand and (align_corners, half_pixel_centers). Refuses other forms of the call."""
    wanted, name, text = (
        site.result_type(),
        call_target(site.op),
        text_of(site.op, "backend_config"),
    )
    config = _CONFIGS.get(text.strip('"'))
    if config is None:
        known = ", ".join(_CONFIGS)
        refuse("NCC_EVRF064", f"{name} requires one of {known} in backend_config, got {text!r}")
    given = [v.type for v in site.operands]
    kept = len(given) == 1 and (given[0].dtype, given[0].shape[:1], given[0].shape[3:]) == (
        wanted.dtype,
        wanted.shape[:1],
        wanted.shape[3:],
    )
    if not kept or given[0].rank != 4 or not (any_type or wanted.dtype.is_float):
        shown = ", ".join(map(str, given))
        refuse("NCC_EVRF064", f"{name} requires one NHWC image of floats: {shown} -> {wanted}")
    return site.operands[0], config


def _samples(size: int, count: int, corners: bool, centers: bool) -> np.ndarray:
    """Sampling points of `count` pixels in an image dim of `size`, fp32."""
    scale = np.float32((size - 1) / (count - 1) if corners and count > 1 else size / count)
    return (np.arange(count, dtype=np.float32) + np.float32(0.5 * centers)) * scale


def _nearest_index(size: int, count: int, corners: bool, centers: bool) -> np.ndarray:
    points = _samples(size, count, corners, centers)
    index = np.floor(points + np.float32(0.5)) if corners else np.floor(points)
    return np.clip(index, 0, size - 1).astype(np.int32)


def _triangle(size: int, count: int, corners: bool, centers: bool) -> np.ndarray:
    """[count, size] weights of the input pixels, each row summing to one."""
    points = _samples(size, count, corners, centers) - np.float32(0.5 * centers)
    distance = np.abs(np.arange(size, dtype=np.float32)[None, :] - points[:, None])
    weights = np.maximum(np.float32(0), 1 - distance)
    total = weights.sum(axis=1, keepdims=True, dtype=np.float32)
    found: np.ndarray = weights / total
    return found


def _picked(site: Site, image: Value, dim: int, index: np.ndarray) -> Value:
    """Rows `index` of a dim."""
    places = site.make.dense(index[:, None], DType.I32)
    sizes = tuple(1 if d == dim else n for d, n in enumerate(image.type.shape))
    others = tuple(d for d in range(image.type.rank) if d != dim)
    attrs = GatherAttrs(
        offset_dims=others,
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        index_vector_dim=1,
        slice_sizes=sizes,
    )
    return site.make.op("gather", image, places, attrs=attrs)


def _multiplied(site: Site, image: Value, matrices: Sequence[np.ndarray]) -> Value:
    """The image with rows and columns replaced by their products with [out, in] matrices, fp32."""
    make = site.make
    wide = make.convert(image, DType.F32)
    for dim, matrix in zip((_ROWS, _COLUMNS), matrices, strict=True):
        product = make.dot(make.dense(matrix, DType.F32), wide, ((1,), (dim,)))
        wide = make.transpose(product, (*range(1, dim + 1), 0, *range(dim + 1, wide.type.rank)))
    return make.convert(wide, image.type.dtype)
