"""The table `[model]` of a job: what is trained, or served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.options import choice
from shardwright.compiler.support.quantities import TOKENS, amount
from shardwright.orchestrator.models.presets import preset_names
from shardwright.orchestrator.validation.recipes import recipe_names
from shardwright.sharding.settings import MOST, limited

OF_TORCH = (
    *("adam", "adafactor", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "muon"),
)
"""Optimizers of torch.optim besides: the rules that `compiler/frontend/pytorch` has."""


def named(default: str, names: Callable[[], Iterable[str]], **about: Any) -> Any:
    """A name of a registry, or something else that whoever reads the key understands."""
    return field(default=default, metadata={"names": names, **about})


def _read_names(value: Any) -> tuple[str, ...] | None:
    """Names between commas, or a list of TOML."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(name.strip() for name in names) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is trained: exactly one of `preset`, `config`, `entry`, `hlo`, `onnx`, `mxnet`,
    `tensorflow`, `recipe`."""

    preset: str = named("", preset_names)
    """Name of a published architecture (`llama2-70b`)."""

    config: str = ""
    """Path of a Hugging Face style `config.json`, relative to the job file, or what one holds,
    `{...}`."""

    entry: str = ""
    """`module:function` returning a TrainTask; the module is looked up beside the job file
    first."""

    hlo: str = ""
    """Path of a lowered step (HLO, StableHLO or jax.export content), relative to the job file; for
    timing only. Its samples are those that are in flight at a time: `strategy.micro_batch` on all
    data-parallel ranks."""

    onnx: str = ""
    """Path of an ONNX model, relative to the job file: its floating-point initializers are
    parameters, and `loss` says what its results are trained for (docs/onnx.md)."""

    tensorflow: str = ""
    """Path of a TensorFlow SavedModel (`folder:signature` names one) or a `.keras` file, relative
    to the job file: its trainable variables are parameters, and `loss` says what it is trained for
    (docs/tensorflow.md). A function of a Python file is an `entry`."""

    mxnet: str = ""
    """Path of an MXNet symbol (`model-symbol.json`), relative to the job file, beside which the
    file of its parameters lies: they are trained for the symbol's own losses, or for `loss`
    (docs/mxnet.md)."""

    recipe: str = named("", recipe_names)
    """Name of a published run: its model, and its layout, batches and software where nothing else
    is said (docs/validation.md)."""

    mode: str = choice("train", "train", "prefill", "decode")
    """What a step does: trains; reads the prompts of `strategy.global_batch` sequences into a cache
    of keys and values; or decodes the next token of each (docs/inference.md)."""

    seq_len: int = amount(TOKENS, MOST * 100)
    """Tokens per sample, 4096 or 4Ki (4k are 4000); 0 takes the model's own, where it says one
    (docs/plan.md). Of inference the context: the length of prompts, and of the cache (vLLM's
    `max_model_len`)."""

    dtype: str = choice("auto", "auto", "float32", "bfloat16")
    """Compute type of forward and backward; parameters stay fp32 where they are trained. `auto`:
    bfloat16 for presets and configs whose `torch_dtype` has 16 bits, else float32."""

    optimizer: str = choice("adamw", "adamw", "lamb", "sgd", *OF_TORCH)
    """How weights are updated: adamw with betas 0.9, 0.95 and decay 0.1, lamb, sgd, or another of
    torch.optim with its defaults there and `learning_rate` (docs/pytorch.md)."""
    learning_rate: float = 1e-3
    clip: float = 1.0
    """Global gradient norm; 0 turns clipping off."""

    capacity_factor: float = limited(0.0, 0.0, 1e3)
    """Rows that an expert takes of a sequence, as a multiple of its even share; rows beyond them
    keep their residual alone. 0: as many as choose it, no row is dropped."""

    loss: str = ""
    """What a model of ONNX, MXNet or TensorFlow is trained for: cross_entropy or mse of its first
    result and a target, or the name of a result that is one number; empty: the losses of an MXNet
    symbol."""

    input_shape: str = ""
    """Sizes of dims that a model of ONNX, MXNet or TensorFlow leaves open beside its samples:
    `seq=128`, or of all dims of an input, `x=4x3x8x8`, with commas between them; `?` in front are
    the samples."""

    lora_r: int = limited(0, 0, MOST)
    """Rank of low-rank adapters (LoRA), which are trained in place of the model; 0: none, the model
    is (docs/lora.md)."""

    lora_alpha: float = limited(0.0, 0.0, 1e9)
    """Adapters are multiplied with `lora_alpha / lora_r`; 0: twice the rank."""

    lora_targets: tuple[str, ...] = field(
        default=("all-linear",),
        metadata={"read": _read_names, "form": "names of projections, q_proj,v_proj or a list"},
    )
    """Projections that get an adapter, by the names of PEFT's `target_modules`: q_proj, k_proj,
    v_proj, o_proj, gate_proj, up_proj, down_proj, or all-linear."""

    lora_base: str = choice("bfloat16", "float32", "bfloat16", "int8")
    """How the frozen model is stored; int8: the matrices of layers, with a scale per column."""

    generator: str = choice("auto", "auto", "threefry2x32", "rbg", "unsafe_rbg")
    """What draws random numbers of your own step (`entry`) where its code names no generator. auto:
    jax's own choice, Threefry unless JAX_DEFAULT_PRNG_IMPL says otherwise; rbg is the machine's
    generator, with other numbers of the same distributions."""


NO_MODEL = ModelConfig()
