"""Training of large language models as Megatron lays it out: tensor and sequence parallel layers.

Heads, feed-forward columns and vocabulary lie over `tp`; what is between blocks is split along the
sequence over the same cores. The optimizer state is spread over the data-parallel cores (ZeRO-1)
unless `zero` says otherwise.
"""

from __future__ import annotations

from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.decisions import Decisions, zero_of
from shardwright.sharding.strategies.splits import split_layers
from shardwright.sharding.strategies.state import place_state


def llm_training(step: Decisions, settings: StrategySettings) -> None:
    """Decide where everything lives under tensor parallelism.

    Raises: ShardingError for a batch that does not divide, or `cp` without a sequence.
    """
    split_layers(step, settings)
    place_state(step, zero_of(settings))
