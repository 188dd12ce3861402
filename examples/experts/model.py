"""A decoder with eight experts per layer, of which every token takes two."""

from __future__ import annotations

from shardwright import TrainTask
from shardwright.orchestrator.models import moe
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.llama import LlamaConfig

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def make_task() -> TrainTask:
    """Every expert has room for a quarter more rows than its even part."""
    options = TaskOptions(seq_len=256, remat="full", name="experts")
    return moe.train_task(LlamaConfig.from_dict(SIZES), moe.Experts(8), options)
