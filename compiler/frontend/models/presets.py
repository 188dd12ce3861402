"""Published model sizes by name, and the task of a preset.

Sizes are the `config.json` values of the models' Hugging Face pages, which repeat the papers'
tables; the source is beside each. Rotary scaling of later Llama 3 releases is not part of these.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compiler.diagnostics import UsageError

if TYPE_CHECKING:
    from compiler.frontend.task import TrainTask

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


def preset_config(name: str) -> dict[str, Any]:
    """The config of a preset. Raises UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError("SW_PRESET", f"preset requires one of {', '.join(PRESETS)}, got {name}")
    return dict(PRESETS[name])


def preset_task(name: str, *, seq_len: int = 0, **options: Any) -> TrainTask:
    """The task of a preset; `seq_len` 0 is the longest it was trained on, `options` are
    `llama.train_task`'s.
    """
    from compiler.frontend.models import llama

    config = preset_config(name)
    length = seq_len or config["max_position_embeddings"]
    return llama.train_task(config, seq_len=length, name=name, **options)
