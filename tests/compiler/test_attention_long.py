"""Attention over many positions: its memory grows with them and not with their square, and its
values are those of a blocked computation in fp64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.options import CompileOptions
from tests.support.cells import long_in_matrix
from tests.support.model_run import compile_function

DEPTH = 64


def attention(q, k, v):
    """Causal softmax attention of one head, [positions, depth]."""
    scores = jnp.einsum("td,sd->ts", q, k) * DEPTH**-0.5
    seen = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[None, :]
    return jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) @ v


def step(q, k, v, g):
    """What attention gives, and the gradients of q, k and v for `g` of it."""
    out, pull = jax.vjp(attention, q, k, v)
    return (out, *pull(g))


def blocked(q, k, v, g, rows: int = 512):
    """`step` in fp64, a block of queries at a time."""
    q, k, v, g = (np.asarray(a, np.float64) for a in (q, k, v, g))
    out, dq, dk, dv = (np.zeros_like(a) for a in (q, q, k, v))
    for first in range(0, len(q), rows):
        at, seen = slice(first, first + rows), slice(0, first + rows)
        scores = q[at] @ k[seen].T / np.sqrt(DEPTH)
        scores[first + np.arange(rows)[:, None] < np.arange(first + rows)[None, :]] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out[at] = p @ v[seen]
        dv[seen] += p.T @ g[at]
        dp = g[at] @ v[seen].T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) / np.sqrt(DEPTH)
        dq[at] = ds @ k[seen]
        dk[seen] += ds.T @ q[at]
    return out, dq, dk, dv


def given(positions: int) -> list[jax.Array]:
    rng = np.random.default_rng(7)
    return [jnp.asarray(rng.standard_normal((positions, DEPTH)), jnp.float32) for _ in range(4)]


@pytest.mark.exhaustive
def test_values_at_16384_positions() -> None:
    arrays = given(16384)
    made = compile_function(step, arrays, CompileOptions(optlevel=1))
    for got, want in zip(made.run("L0"), blocked(*arrays), strict=True):
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= 1e-5


def stored(positions: int) -> tuple[int, int]:
    """Elements of the largest tensor in HBM, and of all of them."""
    made = compile_function(step, [jnp.zeros((positions, DEPTH), jnp.bfloat16)] * 4)
    sizes = [int(np.prod(t.shape)) for f in made.program.functions for t in f.tensors]
    return max(sizes), sum(sizes)


SIZES = (65536, 1048576, 16384, 262144)


@pytest.mark.parametrize("positions", long_in_matrix(SIZES, SIZES[:1], SIZES[1:]))
def test_what_is_stored_grows_with_the_positions(positions: int) -> None:
    largest, total = stored(positions)
    assert largest == positions * DEPTH
    assert total <= 16 * positions * DEPTH
