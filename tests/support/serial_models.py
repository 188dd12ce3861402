"""Three small models of inference with weights inside: a perceptron, a convolutional net, and a
block of a transformer behind its table of tokens. Each function takes one array."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RNG = np.random.default_rng(0)


def _weights(*shape: int) -> np.ndarray:
    scale = math.sqrt(math.prod(shape[:-1]))
    return (_RNG.normal(size=shape) / scale).astype(np.float32)


_DENSE = [_weights(32, 64), _weights(64, 64), _weights(64, 48), _weights(48, 10)]


def perceptron(x: Any) -> Any:
    h = jax.nn.relu(x @ _DENSE[0])
    h = jax.nn.gelu(jnp.tanh(h @ _DENSE[1]) @ _DENSE[2])
    return jax.nn.softmax(h @ _DENSE[3])


_KERNELS, _HEAD = [_weights(3, 3, 3, 8), _weights(3, 3, 8, 8)], _weights(128, 10)


def convolutions(x: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    first, second = (
        lambda h, k=k: jax.nn.relu(
            jax.lax.conv_general_dilated(h, k, (1, 1), "SAME", dimension_numbers=layout)
        )
        for k in _KERNELS
    )
    window = (1, 2, 2, 1)
    h = jax.lax.reduce_window(first(x), -jnp.inf, jax.lax.max, window, window, "VALID")
    return second(h).reshape(x.shape[0], -1) @ _HEAD


_TABLE, _WIDE, _NARROW = _weights(20, 32), _weights(32, 64), _weights(64, 32)
_PROJECTIONS = [_weights(32, 32) for _ in range(4)]


def _normed(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def block(tokens: Any) -> Any:
    x = jnp.asarray(_TABLE)[tokens]
    samples, length, width = x.shape
    h = _normed(x)
    heads = [(h @ w).reshape(samples, length, 4, 8).swapaxes(1, 2) for w in _PROJECTIONS[:3]]
    scores = heads[0] @ heads[1].swapaxes(2, 3) / math.sqrt(8)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = (jax.nn.softmax(scores) @ heads[2]).swapaxes(1, 2).reshape(samples, length, width)
    x = x + mixed @ _PROJECTIONS[3]
    return x + jax.nn.gelu(_normed(x) @ _WIDE) @ _NARROW


@dataclass(frozen=True)
class Model:
    """A function of one array, such an array, and how many operators of it stay on the host."""

    function: Callable[[Any], Any]
    argument: np.ndarray
    on_host: int = 0

    @property
    def expected(self) -> np.ndarray:
        """What JAX gives."""
        return np.asarray(jax.jit(self.function)(self.argument))


MODELS = {
    "perceptron": Model(perceptron, _RNG.normal(size=(4, 32)).astype(np.float32)),
    "convolutions": Model(convolutions, _RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)),
    "block": Model(block, _RNG.integers(0, 20, (2, 8)).astype(np.int32), on_host=5),
}
