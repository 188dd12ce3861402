"""How many ranks share the state where no mesh is named, and what a mesh without such is told."""

from __future__ import annotations

import pytest

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.ranks import mesh_for_state
from shardwright.sharding.strategies.registry import recipe_of

WIDE = 2048


def step(*widths: int) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """A gradient step of one weight [2048, width] each, on 24 samples."""
    b = Builder()
    weights = [b.input((WIDE, width)) for width in widths]
    x = b.input((24, WIDE))
    grads, total = [], None
    for weight in weights:
        y = b.op("tanh", b.dot(x, weight))
        grads.append(b.add(weight, b.dot(x, y, ((0,), (0,)))))
        loss = b.reduce(y, "add", (0, 1))
        total = loss if total is None else b.add(total, loss)
    assert total is not None
    graph = b.finish(*grads, total)
    state = tuple(Slot(f"params/w{n}", "parameter") for n in range(len(widths)))
    return graph, (*state, Slot("batch/x", "batch", 0)), (*state, Slot("metrics/loss", "metric"))


@pytest.mark.parametrize(
    ("widths", "ranks", "shared"),
    [
        ((2048,), 24, 8),  # 2048 and 2048 do not divide by 3
        ((2304,), 24, 24),  # 2304 = 96 * 24
        ((2304, 2048), 24, 8),  # an eighth of both is less than one 24th and a whole one
        ((2304, 256), 24, 8),  # 2304/8 + 256/8 = 320 < 2304/24 + 256 = 352
        ((23040, 256), 24, 24),  # 23040/8 + 32 > 960 + 256
        ((2048,), 16, 16),
        ((2048,), 1, 1),
    ],
)
def test_a_rank_holds_the_least(widths: tuple[int, ...], ranks: int, shared: int) -> None:
    given = make_mesh({"dp_shard": ranks})
    mesh, notes = mesh_for_state(*step(*widths), given, StrategySettings(name="fsdp"))
    assert mesh.sizes["dp_shard"] == shared and mesh.num_cores == ranks
    assert [note.code for note in notes] == ["SW_MESH_CHOSEN"] * (mesh != given)


@pytest.mark.parametrize(
    ("name", "zero", "shared"), [("generic", -1, 24), ("generic", 1, 8), ("llm-training", -1, 8)]
)
def test_only_a_spread_state_needs_ranks(name: str, zero: int, shared: int) -> None:
    settings = StrategySettings(name=name, zero=zero)
    mesh, _ = mesh_for_state(*step(2048), make_mesh({"dp_shard": 24}), settings)
    assert mesh.sizes["dp_shard"] == shared


@pytest.mark.parametrize(
    ("name", "zero", "words"),
    [
        ("llm-training", -1, "strategy.zero = 1 spreads optimizer state over dp_shard"),
        ("generic", 2, "strategy.zero = 2 spreads gradients and optimizer state"),
        ("fsdp", -1, "strategy.zero = 3 spreads weights, gradients and optimizer state"),
        ("generic", 0, ""),
        ("llm-training", 0, ""),
    ],
)
def test_replicas_alone_spread_nothing_and_say_so(name: str, zero: int, words: str) -> None:
    graph, inputs, outputs = step(2048)
    settings = StrategySettings(name=name, zero=zero)
    recipe = recipe_of(graph, inputs, outputs, make_mesh({"dp_replicate": 4}), settings)
    found = [f.message for f in recipe.findings if f.code == "SW_ZERO_REPLICATED"]
    assert len(found) == bool(words) and all(words in text for text in found)
    shared = recipe_of(
        graph, inputs, outputs, make_mesh({"dp_replicate": 2, "dp_shard": 2}), settings
    )
    assert "SW_ZERO_REPLICATED" not in [f.code for f in shared.findings]
