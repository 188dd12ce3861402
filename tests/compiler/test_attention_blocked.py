"""Attention whose rows are blocked, from JAX to instructions: values forward and backward at both
levels, masks of every kind, and no score in HBM.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.codegen.rows import nest
from shardwright.compiler.options import CompileOptions
from tests.support.machines import machine_file
from tests.support.model_run import compile_function, worst_distance

T, S, D = 256, 4096, 32
NEVER = float(np.finfo(np.float32).min)


def attention(low: float, first: int):
    """Softmax attention; query i sees the keys up to first + 16 i."""

    def fn(q, k, v):
        scores = jnp.einsum("htd,hsd->hts", q, k).astype(jnp.float32) / np.sqrt(D)
        mask = first + 16 * jnp.arange(T)[:, None] >= jnp.arange(S)[None, :]
        weights = jax.nn.softmax(jnp.where(mask, scores, low), axis=-1).astype(q.dtype)
        return jnp.einsum("hts,hsd->htd", weights, v)

    return fn


def gradients(fn):
    return lambda q, k, v, g: jax.vjp(fn, q, k, v)[1](g)


def arrays(dtype) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    lengths = (T, S, S, T)
    return [jnp.asarray(rng.standard_normal((1, n, D)), dtype) for n in lengths]


@pytest.fixture
def blocked(monkeypatch, tmp_path):
    """A machine with little SBUF, and the plans of reduction fusions that were generated for it."""
    plans = []

    def shrink(sbuf_bytes: int):
        return machine_file(tmp_path, sbuf_bytes_per_partition=sbuf_bytes), plans

    emit = nest.Nest.emit
    monkeypatch.setattr(nest.Nest, "emit", lambda self: (plans.append(self.plan), emit(self))[1])
    return shrink


def compiled(fn, given, machine):
    made = compile_function(fn, given, CompileOptions(optlevel=1), machine)
    stored = [t for f in made.program.functions for t in f.tensors]
    assert all(np.prod(t.shape) < T * S for t in stored), "a score tensor in HBM"
    return made


MASKS = {"causal": (-1e30, 40), "-inf": (-np.inf, 0), "lowest": (NEVER, 0), "empty": (NEVER, -160)}


@pytest.mark.parametrize("mask", MASKS)
def test_forward_is_online(mask: str, blocked) -> None:
    """Rows without a key (of the last mask) have equal weights, as in JAX."""
    machine, plans = blocked(30_000)
    made = compiled(attention(*MASKS[mask]), arrays(jnp.float32)[:3], machine)
    assert plans and all(plan.online for plan in plans)
    for level in ("L0", "L1"):
        assert worst_distance(made.run(level), made.expected()) <= 1e-5


@pytest.mark.parametrize("mask", ["causal", "-inf", "empty"])
def test_backward_is_blocked(mask: str, blocked) -> None:
    machine, plans = blocked(60_000)
    made = compiled(gradients(attention(*MASKS[mask])), arrays(jnp.float32), machine)
    assert any(plan.blocked for plan in plans)
    for level in ("L0", "L1"):
        assert worst_distance(made.run(level), made.expected()) <= 1e-5


@pytest.mark.parametrize("backward", [False, True])
def test_short_floats(backward: bool, blocked) -> None:
    """bf16 against fp32 JAX; as near as bf16 JAX (docs/numerics.md)."""
    machine, plans = blocked(50_000 if backward else 26_000)
    forward = attention(-1e30, 40)
    fn, given = (
        (gradients(forward), arrays(jnp.bfloat16))
        if backward
        else (forward, arrays(jnp.bfloat16)[:3])
    )
    made = compiled(fn, given, machine)
    assert any(plan.blocked for plan in plans)
    wanted = [np.asarray(x) for x in jax.tree.leaves(fn(*(x.astype(jnp.float32) for x in given)))]
    bound = max(1e-2, worst_distance(made.expected(), wanted))
    for level in ("L0", "L1"):
        assert worst_distance(made.run(level), wanted) <= bound


CORES = S // T


def placed(at, q, k, v):
    """The rows that one of `CORES` cores has, which see the keys up to their own."""
    rows = jnp.clip(at, 0, CORES - 1) * T + jnp.arange(T)
    scores = jnp.einsum("htd,hsd->hts", q, k).astype(jnp.float32) / np.sqrt(D)
    scores = jnp.where(rows[:, None] >= jnp.arange(S)[None, :], scores, -1e30)
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_a_mask_by_the_place_of_a_core_is_blocked_too(backward, dtype, blocked) -> None:
    """One program for all cores; the mask is made of a number, and no plane of it is stored."""
    machine, plans = blocked(60_000 if backward else 30_000)
    given = arrays(dtype)

    def gradients_of_place(at, q, k, v, g):
        return jax.vjp(lambda *x: placed(at, *x), q, k, v)[1](g)

    fn = gradients_of_place if backward else placed
    given = given if backward else given[:3]
    made = compiled(fn, [jnp.int32(0), *given], machine)
    assert any(plan.blocked for plan in plans)
    wide = [x.astype(jnp.float32) for x in given]
    for at in (0, 5, CORES - 1):
        here = replace(made, args=(jnp.int32(at), *given))
        wanted = [np.asarray(x) for x in jax.tree.leaves(fn(jnp.int32(at), *wide))]
        near = max(1e-2, worst_distance(here.expected(), wanted))
        bound = 1e-5 if dtype is jnp.float32 else near
        for level in ("L0", "L1"):
            assert worst_distance(here.run(level), wanted) <= bound
