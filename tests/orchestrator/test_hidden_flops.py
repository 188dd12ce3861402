"""How much of attention a mask hides, for spellings of masks, against counts of positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.report.hidden import attention_flops
from tests.support.compiled import graph_of

T, HEADS, WIDTH = 6, 2, 4
PRODUCTS = 2 * 2 * HEADS * T * T * WIDTH  # scores and what they weigh, 2 FLOP each
Mask = Callable[[jax.Array], jax.Array]


def attention(
    mask: Mask, layers: int = 1
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = mask(jnp.einsum("hte,hse->hts", q, k))
        return jnp.einsum("hts,hse->hte", jax.nn.softmax(scores), v)

    def all_layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda q, _: (one(q, k, v), None), q, None, length=layers)[0]

    return one if layers == 1 else all_layers


def counted(mask: Mask, layers: int = 1) -> tuple[int, float]:
    one = np.ones((HEADS, T, WIDTH), np.float32)
    graph = graph_of(attention(mask, layers), one, one, one)
    found = attention_flops(run(graph, step_passes(DEFAULTS)))
    return found.whole, found.hidden / found.whole


def positions() -> tuple[jax.Array, jax.Array]:
    at = jnp.arange(T)
    return at[:, None], at[None, :]


def later(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return jnp.where(rows >= keys, scores, -1e30)


def turned(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return jnp.where(keys > rows, -jnp.inf, scores)


def triangle(scores: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)


def added(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return scores + jnp.where(rows >= keys, 0.0, -1e9)


def itself_too(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return jnp.where(rows > keys, scores, -1e30)


def two_ahead(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return jnp.where(rows + 2 >= keys, scores, -1e30)


def every_other_row(scores: jax.Array) -> jax.Array:
    rows, keys = positions()
    return jnp.where(2 * rows >= keys, scores, -1e30)


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        (later, 15),  # above the diagonal of 6 x 6
        (turned, 15),
        (triangle, 15),
        (added, 15),
        (itself_too, 21),  # and the diagonal
        (two_ahead, 6),  # 3 + 2 + 1
        (every_other_row, 5 + 3 + 1),
    ],
)
@pytest.mark.parametrize("layers", [1, 3])
def test_scores_that_a_comparison_of_positions_hides(mask: Mask, hidden: int, layers: int) -> None:
    whole, share = counted(mask, layers)
    assert whole == layers * PRODUCTS
    assert share == pytest.approx(hidden / T**2)


def unmasked(scores: jax.Array) -> jax.Array:
    return scores


def near_zero(scores: jax.Array) -> jax.Array:
    """What is hidden is still seen a little."""
    rows, keys = positions()
    return jnp.where(rows >= keys, scores, -5.0)


def windowed(scores: jax.Array) -> jax.Array:
    """Two comparisons: counted in full, and said so (docs/report.md)."""
    rows, keys = positions()
    return jnp.where((rows >= keys) & (rows - keys < 2), scores, -1e30)


def by_values(scores: jax.Array) -> jax.Array:
    return jnp.where(scores > 0, scores, -1e30)


@pytest.mark.parametrize("mask", [unmasked, near_zero, windowed, by_values])
def test_what_counts_in_full(mask: Mask) -> None:
    assert counted(mask) == (PRODUCTS, 0.0)


def test_a_step_without_attention_has_none() -> None:
    one = np.ones((4, 4), np.float32)
    found = attention_flops(graph_of(lambda x, y: jnp.maximum(x @ y, 0) @ y, one, one))
    assert (found.whole, found.hidden) == (0, 0)
