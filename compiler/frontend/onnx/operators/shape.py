"""Shapes: what is computed of them, and operators that lay elements out anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import MOST_FOLDED, Call, axes_of, axis_of
from shardwright.compiler.frontend.graphs.types import computed_type
from shardwright.compiler.frontend.onnx.operators.registry import ONNX
from shardwright.compiler.frontend.onnx.tensors import type_of


@ONNX.row("Shape", has_own_type=True)
def _shape(call: Call, x: Any) -> Any:
    start, end = call.integer("start"), call.node.attributes.get("end")
    return np.asarray(x.shape[start:end], np.int64)


@ONNX.row("Size", has_own_type=True)
def _size(call: Call, x: Any) -> Any:
    return np.asarray(math.prod(x.shape), np.int64)


_CONSTANTS = {"value_float": np.float32, "value_int": np.int64} | {
    "value_floats": np.float32,
    "value_ints": np.int64,
}


@ONNX.row("Constant", has_own_type=True)
def _constant(call: Call) -> Any:
    given = call.node.attributes
    if isinstance(given.get("value"), np.ndarray):
        return given["value"]
    for name, dtype in _CONSTANTS.items():
        if name in given:
            return np.asarray(given[name], dtype)
    raise unfit("a constant of numbers", ", ".join(given) or "no value")


@ONNX.row("ConstantOfShape", static=(0,), folds=True, has_own_type=True)
def _constant_of_shape(call: Call, shape: Any) -> Any:
    value = call.node.attributes.get("value", np.zeros(1, np.float32))
    xp = call.library(shape.tolist())
    dtype = value.dtype if xp is np else computed_type(value.dtype)
    return xp.full(tuple(shape.tolist()), value.reshape(-1)[0], dtype)


@ONNX.row("Range", static=(0, 1, 2), has_own_type=True)
def _range(call: Call, start: Any, limit: Any, delta: Any) -> Any:
    if not delta:
        raise unfit("a step that is not 0", "0")
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    xp = call.library([count])
    places = xp.arange(count, dtype=np.int64 if xp is np else np.int32)
    dtype = start.dtype if xp is np else computed_type(start.dtype)
    return (start + places.astype(dtype) * delta).astype(dtype)


@ONNX.row("EyeLike", has_own_type=True)
def _eye_like(call: Call, x: Any) -> Any:
    number = call.integer("dtype")
    dtype = computed_type(type_of(number, "EyeLike") if number else x.dtype)
    rows, columns = x.shape
    return jnp.eye(rows, columns, call.integer("k"), dtype)


@ONNX.row("Reshape", static=(1,), folds=True)
def _reshape(call: Call, x: Any, shape: Any) -> Any:
    """0 is the dim of x, -1 what is left."""
    dims = shape.tolist()
    if not call.integer("allowzero"):
        dims = [x.shape[n] if dim == 0 else dim for n, dim in enumerate(dims)]
    return x.reshape(tuple(dims))


@ONNX.row("Flatten", folds=True)
def _flatten(call: Call, x: Any) -> Any:
    axis = call.integer("axis", 1)
    axis = axis if axis == x.ndim else axis_of(axis, x.ndim)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@ONNX.row("Transpose", folds=True)
def _transpose(call: Call, x: Any) -> Any:
    return call.xp.transpose(x, call.ints("perm"))


@ONNX.row("Squeeze", since=13, static=(1,), folds=True)
def _squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    return call.xp.squeeze(x, None if axes is None else axes_of(axes.tolist(), x.ndim))


@ONNX.row("Squeeze", folds=True)
def _squeeze_of_attributes(call: Call, x: Any) -> Any:
    axes = call.ints("axes")
    return call.xp.squeeze(x, None if axes is None else axes_of(axes, x.ndim))


@ONNX.row("Unsqueeze", since=13, static=(1,), folds=True)
def _unsqueeze(call: Call, x: Any, axes: Any) -> Any:
    flat = axes.reshape(-1).tolist()
    return call.xp.expand_dims(x, axes_of(flat, x.ndim + len(flat)))


@ONNX.row("Unsqueeze", folds=True)
def _unsqueeze_of_attributes(call: Call, x: Any) -> Any:
    axes = call.ints("axes") or ()
    return call.xp.expand_dims(x, axes_of(axes, x.ndim + len(axes)))


@ONNX.row("Concat", folds=True)
def _concat(call: Call, *operands: Any) -> Any:
    return call.xp.concatenate(operands, axis_of(call.integer("axis"), operands[0].ndim))


def _parts(call: Call, x: Any, sizes: Sequence[int] | None) -> Any:
    """x cut along an axis: as sizes say, else alike, the last one smaller where it has to be."""
    axis = axis_of(call.integer("axis"), x.ndim)
    count = call.integer("num_outputs", call.count)
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [min(each, max(x.shape[axis] - n * each, 0)) for n in range(count)]
    if sum(sizes) != x.shape[axis] or len(sizes) != call.count:
        raise unfit(f"{call.count} parts of {x.shape[axis]}", str(list(sizes)))
    return tuple(call.xp.split(x, np.cumsum(sizes)[:-1], axis))


@ONNX.row("Split", since=13, static=(1,), folds=True)
def _split(call: Call, x: Any, sizes: Any = None) -> Any:
    return _parts(call, x, None if sizes is None else sizes.tolist())


@ONNX.row("Split", since=2, folds=True)
def _split_of_attributes(call: Call, x: Any) -> Any:
    return _parts(call, x, call.ints("split"))


def _sliced(x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
    found = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not step:
            raise unfit("steps that are not 0", str(list(steps)))
        place = axis_of(axis, x.ndim)
        # Python's own slices count from the back once, and stop at the ends.
        first, last, _ = slice(start, end, step).indices(x.shape[place])
        found[place] = slice(first, None if last < 0 else last, step)
    return x[tuple(found)]


@ONNX.row("Slice", since=10, static=(1, 2, 3, 4), folds=True)
def _slice(call: Call, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    count = len(starts)
    chosen = range(count) if axes is None else axes.tolist()
    by = [1] * count if steps is None else steps.tolist()
    return _sliced(x, starts.tolist(), ends.tolist(), chosen, by)


@ONNX.row("Slice", folds=True)
def _slice_of_attributes(call: Call, x: Any) -> Any:
    starts, ends = call.ints("starts") or (), call.ints("ends") or ()
    return _sliced(x, starts, ends, call.ints("axes") or range(len(starts)), [1] * len(starts))


@ONNX.row("Expand", static=(1,), folds=True)
def _expand(call: Call, x: Any, shape: Any) -> Any:
    whole = np.broadcast_shapes(x.shape, tuple(shape.tolist()))
    return call.library(whole).broadcast_to(x, whole)


@ONNX.row("Tile", static=(1,), folds=True)
def _tile(call: Call, x: Any, repeats: Any) -> Any:
    times = repeats.tolist()
    if len(times) != x.ndim:
        raise unfit(f"{x.ndim} repeats", str(times))
    whole = [dim * count for dim, count in zip(x.shape, times, strict=True)]
    return call.library(whole).tile(x, times)


_MODES = ("constant", "reflect", "edge", "wrap")


def _padded(call: Call, x: Any, pads: Sequence[int], value: Any, axes: Sequence[int]) -> Any:
    """Pads below 0 cut."""
    mode, count = call.one_of("mode", "constant", *_MODES), len(axes)
    if len(pads) != 2 * count:
        raise unfit(f"{2 * count} pads", str(list(pads)))
    widths, cuts = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
    for n, axis in enumerate(axes_of(axes, x.ndim)):
        before, behind = pads[n], pads[n + count]
        cuts[axis] = slice(max(-before, 0), x.shape[axis] - max(-behind, 0))
        widths[axis] = (max(before, 0), max(behind, 0))
    x = x[tuple(cuts)]
    whole = [dim + sum(width) for dim, width in zip(x.shape, widths, strict=True)]
    xp = call.library(whole)
    if mode == "constant":
        return xp.pad(x, widths, constant_values=value)
    return xp.pad(x, widths, mode=mode)


@ONNX.row("Pad", since=11, static=(1, 3), folds=True)
def _pad(call: Call, x: Any, pads: Any, value: Any = None, axes: Any = None) -> Any:
    fill = 0 if value is None else value.reshape(())
    chosen = range(x.ndim) if axes is None else axes.tolist()
    return _padded(call, x, pads.tolist(), fill, chosen)


@ONNX.row("Pad", since=2, folds=True)
def _pad_of_attributes(call: Call, x: Any) -> Any:
    return _padded(call, x, call.ints("pads") or (), call.number("value"), range(x.ndim))


@ONNX.row("CenterCropPad", static=(1,))
def _center_crop_pad(call: Call, x: Any, shape: Any) -> Any:
    axes = axes_of(call.ints("axes") or range(x.ndim), x.ndim)
    for axis, size in zip(axes, shape.tolist(), strict=True):
        over = x.shape[axis] - size
        if over > 0:
            cut = [slice(None)] * x.ndim
            cut[axis] = slice(over // 2, over // 2 + size)
            x = x[tuple(cut)]
        elif over < 0:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (-over // 2, -over - (-over // 2))
            x = jnp.pad(x, widths)
    return x


@ONNX.row("Trilu", static=(1,), folds=True)
def _trilu(call: Call, x: Any, k: Any = None) -> Any:
    cut = call.xp.triu if call.integer("upper", 1) else call.xp.tril
    return cut(x, 0 if k is None else int(k))


@ONNX.row("DepthToSpace")
def _depth_to_space(call: Call, x: Any) -> Any:
    size = call.integer("blocksize")
    n, c, h, w = x.shape
    if call.one_of("mode", "DCR", "DCR", "CRD") == "DCR":
        x = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(n, c // size**2, h * size, w * size)


@ONNX.row("SpaceToDepth")
def _space_to_depth(call: Call, x: Any) -> Any:
    size = call.integer("blocksize")
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * size**2, h // size, w // size)


def _window(*terms: float) -> Any:
    """A window that is a sum of cosines, of so many points."""

    def row(call: Call, size: Any) -> Any:
        count, dtype = int(size), type_of(call.integer("output_datatype", 1), "a window")
        if not 0 < count <= MOST_FOLDED:
            raise unfit(f"a window of 1 to {MOST_FOLDED} points", str(count))
        turns = np.arange(count) / (count if call.integer("periodic", 1) else count - 1)
        waves = (a * np.cos(2 * np.pi * n * turns) for n, a in enumerate(terms))
        return sum(waves, np.zeros(count)).astype(dtype)

    return row


ONNX.rows(
    {
        "BlackmanWindow": _window(0.42, -0.5, 0.08),
        "HammingWindow": _window(25 / 46, -21 / 46),
        "HannWindow": _window(0.5, -0.5),
    },
    since=17,
    static=(0,),
    has_own_type=True,
)


@ONNX.row("NonZero", static=(0,), has_own_type=True)
def _non_zero(call: Call, x: Any) -> Any:
    return np.asarray(np.nonzero(np.atleast_1d(x)), np.int64)


@ONNX.row("OneHot", static=(1,), has_own_type=True)
def _one_hot(call: Call, indices: Any, depth: Any, values: Any) -> Any:
    count, axis = int(depth.reshape(())), call.integer("axis", -1)
    places = jnp.asarray(indices)
    places = jnp.where(places < 0, places + count, places)
    axis = axis_of(axis, places.ndim + 1)
    own = jnp.arange(count).reshape([-1 if n == axis else 1 for n in range(places.ndim + 1)])
    hot = jnp.expand_dims(places, axis).astype(jnp.int32) == own
    return jnp.where(hot, values[1], values[0])
