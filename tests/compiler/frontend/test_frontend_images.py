"""Image operators as users write them: JAX functions and their gradients imported, run by the
reference and by generated code, and held against JAX; what neuronx-cc refuses, with its codes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.result import distance
from tests.support import xla
from tests.support.compiled import run_levels

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def of_function(function: Callable[..., Any], *args: Any) -> Graph:
    traced = jax.jit(function, keep_unused=True).trace(*args)
    return run(verify(import_module(artifact_of(traced))), PASSES)


def check(function: Callable[..., Any], *shapes: tuple[int, ...], bound: float = 1e-5) -> Graph:
    """The function equals JAX in the reference and in generated code."""
    rng = np.random.default_rng(len(shapes))
    args = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    graph = of_function(function, *args)
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*args))]
    (code,) = run_levels(graph, args, ("L0",))
    for want, meant, made in zip(wanted, evaluate(graph, args), code, strict=True):
        assert want.shape == meant.shape == made.shape and want.dtype == meant.dtype == made.dtype
        assert distance(want, meant) <= bound
        assert distance(want, made) <= bound
    return graph


def names(graph: Graph) -> set[str]:
    return {op.name for op in graph.walk()}


def with_gradients(function: Callable[..., Any], *arguments: int) -> Callable[..., Any]:
    """(value, gradients of a weighted sum of it): weights keep the gradient from being constant."""

    def both(*args: jax.Array) -> Any:
        def scalar(*inner: jax.Array) -> jax.Array:
            y = function(*inner)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

        return function(*args), jax.grad(scalar, arguments)(*args)

    return both


def conv(strides: Any, padding: Any, dims: Any = NHWC, **more: Any) -> Callable[..., jax.Array]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=dims, **more
    )


CONVOLUTIONS = {
    "same": (conv((1, 1), "SAME"), (2, 7, 6, 5), (3, 3, 5, 4)),
    "strided": (conv((2, 2), "SAME"), (2, 9, 8, 3), (3, 3, 3, 4)),
    "even_taps": (conv((2, 1), "VALID"), (2, 9, 8, 3), (4, 2, 3, 4)),
    "stride_skips_edge": (conv((3, 3), "VALID"), (1, 9, 9, 3), (2, 2, 3, 4)),
    "dilated": (conv((1, 1), "SAME", rhs_dilation=(2, 3)), (2, 9, 8, 3), (3, 3, 3, 4)),
    "transposed": (conv((1, 1), ((2, 1), (1, 2)), lhs_dilation=(2, 2)), (2, 5, 4, 3), (3, 3, 3, 4)),
    "cropped": (conv((1, 1), ((-1, 0), (2, -2))), (2, 9, 8, 3), (3, 3, 3, 4)),
    "nchw": (conv((2, 2), "SAME", NCHW), (2, 3, 9, 8), (4, 3, 3, 3)),
    "groups": (conv((1, 1), "SAME", feature_group_count=2), (2, 6, 6, 4), (3, 3, 2, 6)),
    "depthwise": (conv((2, 2), "SAME", feature_group_count=6), (2, 7, 6, 6), (3, 3, 1, 12)),
    "batch_groups": (conv((1, 1), "SAME", batch_group_count=2), (4, 6, 6, 3), (3, 3, 3, 4)),
    "line": (conv((2,), "SAME", ("NWC", "WIO", "NWC")), (2, 11, 3), (4, 3, 5)),
    "cube": (
        conv((1, 2, 1), "SAME", ("NDHWC", "DHWIO", "NDHWC")),
        (1, 4, 5, 4, 3),
        (2, 3, 3, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients(name: str) -> None:
    function, *shapes = CONVOLUTIONS[name]
    graph = check(with_gradients(function, 0, 1), *shapes)
    assert sum(op.name == "convolution" for op in graph.ops) == 3


def pool(kind: str, size: int, stride: int, padding: str) -> Callable[[jax.Array], jax.Array]:
    fold, start = {"max": (lax.max, -jnp.inf), "add": (lax.add, 0.0)}[kind]
    window, steps = (1, size, size, 1), (1, stride, stride, 1)
    return lambda x: lax.reduce_window(x, start, fold, window, steps, padding)


@pytest.mark.parametrize("kind", ["max", "add"])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, "VALID"), (3, 2, "SAME")])
def test_poolings_and_their_gradients(kind: str, size: int, stride: int, padding: str) -> None:
    graph = check(with_gradients(pool(kind, size, stride, padding), 0), (2, 7, 8, 3))
    assert "reduce_window" in names(graph)
    assert ("select_and_scatter" in names(graph)) == (kind == "max")


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    gradient = jax.grad(lambda x: jnp.sum(pool("max", 2, 2, "VALID")(x)))
    x = np.ones((1, 4, 4, 1), np.float32)
    graph = of_function(gradient, x)
    ((have,),) = run_levels(graph, [x], ("L0",))
    np.testing.assert_array_equal(have, np.asarray(gradient(x)))
    assert have[0, 0, 0, 0] == 1 and have[0, 0, 1, 0] == 0


def test_average_pooling_counts_what_is_inside() -> None:
    def average(x: jax.Array) -> jax.Array:
        return pool("add", 3, 2, "SAME")(x) / pool("add", 3, 2, "SAME")(jnp.ones_like(x))

    check(with_gradients(average, 0), (2, 7, 8, 3))


CUMULATIVE = {
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumsum_reversed": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "cumprod": lambda x: jnp.cumprod(1 + 0.01 * x, 1),
    "cummax": lambda x: lax.cummax(x, axis=1),
    "cummin": lambda x: lax.cummin(x, axis=0),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
}


@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative_folds(name: str) -> None:
    check(CUMULATIVE[name], (5, 37))


def test_infinities_survive_a_maximum_that_could_cross_the_partitions() -> None:
    """Wide windows over few rows: the short index goes to the partitions all the same."""
    x = np.full((3, 40), -np.inf, np.float32)
    x[:, 7] = 1.5
    ((have,),) = run_levels(of_function(lambda y: lax.cummax(y, axis=1), x), [x], ("L0",))
    np.testing.assert_array_equal(have, np.maximum.accumulate(x, 1))


def test_the_gradient_of_a_cumulative_sum() -> None:
    check(with_gradients(CUMULATIVE["cumsum"], 0), (5, 37))


def test_a_start_value_that_is_no_identity_counts_once_per_window() -> None:
    def windows(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, 2.0, lax.add, (2, 3), (1, 2), ((1, 0), (0, 2)))

    check(windows, (5, 6))


RESIZES = {
    "nearest": ((2, 9, 5, 3), "nearest"),
    "bilinear": ((2, 11, 4, 3), "bilinear"),
    "cubic": ((2, 9, 10, 3), "cubic"),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resizing(name: str) -> None:
    shape, method = RESIZES[name]
    check(with_gradients(lambda x: jax.image.resize(x, shape, method), 0), (2, 6, 5, 3))


MOVES = {
    "reverse": lambda x: jnp.tanh(jnp.flip(x, (0, 2))) + x,
    "reverse_of_sum": lambda x: jnp.flip(jnp.tanh(x) + 1, 1) * x,
    "interior": lambda x: lax.pad(jnp.tanh(x), 1.5, ((1, 2, 0), (-1, 1, 2), (0, -2, 1))),
    "crop_all": lambda x: lax.pad(x, 0.0, ((-4, 1, 0), (0, 0, 0), (0, 0, 0))),
    "join_many": lambda x: jnp.concatenate([x[:, i : i + 2] * i for i in range(5)] + [x, x], 1),
    "join_reversed": lambda x: jnp.concatenate([x[::-1], x[:, ::-1], jnp.sin(x)], 2),
    "mirror": lambda x: jnp.pad(x, ((1, 1), (2, 2), (0, 3)), mode="reflect"),
    "roll": lambda x: jnp.roll(x, (1, -2), (0, 1)),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_data(name: str) -> None:
    check(with_gradients(MOVES[name], 0), (4, 7, 5))


BATCH_NORM = """
  func.func public @main(%x: tensor<{x}>, %s: tensor<{f}>, %o: tensor<{f}>,
                         %m: tensor<{f}>, %v: tensor<{f}>, %g: tensor<{x}>)
      -> (tensor<{x}>, tensor<{x}>, tensor<{f}>, tensor<{f}>,
          tensor<{x}>, tensor<{f}>, tensor<{f}>) {{
    %u = stablehlo.multiply %v, %v : tensor<{f}>
    %i = "stablehlo.batch_norm_inference"(%x, %s, %o, %m, %u)
      {{epsilon = 0.01 : f32, feature_index = {d} : i64}}
      : (tensor<{x}>, tensor<{f}>, tensor<{f}>, tensor<{f}>, tensor<{f}>) -> tensor<{x}>
    %t:3 = "stablehlo.batch_norm_training"(%x, %s, %o)
      {{epsilon = 0.01 : f32, feature_index = {d} : i64}}
      : (tensor<{x}>, tensor<{f}>, tensor<{f}>) -> (tensor<{x}>, tensor<{f}>, tensor<{f}>)
    %b:3 = "stablehlo.batch_norm_grad"(%x, %s, %m, %u, %g)
      {{epsilon = 0.01 : f32, feature_index = {d} : i64}}
      : (tensor<{x}>, tensor<{f}>, tensor<{f}>, tensor<{f}>, tensor<{x}>)
      -> (tensor<{x}>, tensor<{f}>, tensor<{f}>)
    return %i, %t#0, %t#1, %t#2, %b#0, %b#1, %b#2 : tensor<{x}>, tensor<{x}>, tensor<{f}>,
      tensor<{f}>, tensor<{x}>, tensor<{f}>, tensor<{f}>
  }}"""


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 4, 5), 3), ((3, 6, 4), 1)])
def test_batch_norm_family(shape: tuple[int, ...], dim: int) -> None:
    whole, feature = ("x".join(map(str, (*s, "f32"))) for s in (shape, (shape[dim],)))
    text = textwrap.dedent(BATCH_NORM.format(x=whole, f=feature, d=dim))
    rng = np.random.default_rng(dim)
    sizes = [shape, *[(shape[dim],)] * 4, shape]
    inputs = [rng.standard_normal(s).astype(np.float32) for s in sizes]
    graph = run(import_module(text), PASSES)
    wanted = xla.run(text, inputs)
    (code,) = run_levels(graph, inputs, ("L0",))
    for want, meant, made in zip(wanted, evaluate(graph, inputs), code, strict=True):
        assert distance(want, meant) <= 1e-5 and distance(want, made) <= 1e-5


def refuse(function: Callable[..., Any], code: str, *shapes: tuple[int, ...]) -> None:
    with pytest.raises(ImportRuleError) as caught:
        of_function(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert caught.value.code == code
    assert "test_frontend_images.py" in str(caught.value)


def test_refused_convolutions() -> None:
    both = conv((1, 1), ((0, 0), (0, 0)), lhs_dilation=(2, 2), rhs_dilation=(2, 2))
    refuse(both, "NCC_EVRF010", (1, 8, 8, 3), (3, 3, 3, 4))
    strided = conv((2, 2), ((0, 0), (0, 0)), lhs_dilation=(2, 2))
    refuse(strided, "NCC_EVRF011", (1, 8, 8, 3), (3, 3, 3, 4))


def test_refused_windows() -> None:
    def window(**given: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID", **given)

    refuse(window(base_dilation=(1, 2)), "NCC_EVRF017", (5, 6))
    refuse(window(window_dilation=(2, 1)), "NCC_EVRF018", (5, 6))
