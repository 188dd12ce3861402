"""What the levels of optimisation give on whole functions."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.timing.evaluate import function_segments
from tests.support.compiled import TARGET, graph_of, link
from tests.support.model_run import compile_function, worst_distance


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


def transposed(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """With weights of (features out, features in), as PyTorch keeps them."""
    return jnp.tanh(x @ up.reshape(1024, 256).T) @ down


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fn", [mlp, transposed])
def test_the_quick_level_is_at_most_two_fifths_slower(fn, dtype: str) -> None:
    """Both products of `mlp` have code as one kernel, which takes 2,330 us; apart 32 in fp32, 20 in
    bf16.
    """
    graph = graph_of(fn, *(jnp.ones(s, dtype) for s in ((256, 256), (256, 1024), (1024, 128))))
    quick, usual = (time_of(link(graph, CompileOptions(optlevel=level))) for level in (1, 2))
    assert quick <= 1.4 * usual


def time_of(program: Program, recovery: float = 0.0) -> int:
    """Picoseconds of all functions, each once, where neighbours fill a part of the stalls."""
    machine = load_target(TARGET)
    machine = replace(machine, core=replace(machine.core, stall_recovery=recovery))
    segments = [s for f in program.functions for s in function_segments(f, machine)]
    return sum(s.duration_ps for s in segments)


def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(mlp(x, up, down)).astype("float32"))


@pytest.mark.parametrize("recovery", [0.5, 1.0])
@pytest.mark.parametrize("flags", [{"optlevel": 3}, {"model_type": "transformer"}])
@pytest.mark.parametrize(
    "shape", [pytest.param((512, 256, 1024), marks=pytest.mark.matrix), (300, 384, 200)]
)
def test_what_searches_longer_never_loses(shape, flags: dict, recovery: float) -> None:
    """Beside neighbours that fill half of the stalls, or all of them."""
    rows, width, inner = shape
    given = (jnp.ones(s, "bfloat16") for s in ((rows, width), (width, inner), (inner, width)))
    graph = graph_of(jax.grad(loss, (0, 1, 2)), *given)
    usual = time_of(link(graph, DEFAULTS), recovery)
    assert time_of(link(graph, CompileOptions(**flags)), recovery) <= usual


def test_what_a_quick_compile_finds_the_usual_one_has_too() -> None:
    """Of this one epilogues took so much that no reduction fusion was left: 133 us against 82."""
    given = (jnp.ones(s, "bfloat16") for s in ((256, 256), (256, 1024), (1024, 128)))
    graph = graph_of(jax.grad(loss, (0, 1, 2)), *given)
    quick, usual = (time_of(link(graph, CompileOptions(optlevel=level))) for level in (1, 2))
    assert usual <= quick


KEYS, WIDTH = 8192, 32


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T / WIDTH**0.5, axis=-1) @ v


def test_attention_computed_again_is_a_kernel_of_its_own() -> None:
    """Forward and backward as one kernel would hold the packed tiles of both; apart, both are
    faster and scores are made once more. Values are those of JAX.
    """
    rng = np.random.default_rng(5)
    lengths = (256, KEYS, KEYS, 256)
    given = [jnp.asarray(rng.standard_normal((n, WIDTH)), "float32") for n in lengths]

    def redone(q, k, v, g):
        out, back = jax.vjp(attention, q, k, v)
        return out, back(g)

    made = compile_function(redone, given)
    kernels = [k.program for f in made.program.functions for k in f.kernels]
    counts = [sum(node.op == "contract" for node in kernel.nodes) for kernel in kernels]
    assert sorted(n for n in counts if n) == [2, 5]
    assert worst_distance(made.run("L1"), made.expected()) <= 1e-5
