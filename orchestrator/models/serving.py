"""Inference tasks of presets and configs: which models decode, and at what sizes.

Rows have seats in all experts: a core has several sequences, whose rows read each matrix once.
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.config_file import Config
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.generation import Serving, serving_task
from shardwright.orchestrator.models.presets import SIZED, UNETS, preset_config

_GPT2_KEYS = {
    "vocab": "vocab_size",
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "ffn": "n_inner",
    "positions": "n_positions",
}
"""Sizes of a GPT of ours -> keys of a `config.json` of GPT-2, which is built alike."""
_WITHOUT_DROPOUT = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)


def served_preset(name: str, *, context: int, **asked: Any) -> TrainTask:
    """The inference task of a preset; context 0: all of its positions, a longer one has as many.
    Raises UsageError for what is no decoder, which has nothing to cache."""
    config, most = preset_config(name), "max_position_embeddings"
    family = "unet" if name in UNETS else SIZED[name][0] if name in SIZED else ""
    if family == "gpt":
        config = {key: config[size] for size, key in _GPT2_KEYS.items()} | _WITHOUT_DROPOUT
        config["model_type"], most = "gpt2", "n_positions"
    elif family:
        what = "a U-Net" if family == "unet" else "an encoder"
        raise UsageError(
            "SW_MODE",
            f"model.mode = {asked['mode']} requires a decoder, which has keys and values to"
            f" cache, got {name}, {what}",
            hint="shardwright compile times its forward pass, lowered to HLO",
        )
    config[most] = max(config[most], context)
    model = architecture_of(config).with_experts(Experts.seated)
    return serving_task(model, Serving(context=context or model.positions, name=name, **asked))


def served_config(config: Config, *, context: int, **asked: Any) -> TrainTask:
    """The inference task of a `config.json`; context 0: all of its positions. Raises UsageError for
    a config that is not built here, and a context longer than it allows."""
    model = architecture_of(config).with_experts(Experts.seated)
    if context > model.positions:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires 1 to {model.positions} (max_position_embeddings), got {context}",
            hint="take a shorter one; a model of more positions is another config",
        )
    return serving_task(model, Serving(context=context or model.positions, **asked))
