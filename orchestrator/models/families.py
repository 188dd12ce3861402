"""The training task of a model family at given sizes, for callers that hold sizes and not a config.

One set of sizes serves all families; what a family does not have (key-value heads, classes) is
beside it or goes by another name there.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import decoder, encoder, gpt, vit
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of


def family_task(family: str, sizes: Sizes, options: TaskOptions, kv_heads: int = 0) -> TrainTask:
    """The task of `family`: encoder, gpt, vit or llama (which alone has `kv_heads`; 0 means
    `heads`).

    Raises UsageError for an unknown family or sizes that do not fit.
    """
    makers = {"encoder": encoder.train_task, "gpt": gpt.train_task, "vit": vit.train_task}
    if family in makers:
        return makers[family](sizes, options)
    if family == "llama":
        return _llama_task(sizes, kv_heads or sizes.heads, options)
    raise UsageError("SW_MODEL", f"model family requires encoder, gpt, vit or llama, got {family}")


def _llama_task(sizes: Sizes, kv_heads: int, options: TaskOptions) -> TrainTask:
    """A Llama with stored parameters in the type of the precision."""
    model = architecture_of(
        {
            "model_type": "llama",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.ffn,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": sizes.vocab,
            "max_position_embeddings": sizes.positions,
            "head_dim": sizes.head_dim,
        }
    )
    return decoder.train_task(replace(model, fused=sizes.fused, drops_states=True), options)
