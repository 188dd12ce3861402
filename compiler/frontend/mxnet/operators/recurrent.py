"""The fused recurrent network: layers of one or two directions over [T, B, I].

Its parameters are one list: of every layer and direction the weights of the input and of the state,
then, in the same order, their biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET

Cell = Callable[[Any, tuple[Any, ...], tuple[Any, Any]], tuple[Any, ...]]
"""(x W + b at one time, state, (weight, bias) of the state) -> the next state."""


def _simple(activation: Callable[[Any], Any]) -> Cell:
    def cell(x: Any, state: tuple[Any, ...], own: tuple[Any, Any]) -> tuple[Any, ...]:
        return (activation(x + state[0] @ own[0].T + own[1]),)

    return cell


def _gru(x: Any, state: tuple[Any, ...], own: tuple[Any, Any]) -> tuple[Any, ...]:
    (h,) = state
    xr, xz, xn = jnp.split(x, 3, -1)
    hr, hz, hn = jnp.split(h @ own[0].T + own[1], 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + r * hn) + z * h,)


def _lstm(x: Any, state: tuple[Any, ...], own: tuple[Any, Any]) -> tuple[Any, ...]:
    h, c = state
    i, f, g, o = jnp.split(x + h @ own[0].T + own[1], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


_CELLS: dict[str, tuple[Cell, int, int]] = {
    "rnn_relu": (_simple(lambda x: jnp.maximum(x, 0)), 1, 1),
    "rnn_tanh": (_simple(jnp.tanh), 1, 1),
    "lstm": (_lstm, 4, 2),
    "gru": (_gru, 3, 1),
}
"""Mode -> its cell, gates and states."""


def _weights(
    call: Call, flat: Any, inputs: int, gates: int
) -> list[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Of each layer and direction (weight, bias) of the input, and of the state."""
    hidden, layers = call.integer("state_size"), call.integer("num_layers", 1)
    ways = 1 + call.flag("bidirectional")
    if hidden < 1 or layers < 1:
        raise unfit("state_size and num_layers from 1", f"{hidden} and {layers}")
    widths = [inputs if layer == 0 else ways * hidden for layer in range(layers)]
    shapes = [
        (gates * hidden, width) for each in widths for _ in range(ways) for width in (each, hidden)
    ]
    sizes = [math.prod(shape) for shape in shapes] + [gates * hidden] * len(shapes)
    if flat.size != sum(sizes):
        raise unfit(f"{sum(sizes)} parameters", str(flat.size))

    def parts() -> Iterator[Any]:
        at = 0
        for size in sizes:
            yield jax.lax.slice_in_dim(flat.reshape(-1), at, at + size)
            at += size

    found = list(parts())
    matrices = [part.reshape(shape) for part, shape in zip(found, shapes, strict=False)]
    pairs = list(zip(matrices, found[len(shapes) :], strict=True))
    return list(zip(pairs[::2], pairs[1::2], strict=True))


@MXNET.row("RNN", has_own_type=True)
def _rnn(call: Call, x: Any, flat: Any, state: Any, memory: Any = None) -> Any:
    """Y [T, B, D x H], then each last state [L x D, B, H]. A state of one sample is one of all."""
    if call.node.attributes.get("projection_size") or call.flag("use_sequence_length"):
        raise NotImplementedError("projection_size, or use_sequence_length")
    cell, gates, count = _CELLS[call.one_of("mode", "", *_CELLS)]
    pairs = _weights(call, flat, x.shape[2], gates)
    ways, hidden = 1 + call.flag("bidirectional"), call.integer("state_size")
    whole = (len(pairs), x.shape[1], hidden)
    given = (state, memory)[:count]
    if any(each is None for each in given):
        raise unfit(f"{count} states", "fewer")
    states = [jnp.broadcast_to(each, whole) for each in given]
    last: list[tuple[Any, ...]] = []
    for layer in range(len(pairs) // ways):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            (w, b), own = pairs[place]

            def at(state: Any, x: Any, own: tuple[Any, Any] = own) -> tuple[tuple[Any, ...], Any]:
                state = cell(x, state, own)
                return state, state[0]

            start = tuple(each[place] for each in states)
            gated = jnp.einsum("tbi,gi->tbg", x, w) + b
            end, y = jax.lax.scan(at, start, gated, reverse=way == 1)
            outputs.append(y)
            last.append(end)
        x = outputs[0] if ways == 1 else jnp.concatenate(outputs, -1)
    return (x, *(jnp.stack(part) for part in zip(*last, strict=True)))
