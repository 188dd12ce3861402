"""Writes `step.hlo.pb`: the loss and gradients of a small MLP, as XLA would hand them over."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp


def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    up, down = weights
    return jnp.mean((jnp.tanh(x @ up) @ down - x) ** 2)


if __name__ == "__main__":
    f32 = jnp.float32
    weights = (jax.ShapeDtypeStruct((128, 512), f32), jax.ShapeDtypeStruct((512, 128), f32))
    lowered = jax.jit(jax.value_and_grad(loss)).lower(weights, jax.ShapeDtypeStruct((64, 128), f32))
    module = lowered.compiler_ir("hlo")
    assert module is not None
    Path("step.hlo.pb").write_bytes(module.as_serialized_hlo_module_proto())
