"""Elements by index, order of elements, and sums along an axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, axis_of
from shardwright.compiler.frontend.onnx.operators.registry import ONNX


def _inside(indices: Any, size: int) -> Any:
    """Indices counted from the front."""
    if isinstance(indices, np.ndarray):
        if indices.size and not (-size <= indices.min() and indices.max() < size):
            raise unfit(f"indices from {-size} to {size - 1}", f"{indices.min()}, {indices.max()}")
        return np.where(indices < 0, indices + size, indices)
    return jnp.where(indices < 0, indices + size, indices)


@ONNX.row("Gather", folds=True, picks=(1, 0))
def _gather(call: Call, x: Any, indices: Any) -> Any:
    axis = axis_of(call.integer("axis"), x.ndim)
    places = _inside(indices, x.shape[axis])
    if call.xp is np:
        return np.take(x, places, axis)
    if isinstance(places, np.ndarray) and not places.ndim:
        return jax.lax.index_in_dim(x, int(places), axis, keepdims=False)
    return jnp.take(x, places, axis, mode="clip")


@ONNX.row("GatherElements")
def _gather_elements(call: Call, x: Any, indices: Any) -> Any:
    axis = axis_of(call.integer("axis"), x.ndim)
    places = _inside(indices, x.shape[axis])
    at = [
        jnp.arange(n).reshape([-1 if d == k else 1 for d in range(x.ndim)])
        for k, n in enumerate(places.shape)
    ]
    at[axis] = places
    return jnp.asarray(x).at[tuple(at)].get(mode="clip")


@ONNX.row("GatherND")
def _gather_nd(call: Call, x: Any, indices: Any) -> Any:
    batch = call.integer("batch_dims")

    def taken(x: Any, indices: Any) -> Any:
        parts = jnp.moveaxis(jnp.asarray(indices), -1, 0)
        places = tuple(_inside(part, x.shape[n]) for n, part in enumerate(parts))
        return jnp.asarray(x).at[places].get(mode="clip")

    for _ in range(batch):
        taken = jax.vmap(taken)
    return taken(x, indices)


def _scattered(call: Call, x: Any, places: Any, updates: Any) -> Any:
    """x with updates put, added, or whatever the node says, at places of each dim."""
    how = call.one_of("reduction", "none", "none", "add", "mul", "max", "min")
    target = jnp.asarray(x).at[places]
    put = {"none": target.set, "add": target.add, "mul": target.multiply}
    return (put | {"max": target.max, "min": target.min})[how](updates)


@ONNX.row("ScatterElements", since=11)
@ONNX.row("Scatter", since=9, until=11)
def _scatter_elements(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    axis = axis_of(call.integer("axis"), x.ndim)
    places = [
        jnp.arange(n).reshape([-1 if d == k else 1 for d in range(x.ndim)])
        for k, n in enumerate(indices.shape)
    ]
    places[axis] = _inside(indices, x.shape[axis])
    return _scattered(call, x, tuple(places), updates)


@ONNX.row("ScatterND")
def _scatter_nd(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    parts = jnp.moveaxis(jnp.asarray(indices), -1, 0)
    places = tuple(_inside(part, x.shape[n]) for n, part in enumerate(parts))
    return _scattered(call, x, places, updates)


@ONNX.row("Compress", static=(1,))
def _compress(call: Call, x: Any, condition: Any) -> Any:
    if "axis" not in call.node.attributes:
        return x.reshape(-1)[np.nonzero(condition)[0]]
    return jnp.take(x, np.nonzero(condition)[0], axis_of(call.integer("axis"), x.ndim))


def _largest(call: Call, x: Any, k: int) -> Any:
    axis = axis_of(call.integer("axis", -1), x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise unfit(f"at most {x.shape[axis]} elements of axis {axis}", str(k))
    rows = jnp.moveaxis(jnp.asarray(x), axis, -1)
    if call.integer("largest", 1):
        values, places = jax.lax.top_k(rows, k)
    else:
        places = jnp.argsort(rows, -1, stable=True)[..., :k]
        values = jnp.take_along_axis(rows, places, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(jnp.int32)


@ONNX.row("TopK", since=10, static=(1,), has_own_type=True)
def _top_k(call: Call, x: Any, k: Any) -> Any:
    return _largest(call, x, int(k.reshape(())))


@ONNX.row("TopK", has_own_type=True)
def _top_k_of_attributes(call: Call, x: Any) -> Any:
    return _largest(call, x, call.integer("k"))


def _argument(name: str) -> Any:
    """The place of the largest or smallest element; of several the first or the last."""

    def row(call: Call, x: Any) -> Any:
        axis = axis_of(call.integer("axis"), x.ndim)
        find, keeps = getattr(jnp, name), bool(call.integer("keepdims", 1))
        if call.integer("select_last_index"):
            return x.shape[axis] - 1 - find(jnp.flip(x, axis), axis, keepdims=keeps)
        return find(x, axis, keepdims=keeps)

    return row


ONNX.rows({"ArgMax": _argument("argmax"), "ArgMin": _argument("argmin")}, has_own_type=True)


@ONNX.row("CumSum", static=(1,), folds=True)
def _cum_sum(call: Call, x: Any, axis: Any) -> Any:
    place, xp = axis_of(int(axis.reshape(())), x.ndim), call.xp
    backwards = bool(call.integer("reverse"))
    x = xp.flip(x, place) if backwards else x
    found = xp.cumsum(x, place)
    found = found - x if call.integer("exclusive") else found
    return xp.flip(found, place) if backwards else found


@ONNX.row("ReverseSequence")
def _reverse_sequence(call: Call, x: Any, lengths: Any) -> Any:
    time, batch = call.integer("time_axis"), call.integer("batch_axis", 1)
    rows = jnp.moveaxis(x, (batch, time), (0, 1))
    places, ends = jnp.arange(rows.shape[1])[None], jnp.asarray(lengths)[:, None]
    turned = jnp.where(places < ends, ends - 1 - places, places)
    turned = turned.reshape(turned.shape + (1,) * (rows.ndim - 2))
    return jnp.moveaxis(jnp.take_along_axis(rows, turned, 1), (0, 1), (batch, time))
