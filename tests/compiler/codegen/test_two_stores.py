"""A product stored in two layouts is tiled for both of them; what neighbours fill of a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.compiler.driver import compile_unit
from shardwright.compiler.isa.program import Function
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.timing.evaluate import function_segments
from tests.support.compiled import graph_of

TARGET = load_target("trn1.32xlarge")


def mixed(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weighted values of every head, [batch, heads, positions, width]."""
    return jnp.einsum("bhts,bshe->bhte", weights, values)


def compiled(function: Any, rows: int = 256) -> Function:
    shapes = ((2, 16, rows, rows), (2, rows, 16, 64))
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]
    return compile_unit(Unit("step", graph_of(function, *arrays), Signature()), TARGET.name)


def duration_ps(function: Function, recovery: float = 0.0) -> int:
    target = replace(TARGET, core=replace(TARGET.core, stall_recovery=recovery))
    return sum(s.duration_ps for s in function_segments(function, target, recorded=False))


def test_a_second_layout_costs_what_its_bytes_cost() -> None:
    def both(weights: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = mixed(weights, values)
        return made, jnp.transpose(made, (0, 2, 1, 3)).reshape(2, 256, 1024)

    def transposed(weights: jax.Array, values: jax.Array) -> jax.Array:
        return both(weights, values)[1]

    one, other, two = (duration_ps(compiled(f)) for f in (mixed, transposed, both))
    assert two <= 1.5 * max(one, other)


@pytest.mark.parametrize(("rows", "stride"), [(197, 16 * 64), (256, 64)])
def test_rows_that_make_no_blocks_lie_as_their_reader_wants_them(rows: int, stride: int) -> None:
    """197 short rows are no blocks of several to a partition: heads lie side by side instead."""

    def projected(weights: jax.Array, values: jax.Array) -> jax.Array:
        made = jnp.transpose(mixed(weights, values), (0, 2, 1, 3))
        return made.reshape(2, rows, 1024) @ jnp.ones((1024, 8), jnp.bfloat16)

    function = compiled(projected, rows)
    products = (k.program for k in function.kernels if k.program.name == "dot_general")
    made = next(p.nodes[-1].attrs["view"] for p in products if len(p.iter_dims) == 5)
    assert stride in made.strides and (rows == 256 or 197 * 64 not in made.strides)


def test_recovered_stalls_end_at_the_busiest_engine() -> None:
    function = compiled(mixed)
    full, half, none = (duration_ps(function, s) for s in (0.0, 0.5, 1.0))
    busiest = 0
    for segment in function_segments(function, TARGET, recorded=False):
        for kernel in segment.kernels:
            moved = sum(ps for e, ps in kernel.busy_ps.items() if e.startswith("dma"))
            others = [ps for e, ps in kernel.busy_ps.items() if not e.startswith("dma")]
            busiest += max(moved, *others)
    assert none == busiest < full
    assert half == pytest.approx((full + none) / 2, rel=1e-6)
