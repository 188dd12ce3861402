"""Published model sizes by name, and the task of a preset.

Sizes are the `config.json` values of the models' Hugging Face pages, which repeat the papers'
tables; the source is beside each. Rotary scaling of later Llama 3 releases is not part
of these.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean

if TYPE_CHECKING:
    from shardwright.compiler.frontend.task import TrainTask

_LLAMA2 = {"vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        # Source: Touvron et al. 2023, "Llama 2" (arXiv 2307.09288), and the config.json of
        # meta-llama/Llama-2-*-hf.
        "llama2-7b": _sizes(4096, 11008, 32, 32, 32) | _LLAMA2,
        "llama2-13b": _sizes(5120, 13824, 40, 40, 40) | _LLAMA2,
        "llama2-70b": _sizes(8192, 28672, 80, 64, 8) | _LLAMA2,
        # Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3,
        # and the config.json of meta-llama/Meta-Llama-3-*B.
        "llama3-8b": _sizes(4096, 14336, 32, 32, 8) | _LLAMA3,
        "llama3-70b": _sizes(8192, 28672, 80, 64, 8) | _LLAMA3,
    }
)


def _family(
    family: str, vocab: int, positions: int, rows: dict[str, tuple[int, int, int]]
) -> dict[str, tuple[str, dict[str, int]]]:
    """Models whose MLP is four times as wide as they; rows are layers, width and heads."""
    return {
        name: (
            family,
            {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "head_dim": hidden // heads,
                "ffn": 4 * hidden,
                "vocab": vocab,
                "positions": positions,
            },
        )
        for name, (layers, hidden, heads) in rows.items()
    }


SIZED: MappingProxyType[str, tuple[str, dict[str, int]]] = MappingProxyType(
    # Source: Devlin et al. 2019, "BERT" (arXiv 1810.04805), and the config.json of
    # google-bert/bert-*-uncased.
    _family("encoder", 30522, 512, {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)})
    # Source: Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv 2005.14165), table
    # 2.1. Its 1.3B row has heads of 128 whose number does not fit the width: 16 do. Its 13B row
    # prints a width of 5140, which 40 heads of 128 make 5120.
    | _family(
        "gpt",
        50257,
        2048,
        {
            "gpt3-125m": (12, 768, 12),
            "gpt3-350m": (24, 1024, 16),
            "gpt3-760m": (24, 1536, 16),
            "gpt3-1.3b": (24, 2048, 16),
            "gpt3-2.7b": (32, 2560, 32),
            "gpt3-6.7b": (32, 4096, 32),
            "gpt3-13b": (40, 5120, 40),
            "gpt3-175b": (96, 12288, 96),
        },
    )
    # Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words" (arXiv 2010.11929), table 1,
    # and the config.json of google/vit-*-patch16-224: classes; 14 x 14 patches and the class token.
    | _family("vit", 1000, 197, {"vit-base": (12, 768, 12), "vit-large": (24, 1024, 16)})
)
"""Models that are no Llama: family (`families.py`) and sizes."""


LENGTHENED = ("encoder", "gpt")
"""Families whose sequences are text, of any length; the positions of a vit are its patches."""
_OTHER_MODELS = "other models: a config.json, module:function, or a lowered step"


def preset_names() -> tuple[str, ...]:
    """All presets."""
    return (*PRESETS, *SIZED)


def preset_config(name: str) -> dict[str, Any]:
    """The config of a preset: keys of a `config.json` for Llama, sizes for the others.

    Raises UsageError for an unknown name.
    """
    if name not in preset_names():
        raise UsageError(
            "SW_PRESET",
            f"preset requires one of {', '.join(preset_names())}, got {name}",
            hint=did_you_mean(name, preset_names(), _OTHER_MODELS),
        )
    return dict(PRESETS[name] if name in PRESETS else SIZED[name][1])


def without_experts(name: str) -> UsageError:
    """The refusal of a capacity of experts that a model does not have."""
    return UsageError(
        "SW_MODEL_SETTING",
        f"model.capacity_factor requires a model with experts, got {name}",
        hint="leave the setting out",
    )


def preset_task(
    name: str,
    *,
    seq_len: int = 0,
    dtype: str = "f32",
    remat: str = "full",
    **options: Any,
) -> TrainTask:
    """The task of a preset; `seq_len` 0 is the longest it was trained on, a longer one has as many
    positions (learned ones are then more parameters). `options` are optimizer, clip, lr, lora and
    capacity_factor. Parameters stay fp32, unless adapters leave them frozen.

    Raises: UsageError for adapters of a model that is no decoder of the family table.
    """
    config = preset_config(name)
    most = "max_position_embeddings" if name in PRESETS else "positions"
    if name in PRESETS or SIZED[name][0] in LENGTHENED:
        config[most] = max(config[most], seq_len)
    if name in PRESETS:
        from shardwright.orchestrator.models.config_task import train_task

        options |= {"dtype": dtype, "remat": remat}
        return train_task(config, seq_len=seq_len, name=name, **options)
    if options.pop("capacity_factor", 0):
        raise without_experts(name)
    if options.get("lora"):
        raise UsageError(
            "SW_LORA_MODEL",
            f"adapters (model.lora_r) require one of {', '.join(PRESETS)} or a config.json of a"
            f" decoder, got {name}",
            hint="take one of these, or write the step yourself (examples/dpo)",
        )
    from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
    from shardwright.orchestrator.models.families import family_task
    from shardwright.orchestrator.models.layers import Precision

    family, sizes = SIZED[name][0], Sizes(**config, complete=True)
    precision = Precision(activations=dtype)
    length = seq_len or sizes.positions
    chosen = TaskOptions(seq_len=length, precision=precision, remat=remat, name=name, **options)
    return family_task(family, sizes, chosen)
