"""Elements by index; indices are numbers of any type, and those outside are moved to the ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.table import Call, axis_of
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET, dtype_of


def _placed(indices: Any, size: int, mode: str) -> Any:
    """Indices as whole numbers from 0 to size - 1."""
    places = jnp.asarray(indices).astype(jnp.int32)
    return jnp.mod(places, size) if mode == "wrap" else jnp.clip(places, 0, size - 1)


@MXNET.row("Embedding", "_contrib_SparseEmbedding", has_own_type=True, picks=(0, 1))
def _embedding(call: Call, indices: Any, weight: Any) -> Any:
    return jnp.take(weight, _placed(indices, weight.shape[0], "clip"), 0, mode="clip")


@MXNET.row("take", picks=(1, 0))
def _take(call: Call, x: Any, indices: Any) -> Any:
    axis, mode = axis_of(call.integer("axis"), x.ndim), call.one_of("mode", "clip", "clip", "wrap")
    return jnp.take(x, _placed(indices, x.shape[axis], mode), axis, mode="clip")


@MXNET.row("batch_take")
def _batch_take(call: Call, x: Any, indices: Any) -> Any:
    places = _placed(indices, x.shape[1], "clip")
    return jnp.take_along_axis(x, places.reshape(-1, 1), 1)[:, 0]


@MXNET.row("pick", "choose_element_0index")
def _pick(call: Call, x: Any, indices: Any) -> Any:
    axis = axis_of(call.integer("axis", -1), x.ndim)
    mode = call.one_of("mode", "clip", "clip", "wrap")
    places = _placed(indices, x.shape[axis], mode)
    places = places if places.ndim == x.ndim else jnp.expand_dims(places, axis)
    found = jnp.take_along_axis(x, places, axis)
    return found if call.flag("keepdims") else jnp.squeeze(found, axis)


@MXNET.row("one_hot", has_own_type=True)
def _one_hot(call: Call, indices: Any) -> Any:
    hot = jnp.asarray(indices).astype(jnp.int32)[..., None] == jnp.arange(call.integer("depth"))
    found = jnp.where(hot, call.number("on_value", 1.0), call.number("off_value"))
    return found.astype(dtype_of(call, "dtype", np.float32))


@MXNET.row("gather_nd")
def _gather_nd(call: Call, x: Any, indices: Any) -> Any:
    """The first dim of the indices are the dims of x."""
    places = tuple(_placed(part, x.shape[n], "wrap") for n, part in enumerate(indices))
    return jnp.asarray(x).at[places].get(mode="clip")


@MXNET.row("scatter_nd")
def _scatter_nd(call: Call, x: Any, indices: Any) -> Any:
    shape = call.ints("shape") or ()
    places = tuple(_placed(part, shape[n], "clip") for n, part in enumerate(indices))
    return jnp.zeros(shape, x.dtype).at[places].set(x)


def _times(call: Call, x: Any, lengths: Any) -> tuple[int, Any, Any]:
    """(axis of time, time's place beside x, lengths beside x), of x [T, B, ...] or [B, T, ...]."""
    axis = axis_of(call.integer("axis"), 2)
    steps = x.shape[axis]
    rest = [1] * (x.ndim - 2)
    time = jnp.arange(steps).reshape((steps, 1, *rest) if axis == 0 else (1, steps, *rest))
    ends = jnp.asarray(lengths).astype(jnp.int32)
    return axis, time, ends.reshape((1, -1, *rest) if axis == 0 else (-1, 1, *rest))


@MXNET.row("SequenceMask")
def _sequence_mask(call: Call, x: Any, lengths: Any = None) -> Any:
    if lengths is None or not call.flag("use_sequence_length"):
        return x
    _, time, ends = _times(call, x, lengths)
    return jnp.where(time < ends, x, jnp.asarray(call.number("value"), x.dtype))


@MXNET.row("SequenceLast")
def _sequence_last(call: Call, x: Any, lengths: Any = None) -> Any:
    if lengths is None or not call.flag("use_sequence_length"):
        return jax.lax.index_in_dim(x, -1, axis_of(call.integer("axis"), 2), keepdims=False)
    axis, _, ends = _times(call, x, lengths)
    return jnp.squeeze(jnp.take_along_axis(x, ends - 1, axis, mode="clip"), axis)


@MXNET.row("SequenceReverse")
def _sequence_reverse(call: Call, x: Any, lengths: Any = None) -> Any:
    if lengths is None or not call.flag("use_sequence_length"):
        return jnp.flip(x, 0)
    axis, time, ends = _times(call, x, lengths)
    turned = jnp.where(time < ends, ends - 1 - time, time)
    return jnp.take_along_axis(x, turned, axis, mode="clip")
