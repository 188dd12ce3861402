"""Composite custom calls of the vendor's frameworks, against JAX at both levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compiler.diagnostics import ImportRuleError
from compiler.frontend.stablehlo import import_module
from tests.support.compiled import run_levels

X = np.random.default_rng(3).normal(size=(6, 20)).astype(np.float32)
X[2, 5] = X[2, 11] = 9.0  # a tie: the first position counts
WEIGHT = np.linspace(0.5, 1.5, 20, dtype=np.float32)
EPS = np.float32(1e-3)


def module(target: str, config: str, operands: tuple[Any, ...], results: str) -> str:
    types = ["tensor<" + "x".join([*map(str, np.shape(x)), "f32"]) + ">" for x in operands]
    names = [f"%a{i}" for i in range(len(operands))]
    arguments = ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True))
    count = results.count("tensor")
    made = ", ".join(f"%y#{i}" for i in range(count)) if count > 1 else "%y"
    return f"""
    func.func @main({arguments}) -> ({results}) {{
      %y{f":{count}" if count > 1 else ""} = "stablehlo.custom_call"({", ".join(names)})
        {{call_target_name = "{target}", backend_config = "{config}"}}
        : ({", ".join(types)}) -> ({results}) loc("net.py":7:1)
      return {made} : {results}
    }}"""


def rms_norm(x: Any, w: Any, eps: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w


CASES: list[tuple[str, str, tuple[Any, ...], str, Callable[..., Any]]] = [
    ("AwsNeuronArgMax", "1", (X,), "tensor<6xui32>", lambda x: jnp.argmax(x, 1)),
    ("AwsNeuronArgMax", "0", (X,), "tensor<20xui32>", lambda x: jnp.argmax(x, 0)),
    ("AwsNeuronArgMin", "-1", (X,), "tensor<6xui32>", lambda x: jnp.argmin(x, 1)),
    ("AwsNeuronRmsNorm", "1", (X, WEIGHT, EPS), "tensor<6x20xf32>", rms_norm),
    ("AwsNeuronSoftmax", "", (X,), "tensor<6x20xf32>", jax.nn.softmax),
    (
        "AwsNeuronTopK",
        "3",
        (X,),
        "tensor<6x3xf32>, tensor<6x3xui32>",
        lambda x: jax.lax.top_k(x, 3),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_equal_to_jax(case: tuple[str, str, tuple[Any, ...], str, Callable[..., Any]]) -> None:
    target, config, operands, results, reference = case
    graph = import_module(module(target, config, operands, results))
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(reference)(*operands))]
    for given in run_levels(graph, list(operands)):
        for have, want in zip(given, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("target", "config", "results"),
    [
        ("AwsNeuronTopK", "many", "tensor<6x3xf32>, tensor<6x3xui32>"),
        ("AwsNeuronTopK", "21", "tensor<6x21xf32>, tensor<6x21xui32>"),
        ("AwsNeuronRmsNorm", "1", "tensor<6x20xf32>"),
    ],
)
def test_forms_that_make_no_sense(target: str, config: str, results: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(module(target, config, (X,), results))
    assert caught.value.code == "NCC_EVRF064"
    assert caught.value.loc is not None and caught.value.loc.line == 7
