"""Kernels that publications time, as JAX functions: products with and without an activation, and
attention of one head.

They say what is computed, not how: tiling, fusion and memory are the compiler's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from compiler.frontend.capture import artifact_of
from compiler.frontend.models.blocks import TYPES
from compiler.frontend.stablehlo import import_module
from compiler.ir.types import Graph
from compiler.passes.dce import dce


def product_graph(m: int, k: int, n: int, dtype: str, *, gelu: bool) -> Graph:
    """`x @ w`, GELU of it where asked for. Shapes: x [m, k], w [k, n]."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return jax.nn.gelu(y) if gelu else y

    return _graph(product, (m, k), (k, n), dtype=dtype)


def gelu_graph(m: int, n: int, dtype: str) -> Graph:
    """GELU of a matrix [m, n]."""
    return _graph(jax.nn.gelu, (m, n), dtype=dtype)


def attention_graph(positions: int, width: int, dtype: str) -> Graph:
    """softmax(q k^T / sqrt(width)) v of one head, scores in fp32. Shapes: [positions, width]."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("te,se->ts", q, k).astype(jnp.float32) * width**-0.5
        return jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v

    each = (positions, width)
    return _graph(attention, each, each, each, dtype=dtype)


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str) -> Graph:
    arguments = [jax.ShapeDtypeStruct(shape, TYPES[dtype]) for shape in shapes]
    traced = jax.jit(function, keep_unused=True).trace(*arguments)
    return dce(import_module(artifact_of(traced)))
