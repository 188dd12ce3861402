"""A BERT-style encoder with a masked-language-model head over all positions.

Post-norm layers, learned positions, full attention, GELU, a transform before the tied output
projection. Left out, because they cost nothing next to the rest: segment embeddings and the
next-sentence head. Dropout is left out too. `targets` of a batch are the tokens to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from compiler.frontend.models import blocks
from compiler.frontend.models.blocks import Params, Precision, Sizes, TaskOptions
from compiler.frontend.task import TrainTask

_EPS = 1e-12  # `layer_norm_eps` of the published BERT configurations


def init_params(sizes: Sizes, key: jax.Array, precision: Precision) -> Params:
    """Fresh parameters: normal 0.02 matrices, zero biases, unit norms."""
    c, dtype = sizes, precision.param_dtype
    outer = {
        "embed": (c.vocab, c.hidden),
        "positions": (c.positions, c.hidden),
        "w_transform": (c.hidden, c.hidden),
    }
    vectors = ("b_transform", "embed_scale", "embed_shift", "head_scale", "head_shift")
    outer_key, layer_key = jax.random.split(key)
    params = blocks.normal_leaves(outer_key, outer, dtype)
    params |= blocks.constant_leaves({name: (c.hidden,) for name in vectors}, dtype)
    params |= blocks.constant_leaves({"b_vocab": (c.vocab,)}, dtype)
    return params | {"layers": blocks.init_layers(c, layer_key, dtype)}


def encoder_layer(sizes: Sizes, precision: Precision, x: jax.Array, layer: Params) -> jax.Array:
    """Attention and MLP, each added to the residual and then normed."""
    x = x + blocks.attention(precision, layer, x, sizes.heads, causal=False)
    x = blocks.layer_norm(precision, x, layer["attn_scale"], layer["attn_shift"], _EPS)
    x = x + blocks.mlp(precision, layer, x, exact=True)
    return blocks.layer_norm(precision, x, layer["mlp_scale"], layer["mlp_shift"], _EPS)


def logits(
    sizes: Sizes, params: Params, tokens: jax.Array, precision: Precision, options: TaskOptions
) -> jax.Array:
    """Logits [B, T, V] of the token at every position."""
    p = precision
    x = params["embed"].astype(p.dtype)[tokens]
    x = x + params["positions"][: tokens.shape[1]].astype(p.dtype)
    x = blocks.layer_norm(p, x, params["embed_scale"], params["embed_shift"], _EPS)
    x = blocks.run_layers(partial(encoder_layer, sizes, p), x, params["layers"], options.remat)
    x = p.add_bias(p.einsum("btd,dk->btk", x, params["w_transform"]), params["b_transform"])
    x = jax.nn.gelu(x, approximate=False)
    x = blocks.layer_norm(p, x, params["head_scale"], params["head_shift"], _EPS)
    return p.add_bias(p.einsum("btd,vd->btv", x, params["embed"]), params["b_vocab"])


def train_task(sizes: Mapping[str, Any] | Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the encoder. Raises UsageError for sizes that do not fit."""
    known = sizes if isinstance(sizes, Sizes) else Sizes(**sizes)

    def loss(params: Params, batch: dict[str, jax.Array], precision: Precision) -> jax.Array:
        given = logits(known, params, batch["tokens"], precision, options)
        return blocks.cross_entropy(precision, given, batch["targets"])

    init = partial(init_params, known)
    return blocks.language_task(init, loss, known.vocab, known.positions, options)
