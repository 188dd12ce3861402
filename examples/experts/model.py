"""A decoder with eight experts per layer, of which every token takes two."""

from __future__ import annotations

from shardwright import TrainTask
from shardwright.orchestrator.models import decoder
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of

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
    feed = Experts(count=8, chosen=2, width=512, routing="products")
    return decoder.train_task(architecture_of(SIZES).fed_by(feed), options)
