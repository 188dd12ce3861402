"""Fully sharded data parallel (ZeRO-3), and its hybrid with replicas (HSDP).

Every weight and its optimizer leaves are sharded over `dp_shard` (and `cp`) along one dim; samples
lie over `dp_replicate` and `dp_shard`. A weight is gathered where the forward or backward pass uses
it, its gradient is reduced and scattered where it is made, and the optimizer works on shards. With
`tp` above 1 layers are split too, and only what a tensor-parallel rank uses is gathered.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import ShardingError
from shardwright.sharding.settings import AUTO, WEIGHTS, StrategySettings
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.splits import split_layers
from shardwright.sharding.strategies.state import place_state


def fsdp(step: Decisions, settings: StrategySettings) -> None:
    """Decide where everything lives under FSDP.

    Raises: ShardingError for a batch that does not divide, `cp` without a sequence, or a `zero`
    other than 3.
    """
    if settings.zero not in (AUTO, WEIGHTS):
        raise ShardingError(
            "SW_FSDP_ZERO",
            f"strategy fsdp requires strategy.zero = 3, got {settings.zero}",
            hint="use strategy generic for zero 0, 1 or 2",
        )
    split_layers(step, settings)
    place_state(step, WEIGHTS)
