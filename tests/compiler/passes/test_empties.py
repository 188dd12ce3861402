"""Tensors without elements: what is made of them is what XLA makes, and none is left to compile."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from tests.support.kernel_reference import lower_function

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
NONE = np.zeros((4, 0), np.float32)


def _scan(x: jax.Array, none: jax.Array) -> jax.Array:
    def body(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[object, jax.Array]:
        total, left = carry
        return (total + row.sum() + left.sum(), left * 2), jnp.concatenate([row, left])

    (total, _), rows = jax.lax.scan(body, (jnp.float32(0), none[0]), x)
    return total + rows


CASES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lambda x, none: x + none.sum(),
    "sum_of_rows": lambda x, none: x + none.sum(1)[:, None],
    "prod": lambda x, none: x * none.prod(),
    "max": lambda x, none: jnp.maximum(x, none.max(initial=-0.5)),
    "all": lambda x, none: jnp.where(jnp.all(none > 0), x, 0),
    "any": lambda x, none: jnp.where(jnp.any(none > 0), x, 0),
    "count": lambda x, none: x + jnp.sum(none.astype(jnp.int32)),
    "product": lambda x, none: x + (none @ none.T).sum(),
    "first": lambda x, none: jnp.concatenate([none, x], 1),
    "between": lambda x, none: jnp.concatenate([x, none, x], 1),
    "pad": lambda x, none: x + jnp.pad(none, ((0, 0), (1, 2)), constant_values=3.0),
    "update": lambda x, none: jax.lax.dynamic_update_slice(x, none, (0, 1)),
    "scatter": lambda x, none: jnp.asarray(x).at[jnp.zeros(0, jnp.int32)].add(jnp.ones((0, 3))),
    "gather": lambda x, none: x + x[jnp.zeros(0, jnp.int32)].sum(),
    "sort": lambda x, none: x + jnp.sort(none, axis=1).sum(),
    "window": lambda x, none: (
        x + jax.lax.reduce_window(none, 0.0, jax.lax.add, (1, 2), (1, 1), ((0, 0), (2, 2)))
    ),
    "gradient": jax.grad(lambda x, none: (jnp.concatenate([none, x], 1) ** 2).sum()),
    "scan": _scan,
}


def empty_values(graph: Graph) -> list[str]:
    """Values without elements that are not arguments."""
    values = [v for op in graph.walk() for v in (*op.operands, *op.results)]
    return [str(v.type) for v in values if not v.type.num_elements]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_made_of_nothing(case: str) -> None:
    graph = import_module(artifact_of(jax.jit(CASES[case], keep_unused=True).trace(X, NONE)))
    (wanted,) = evaluate(graph, [X, NONE])
    np.testing.assert_allclose(wanted, CASES[case](X, NONE), rtol=1e-6)
    after = run(graph, step_passes())
    assert not empty_values(after)
    np.testing.assert_array_equal(evaluate(after, [X, NONE])[0], wanted)
    if case != "scan":  # a function has no loops
        lower_function(after)
