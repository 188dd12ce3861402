"""Recurrent networks: a loop over time for each direction.

X is [T, B, I], or [B, T, I] where `layout` is 1; of D directions and G gates, W is [D, G x H, I],
R [D, G x H, H] and B [D, 2 x G x H].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.onnx.operators.registry import ONNX

Activation = Callable[[Any], Any]
Cell = Callable[["_Layer", Any, tuple[Any, ...]], tuple[Any, ...]]
"""(layer, x W + b at one time [B, G x H], state) -> the next state, its first part the output."""

_ACTIVATIONS: dict[str, Activation] = {
    "elu": jax.nn.elu,
    "hardsigmoid": lambda x: jnp.clip(0.2 * x + 0.5, 0, 1),
    "relu": lambda x: jnp.maximum(x, 0),
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
}
"""Activations by name, in lower case; their settings are the usual ones."""
_DIRECTIONS = ("forward", "reverse", "bidirectional")


class _Layer:
    """One direction: its weights by gate, its activations and flags."""

    def __init__(
        self, call: Call, weights: Sequence[Any], activations: Sequence[Activation]
    ) -> None:
        w, r, b, self.peephole = weights
        gates = w.shape[0]
        self.w, self.r, self.activations = w, r, activations
        self.hidden = r.shape[-1]
        zeros = jnp.zeros((gates,), w.dtype)
        self.w_bias, self.r_bias = (b[:gates], b[gates:]) if b is not None else (zeros, zeros)
        self.clip = call.number("clip")
        self.is_linear_first = bool(call.integer("linear_before_reset"))
        self.is_coupled = bool(call.integer("input_forget"))

    def bounded(self, x: Any) -> Any:
        """What an activation takes, cut where the node says so."""
        return jnp.clip(x, -self.clip, self.clip) if self.clip else x


def _rnn(layer: _Layer, x: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    (f,) = layer.activations
    return (f(layer.bounded(x + state[0] @ layer.r.T + layer.r_bias)),)


def _gru(layer: _Layer, x: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    (h,), (f, g) = state, layer.activations
    xz, xr, xh = jnp.split(x, 3, -1)
    (rz, rr, rh), (bz, br, bh) = jnp.split(layer.r, 3), jnp.split(layer.r_bias, 3)
    z = f(layer.bounded(xz + h @ rz.T + bz))
    r = f(layer.bounded(xr + h @ rr.T + br))
    inner = r * (h @ rh.T + bh) if layer.is_linear_first else (r * h) @ rh.T + bh
    new = g(layer.bounded(xh + inner))
    return ((1 - z) * new + z * h,)


def _lstm(layer: _Layer, x: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    (h, c), (f, g, out) = state, layer.activations
    xi, xo, xf, xc = jnp.split(x + h @ layer.r.T + layer.r_bias, 4, -1)
    peephole = layer.peephole
    pi, po, pf = jnp.split(peephole, 3) if peephole is not None else (0, 0, 0)
    i = f(layer.bounded(xi + pi * c))
    forget = 1 - i if layer.is_coupled else f(layer.bounded(xf + pf * c))
    c = forget * c + i * g(layer.bounded(xc))
    o = f(layer.bounded(xo + po * c))
    return o * out(c), c


_CELLS: dict[str, tuple[Cell, int, tuple[str, ...]]] = {
    "GRU": (_gru, 1, ("Sigmoid", "Tanh")),
    "LSTM": (_lstm, 2, ("Sigmoid", "Tanh", "Tanh")),
    "RNN": (_rnn, 1, ("Tanh",)),
}
"""Operator -> its cell, how many states it has, its usual activations."""


def _activations(call: Call, usual: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction."""
    names = call.node.attributes.get("activations") or tuple(usual) * directions
    if "activation_alpha" in call.node.attributes or "activation_beta" in call.node.attributes:
        raise NotImplementedError("activations with settings of their own")
    known = [_ACTIVATIONS.get(str(name).lower()) for name in names]
    if len(known) != len(usual) * directions or None in known:
        raise unfit(
            f"{len(usual) * directions} activations of {', '.join(_ACTIVATIONS)}", str(list(names))
        )
    found = [each for each in known if each is not None]
    return [found[n * len(usual) : (n + 1) * len(usual)] for n in range(directions)]


def _check_lengths(lengths: Any, steps: int) -> None:
    """Refuse sequences of different lengths."""
    if lengths is not None and (lengths != steps).any():
        raise NotImplementedError(f"sequence_lens other than {steps}, all of X")


def _network(
    call: Call, x: Any, w: Any, r: Any, b: Any, lengths: Any, *states: Any, peephole: Any = None
) -> Any:
    """Y [T, D, B, H], then each last state [D, B, H]."""
    cell, count, usual = _CELLS[call.node.operator]
    is_batch_first = bool(call.integer("layout"))
    x = jnp.swapaxes(x, 0, 1) if is_batch_first else x
    way = call.one_of("direction", "forward", *_DIRECTIONS)
    directions = 1 + (way == "bidirectional")
    activations = _activations(call, usual, directions)
    _check_lengths(lengths, x.shape[0])
    zeros = jnp.zeros((directions, x.shape[1], r.shape[-1]), x.dtype)
    given = [zeros if s is None else s for s in (*states, None, None)[:count]]
    if is_batch_first:
        given = [s if s is zeros else jnp.swapaxes(s, 0, 1) for s in given]
    outputs, last = [], []
    for n in range(directions):
        weights = [None if part is None else part[n] for part in (w, r, b, peephole)]
        layer = _Layer(call, weights, activations[n])
        inputs = jnp.einsum("tbi,gi->tbg", x, layer.w) + layer.w_bias
        is_back = way == "reverse" or n == 1

        def at(state: Any, x: Any, layer: _Layer = layer) -> tuple[Any, Any]:
            state = cell(layer, x, state)
            return state, state[0]

        end, y = jax.lax.scan(at, tuple(s[n] for s in given), inputs, reverse=is_back)
        outputs.append(y)
        last.append(end)
    found = [jnp.stack(outputs, 1), *(jnp.stack(part) for part in zip(*last, strict=True))]
    if is_batch_first:
        found = [found[0].transpose(2, 0, 1, 3), *(jnp.swapaxes(s, 0, 1) for s in found[1:])]
    return tuple(found)


@ONNX.row("RNN", "GRU", since=7, static=(4,), has_own_type=True)
def _simple(
    call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, state: Any = None
) -> Any:
    return _network(call, x, w, r, b, lengths, state)


@ONNX.row("LSTM", since=7, static=(4,), has_own_type=True)
def _long_short(
    call: Call,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    c: Any = None,
    peephole: Any = None,
) -> Any:
    return _network(call, x, w, r, b, lengths, h, c, peephole=peephole)
