"""Layer loops keep the lightest values that the backward loop needs; values stay bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import SAVE_PASSES, STEP_PASSES
from shardwright.compiler.rewriting.driver import run
from tests.support.compiled import graph_of

LAYERS, ROWS, WIDTH, WIDE = 3, 10, 6, 28
Layer = Callable[[jax.Array, dict[str, jax.Array]], jax.Array]


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = {"up": (WIDTH, WIDE), "down": (WIDE, WIDTH), "scale": (WIDTH,), "bias": (WIDE,)}
    return {n: 0.4 * rng.normal(size=(LAYERS, *s)).astype(np.float32) for n, s in shapes.items()}


def example() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)


def gelu(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]


def exact_gelu(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"], approximate=False) @ w["down"]


def gated(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    gate, up = x @ w["up"], jnp.tanh(x) @ w["up"]
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def normed(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    inner = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w["scale"]
    return x + jnp.tanh(inner @ w["up"]) @ w["down"]


def linear(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + (x @ w["up"]) @ w["down"]


def kept(graph: Graph, width: int) -> int:
    """Values of `width` per row that the loops of the level keep."""
    shape = (LAYERS, ROWS, width)
    made = {v for op in graph.ops if op.name == "loop" for v in op.results}
    read = {v for op in graph.ops if op.name == "loop" for v in op.operands}
    return sum(v.type.shape == shape for v in made & read)


def before_and_after(layer: Layer) -> tuple[Graph, Graph]:
    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)
        return jnp.sum(h * h)

    arguments: tuple[Any, ...] = (weights(), example())
    before = run(graph_of(jax.value_and_grad(loss), *arguments), STEP_PASSES)
    after = run(before, SAVE_PASSES)
    arrays = jax.tree.leaves(arguments)
    for a, b in zip(evaluate(before, arrays), evaluate(after, arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    return before, after


@pytest.mark.parametrize(
    ("layer", "few"), [(gelu, 1), (exact_gelu, 1), (gated, 2)], ids=["gelu", "exact gelu", "gated"]
)
def test_activations_are_made_again_of_their_inputs(layer: Layer, few: int) -> None:
    before, after = before_and_after(layer)
    assert kept(before, WIDE) > few
    assert kept(after, WIDE) == few


def test_a_norm_keeps_its_input_and_statistics() -> None:
    before, after = before_and_after(normed)
    assert kept(after, WIDTH) == 1 < kept(before, WIDTH)


def test_what_contractions_need_stays() -> None:
    before, after = before_and_after(linear)
    assert kept(after, WIDE) == kept(before, WIDE)
    assert kept(after, WIDTH) == kept(before, WIDTH)


def test_long_code_is_not_repeated_for_few_bytes() -> None:
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = z = x @ w["up"]
        for _ in range(30):
            z = jax.lax.stop_gradient(jnp.sin(z) + z)
        return x + (h * z) @ w["down"]

    before, after = before_and_after(layer)
    assert kept(after, WIDE) == kept(before, WIDE) > 1


def test_code_that_does_not_pay_does_not_keep_other_code_from_it() -> None:
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = z = (x * 0.5) @ w["up"][:, : WIDE - 1]
        for _ in range(30):
            z = jax.lax.stop_gradient(jnp.sin(z) + z)
        return gelu(x, w) + (h * z) @ w["down"][: WIDE - 1]

    before, after = before_and_after(layer)
    assert kept(after, WIDE - 1) == kept(before, WIDE - 1) > 1
    assert kept(after, WIDE) == 1 < kept(before, WIDE)


def test_conversions_are_free() -> None:
    """What one operation and conversions make of a short value is made again."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = (x @ w["up"]).astype(jnp.bfloat16)
        wide = h.astype(jnp.float32) * 3.0
        return x + (wide * wide) @ w["down"]

    before, after = before_and_after(layer)
    stacks = {
        v.type.dtype.value
        for op in after.ops
        if op.name == "loop"
        for v in op.results
        if v.type.shape == (LAYERS, ROWS, WIDE)
    }
    assert kept(before, WIDE) and stacks == {"bf16"}
