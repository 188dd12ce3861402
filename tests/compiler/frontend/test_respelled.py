"""CHLO operators by the names that custom calls, MHLO and HLO give them, against JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify

_INPUT = np.linspace(0.05, 0.95, 12, dtype=np.float32).reshape(3, 4)[:, ::-1].copy()
_UNARY: dict[str, Callable[[Any], Any]] = {
    "mhlo.erf": special.erf,
    "mhlo.erf_inv": lax.erf_inv,
    "mhlo.asin": lax.asin,
    "mhlo.acos": lax.acos,
    "mhlo.atanh": lax.atanh,
    "mhlo.sinh": lax.sinh,
    "mhlo.tan": lax.tan,
    "chlo.lgamma": lax.lgamma,
}
_TOP_K = """
func.func @main(%x: tensor<3x4xf32>) -> (tensor<3x2xf32>, tensor<3x2xi32>) {
  %v, %i = "stablehlo.custom_call"(%x) {call_target_name = "mhlo.topk", SETTINGS}
    : (tensor<3x4xf32>) -> (tensor<3x2xf32>, tensor<3x2xi32>)
  return %v, %i : tensor<3x2xf32>, tensor<3x2xi32>
}"""


def top_k(settings: str) -> Graph:
    """A custom call of top-k with `settings`."""
    return verify(import_module(_TOP_K.replace("SETTINGS", settings)))


@pytest.mark.parametrize("target", _UNARY)
def test_a_custom_call_named_after_an_operator_is_the_operator(target: str) -> None:
    type = "tensor<3x4xf32>"
    graph = import_module(f"""
        func.func @main(%x: {type}) -> {type} {{
          %y = stablehlo.custom_call @{target}(%x) {{mhlo.attributes = {{}}}} : ({type}) -> {type}
          return %y : {type}
        }}""")
    (result,) = evaluate(verify(graph), [_INPUT])
    np.testing.assert_allclose(result, _UNARY[target](_INPUT), rtol=2e-5, atol=1e-6)


def test_erf_of_an_hlo_file_stays_one_operator() -> None:
    step = jax.jit(lambda x: (lax.erf(x), *lax.top_k(x, 2))).lower(_INPUT)
    proto = step.compiler_ir("hlo").as_serialized_hlo_module_proto()
    graph = verify(import_module(hlo_to_stablehlo(proto)))
    assert [op.name for op in graph.ops].count("erf") == 1
    expected = (lax.erf(_INPUT), *lax.top_k(_INPUT, 2))
    for ours, theirs in zip(evaluate(graph, [_INPUT]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("largest", [True, False])
def test_top_k_takes_the_largest_or_the_smallest(largest: bool) -> None:
    word = str(largest).lower()
    values, places = evaluate(
        top_k(f"mhlo.attributes = {{k = 2 : i64, largest = {word}}}"), [_INPUT]
    )
    theirs, where = lax.top_k(_INPUT if largest else -_INPUT, 2)
    np.testing.assert_array_equal(places, where)
    np.testing.assert_array_equal(values, theirs if largest else -theirs)


def test_top_k_without_its_count_is_refused() -> None:
    with pytest.raises(ImportRuleError) as caught:
        top_k("mhlo.version = 1 : i64")
    assert caught.value.code == "NCC_EHCA005"
    assert "mhlo.topk" in str(caught.value)
