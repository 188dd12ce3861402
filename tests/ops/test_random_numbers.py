"""Random numbers of JAX on the simulated core: the same bits, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import graph_of, run_levels

KEY = np.array([0, 7], np.uint32)
SHAPE = (5, 37)
R = jax.random
WORDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "split": lambda k: R.split(k, 3),
    "fold_in": lambda k: R.fold_in(k, 5),
    "bits": lambda k: R.bits(k, SHAPE),
    "bits_8": lambda k: R.bits(k, (5, 6), jnp.uint8),
    "bits_16": lambda k: R.bits(k, (7,), jnp.uint16),
    "uniform": lambda k: R.uniform(k, SHAPE),
    "uniform_bf16": lambda k: R.uniform(k, (5, 6), jnp.bfloat16),
    "bernoulli": lambda k: R.bernoulli(k, 0.3, SHAPE),
    "randint": lambda k: R.randint(k, SHAPE, -3, 1000),
    "rademacher": lambda k: R.rademacher(k, (9,)),
    "choice": lambda k: R.choice(k, 10, (5,)),
    "dropout": lambda k: jnp.where(R.bernoulli(k, 0.9, (4, 8)), 1 / 0.9, 0.0),
}
NUMBERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "normal": lambda k: R.normal(k, SHAPE),
    "truncated_normal": lambda k: R.truncated_normal(k, -2, 2, SHAPE),
    "gumbel": lambda k: R.gumbel(k, SHAPE),
    "exponential": lambda k: R.exponential(k, (9,)),
    "laplace": lambda k: R.laplace(k, (9,)),
    "cauchy": lambda k: R.cauchy(k, (9,)),
}


@pytest.mark.parametrize("name", WORDS)
def test_bits_are_those_of_jax(name: str) -> None:
    want = np.asarray(jax.jit(WORDS[name])(KEY))
    for (have,) in run_levels(graph_of(WORDS[name], KEY), [KEY]):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", NUMBERS)
def test_distributions_round_like_jax(name: str) -> None:
    want = np.asarray(jax.jit(NUMBERS[name])(KEY))
    for (have,) in run_levels(graph_of(NUMBERS[name], KEY), [KEY]):
        np.testing.assert_allclose(have, want, rtol=4e-6, atol=1e-6)
