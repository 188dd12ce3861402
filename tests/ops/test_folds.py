"""Windows and reductions whose bodies are no reduction of the machine, against JAX, with special
values, in the graph and on the simulated core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from tests.support.compiled import graph_of, run_levels

RNG = np.random.default_rng(5)
INF = np.float32(np.inf)
LONG = RNG.normal(size=(37, 5)).astype(np.float32)
EDGES = np.resize(np.array([-INF, -INF, 0, 1, -INF, 3e38, -3e38, 2, 0.5], np.float32), (9, 3))
WORSE = EDGES.copy()
WORSE[4], WORSE[6, 1] = np.nan, np.inf
IMAGE = RNG.normal(size=(2, 9, 8, 3)).astype(np.float32)
IMAGE[0, 0, 0], IMAGE[1, :4, :4], IMAGE[1, 5, :, 0], IMAGE[0, 3, :4] = np.nan, -INF, INF, 1
ULPS = 2e-5


def better(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    kept = a[0] >= b[0]
    return lax.select(kept, a[0], b[0]), lax.select(kept, a[1], b[1])


def pool_with_indices(padding: str) -> Callable[[jax.Array], Any]:
    def pool(x: jax.Array) -> Any:
        rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (1, 2))
        start = (-INF, np.int32(-1))
        sizes, strides = (1, 3, 2, 1), (1, 2, 2, 1)
        return lax.reduce_window((x, 8 * rows + columns), start, better, sizes, strides, padding)

    return pool


def windows(start: float, body: Any, *how: Any) -> Callable[[jax.Array], Any]:
    return lambda x: lax.reduce_window(x, np.float32(start), body, *how)


CASES: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, axis=0), LONG),
    "cumlogsumexp_edges": (lambda x: lax.cumlogsumexp(x, axis=0), EDGES),
    "cumlogsumexp_reverse": (lambda x: lax.cumlogsumexp(x, axis=0, reverse=True), WORSE),
    "cumlogsumexp_columns": (lambda x: lax.cumlogsumexp(x, axis=1), WORSE),
    "pool_with_indices": (pool_with_indices("VALID"), IMAGE),
    "pool_with_indices_padded": (pool_with_indices("SAME"), IMAGE),
    "reduce_rows": (lambda x: lax.reduce(x, -INF, jnp.logaddexp, (0,)), EDGES),
    "reduce_all": (lambda x: lax.reduce(x, -INF, jnp.logaddexp, (0, 1)), LONG),
    "strided": (windows(-INF, jnp.logaddexp, (3, 2), (2, 1), ((1, 1), (0, 1))), WORSE),
    "start_counts": (windows(0.5, jnp.logaddexp, (3, 1), (1, 1), "VALID"), LONG),
    "selecting": (
        windows(-INF, lambda a, b: lax.select(a > b, a, b), (37, 1), (1, 1), ((36, 0), (0, 0))),
        LONG,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_jax(name: str) -> None:
    fn, x = CASES[name]
    graph, wanted = graph_of(fn, x), jax.tree.leaves(jax.jit(fn)(x))
    for outputs in (evaluate(graph, [x]), *run_levels(graph, [x])):
        for have, want in zip(outputs, wanted, strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_allclose(have, want, rtol=ULPS, atol=ULPS / 10)


def test_the_gradient_of_a_cumulative_logsumexp() -> None:
    loss = jax.grad(lambda x: jnp.sum(jnp.sin(lax.cumlogsumexp(x, axis=0))))
    (have,) = evaluate(graph_of(loss, LONG), [LONG])
    np.testing.assert_allclose(have, jax.jit(loss)(LONG), rtol=1e-4, atol=1e-5)


FOLD = """func.func public @main(%a: tensor<8xf32>, %c: tensor<f32>) -> tensor<6xf32> {{
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %r = "stablehlo.reduce_window"(%a, %z) <{{window_dimensions = array<i64: 3>}}> ({{
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
    {body}
    stablehlo.return %s : tensor<f32>
  }}) : (tensor<8xf32>, tensor<f32>) -> tensor<6xf32> loc("net.py":7:0)
  return %r : tensor<6xf32>
}}
"""


def sliding(x: np.ndarray) -> Iterator[list[float]]:
    return ([0, *x[i : i + 3]] for i in range(len(x) - 2))


def test_a_body_may_read_a_value_of_outside() -> None:
    test = "%t = stablehlo.compare GT, %x, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>"
    kept = "%s = stablehlo.select %t, %x, %y : tensor<i1>, tensor<f32>"
    text = FOLD.format(body=f"{test} {kept}")
    inputs = [LONG[:8, 0], np.array(0.2, np.float32)]
    (have,) = evaluate(import_module(text), inputs)
    want = [next((v for v in x if v > inputs[1]), x[-1]) for x in sliding(inputs[0])]
    np.testing.assert_array_equal(have, want)


def test_a_body_of_other_ops_says_what_to_write() -> None:
    body = "%p = stablehlo.iota dim = 0 : tensor<1xf32> %s = stablehlo.reshape %p"
    text = FOLD.format(body=f"{body} : (tensor<1xf32>) -> tensor<f32>")
    with pytest.raises(ImportRuleError, match="elementwise operators, got iota") as caught:
        import_module(text)
    assert caught.value.code == "NCC_EVRF001" and str(caught.value.loc) == "net.py:7"
    assert "associative_scan" in caught.value.diagnostic.hint
