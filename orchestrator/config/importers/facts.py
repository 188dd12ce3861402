"""What fields of other projects say that is no key of a job by itself, in a user's words.

Facts come from tables and go into keys in `meaning` of their project. Where one key follows from a
fact, its words are that key.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FACTS: Mapping[str, str] = MappingProxyType(
    {
        "name": "the family of the model",
        "flavor": "the sizes of the model",
        "source": "the family of the model",
        "config_file": "the model",
        "layers": "the layers of the model",
        "hidden": "the width of the model",
        "ffn": "the width of its MLPs",
        "heads": "the heads of its attention",
        "is_grouped": "whether heads share keys and values",
        "groups": "its heads of keys and values",
        "kv_heads": "its heads of keys and values",
        "head_dim": "the width of a head",
        "vocab": "the size of its vocabulary",
        "padded_vocab": "the size of its vocabulary",
        "vocab_multiple": "what its vocabulary is padded to a multiple of",
        "positions": "its longest sequence",
        "positions_kind": "its kind of positions",
        "is_rotary": "its kind of positions",
        "rope_theta": "the base of its rotary positions",
        "is_gated": "whether its MLPs are gated",
        "norm": "its kind of norm",
        "eps": "the epsilon of its norms",
        "has_head_norms": "norms of queries and keys",
        "has_no_bias": "biases of linear layers",
        "has_qkv_bias": "biases of queries, keys and values",
        "is_untied": "whether both ends have their own matrix",
        "window": "the window of its attention",
        "experts": "its experts",
        "chosen": "experts that see a token",
        "expert_ffn": "the width of an expert",
        "expert_tp": "how experts are split",
        "is_bf16": "model.dtype",
        "is_fp16": "model.dtype",
        "data_length": "model.seq_len",
        "per_node": "cluster.instances",
        "nodes": "cluster.instances",
        "world": "cluster.instances",
        "tasks": "cluster.instances",
        "tasks_per_node": "cluster.instances",
        "task_nodes": "cluster.instances",
        "devices": "cluster.target",
        "local_batch": "strategy.micro_batch, and strategy.global_batch with the ranks",
        "global_batch": "strategy.global_batch",
        "pp_batch": "strategy.micro_batch of a pipeline",
        "reshard": "strategy.reshard_after_forward",
        "stage_layers": "strategy.stage_parts",
        "part_layers": "strategy.stage_parts",
        "parts": "strategy.stage_parts",
        "selective": "strategy.remat",
        "recomputes": "strategy.remat",
        "recomputes_attention": "strategy.remat",
        "recomputes_all": "strategy.remat",
        "is_distributed": "strategy.zero",
        "is_fsdp": "strategy.zero",
        "is_megatron_fsdp": "strategy.zero",
        "sharded": "strategy.zero",
        "is_zero1": "strategy.zero",
        "overlaps_reduction": "strategy.reduce_gradients",
        "reduces_wide": "strategy.reduce_dtype",
        "reduces_short": "strategy.reduce_dtype",
        "adds_apart": "strategy.gradient_accumulation_fusion",
        "compiler_flags": "options of the compiler",
        "saves": "whether state is saved",
        "save_interval": "goodput.checkpoint_interval_steps",
        "save_unit": "goodput.checkpoint_interval_s or goodput.checkpoint_interval_steps",
        "steps": "goal.tokens: steps times the tokens of one",
        "samples": "goal.tokens: samples times the tokens of one",
    }
)
"""Words by fact."""
