"""Recurrent networks: a loop over time for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.random import dropped
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place

Cell = Callable[[Any, Any, Any, Any], Any]
"""(x W_ih + b_ih at one time [B, G], state, W_hh, b_hh) -> the next state; its first part [B, H]
is the output."""


def _lstm(x: Any, state: Any, weight: Any, bias: Any) -> Any:
    h, c = state
    gates = x + h @ weight.T + bias
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(x: Any, state: Any, weight: Any, bias: Any) -> Any:
    (h,) = state
    r, z, n = jnp.split(x, 3, -1)
    hr, hz, hn = jnp.split(h @ weight.T + bias, 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    n = jnp.tanh(n + r * hn)
    return ((1 - z) * n + z * h,)


def _plain(activation: Callable[[Any], Any]) -> Cell:
    def cell(x: Any, state: Any, weight: Any, bias: Any) -> Any:
        return (activation(x + state[0] @ weight.T + bias),)

    return cell


def _layer(
    cell: Cell, x: Any, state: Any, weights: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[Any, Any]:
    """One direction of a layer: x [T, B, I] -> ([T, B, H], the last state). A matrix behind the
    biases projects the output, as `proj_size` of an LSTM says."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (jnp.zeros((), x.dtype),) * 2
    projection = rest[2:] if has_biases else rest
    inputs = jnp.einsum("tbi,gi->tbg", x, w_ih) + b_ih

    def at(state: Any, x: Any) -> tuple[Any, Any]:
        output, *others = cell(x, state, w_hh, b_hh)
        for matrix in projection:
            output = output @ matrix.T
        return (output, *others), output

    last, outputs = jax.lax.scan(at, state, inputs, reverse=reverse)
    return outputs, last


def _network(
    place: Place,
    cell: Cell,
    x: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    options: tuple[bool, int, float, bool, bool, bool],
) -> Any:
    """All layers: the outputs, then each state [layers x directions, B, H]."""
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    directions = 1 + bidirectional
    per = len(params) // (layers * directions)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            state = tuple(part[n] for part in states)
            weights = params[n * per : (n + 1) * per]
            y, end = _layer(cell, x, state, weights, has_biases, reverse=bool(direction))
            outputs.append(y)
            last.append(end)
        x = jnp.concatenate(outputs, -1)
        if dropout and train and layer + 1 < layers:
            x = dropped(x, dropout, place.key)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    return x, *(jnp.stack(part) for part in zip(*last, strict=True))


@ATEN.row("lstm.input", placed=True)
def lstm(place: Place, x: Any, states: Any, params: Any, *options: Any) -> Any:
    """Long short-term memory, of x [T, B, I] or [B, T, I]."""
    return _network(place, _lstm, x, states, params, options)


@ATEN.row("gru.input", placed=True)
def gru(place: Place, x: Any, state: Any, params: Any, *options: Any) -> Any:
    """Gated recurrent units."""
    return _network(place, _gru, x, (state,), params, options)


@ATEN.row("rnn_tanh.input", placed=True)
def rnn_tanh(place: Place, x: Any, state: Any, params: Any, *options: Any) -> Any:
    """A plain recurrent network with tanh."""
    return _network(place, _plain(jnp.tanh), x, (state,), params, options)


@ATEN.row("rnn_relu.input", placed=True)
def rnn_relu(place: Place, x: Any, state: Any, params: Any, *options: Any) -> Any:
    """A plain recurrent network with a rectifier."""
    return _network(place, _plain(jax.nn.relu), x, (state,), params, options)
