"""Values in host memory as JAX writes them: an offload policy of the user's own step is captured,
whatever platform it is lowered for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from tests.support.model_run import compile_function

LAYERS = 3
WEIGHTS = np.linspace(-1, 1, LAYERS * 64, dtype=np.float32).reshape(LAYERS, 8, 8)
SAMPLES = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["entering", "product"],
    offload_src="device",
    offload_dst="pinned_host",
)


def gradient(weights: Any, samples: Any) -> Any:
    """Of a scan whose layers leave two values on the host."""

    def layer(x: Any, weight: Any) -> tuple[Any, None]:
        x = checkpoint_name(x, "entering")
        return jnp.tanh(checkpoint_name(x @ weight, "product")) + x, None

    def loss(weights: Any) -> Any:
        out, _ = jax.lax.scan(jax.checkpoint(layer, policy=POLICY), samples, weights)
        return jnp.sum(out * out)

    return jax.grad(loss)(weights)


def captured() -> Graph:
    return import_module(artifact_of(jax.jit(gradient).trace(WEIGHTS, SAMPLES)))


def moves(graph: Graph) -> Counter[str]:
    return Counter(op.attrs.memory for op in graph.walk() if op.name == "move_to")


def test_a_policy_of_the_user_is_captured() -> None:
    """Lowered for the CPU, where jax itself drops what it says about memories."""
    graph = captured()
    assert moves(graph) == {"host": 2, "device": 2}
    (found,) = evaluate(graph, [WEIGHTS, SAMPLES])
    np.testing.assert_allclose(found, gradient(WEIGHTS, SAMPLES), rtol=1e-5, atol=1e-6)


def test_moves_are_printed_as_jax_writes_them() -> None:
    graph = captured()
    again = import_module(to_stablehlo(graph))
    assert moves(again) == moves(graph)


def test_a_file_of_one_core_keeps_everything_in_hbm() -> None:
    compiled = compile_function(gradient, (WEIGHTS, SAMPLES))
    program = compiled.program
    assert not any(f.collectives for f in program.functions)
    assert {b.kind for b in program.buffers} == {"named", "arena"}


def test_a_memory_nobody_knows_is_refused() -> None:
    text = """
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %r = "stablehlo.custom_call"(%a) {call_target_name = "annotate_device_placement",
    mhlo.frontend_attributes = {_xla_buffer_placement = "disk"}} : (tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
"""
    with pytest.raises(ImportRuleError, match=r"a memory of device, pinned_host, .* got disk"):
        import_module(text)
