"""Levels and model types change what is searched and kept, with an effect on simulated time and
bytes of whole functions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.compiler.driver import compile_unit
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.model_types import MODEL_TYPES
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.timing.evaluate import Segment, function_segments
from tests.support.compiled import TARGET

GROUPS = 32


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def simulated(function: Any, arguments: Any, **options: Any) -> Segment:
    """The compute segment of a function of bf16 arrays."""
    traced = jax.jit(function, keep_unused=True).trace(*arguments)
    unit = Unit("function", import_module(artifact_of(traced)), Signature())
    compiled = compile_unit(unit, TARGET, CompileOptions(**options))
    (segment,) = function_segments(compiled, load_target(TARGET))
    return segment


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Products whose summed index is innermost on both sides, as gradients of a decoder have."""
    return jax.nn.gelu(x @ up.T) @ down.T


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    n, h, w, c = x.shape
    wide = x.astype(jnp.float32).reshape(n, h * w, GROUPS, c // GROUPS)
    wide = wide - wide.mean((1, 3), keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean((1, 3), keepdims=True) + 1e-5)
    return (wide.reshape(x.shape) * scale).astype(x.dtype)


def residual(x: jax.Array, time: jax.Array, filters: jax.Array, scale: jax.Array) -> jax.Array:
    """The block of a U-Net: convolution, time embedding, norm, activation, convolution."""
    for k in range(2):
        y = jax.lax.conv_general_dilated(
            jax.nn.silu(norm(x, scale)),
            filters[k],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x + y + time[:, None, None, :]
    return x


DECODER = (array(4096, 4096), array(11008, 4096), array(4096, 11008))
UNET = (array(2, 32, 32, 320), array(2, 320), array(2, 3, 3, 320, 320), array(320))


@pytest.mark.matrix
def test_higher_levels_are_faster() -> None:
    first, second, third = (
        simulated(mlp, DECODER, optlevel=level).duration_ps for level in (1, 2, 3)
    )
    assert third < 0.97 * second < 0.97 * first


@pytest.mark.matrix
def test_transformers_search_products_as_level_3_does() -> None:
    generic, special = (
        simulated(mlp, DECODER, model_type=name) for name in ("generic", "transformer")
    )
    assert special.duration_ps < 0.97 * generic.duration_ps


def test_unets_keep_norms_on_chip() -> None:
    generic, special = (
        simulated(residual, UNET, model_type=name) for name in ("generic", "unet-inference")
    )
    assert special.hbm_bytes < 0.75 * generic.hbm_bytes
    assert special.duration_ps < 0.99 * generic.duration_ps


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_the_table_knows_every_choice(name: str) -> None:
    (field,) = (f for f in CompileOptions.__dataclass_fields__.values() if f.name == "model_type")
    assert name in field.metadata["choices"] and len(MODEL_TYPES) == len(field.metadata["choices"])
