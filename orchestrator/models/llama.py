"""A decoder transformer of the Llama family, written as a JAX user writes it: no sharding
annotation anywhere.

Sizes come from a Hugging Face `config.json`. Layers are stacked on a leading dim and run by
`lax.scan`, each under
`jax.checkpoint` as `remat` says; parameters are fp32, arithmetic is fp32 or bf16, logits and loss
are always fp32.

Einsum letters: b batch, t and s positions, k kv heads, g heads per kv head, e head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks, config_file, rope
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.config_file import RopeScaling
from shardwright.orchestrator.models.layers import (
    EXACT,
    How,
    Params,
    Precision,
    Site,
    check_remat,
    hide_later,
    run_layers,
)
from shardwright.orchestrator.models.rope import Rope, Tables, rotate

COMPUTE_TYPES = {"f32": "f32", "fp32": "f32", "float32": "f32", "bf16": "bf16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of the model, under the keys of a Hugging Face `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    head_dim: int = 0
    fused: bool = False
    """Whether projections that read the same input are one matrix (Megatron-LM, NxD)."""

    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0
    """Positions that a token may look back; 0: all. Only windows that no sequence is longer than
    are built."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a `config.json`. Raises UsageError for a missing size or feature not built here."""
        config_file.refuse_features(config, _PLAIN_VALUES)
        found: dict[str, Any] = {**config_file.sizes(config, _REQUIRED, _OPTIONAL)}
        found |= config_file.numbers(config, ("rms_norm_eps",)) | config_file.rope(config)
        if config.get("use_sliding_window", True):
            found |= config_file.sizes(config, (), ("sliding_window",))
        heads = found["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": found["hidden_size"] // heads}
        tied = bool(config.get("tie_word_embeddings"))
        built = cls(**(usual | found), tie_word_embeddings=tied)
        built.check()
        return built

    def check(self) -> None:
        """Raises UsageError when the sizes do not fit each other."""
        groups = self.num_attention_heads % self.num_key_value_heads
        if groups or self.head_dim % 2:
            raise config_file.refused(
                "num_key_value_heads to divide num_attention_heads and an even head dim",
                f"{self.num_key_value_heads}, {self.num_attention_heads} and {self.head_dim}",
            )


_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "vocab_size"),
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "pretraining_tp": (1,),
    "tie_word_embeddings": (False, True),
}


def init_params(config: LlamaConfig, key: jax.Array) -> Params:
    """Fresh parameters: normal 0.02 for matrices, ones for norms, fp32."""
    layers = blocks.normal_leaves(key, _matrix_shapes(config))
    outer = {name: layers.pop(name) for name in ("embed", "lm_head") if name in layers}
    width = (config.hidden_size,)
    for name in ("attn_norm", "mlp_norm"):
        layers[name] = jnp.ones((config.num_hidden_layers, *width), jnp.float32)
    return outer | {"layers": layers, "final_norm": jnp.ones(width, jnp.float32)}


_FUSED = {"w_qkv": ("wq", "wk", "wv"), "w_kv": ("wk", "wv"), "w_gate_up": ("w_gate", "w_up")}
"""Matrices of fused projections -> what they stand for, of equal widths; the first that fits."""


def _matrix_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices; those of the layers are stacked on dim 0."""
    c = config
    q_width, kv_width = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
    reading = {"wq": q_width, "wk": kv_width, "wv": kv_width}
    reading |= dict.fromkeys(("w_gate", "w_up"), c.intermediate_size)
    stacked: dict[str, tuple[int, ...]] = {n: (c.hidden_size, w) for n, w in reading.items()}
    stacked |= {"wo": (q_width, c.hidden_size), "w_down": (c.intermediate_size, c.hidden_size)}
    for name, parts in _FUSED.items() if c.fused else ():
        widths = {stacked[part][1] for part in parts if part in stacked}
        if len(widths) == 1 and set(parts) <= stacked.keys():
            stacked = {n: s for n, s in stacked.items() if n not in parts}
            stacked[name] = (c.hidden_size, len(parts), *widths)
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size)}
    shapes |= {name: (c.num_hidden_layers, *shape) for name, shape in stacked.items()}
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.hidden_size, c.vocab_size)
    return shapes


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dim, computed in fp32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_tables(config: LlamaConfig, seq_len: int) -> Tables:
    """The tables of as many positions."""
    positions = Rope(dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)
    return rope.tables(positions, seq_len)


def projected(layer: Params, x: jax.Array, *names: str) -> list[jax.Array]:
    """`x` [B, T, D] times the matrices `names`, of those that are fused as one product."""
    found = {name: x @ layer[name].astype(x.dtype) for name in names if name in layer}
    for fused, parts in _FUSED.items():
        if fused in layer and set(parts) <= set(names):
            wide = jnp.einsum("btd,dcn->btcn", x, layer[fused].astype(x.dtype))
            found |= {part: wide[:, :, i] for i, part in enumerate(parts)}
    return [found[name] for name in names]


def attention(
    config: LlamaConfig, layer: Params, x: jax.Array, tables: Tables, how: How
) -> jax.Array:
    """Causal grouped-query attention."""
    c, (b, t, _), dtype = config, x.shape, x.dtype
    kv_heads, group = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
    made = projected(layer, x, "wq", "wk", "wv")
    q, k, v = (y.reshape(b, t, -1, c.head_dim) for y in made)
    q, k = rotate(q, tables), rotate(k, tables)
    q = q.reshape(b, t, kv_heads, group, c.head_dim)
    scores = jnp.einsum("btkge,bske->bkgts", q, k).astype(jnp.float32) * c.head_dim**-0.5
    weights = how.drop(jax.nn.softmax(hide_later(scores), axis=-1).astype(dtype), Site.WEIGHTS)
    mixed = jnp.einsum("bkgts,bske->btkge", weights, v)
    return mixed.reshape(b, t, -1) @ layer["wo"].astype(dtype)


def swiglu(layer: Params, x: jax.Array) -> jax.Array:
    """The gated feed-forward block."""
    gate, up = projected(layer, x, "w_gate", "w_up")
    return (jax.nn.silu(gate) * up) @ layer["w_down"].astype(x.dtype)


Feed = Callable[[Params, jax.Array], jax.Array]
"""What a layer does with every position behind attention."""


def decoder_layer(
    config: LlamaConfig,
    x: jax.Array,
    layer: Params,
    how: How,
    tables: Tables,
    feed: Feed = swiglu,
) -> jax.Array:
    """One layer: attention and feed-forward, each behind a norm and added to the residual."""
    normed = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    x = x + how.drop(attention(config, layer, normed, tables, how), Site.ATTENDED)
    fed = feed(layer, rms_norm(x, layer["mlp_norm"], config.rms_norm_eps))
    return x + how.drop(fed, Site.FED)


def logits(config: LlamaConfig, params: Params, tokens: jax.Array, how: How) -> jax.Array:
    """Next-token logits [B, T, V] in fp32."""
    tables = rope_tables(config, tokens.shape[1])
    return decoded(config, params, embedded(params, tokens, how), tables, how)


def embedded(params: Params, tokens: jax.Array, how: How) -> jax.Array:
    """What enters the layers [B, T, D]."""
    return how.drop(params["embed"].astype(how.precision.dtype)[tokens], Site.STATES)


def decoded(
    config: LlamaConfig,
    params: Params,
    x: jax.Array,
    tables: Tables,
    how: How,
    feed: Feed = swiglu,
) -> jax.Array:
    """Next-token logits [B, T, V] in fp32 of embedded tokens [B, T, D]."""
    layer = partial(decoder_layer, config, tables=tables, feed=feed)
    x = run_layers(layer, x, params["layers"], how)
    x = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    head = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    return (x @ head.astype(x.dtype)).astype(jnp.float32)


def loss(config: LlamaConfig, params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
    """Mean next-token cross entropy, in nat."""
    given = logits(config, params, batch["tokens"], how)
    return blocks.cross_entropy(EXACT, given, batch["targets"])


def train_task(
    config: Mapping[str, Any] | LlamaConfig,
    *,
    seq_len: int,
    dtype: str = "f32",
    optimizer: str = "adamw",
    clip: float = 1.0,
    lr: float = 3e-4,
    remat: str = "full",
    name: str = "llama",
) -> TrainTask:
    """The training step of a Llama model on byte-level text; `seq_len` 0: `usual_length`.

    Raises: UsageError for an unknown type, optimizer or remat, a sequence longer than the config
    allows, and for none where the config does not say how long one is.
    """
    sizes = config if isinstance(config, LlamaConfig) else LlamaConfig.from_dict(config)
    seq_len = seq_len or config_file.usual_length(
        sizes.max_position_embeddings, sizes.rope_scaling, sizes.sliding_window
    )
    _check_options(sizes, seq_len, dtype, remat)
    precision = Precision(activations=COMPUTE_TYPES[dtype])
    options = TaskOptions(
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        clip=clip,
        lr=lr,
        remat=remat,
        name=name,
    )
    return task_of(sizes, options)


def task_of(config: LlamaConfig, options: TaskOptions) -> TrainTask:
    """The training step at sizes that fit each other. Raises UsageError as `train_task`."""
    init, positions = partial(init_params, config), config.max_position_embeddings
    return blocks.language_task(init, partial(loss, config), config.vocab_size, positions, options)


def _check_options(config: LlamaConfig, seq_len: int, dtype: str, remat: str) -> None:
    """Raises UsageError for an option out of range."""
    check_options(config.max_position_embeddings, seq_len, dtype, remat)
    if 0 < config.sliding_window < seq_len:
        raise config_file.refused(
            f"sliding_window of at least seq_len {seq_len}, or null",
            str(config.sliding_window),
            f"plan --seq-len {config.sliding_window}, or {config_file.OWN_MODEL}",
        )


def check_options(positions: int, seq_len: int, dtype: str, remat: str) -> None:
    """Raises UsageError for an option out of range of a model of so many positions."""
    if dtype not in COMPUTE_TYPES:
        raise UsageError("SW_DTYPE", f"dtype requires {', '.join(COMPUTE_TYPES)}, got {dtype}")
    check_remat(remat)
    if not 1 <= seq_len <= positions:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires 1 to {positions} (max_position_embeddings), got {seq_len}",
            hint="set max_position_embeddings of the config to as many",
        )
