"""Small real models end to end: compiled, executed instruction by instruction, equal to JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_zoo
from tests.support.cells import diagonals, long_in_matrix
from tests.support.model_run import compile_function, worst_distance
from tests.support.model_table import MODELS, PARTS, arguments, compiled_part, distances, measure
from tests.support.model_zoo import Model

UNSURE = ("encoder_decoder", "resnet", "unet", "vit")
"""Steps whose bf16 error is above 1e-2."""


@pytest.mark.parametrize("name", ["graph_net", "moe_dispatched"])
def test_the_forward_pass_equals_jax(name: str) -> None:
    """The kinds no other quick test has; the matrix has a part of every model."""
    row = measure(name, "forward", "float32")
    assert row.passes, row


@pytest.mark.parametrize(
    ("name", "part", "dtype", "optlevel"),
    diagonals(list(itertools.product(MODELS, PARTS, ("float32", "bfloat16"), (1, 2))), 10),
)
def test_every_part_in_every_type(name: str, part: str, dtype: str, optlevel: int) -> None:
    row = measure(name, part, dtype, optlevel)
    assert row.passes, row
    assert row.figures.time_ps > 0 and row.figures.hbm_bytes > 0


@pytest.mark.parametrize("name", long_in_matrix(UNSURE, UNSURE[:1], UNSURE[1:]))
def test_bf16_errors_are_those_of_jax_over_seeds(name: str) -> None:
    """On one seed the worst leaf of either may be the larger one; over seeds ours must not be."""
    compiled = compiled_part(name, "step", "bfloat16")
    ratios = []
    for seed in range(4):
        errors, bound = distances(compiled, name, "step", "bfloat16", seed, ("L1",))
        ratios.append(errors["L1"] / bound)
    assert max(ratios) <= 1.5, ratios
    assert np.exp(np.mean(np.log(ratios))) <= 1, ratios


PRIMES: dict[Callable[..., Model], dict[str, int]] = {
    model_zoo.decoder: {"width": 74, "heads": 2, "ff": 61, "vocabulary": 97, "time": 43},
    model_zoo.encoder: {"width": 62, "heads": 2, "ff": 113, "time": 37, "classes": 7},
    model_zoo.lstm: {"inputs": 23, "width": 41, "time": 11, "samples": 3},
    model_zoo.diffusion: {"inputs": 31, "width": 71, "samples": 7},
    model_zoo.random_user: {"inputs": 37, "width": 61, "latent": 11, "samples": 7},
}


IN_OTHERS = (model_zoo.decoder, model_zoo.random_user)
"""Layers of another model, at other widths."""


@pytest.mark.parametrize(
    "make", long_in_matrix(PRIMES, IN_OTHERS), ids=[m.__name__ for m in PRIMES]
)
def test_prime_widths_change_no_outcome(make: Callable[..., Model]) -> None:
    fn, args = arguments(make(**PRIMES[make]), "forward")
    compiled = compile_function(fn, args)
    assert worst_distance(compiled.run("L1"), compiled.expected()) <= 1e-5


@pytest.mark.parametrize(
    ("scores", "values"),
    [
        ("bthd,bshd->bhts", "bhts,bshe->bthe"),
        ("bthd,bshd->tsbh", "tsbh,bshe->ebth"),
        ("bthd,bshd->sthb", "sthb,bshe->htbe"),
    ],
)
def test_permuted_einsum_letters_change_no_outcome(scores: str, values: str) -> None:
    """The same attention with its indices in other orders."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum(scores, q, k)
        axis = scores.partition("->")[2].index("s")
        return jnp.einsum(values, jax.nn.softmax(s, axis=axis), v)

    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 3, 16)).astype(np.float32) for n in (40, 33, 33))
    compiled = compile_function(attend, (q, k, v))
    for level in ("L0", "L1"):
        assert worst_distance(compiled.run(level), compiled.expected()) <= 1e-5


def test_names_change_nothing() -> None:
    """Keys of the parameter tree and of the function do not reach the code."""
    model = model_zoo.lstm()
    fn, (params, *batch) = arguments(model, "forward")

    def other_function(tree: Any, *rest: Any) -> Any:
        return fn({key.removeprefix("a_"): leaf for key, leaf in tree.items()}, *rest)

    renamed = {f"a_{key}": leaf for key, leaf in params.items()}
    first = compile_function(fn, (params, *batch))
    second = compile_function(other_function, (renamed, *batch))
    assert all(map(np.array_equal, first.run("L1"), second.run("L1")))
    kernels = [
        [k.program.nodes for f in c.program.functions for k in f.kernels] for c in (first, second)
    ]
    assert kernels[0] == kernels[1]
