"""Published model sizes by name, and the task of a preset.

Sizes are the `config.json` values of the models' Hugging Face pages, which repeat the papers'
tables; the source is beside each.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.orchestrator.models import config_file

if TYPE_CHECKING:
    from shardwright.compiler.frontend.task import TrainTask
    from shardwright.orchestrator.models.adapters import Lora

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


_LLAMA31: dict[str, Any] = _LLAMA3 | {
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA32 = _LLAMA31 | {
    "rope_scaling": _LLAMA31["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_TIED = {"tie_word_embeddings": True}

CONFIGS: MappingProxyType[str, tuple[dict[str, Any], int]] = MappingProxyType(
    {
        # Source: Grattafiori et al. 2024, table 3, and the config.json of meta-llama/Llama-3.*;
        # samples of 8,192 tokens until the last stage (section 3.4).
        "llama3.1-8b": (_sizes(4096, 14336, 32, 32, 8) | _LLAMA31, 8192),
        "llama3.1-70b": (_sizes(8192, 28672, 80, 64, 8) | _LLAMA31, 8192),
        "llama3.1-405b": (_sizes(16384, 53248, 126, 128, 8) | _LLAMA31, 8192),
        "llama3.2-1b": (_sizes(2048, 8192, 16, 32, 8) | _LLAMA32 | {"head_dim": 64}, 8192),
        "llama3.2-3b": (_sizes(3072, 8192, 28, 24, 8) | _LLAMA32 | {"head_dim": 128}, 8192),
        "llama3.3-70b": (_sizes(8192, 28672, 80, 64, 8) | _LLAMA31, 8192),
        # Source: Yang et al. 2025, "Qwen3 Technical Report" (arXiv 2505.09388), tables 1 and 2, and
        # the config.json of Qwen/Qwen3-*; samples of 4,096 tokens until the last stage (section
        # 3.2).
        "qwen3-0.6b": (_sizes(1024, 3072, 28, 16, 8) | _QWEN3 | _TIED, 4096),
        "qwen3-1.7b": (_sizes(2048, 6144, 28, 16, 8) | _QWEN3 | _TIED, 4096),
        "qwen3-4b": (_sizes(2560, 9728, 36, 32, 8) | _QWEN3 | _TIED, 4096),
        "qwen3-8b": (_sizes(4096, 12288, 36, 32, 8) | _QWEN3, 4096),
        "qwen3-14b": (_sizes(5120, 17408, 40, 40, 8) | _QWEN3, 4096),
        "qwen3-32b": (_sizes(5120, 25600, 64, 64, 8) | _QWEN3, 4096),
        "qwen3-30b-a3b": (
            _sizes(2048, 6144, 48, 32, 4)
            | _QWEN3
            | {
                "model_type": "qwen3_moe",
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
            },
            4096,
        ),
        # Source: Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088), table 1, and the
        # config.json of mistralai/Mixtral-8x7B-v0.1. The length is our choice.
        "mixtral-8x7b": (
            _sizes(4096, 14336, 32, 32, 8)
            | {
                "model_type": "mixtral",
                "vocab_size": 32000,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "sliding_window": None,
            },
            4096,
        ),
    }
)
"""Models of the table of families (`family_rows.py`): a `config.json`, and tokens of a sample."""


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


UNETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        # Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models" (arXiv 2006.11239),
        # appendix B, and its code: the models of CIFAR-10 (35.7M) and of LSUN and CelebA-HQ (114M).
        "unet-ddpm32": {"image": 32, "width": 128, "multiples": (1, 2, 2, 2)},
        "unet-ddpm256": {"image": 256, "width": 128, "multiples": (1, 1, 2, 2, 4, 4)},
    }
)
"""U-Nets of diffusion models: sizes of `unet.py`."""


LENGTHENED = ("encoder", "gpt")
"""Families whose sequences are text, of any length; the positions of a vit are its patches."""
_OTHER_MODELS = "other models: a config.json, module:function, or a lowered step"


def preset_names() -> tuple[str, ...]:
    """All presets."""
    return (*PRESETS, *CONFIGS, *SIZED, *UNETS)


def preset_list() -> str:
    """All presets in words, the sizes of a model side by side: llama2-7b, -13b, -70b."""
    words, last = [], ""
    for name in preset_names():
        model, _, size = name.partition("-")
        words.append(f"-{size}" if model == last else name)
        last = model
    return ", ".join(words)


def preset_config(name: str) -> dict[str, Any]:
    """The config of a preset: keys of a `config.json`, or sizes of `SIZED` or `UNETS`.

    Raises UsageError for an unknown name.
    """
    if name not in preset_names():
        raise UsageError(
            "SW_PRESET",
            f"preset requires one of {preset_list()}, got {name}",
            hint=did_you_mean(name, preset_names(), _OTHER_MODELS),
        )
    if name in CONFIGS:
        return dict(CONFIGS[name][0])
    if name in UNETS:
        return dict(UNETS[name])
    return dict(PRESETS[name] if name in PRESETS else SIZED[name][1])


def preset_task(
    name: str,
    *,
    seq_len: int = 0,
    dtype: str = "f32",
    remat: str = "full",
    **options: Any,
) -> TrainTask:
    """The task of a preset; `seq_len` 0 is the longest it was trained on, a longer one has as many
    positions (learned ones are then more parameters). `options` are optimizer, clip, lr, lora,
    capacity_factor and seats_for_all. Parameters stay fp32, unless adapters leave them frozen.

    Raises: UsageError for adapters of a model that is no decoder of the family table.
    """
    config = preset_config(name)
    if name in UNETS or name in SIZED:
        options = _without_parts(name, **options)
    if name in UNETS:
        return _unet_task(name, config, seq_len, dtype, remat, **options)
    most = "positions" if name in SIZED else "max_position_embeddings"
    if name not in SIZED or SIZED[name][0] in LENGTHENED:
        config[most] = max(config[most], seq_len)
    if name not in SIZED:
        seq_len = seq_len or (CONFIGS[name][1] if name in CONFIGS else 0)
        from shardwright.orchestrator.models.config_task import train_task

        options |= {"dtype": dtype, "remat": remat}
        return train_task(config, seq_len=seq_len, name=name, **options)
    from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
    from shardwright.orchestrator.models.families import family_task
    from shardwright.orchestrator.models.layers import Precision

    family, sizes = SIZED[name][0], Sizes(**config, complete=True)
    precision = Precision(activations=dtype)
    length = seq_len or sizes.positions
    chosen = TaskOptions(seq_len=length, precision=precision, remat=remat, name=name, **options)
    return family_task(family, sizes, chosen)


def _without_parts(
    name: str,
    *,
    lora: Lora | None = None,
    capacity_factor: float = 0.0,
    seats_for_all: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The options of a model without experts and adapters; how experts are computed says nothing
    about it. Raises UsageError for adapters and a capacity."""
    del seats_for_all
    if capacity_factor:
        raise config_file.without_experts(name)
    if lora:
        raise UsageError(
            "SW_LORA_MODEL",
            f"adapters (model.lora_r) require one of {', '.join((*PRESETS, *CONFIGS))} or a"
            f" config.json of a decoder, got {name}",
            hint="take one of these, or write the step yourself (examples/dpo)",
        )
    return options


def _unet_task(
    name: str, config: dict[str, Any], seq_len: int, dtype: str, remat: str, **options: Any
) -> TrainTask:
    from shardwright.orchestrator.models import unet
    from shardwright.orchestrator.models.blocks import TaskOptions
    from shardwright.orchestrator.models.layers import Precision

    chosen = TaskOptions(
        seq_len=seq_len or 1,
        precision=Precision(activations=dtype),
        remat=remat,
        name=name,
        **options,
    )
    return unet.train_task(unet.UNet(**config), chosen)
