"""Names of strategies are those of the settings, letter by letter."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.build import Builder
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.registry import recipe_of


@pytest.mark.parametrize("name", ["FSDP", "llm_training", "Manual"])
def test_names_are_compared_as_they_are(name: str) -> None:
    """What compares `settings.name` elsewhere must not see another strategy than the registry."""
    builder = Builder()
    x = builder.input((2, 2))
    graph, slots = builder.finish(x), [Slot("params/x", "parameter")]
    with pytest.raises(ShardingError, match="SW_STRATEGY"):
        recipe_of(graph, slots, slots, make_mesh({"tp": 1}), StrategySettings(name=name))
