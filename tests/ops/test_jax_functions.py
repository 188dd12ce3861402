"""JAX functions that lower to more than one op: values on the simulated core against JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.isa.program import Program
from shardwright.compiler.passes.integers import downcasts
from tests.harnesses.special import values_of
from tests.support.compiled import graph_of, levels_of, link, run_levels

RNG = np.random.default_rng(5)
SHAPE = (6, 20)
NORMAL = RNG.normal(0, 1.5, SHAPE).astype(np.float32)
POSITIVE = np.abs(NORMAL) + np.float32(0.05)
UNIT = RNG.uniform(-0.95, 0.95, SHAPE).astype(np.float32)
EDGES = np.resize(
    np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, 1.5, -2.5, 3e9], np.float32), SHAPE
)
SMALL = RNG.integers(-9, 10, SHAPE).astype(np.int32)
BITS = RNG.integers(-(2**31), 2**31, SHAPE).astype(np.int32)
TALL = RNG.integers(-(2**31), 2**31, (300, 17)).astype(np.int32)
ULPS = 4e-6


def _bits_of(x: Any, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def _dot_of_bytes(a: Any) -> jax.Array:
    return lax.dot(a, a.T, preferred_element_type=jnp.int32)


FLOATS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "erf_inv": (lax.erf_inv, (UNIT,)),
    "erfc": (lax.erfc, (NORMAL,)),
    "lgamma": (lax.lgamma, (POSITIVE,)),
    "digamma": (lax.digamma, (POSITIVE,)),
    "sinh": (lax.sinh, (NORMAL,)),
    "cosh": (lax.cosh, (NORMAL,)),
    "asin": (lax.asin, (UNIT,)),
    "acos": (lax.acos, (UNIT,)),
    "atan": (lax.atan, (NORMAL,)),
    "asinh": (lax.asinh, (NORMAL,)),
    "acosh": (lax.acosh, (POSITIVE + 1,)),
    "atanh": (lax.atanh, (UNIT,)),
    "exp2": (lax.exp2, (NORMAL,)),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), (NORMAL,)),
    "gelu_grad": (
        jax.grad(lambda x: jnp.sum(jax.nn.gelu(x, approximate=False) ** 2)),
        (NORMAL,),
    ),
    "float_floordiv": (lambda a, b: a // b, (NORMAL, POSITIVE)),
    "float_mod": (lambda a, b: a % b, (NORMAL, POSITIVE)),
    "nan_to_num": (jnp.nan_to_num, (EDGES,)),
    "trunc": (jnp.trunc, (EDGES,)),
    "round_away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), (EDGES,)),
    "erf_edges": (lax.erf, (EDGES,)),
    "cbrt_edges": (lax.cbrt, (EDGES,)),
    "reduce_precision_f16": (lambda x: lax.reduce_precision(x, 5, 10), (EDGES * 3e4,)),
    "reduce_precision_e4m3": (lambda x: lax.reduce_precision(x, 4, 3), (NORMAL,)),
    "reduce_precision_bf16": (lambda x: lax.reduce_precision(x, 8, 7), (NORMAL,)),
    "select_by_scalar": (lambda a, b: lax.select(jnp.sum(a) > 0, a, b), (NORMAL, UNIT)),
    "clamp_by_scalars": (lambda x: lax.clamp(np.float32(-1), x, np.float32(1)), (NORMAL,)),
}
INTEGERS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "isinf": (jnp.isinf, (EDGES,)),
    "isnan": (jnp.isnan, (EDGES,)),
    "floordiv": (lambda a, b: a // b, (BITS, SMALL + 20)),
    "mod": (lambda a, b: a % b, (BITS, SMALL + 20)),
    "cube": (lambda a: a**3, (BITS,)),
    "dot": (lambda a: a @ a.T, (SMALL,)),
    "dot_of_bytes": (_dot_of_bytes, (SMALL.astype("i1"),)),
    "sum_all": (jnp.sum, (TALL,)),
    "prod_rows": (lambda a: jnp.prod(a, axis=0), (TALL,)),
    "max_all": (jnp.max, (TALL.astype(np.uint32),)),
    "xor_rows": (lambda a: lax.reduce_xor(a, axes=(0,)), (TALL,)),
    "or_all": (lambda a: lax.reduce_or(a, axes=(0, 1)), (TALL,)),
    "any": (lambda a: jnp.any(a > 2**30, axis=0), (TALL,)),
    "xor_of_equal": (
        lambda a: lax.reduce_xor(jnp.broadcast_to(a[:, None], (6, 5, 20)), axes=(1,)),
        (BITS,),
    ),
    "apart": (lambda x: _bits_of(x, jnp.uint8), (NORMAL,)),
    "together": (lambda x: _bits_of(x.reshape(6, 10, 2), jnp.int32), (BITS.astype(np.uint16),)),
    "through_bytes": (lambda x: _bits_of(_bits_of(x, jnp.uint16), jnp.int32), (NORMAL,)),
}


SCALARS = ("select_by_scalar",)  # a NaN in the sum that decides is all there is to see
DIFFERENCES = ("gelu", "gelu_grad", "lgamma")
"""Exact relative to 1: 1 + erf(x), and what is near 0 between the poles of gamma."""
BOUNDED = {"gelu_grad": 1e18}
"""Beyond, JAX multiplies the infinite square of x by 0; docs/numerics.md, "Special values"."""


@pytest.mark.parametrize("name", FLOATS)
def test_float_functions(name: str) -> None:
    fn, args = FLOATS[name]
    want = np.asarray(jax.jit(fn)(*args), np.float64)
    finite = want[np.isfinite(want)]
    scale = float(np.sqrt(np.mean(finite**2)))
    program = link(graph_of(fn, *args))
    for (have,) in levels_of(program, args):
        np.testing.assert_allclose(have, want, rtol=ULPS, atol=ULPS * scale)
    if name not in SCALARS:
        _check_special_values(name, program)


def _check_special_values(name: str, program: Program) -> None:
    """Page by page, as many as the program takes at once; relative to every element by itself."""
    fn, args = FLOATS[name]
    for given in _pages(len(args), BOUNDED.get(name, np.inf)):
        want = np.asarray(jax.jit(fn)(*given), np.float64)
        floor = ULPS if name in DIFFERENCES else float(np.finfo(np.float32).smallest_normal)
        for (have,) in levels_of(program, given):
            np.testing.assert_allclose(have, want, rtol=ULPS, atol=floor, err_msg=str(given))


def _pages(operands: int, bound: float) -> Iterator[list[np.ndarray]]:
    """Special values, or all pairs of them, without subnormals, which XLA takes for zeros."""
    numbers = values_of(DType.F32, alone=operands == 1)
    normal = np.abs(numbers) >= np.finfo(np.float32).smallest_normal
    numbers = numbers[(normal | (numbers == 0) | np.isnan(numbers)) & ~(np.abs(numbers) > bound)]
    columns = [c.reshape(-1) for c in np.meshgrid(*[numbers] * operands)]
    size = SHAPE[0] * SHAPE[1]
    for start in range(0, columns[0].size, size):
        yield [np.resize(c[start : start + size], SHAPE) for c in columns]


@pytest.mark.filterwarnings("ignore:.*integer dot")
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_functions_are_exact(name: str) -> None:
    fn, args = INTEGERS[name]
    want = np.asarray(jax.jit(fn)(*args))
    for (have,) in run_levels(graph_of(fn, *args), args):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


def test_erf_stays_one_operation() -> None:
    graph = graph_of(lax.erf, NORMAL)
    assert [op.name for op in graph.ops] == ["erf"]
    graph = graph_of(lax.erf, NORMAL.astype(jnp.bfloat16))
    assert "erf" in [op.name for op in graph.ops]


def test_integer_dot_warns_with_the_line() -> None:
    module = jax.jit(lambda a: a @ a.T).lower(SMALL).compiler_ir("stablehlo")
    (found,) = downcasts(import_module(module.operation.get_asm(enable_debug_info=True)))
    assert re.search(r"test_jax_functions\.py:\d+.*2\^24", found.render())


KNOWN_CALLS: dict[str, Callable[..., Any]] = {
    "AwsNeuronErf": lax.erf,
    "AwsNeuronGelu": lambda x: jax.nn.gelu(x, approximate=False),
    "AwsNeuronGeluBackward": lambda x: (
        jax.scipy.stats.norm.cdf(x) + x * jax.scipy.stats.norm.pdf(x)
    ),
    "AwsNeuronGeluApprxTanh": jax.nn.gelu,
    "AwsNeuronSilu": jax.nn.silu,
    "AwsNeuronModuleMarkerStart-Forward": lambda x: x,
}
CALL = """
func.func @main(%x: tensor<6x20xf32>) -> tensor<{1}xf32> {{
  %y = "stablehlo.custom_call"(%x) {{call_target_name = "{0}"}}
    : (tensor<6x20xf32>) -> tensor<{1}xf32> loc("net.py":7:1)
  return %y : tensor<{1}xf32>
}}"""


@pytest.mark.parametrize("target", KNOWN_CALLS)
def test_custom_calls_that_are_known(target: str) -> None:
    want = np.asarray(jax.jit(KNOWN_CALLS[target])(NORMAL))
    for (have,) in run_levels(import_module(CALL.format(target, "6x20")), [NORMAL]):
        np.testing.assert_allclose(have, want, rtol=ULPS, atol=ULPS)


@pytest.mark.parametrize(
    ("target", "shape", "code"),
    [("mystery", "6x20", "NCC_EHCA005"), ("AwsNeuronSilu", "120", "NCC_EVRF064")],
)
def test_custom_calls_that_are_refused(target: str, shape: str, code: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(CALL.format(target, shape))
    assert caught.value.code == code
    assert caught.value.loc is not None and caught.value.loc.line == 7
