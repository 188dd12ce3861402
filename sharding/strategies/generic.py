"""Data parallel: every core holds the weights and works on its samples; and the training of large
language models as Megatron lays it out, which is the same with other defaults.

`zero` 0 sums gradients everywhere; 1 and 2 spread the optimizer state over `dp_shard`, so that
gradients are reduced and scattered and new weights gathered once per step (2 also accumulates
scattered gradients). Other axes of the mesh split layers: heads, feed-forward columns and
vocabulary lie over `tp`, and what is between blocks is split along the sequence over those cores.
llm-training has `tp` and ZeRO-1 unless the job says otherwise.
"""

from __future__ import annotations

from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.splits import split_layers
from shardwright.sharding.strategies.state import place_state


def generic(step: Decisions, settings: StrategySettings) -> None:
    """Decide where everything lives under data and tensor parallelism.

    Raises: ShardingError for a batch that does not divide, or `cp` without a sequence.
    """
    split_layers(step, settings)
    place_state(step, settings.zero_stage)
