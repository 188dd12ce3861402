"""The three attention forms, from JAX to instructions: equal values, fewer bytes each time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.options import CompileOptions
from tests.support.machines import machine_file
from tests.support.model_run import compile_function, figures, worst_distance

HEADS, T, D = 2, 260, 32
FORMS = ("unfused", "fused", "flash")


def attention(q, k, v):
    scores = jnp.einsum("htd,hsd->hts", q, k) / np.sqrt(D)
    places = jnp.arange(q.shape[1])
    mask = places[:, None] >= places[None, :]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("hts,hsd->htd", weights, v)


def gradients(q, k, v, g):
    return jax.vjp(attention, q, k, v)[1](g)


def arrays(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((HEADS, T, D)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("fn", "count"), [(attention, 3), (gradients, 4)])
def test_forms_agree_and_move_fewer_bytes(fn, count: int, level: int) -> None:
    moved = []
    for form in FORMS:
        made = compile_function(fn, arrays(count), CompileOptions(attention=form, optlevel=level))
        moved.append(figures(made).hbm_bytes)
        for value_level in ("L0", "L1"):
            assert worst_distance(made.run(value_level), made.expected()) <= 1e-5, form
    assert moved[0] > 1.5 * moved[1] > 3 * moved[2]
    stored = [t for f in made.program.functions for t in f.tensors] + made.program.buffers
    assert all(np.prod(t.shape) < HEADS * T * T for t in stored), "a score tensor in HBM"


@pytest.mark.parametrize(
    ("fn", "count", "sbuf_bytes", "work"),
    [(attention, 3, 34_000, 1.2), (gradients, 4, 60_000, 1.0)],  # sums over rows always make again
)
def test_rows_that_do_not_fit_have_the_values_of_jax(fn, count, sbuf_bytes, work, tmp_path) -> None:
    """With less SBUF a row of scores does not fit: they are made again, and stay out of HBM."""
    rng = np.random.default_rng(3)
    given = [rng.standard_normal((1, 1024, D)).astype(np.float32) for _ in range(count)]
    ample = figures(compile_function(fn, given, CompileOptions(optlevel=1)))
    small = machine_file(tmp_path, sbuf_bytes_per_partition=sbuf_bytes)
    made = compile_function(fn, given, CompileOptions(optlevel=1), small)
    for value_level in ("L0", "L1"):
        assert worst_distance(made.run(value_level), made.expected()) <= 1e-5
    stored = [t for f in made.program.functions for t in f.tensors]
    assert all(np.prod(t.shape) < 1024 * 1024 for t in stored), "a score tensor in HBM"
    assert figures(made).busy_ps["tensor"] >= work * ample.busy_ps["tensor"]


def apart(scores, mask):
    """The maximum is of scores that were filled with another number."""
    return jnp.where(mask, scores, -1e9) - jnp.where(mask, scores, -1e8).max(-1, keepdims=True)


def behind(scores, mask):
    """Masked once more after the maximum is taken away."""
    top = jnp.where(mask, scores, -1e9).max(-1, keepdims=True)
    return jnp.where(mask, scores - top, -1e9)


def added(scores, mask):
    x = scores + jnp.where(mask, 0.0, -1e9)
    return x - x.max(-1, keepdims=True)


@pytest.mark.parametrize("spelling", [apart, behind, added])
def test_one_mask_in_two_places_has_the_values_of_jax(spelling) -> None:
    """Long enough that some blocks of columns are left out, and some need no mask."""

    def fn(q, k, v):
        places = jnp.arange(640)
        scores = jnp.einsum("td,sd->ts", q, k) / np.sqrt(D)
        weights = jnp.exp(spelling(scores, places[:, None] >= places))
        return (weights / weights.sum(-1, keepdims=True)) @ v

    rng = np.random.default_rng(5)
    given = [rng.standard_normal((640, D)).astype(np.float32) for _ in range(3)]
    made = compile_function(fn, given, CompileOptions(optlevel=1))
    assert worst_distance(made.run("L0"), made.expected()) <= 1e-5
