"""Shapes, operators that lay elements out anew, and arrays that are made of nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axes_of, axis_of
from shardwright.compiler.frontend.mxnet.operators.registry import (
    MXNET,
    dtype_of,
    reduced_axes,
    whole_numbers,
)


@MXNET.row("shape_array", has_own_type=True)
def _shape_array(call: Call, x: Any) -> Any:
    return np.asarray(x.shape, np.int64)


@MXNET.row("size_array", has_own_type=True)
def _size_array(call: Call, x: Any) -> Any:
    return np.asarray([math.prod(x.shape)], np.int64)


def _reshaped(old: Sequence[int], asked: Sequence[int]) -> list[int]:
    """The dims that codes mean: 0 keeps a dim, -1 is what is left, -2 all others, -3 two dims as
    one, -4 one dim as the two that follow. Source: the operator's page."""
    found: list[int] = []
    at, codes = 0, list(asked)
    while codes:
        code = codes.pop(0)
        if code == -2:
            found += old[at:]
            at = len(old)
        elif code == -3:
            found.append(math.prod(_dims(old, at, 2)))
            at += 2
        elif code == -4:
            found += _divided(_dims(old, at, 1)[0], codes[:2])
            codes, at = codes[2:], at + 1
        elif code >= -1:
            found.append(_dims(old, at, 1)[0] if code == 0 else code)
            at += 1
        else:
            raise unfit("codes from -4", str(code))
    return found


def _dims(old: Sequence[int], at: int, count: int) -> Sequence[int]:
    if at + count > len(old):
        raise unfit(f"codes for {len(old)} dims", f"one for dim {at + count}")
    return old[at : at + count]


def _divided(dim: int, parts: Sequence[int]) -> Sequence[int]:
    """A dim as two, of which one may be -1."""
    if len(parts) < 2 or parts.count(-1) > 1 or 0 in parts:
        raise unfit("two sizes behind -4, one of them -1 at most", str(list(parts)))
    known = -math.prod(parts) if -1 in parts else 0
    return [dim // known if part == -1 else part for part in parts]


@MXNET.row("Reshape", "reshape", folds=True)
def _reshape(call: Call, x: Any) -> Any:
    """`target_shape` is how old releases say it: 0 is what is left."""
    asked = whole_numbers(call, "shape")
    if not asked:
        target = call.ints("target_shape") or ()
        if not target:
            raise unfit("a shape", "none")
        kept = call.flag("keep_highest")
        dims = [dim or -1 for dim in target]
        return x.reshape((x.shape[0], *dims[1:]) if kept else tuple(dims))
    if call.flag("reverse"):
        # Codes are read from the right; the two sizes behind -4 keep their order.
        turned = _reshaped(x.shape[::-1], _turned(asked))
        return x.reshape(tuple(turned[::-1]))
    return x.reshape(tuple(_reshaped(x.shape, asked)))


def _turned(asked: Sequence[int]) -> list[int]:
    found: list[int] = []
    rest = list(asked)
    while rest:
        code = rest.pop(0)
        part = [code, *rest[:2][::-1]] if code == -4 else [code]
        rest = rest[2:] if code == -4 else rest
        found = part + found
    return found


@MXNET.row("reshape_like")
def _reshape_like(call: Call, x: Any, like: Any) -> Any:
    """Some dims of x as some dims of another."""
    said = call.node.attributes

    def ends(which: str, rank: int) -> tuple[int, int]:
        first, last = (said.get(f"{which}_{end}") for end in ("begin", "end"))
        start, stop, _ = slice(first, last).indices(rank)
        return start, stop

    (a, b), (c, d) = ends("lhs", x.ndim), ends("rhs", like.ndim)
    return x.reshape((*x.shape[:a], *like.shape[c:d], *x.shape[b:]))


@MXNET.row("Flatten", "flatten", folds=True)
def _flatten(call: Call, x: Any) -> Any:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


@MXNET.row("expand_dims", folds=True)
def _expand_dims(call: Call, x: Any) -> Any:
    return call.xp.expand_dims(x, axis_of(call.integer("axis"), x.ndim + 1))


@MXNET.row("squeeze", folds=True)
def _squeeze(call: Call, x: Any) -> Any:
    """What would lose its last dim keeps one."""
    axes = whole_numbers(call, "axis")
    found = call.xp.squeeze(x, None if axes is None else axes_of(axes, x.ndim))
    return found if found.ndim else found.reshape(1)


@MXNET.row("transpose", folds=True)
def _transpose(call: Call, x: Any) -> Any:
    return call.xp.transpose(x, whole_numbers(call, "axes") or None)


@MXNET.row("SwapAxis", "swapaxes", folds=True)
def _swap_axis(call: Call, x: Any) -> Any:
    return call.xp.swapaxes(x, *(axis_of(call.integer(name), x.ndim) for name in ("dim1", "dim2")))


@MXNET.row("Concat", "concat", "_rnn_param_concat", folds=True)
def _concat(call: Call, *operands: Any) -> Any:
    return call.xp.concatenate(operands, axis_of(call.integer("dim", 1), operands[0].ndim))


@MXNET.row("stack", folds=True)
def _stack(call: Call, *operands: Any) -> Any:
    return call.xp.stack(operands, axis_of(call.integer("axis"), operands[0].ndim + 1))


@MXNET.row("SliceChannel", "split", folds=True)
def _slice_channel(call: Call, x: Any) -> Any:
    count, axis = call.integer("num_outputs", 1), axis_of(call.integer("axis", 1), x.ndim)
    if count < 1 or x.shape[axis] % count:
        raise unfit(f"parts of one size of {x.shape[axis]}", f"{count}")
    parts = call.xp.split(x, count, axis)
    return (
        tuple(call.xp.squeeze(p, axis) for p in parts)
        if call.flag("squeeze_axis")
        else (tuple(parts))
    )


@MXNET.row("_split_v2", folds=True)
def _split(call: Call, x: Any) -> Any:
    """In so many sections, or at the places where parts begin."""
    axis, count = axis_of(call.integer("axis"), x.ndim), call.integer("sections")
    starts = whole_numbers(call, "indices") or (0,)
    if count and x.shape[axis] % count:
        raise unfit(f"parts of one size of {x.shape[axis]}", f"{count}")
    parts = call.xp.split(x, count or list(starts[1:]), axis)
    return tuple(call.xp.squeeze(p, axis) if call.flag("squeeze_axis") else p for p in parts)


def _steps(call: Call, name: str) -> tuple[int | None, ...]:
    """Whole numbers, some of which are left out."""
    said = call.node.attributes.get(name, ())
    said = said if isinstance(said, tuple) else (said,)
    if not all(each is None or type(each) is int for each in said):
        raise unfit(f"an attribute {name} of whole numbers", repr(said)[:60])
    return said


@MXNET.row("slice", "crop", folds=True)
def _slice(call: Call, x: Any) -> Any:
    begin, end, step = (_steps(call, name) for name in ("begin", "end", "step"))
    step = step or (None,) * len(begin)
    if len({len(begin), len(end), len(step)}) > 1 or len(begin) > x.ndim or 0 in step:
        raise unfit(f"begin, end and step of {x.ndim} dims", f"{begin}, {end}, {step}")
    return x[tuple(slice(*each) for each in zip(begin, end, step, strict=True))]


@MXNET.row("slice_axis", folds=True)
def _slice_axis(call: Call, x: Any) -> Any:
    cut = [slice(None)] * x.ndim
    said = call.node.attributes
    cut[axis_of(call.integer("axis"), x.ndim)] = slice(said.get("begin"), said.get("end"))
    return x[tuple(cut)]


@MXNET.row("slice_like")
def _slice_like(call: Call, x: Any, like: Any) -> Any:
    cut = [slice(None)] * x.ndim
    for axis in axes_of(whole_numbers(call, "axes") or range(x.ndim), x.ndim):
        if like.shape[axis] > x.shape[axis]:
            raise unfit(f"at most {x.shape[axis]} elements of axis {axis}", str(like.shape[axis]))
        cut[axis] = slice(0, like.shape[axis])
    return x[tuple(cut)]


@MXNET.row("Crop")
def _crop(call: Call, x: Any, like: Any = None) -> Any:
    """Of images [N, C, H, W], to the size of another or to one that is said."""
    sizes = like.shape[2:] if like is not None else call.ints("h_w") or (0, 0)
    first = call.ints("offset") or (0, 0)
    if call.flag("center_crop"):
        first = tuple((old - new) // 2 for old, new in zip(x.shape[2:], sizes, strict=True))
    (top, left), (high, wide) = first, sizes
    if top + high > x.shape[2] or left + wide > x.shape[3] or min(top, left, high, wide) < 0:
        raise unfit(f"a part of {list(x.shape[2:])}", f"{list(sizes)} from {list(first)} on")
    return x[:, :, top : top + high, left : left + wide]


@MXNET.row("tile", folds=True)
def _tile(call: Call, x: Any) -> Any:
    times = whole_numbers(call, "reps") or ()
    whole = [dim * count for dim, count in zip(x.shape[::-1], times[::-1], strict=False)]
    return call.library(whole).tile(x, times)


@MXNET.row("repeat")
def _repeat(call: Call, x: Any) -> Any:
    axis = call.node.attributes.get("axis")
    return jnp.repeat(
        x, call.integer("repeats", 1), None if axis is None else axis_of(axis, x.ndim)
    )


_MODES = ("constant", "edge", "reflect")


@MXNET.row("Pad", "pad")
def _pad(call: Call, x: Any) -> Any:
    mode, said = call.one_of("mode", "constant", *_MODES), call.ints("pad_width") or ()
    if len(said) != 2 * x.ndim or min(said) < 0:
        raise unfit(f"{2 * x.ndim} widths from 0", str(list(said)))
    widths = [(said[2 * n], said[2 * n + 1]) for n in range(x.ndim)]
    if mode == "constant":
        return jnp.pad(x, widths, constant_values=call.number("constant_value"))
    return jnp.pad(x, widths, mode=mode)


@MXNET.row("reverse", "flip", folds=True)
def _reverse(call: Call, x: Any) -> Any:
    return call.xp.flip(x, axes_of(whole_numbers(call, "axis") or (), x.ndim))


@MXNET.row("broadcast_to", folds=True)
def _broadcast_to(call: Call, x: Any) -> Any:
    """0 keeps a dim."""
    asked = call.ints("shape") or ()
    if len(asked) != x.ndim:
        raise unfit(f"a shape of {x.ndim} dims", str(list(asked)))
    whole = [size or dim for size, dim in zip(asked, x.shape, strict=True)]
    return call.library(whole).broadcast_to(x, whole)


@MXNET.row("broadcast_axis", "broadcast_axes", folds=True)
def _broadcast_axis(call: Call, x: Any) -> Any:
    whole = list(x.shape)
    axes, sizes = (whole_numbers(call, name) or () for name in ("axis", "size"))
    for axis, size in zip(axes_of(axes, x.ndim), sizes, strict=True):
        whole[axis] = size
    return call.library(whole).broadcast_to(x, whole)


@MXNET.row("broadcast_like")
def _broadcast_like(call: Call, x: Any, like: Any) -> Any:
    axes, others = (whole_numbers(call, name) for name in ("lhs_axes", "rhs_axes"))
    whole = list(x.shape) if axes else list(like.shape)
    if axes and others:
        for axis, other in zip(axes_of(axes, x.ndim), axes_of(others, like.ndim), strict=True):
            whole[axis] = like.shape[other]
    return jnp.broadcast_to(x, whole)


@MXNET.row("depth_to_space")
def _depth_to_space(call: Call, x: Any) -> Any:
    size = call.integer("block_size")
    n, c, h, w = x.shape
    x = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // size**2, h * size, w * size)


@MXNET.row("space_to_depth")
def _space_to_depth(call: Call, x: Any) -> Any:
    size = call.integer("block_size")
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * size**2, h // size, w // size)


@MXNET.row("diag")
def _diag(call: Call, x: Any) -> Any:
    k = call.integer("k")
    if x.ndim == 1:
        return jnp.diag(x, k)
    return jnp.diagonal(x, k, call.integer("axis1", 0), call.integer("axis2", 1))


def _filled(value: float) -> Callable[..., Any]:
    def row(call: Call) -> Any:
        """A dim of 0 is not said: as 1, it becomes what it stands beside."""
        shape = tuple(dim or 1 for dim in whole_numbers(call, "shape") or ())
        dtype = dtype_of(call, "dtype", np.float32)
        return call.library(shape).full(shape, call.number("value", value), dtype)

    return row


MXNET.row("_zeros", "_zeros_without_dtype", folds=True, has_own_type=True)(_filled(0.0))
MXNET.row("_ones", folds=True, has_own_type=True)(_filled(1.0))
MXNET.row("_full", folds=True, has_own_type=True)(_filled(0.0))
MXNET.rows(
    {
        "zeros_like": lambda _, x: jnp.zeros(x.shape, x.dtype),
        "ones_like": lambda _, x: jnp.ones(x.shape, x.dtype),
    }
)


@MXNET.row("_arange", folds=True, has_own_type=True)
def _arange(call: Call) -> Any:
    first, last = call.number("start"), call.node.attributes.get("stop")
    start, stop = (0.0, first) if last is None else (first, float(last))
    step, times = call.number("step", 1.0), call.integer("repeat", 1)
    if not step or times < 1:
        raise unfit("a step that is not 0, and a repeat from 1", f"{step} and {times}")
    count = max(math.ceil((stop - start) / step), 0)
    xp = call.library([count * times])
    places = xp.repeat(start + step * xp.arange(count, dtype=np.float32), times)
    return places.astype(dtype_of(call, "dtype", np.float32))


@MXNET.row("_linspace", folds=True, has_own_type=True)
def _linspace(call: Call) -> Any:
    count = call.integer("num", 50)
    xp, ends = call.library([count]), bool(call.integer("endpoint", 1))
    found = xp.linspace(call.number("start"), call.number("stop"), count, endpoint=ends)
    return found.astype(dtype_of(call, "dtype", np.float32))


@MXNET.row("_eye", folds=True, has_own_type=True)
def _eye(call: Call) -> Any:
    rows, columns = call.integer("N"), call.integer("M")
    shape = rows, columns or rows
    dtype = dtype_of(call, "dtype", np.float32)
    return call.library(shape).eye(*shape, call.integer("k"), dtype)


@MXNET.row("_contrib_arange_like")
def _arange_like(call: Call, x: Any) -> Any:
    """Numbers in the shape of x, or as many as an axis of it has."""
    axis, times = call.node.attributes.get("axis"), call.integer("repeat", 1)
    count = math.prod(x.shape) if axis is None else x.shape[axis_of(axis, x.ndim)]
    places = jnp.arange(-(-count // times), dtype=jnp.float32)
    found = call.number("start") + call.number("step", 1.0) * places
    found = jnp.repeat(found, times)[:count]
    return found.reshape(x.shape) if axis is None else found


@MXNET.row("moments", has_own_type=True)
def _moments(call: Call, x: Any) -> Any:
    axes, keeps = reduced_axes(call, x.ndim, "axes"), call.flag("keepdims")
    mean = jnp.mean(x, axes, keepdims=True)
    spread = jnp.mean(jnp.square(x - mean), axes, keepdims=keeps)
    return (mean if keeps else jnp.squeeze(mean, axes)), spread
