"""The machine's generator as keys of JAX: a CPU draws the numbers that compiled code draws."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.generator import MACHINE, implementation
from shardwright.compiler.ir.reference import evaluate
from tests.support.compiled import graph_of, levels_of, link

SHAPE = (6, 7)
DRAWS: dict[str, Any] = {
    "bits": lambda key: jax.random.bits(key, SHAPE),
    "bytes": lambda key: jax.random.bits(key, SHAPE, jnp.uint8),
    "uniform": lambda key: jax.random.uniform(key, SHAPE),
    "mask": lambda key: jax.random.bernoulli(jax.random.fold_in(key, 5), 0.9, SHAPE),
    "split": lambda key: jax.random.uniform(jax.random.split(key, 3)[2], SHAPE),
}


def drawn(draw: Any) -> Any:
    return lambda data: draw(jax.random.wrap_key_data(data, impl=implementation(MACHINE)))


def data(seed: int) -> np.ndarray:
    key = jax.random.key(seed, impl=implementation(MACHINE))
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("name", DRAWS)
def test_compiled_numbers_are_those_of_the_cpu(name: str) -> None:
    fn, key = drawn(DRAWS[name]), data(3)
    wanted = np.asarray(jax.jit(fn)(key))
    graph = graph_of(fn, key)
    names = Counter(op.name for op in graph.walk())
    assert names["random_bits"] and not names["xor"]  # one instruction per number
    (found,) = evaluate(graph, [key])
    np.testing.assert_array_equal(np.asarray(found), wanted)
    ((compiled,),) = levels_of(link(graph), [key], ("L1",))
    np.testing.assert_array_equal(compiled, wanted)


def test_keys_draw_apart() -> None:
    """Of seeds, of what is folded in and of splits: no two masks agree more than by chance."""
    keys = [jax.random.key(seed, impl=implementation(MACHINE)) for seed in range(4)]
    keys += [jax.random.fold_in(keys[0], n) for n in range(4)]
    keys += [*jax.random.split(keys[0], 4)]
    masks = [np.asarray(jax.random.bernoulli(key, 0.5, (10_000,))) for key in keys]
    assert all(abs(mask.mean() - 0.5) < 0.02 for mask in masks)
    agreements = [(a == b).mean() for i, a in enumerate(masks) for b in masks[:i]]
    assert max(abs(share - 0.5) for share in agreements) < 0.025
