"""Functions of the Scalar engine are found by value, in any spelling, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.ops.elementwise import ACTIVATIONS
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.activations import activations
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.result import distance
from tests.support.compiled import graph_of

X = np.linspace(-6, 6, 91).reshape(7, 13).astype(np.float32)
G = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
C = np.float32(np.sqrt(2 / np.pi))

FORWARD: dict[str, tuple[Callable[..., Any], str]] = {
    "exact": (lambda x: jax.nn.gelu(x, approximate=False), "gelu"),
    "exact, by erf": (lambda x: x / 2 * (1 + jax.lax.erf(x / np.float32(2**0.5))), "gelu"),
    "exact, halved last": (
        lambda x: (x + x * jax.lax.erf(x * np.float32(0.5**0.5))) * 0.5,
        "gelu",
    ),
    "tanh": (jax.nn.gelu, "gelu_apprx_tanh"),
    "tanh of a power": (
        lambda x: 0.5 * x * (1 + jnp.tanh(C * (x + 0.044715 * jnp.power(x, 3.0)))),
        "gelu_apprx_tanh",
    ),
    "tanh by logistic": (
        lambda x: x * jax.nn.sigmoid(2 * C * (x + 0.044715 * x * x * x)),
        "gelu_apprx_tanh",
    ),
    "silu": (jax.nn.silu, "silu"),
    "silu by exp": (lambda x: x / (1 + jnp.exp(-x)), "silu"),
    "silu by tanh": (lambda x: x * (0.5 * (jnp.tanh(x / 2) + 1)), "silu"),
}


def mapped(fn: Callable[..., Any], *arguments: Any) -> tuple[Graph, dict[str, int]]:
    """The graph of `fn` after the pass, equal to the one before, and its ops."""
    before = run(graph_of(fn, *arguments), PASSES)
    after = activations(before)
    given = [np.asarray(a) for a in arguments]
    for have, want in zip(evaluate(after, given), evaluate(before, given), strict=True):
        assert distance(have, want) <= (1e-6 if want.dtype == np.float32 else 1e-2)
    return after, count_ops(after)


@pytest.mark.parametrize("spelling", FORWARD)
def test_every_spelling_is_one_instruction(spelling: str) -> None:
    fn, name = FORWARD[spelling]
    assert mapped(fn, X)[1] == {name: 1}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("exact", "gelu_dx"), ("exact, by erf", "gelu_dx"), ("silu", "silu_dx")],
)
def test_derivatives_times_a_gradient(spelling: str, name: str) -> None:
    fn, _ = FORWARD[spelling]
    _, ops = mapped(lambda x, g: jax.vjp(fn, x)[1](g), X, G)
    assert ops == {name: 1, "multiply": 1}


def test_a_gated_unit_and_its_gradients() -> None:
    """The gradient of the gate is found although it is a product of three values."""

    def unit(x: jax.Array, u: jax.Array) -> jax.Array:
        return jax.nn.silu(x) * u

    _, ops = mapped(lambda x, u, g: jax.vjp(unit, x, u)[1](g), X, G, G[::-1].copy())
    assert ops == {"silu": 1, "silu_dx": 1, "multiply": 3}


def test_short_floats_are_compared_within_their_precision() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    assert mapped(jax.nn.gelu, x)[1] == {"gelu_apprx_tanh": 1}
    assert mapped(lambda x: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype), x)[1]["silu"] == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * jax.nn.sigmoid(1.702 * x),  # quick GELU has no function here
        lambda x: 0.5 * x * (1 + jnp.tanh(0.79 * (x + 0.044715 * x * x * x))),
        lambda x: jax.nn.silu(x) + 1e-4,
        lambda x: x * jnp.exp(-x * x),
    ],
    ids=["quick gelu", "another constant", "shifted", "bell"],
)
def test_near_misses_stay(fn: Callable[..., Any]) -> None:
    _, ops = mapped(fn, X)
    assert not (ops.keys() & ACTIVATIONS.keys()) or ops.get("add", 0)


def test_what_others_read_is_not_computed_twice() -> None:
    """The logistic is wanted itself, so that SiLU would save nothing."""

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gate = jax.nn.sigmoid(x)
        return gate, x * gate

    assert mapped(both, X)[1] == {"logistic": 1, "multiply": 1}


@pytest.mark.parametrize("limit", [7.0, 10.0, 60.0, 1e4, 6.6e4])
def test_limits_of_the_source_stay(limit: float) -> None:
    """A limited SiLU (as gated units have it) differs from SiLU beyond its limit alone."""
    x = np.concatenate((X, X * np.float32(limit))).astype(np.float32)

    def limited(x: jax.Array) -> jax.Array:
        low = jnp.clip(x, -limit, limit)
        return low * jax.nn.sigmoid(low)

    def above(x: jax.Array, g: jax.Array) -> jax.Array:
        low = jnp.minimum(x, limit)
        return low * jax.nn.sigmoid(low) * g

    assert mapped(limited, x)[1] == {"silu": 1, "maximum": 1, "minimum": 1, "constant": 2}
    assert mapped(above, x, x)[1] == {"silu": 1, "minimum": 1, "multiply": 1, "constant": 1}


@pytest.mark.parametrize(("low", "high"), [(5.0, 8.0), (-8.0, -5.0)])
def test_what_differs_between_two_bounds_stays(low: float, high: float) -> None:
    """Far from 0 a sample stands every 0.3."""

    def bent(x: jax.Array) -> jax.Array:
        curve = jax.nn.silu(x)
        return jnp.where(x > low, jnp.where(x < high, x * 0.5, curve), curve)

    x = np.linspace(-12, 12, 97, dtype=np.float32)
    assert mapped(bent, x)[1]["select"] == 2
