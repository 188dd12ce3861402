"""Random masks do not depend on the sharding: every core draws its part of the unsharded mask.

Bits come from counters (partitionable threefry), so that a core needs its offset and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import INPUT, OUTPUT
from tests.sharding.test_strategy_matrix import captured, check
from tests.support.partitioned import partition_here
from tests.support.strategy_cells import random_inputs
from tests.support.whole_runs import run_whole

MESH = make_mesh({"dp_shard": 2, "cp": 2, "tp": 2})
SHAPE = (4, 8, 6)


def drawn(kind: str) -> Graph:
    """A step that draws a mask from a key, noise, or bits of the machine's generator."""

    def draw(words: jax.Array) -> jax.Array:
        if kind == "bits":
            state = jnp.concatenate([words, words])
            return jax.lax.rng_bit_generator(state, SHAPE, jnp.uint32)[1].astype(jnp.float32)
        key = jax.random.wrap_key_data(words)
        if kind == "mask":
            return jax.random.bernoulli(key, 0.7, SHAPE).astype(jnp.float32)
        return jax.random.normal(key, SHAPE)

    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return import_module(artifact_of(jax.jit(draw).trace(words)))


@pytest.mark.parametrize("kind", ["mask", "noise", "bits"])
@pytest.mark.parametrize(
    "dims",
    [
        (("dp_shard",), (), ()),
        ((), ("cp",), ()),
        ((), (), ("tp",)),
        (("dp_shard",), ("cp",), ("tp",)),
        (("dp_shard", "tp"), ("cp",), ()),
    ],
    ids=str,
)
def test_every_core_draws_its_part(kind: str, dims: tuple[tuple[str, ...], ...]) -> None:
    graph = drawn(kind)
    specs = {(INPUT, 0): ShardingSpec(((),)), (OUTPUT, 0): ShardingSpec(dims)}
    part = rewrite(partition_here(graph, MESH, specs))
    assert part.specs[part.graph.outputs[0]].dims == dims
    assert not list(collectives(part.graph)), "nobody sends bits"
    key = np.asarray([7, 42], np.uint32)
    (given,), (wanted,) = run_whole(part, [key]), evaluate(graph, [key])
    np.testing.assert_array_equal(given, wanted)
    unsharded = jax.random.bernoulli(jax.random.wrap_key_data(jnp.asarray(key)), 0.7, SHAPE)
    if kind == "mask":
        np.testing.assert_array_equal(given, np.asarray(unsharded, np.float32))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dropout", "data parallel 4"),
        pytest.param("dropout", "tp 4", marks=pytest.mark.matrix),
        ("dropout", "cp 4"),
        pytest.param("bert with dropout", "data parallel 4", marks=pytest.mark.matrix),
        pytest.param("bert with dropout", "tp 4", marks=pytest.mark.matrix),
    ],
)
def test_a_step_with_dropout_equals_the_unsharded_one(model: str, name: str) -> None:
    """Masks of scores, hidden units and the residual, in forward and again in backward."""
    check(model, name)


@pytest.mark.parametrize(("model", "least"), [("dropout", 1e-3), ("bert with dropout", 1e-5)])
def test_the_key_decides(model: str, least: float) -> None:
    """Else the test above would hold without any dropout. Logits of a fresh encoder are small."""
    graph, inputs, outputs = captured(model)
    first = random_inputs(graph, inputs)
    second = [x + 1 if slot.role == "rng" else x for slot, x in zip(inputs, first, strict=True)]
    loss = [slot.name for slot in outputs].index("metrics/loss")
    assert abs(evaluate(graph, first)[loss] - evaluate(graph, second)[loss]) > least
