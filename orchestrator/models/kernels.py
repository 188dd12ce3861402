"""Kernels that publications time, as JAX functions: products with what follows them, attention of
one head, convolutions, and the nearest of many vectors.

They say what is computed, in which types and from which layouts, not how: tiling, fusion and memory
are the compiler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.dce import dce
from shardwright.orchestrator.models.layers import TYPES


def product_graph(
    m: int, k: int, n: int, dtype: str, *, gelu: str = "", bias: str = "", transposed: bool = False
) -> Graph:
    """`x @ w`, with a bias and GELU where asked for. Shapes: x [m, k] ([k, m] when `transposed`),
    w [k, n], bias [n].

    `bias` is empty, `added` or `spread`: spread over the rows by a product with ones, which makes
    it one more row of `w` against ones in `x`. `gelu` is empty, `function` (one function of the
    machine) or `operators` (its tanh form, every operator of it a step of its own).
    """

    def product(x: jax.Array, w: jax.Array, *biases: jax.Array) -> jax.Array:
        y = jnp.einsum("km,kn->mn" if transposed else "mk,kn->mn", x, w)
        for b in biases:
            y = y + b
        return _GELUS[gelu](y) if gelu else y

    depth = k + (bias == "spread")
    x = (depth, m) if transposed else (m, depth)
    shapes = [x, (depth, n), *([(n,)] if bias == "added" else [])]
    return _graph(product, *shapes, dtype=dtype)


def _gelu_by_operators(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, tanh as a logistic; barriers keep it from being recognised."""
    kept = jax.lax.optimization_barrier
    inner = kept((x + 0.044715 * kept(x * x * x)) * math.sqrt(2 / math.pi))
    curve = kept(jax.nn.sigmoid(2 * inner) * 2 - 1)
    return 0.5 * x * (1 + curve)


_GELUS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "function": jax.nn.gelu,
    "operators": _gelu_by_operators,
}


def gelu_graph(m: int, n: int, dtype: str) -> Graph:
    """GELU of a matrix [m, n]."""
    return _graph(jax.nn.gelu, (m, n), dtype=dtype)


def attention_graph(
    positions: int, width: int, dtype: str, *, transposed: bool = False, wide: bool = False
) -> Graph:
    """softmax(q k^T / sqrt(width)) v of one head, scores in fp32. Shapes: [positions, width], of
    the operands [width, positions] when `transposed`. `wide`: probabilities and values stay fp32,
    and scores are not scaled.
    """
    letters = ("et", "es", "es") if transposed else ("te", "se", "se")

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum(f"{letters[0]},{letters[1]}->ts", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores if wide else scores * width**-0.5, axis=-1)
        kept = jnp.float32 if wide else v.dtype
        mixed = jnp.einsum(f"ts,{letters[2]}->te", weights.astype(kept), v.astype(kept))
        return mixed.astype(v.dtype)

    each = (width, positions) if transposed else (positions, width)
    return _graph(attention, each, each, each, dtype=dtype)


def convolution_graph(
    batch: int, channels: tuple[int, int], size: int, window: int, dtype: str, *, pool: int = 1
) -> Graph:
    """A convolution without padding, a bias, and the greatest of `pool` x `pool` elements. Shapes:
    x [batch, channels[0], size, size], w [channels[1], channels[0], window, window].
    """

    def convolution(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        numbers = ("NCHW", "OIHW", "NCHW")
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)
        y = y + b[None, :, None, None]
        if pool == 1:
            return y
        sizes = (1, 1, pool, pool)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, sizes, sizes, "VALID")

    given, made = channels
    shapes = ((batch, given, size, size), (made, given, window, window), (made,))
    return _graph(convolution, *shapes, dtype=dtype)


def nearest_graph(vectors: int, width: int, centres: int, dtype: str) -> Graph:
    """Per vector [vectors, width] the centre [centres, width] with the greatest product."""

    def nearest(x: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.argmax(x @ c.T, axis=-1)

    return _graph(nearest, (vectors, width), (centres, width), dtype=dtype)


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str) -> Graph:
    arguments = [jax.ShapeDtypeStruct(shape, TYPES[dtype]) for shape in shapes]
    traced = jax.jit(function, keep_unused=True).trace(*arguments)
    return dce(import_module(artifact_of(traced)))
