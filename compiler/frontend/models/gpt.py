"""A GPT-style decoder: pre-norm layers, learned positions, causal attention, GELU, tied output.

`targets` of a batch are the next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from shardwright.compiler.frontend.models import blocks
from shardwright.compiler.frontend.models.blocks import Precision, Sizes, TaskOptions
from shardwright.compiler.frontend.models.layers import (
    NO_DROPOUT,
    Dropout,
    Params,
    Site,
    run_layers,
)
from shardwright.compiler.frontend.task import TrainTask

_EPS = 1e-5  # `layer_norm_epsilon` of the published GPT configurations


def init_params(sizes: Sizes, key: jax.Array, precision: Precision) -> Params:
    """Fresh parameters: normal 0.02 matrices, zero biases, unit norms."""
    c, dtype = sizes, precision.param_dtype
    outer = {"embed": (c.vocab, c.hidden), "positions": (c.positions, c.hidden)}
    outer_key, layer_key = jax.random.split(key)
    params = blocks.normal_leaves(outer_key, outer, dtype)
    vectors = {name: (c.hidden,) for name in ("final_scale", "final_shift")}
    params |= blocks.constant_leaves(vectors, dtype)
    return params | {"layers": blocks.init_layers(c, layer_key, dtype)}


def decoder_layer(
    sizes: Sizes, precision: Precision, x: jax.Array, layer: Params, drop: Dropout = NO_DROPOUT
) -> jax.Array:
    """Attention and MLP, each behind a norm and added to the residual."""
    normed = blocks.layer_norm(precision, x, layer["attn_scale"], layer["attn_shift"], _EPS)
    attended = blocks.attention(precision, layer, normed, sizes.heads, causal=True, drop=drop)
    x = x + drop(attended, Site.ATTENDED)
    normed = blocks.layer_norm(precision, x, layer["mlp_scale"], layer["mlp_shift"], _EPS)
    return x + drop(blocks.mlp(precision, layer, normed, exact=False), Site.FED)


def logits(
    sizes: Sizes,
    params: Params,
    tokens: jax.Array,
    precision: Precision,
    options: TaskOptions,
    drop: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Next-token logits [B, T, V]."""
    p = precision
    x = params["embed"].astype(p.stream_dtype)[tokens]
    x = x + params["positions"][: tokens.shape[1]].astype(p.stream_dtype)
    x = drop(x, Site.STATES)
    layer = partial(decoder_layer, sizes, p)
    x = run_layers(layer, x, params["layers"], options.remat, drop)
    x = blocks.layer_norm(p, x, params["final_scale"], params["final_shift"], _EPS)
    return p.einsum("btd,vd->btv", x, params["embed"])


def train_task(sizes: Mapping[str, Any] | Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for sizes that do not fit."""
    known = sizes if isinstance(sizes, Sizes) else Sizes(**sizes)

    def loss(
        params: Params, batch: dict[str, jax.Array], precision: Precision, drop: Dropout
    ) -> jax.Array:
        given = logits(known, params, batch["tokens"], precision, options, drop)
        return blocks.cross_entropy(precision, given, batch["targets"], options.one_hot_loss)

    init = partial(init_params, known)
    return blocks.language_task(init, loss, known.vocab, known.positions, options)
