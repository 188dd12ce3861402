"""Experts in blocks compute what a grouped product over one list of all rows does, whatever rows
choose; no row is dropped, and no more blocks are made than the worst choice needs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.models import config_task, experts
from shardwright.orchestrator.models.architecture import ROUTERS, Architecture, Experts
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import complete, partitioned, prepare
from shardwright.sharding.settings import StrategySettings
from tests.support.road import captured_graph, run_and_compare, worst
from tests.support.tiny_configs import tiny

SAMPLES, ROWS, WIDTH = 2, 27, 8
PART = Experts(count=6, chosen=2, width=12, block=4)


def layer_of(part: Experts) -> dict[str, jax.Array]:
    shapes = {
        "router": (WIDTH, part.count),
        "router_bias": (part.count,),
        **{name: (part.count, WIDTH, part.width) for name in ("w_gate", "w_up")},
        **{name: (part.count, part.width) for name in ("b_gate", "b_up")},
        "w_down": (part.count, part.width, WIDTH),
        "b_down": (part.count, WIDTH),
        "router_shift": (part.count,),
    }
    keys = jax.random.split(jax.random.key(3), len(shapes))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def assert_alike(part: Experts, layer: dict[str, jax.Array]) -> None:
    """Values and gradients of both ways."""
    x, toward = jax.random.normal(jax.random.key(5), (2, SAMPLES, ROWS, WIDTH))
    assert part.count * ROWS > experts.most_blocks(part, ROWS) * part.block  # else seats are fewer

    def total(part: Experts, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(experts.fed(part, layer, x) * toward)

    wanted, found = (
        (experts.fed(way, layer, x), *jax.grad(partial(total, way), argnums=(0, 1))(layer, x))
        for way in (replace(part, routing="grouped"), part)
    )
    for want, have in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * float(jnp.max(abs(want))))


@pytest.mark.parametrize(
    "part",
    [
        *(replace(PART, router=router) for router in ROUTERS),
        replace(PART, bias=True, limit=1.0, router="top-k, softmax"),
        replace(PART, router="sigmoid, top-k", groups=3, groups_chosen=2, corrected=True, scale=2),
        pytest.param(replace(PART, chosen=1, router="softmax, top-k"), marks=pytest.mark.matrix),
        pytest.param(replace(PART, count=9, chosen=3, block=5), marks=pytest.mark.matrix),
    ],
    ids=lambda part: f"{part.router}, {part.chosen} of {part.count}",
)
def test_blocks_are_a_grouped_product(part: Experts) -> None:
    assert_alike(part, layer_of(part))


@pytest.mark.parametrize("first", [0, 4])
def test_all_rows_may_choose_the_same_experts(first: int) -> None:
    part = replace(PART, bias=True)
    layer = layer_of(part)
    layer["router"] *= 0
    layer["router_bias"] = jnp.zeros(part.count).at[first : first + 2].set(jnp.array([2.0, 1.0]))
    assert_alike(part, layer)


def choices_of(sizes: tuple[int, ...], chosen: int) -> jax.Array:
    """Choices [T, K] of which every expert has so many."""
    flat = np.repeat(np.arange(len(sizes)), sizes)
    return jnp.asarray(np.random.default_rng(1).permutation(flat).reshape(-1, chosen), jnp.int32)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((24, 0, 0, 0), 6),
        ((0, 0, 0, 24), 6),
        ((21, 1, 1, 1), 9),  # as many as there can be: three experts with a block of one row
        ((9, 5, 5, 5), 9),
        ((4, 8, 8, 4), 6),
    ],
)
def test_every_choice_has_a_place_in_a_block_of_its_expert(
    sizes: tuple[int, ...], blocks: int
) -> None:
    part = Experts(count=4, chosen=2, width=1, block=4)
    chosen = choices_of(sizes, 2)
    choice, owner, place = experts._runs(part, chosen)
    assert len(owner) == experts.most_blocks(part, len(chosen)) == 9 >= blocks
    flat, places = chosen.reshape(-1), place.reshape(-1)
    assert len(np.unique(places)) == flat.size and int(places.max()) < blocks * part.block
    np.testing.assert_array_equal(choice.reshape(-1)[places], np.arange(flat.size))
    np.testing.assert_array_equal(owner[places // part.block], flat)


def test_each_expert_may_have_one_row() -> None:
    part = Experts(count=8, chosen=2, width=1, block=16)
    assert experts.most_blocks(part, 4) == 8
    _, owner, place = experts._runs(part, jnp.arange(8).reshape(4, 2))
    np.testing.assert_array_equal(owner, np.arange(8))
    np.testing.assert_array_equal(place.reshape(-1), np.arange(8) * 16)


def in_blocks(family: str, block: int) -> Architecture:
    model = architecture_of(tiny(family, vocab_size=256))
    return model.with_experts(lambda part: replace(part, block=block))


MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"dp_shard": 8},
    "llm-training": {"dp_shard": 2, "tp": 4},
}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("mixtral", "fsdp"),
        pytest.param("mixtral", "llm-training", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "llm-training", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "llm-training", marks=pytest.mark.exhaustive),
    ],
)
def test_eight_cores_make_the_step_of_one(family: str, strategy: str) -> None:
    """Matrices are gathered in front of the loop over blocks, and their gradients leave it whole;
    over `tp` an expert's features are split, so that blocks add up what cores made of them.
    """
    model, axes = in_blocks(family, 2), MESHES[strategy]
    task = config_task.train_task(model, seq_len=16, optimizer="sgd", lr=0.1)
    settings = StrategySettings(name=strategy)
    prepared = prepare(*captured_graph(task, 8), make_mesh(axes), settings, None, None)
    part = partitioned(prepared, answer_request)
    layers = [op.regions[0] for op in rewrite(part).graph.ops if op.name == "loop"]
    loops = [op.regions[0] for layer in layers for op in layer.ops if op.name == "loop"]
    sent = {(op.name, at[:2]) for body in loops for op in collectives(body) for at in op.attrs.axes}
    assert loops and sent == ({("all_reduce", "tp")} if "tp" in axes else set())
    errors, _ = run_and_compare(complete(prepared, part, 1).step, task)
    assert worst(errors)[1] <= 1e-5
