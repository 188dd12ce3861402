"""A vision transformer that classifies images by a class token (Dosovitskiy et al. 2021).

Pre-norm layers, learned positions, full attention, exact GELU. Images arrive cut into patches, one
row of pixels each, so that the patch embedding is the product that a convolution with its stride
as its size is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.models import blocks
from shardwright.compiler.frontend.models.blocks import Precision, Samples, Sizes, TaskOptions
from shardwright.compiler.frontend.models.layers import (
    NO_DROPOUT,
    Dropout,
    Params,
    Site,
    run_layers,
)
from shardwright.compiler.frontend.task import TrainTask

_EPS = 1e-12  # `layer_norm_eps` of the published ViT configurations
PIXELS = 16 * 16 * 3
"""Numbers of one patch: `patch_size` 16 and three channels of the published configurations."""


def init_params(sizes: Sizes, key: jax.Array, precision: Precision) -> Params:
    """Fresh parameters; `vocab` of the sizes counts classes, `positions` patches and the class
    token.
    """
    c, dtype = sizes, precision.param_dtype
    outer = {
        "patches": (PIXELS, c.hidden),
        "token": (1, c.hidden),
        "positions": (c.positions, c.hidden),
        "head": (c.hidden, c.vocab),
    }
    outer_key, layer_key = jax.random.split(key)
    params = blocks.normal_leaves(outer_key, outer, dtype)
    vectors = {name: (c.hidden,) for name in ("b_patches", "final_scale", "final_shift")}
    params |= blocks.constant_leaves(vectors | {"b_head": (c.vocab,)}, dtype)
    return params | {"layers": blocks.init_layers(c, layer_key, dtype)}


def encoder_layer(
    sizes: Sizes, precision: Precision, x: jax.Array, layer: Params, drop: Dropout = NO_DROPOUT
) -> jax.Array:
    """Attention and MLP, each behind a norm and added to the residual."""
    p = precision
    normed = blocks.layer_norm(p, x, layer["attn_scale"], layer["attn_shift"], _EPS)
    attended = blocks.attention(p, layer, normed, sizes.heads, causal=False, drop=drop)
    x = x + drop(attended, Site.ATTENDED)
    normed = blocks.layer_norm(p, x, layer["mlp_scale"], layer["mlp_shift"], _EPS)
    return x + drop(blocks.mlp(p, layer, normed, exact=True), Site.FED)


def logits(
    sizes: Sizes,
    params: Params,
    images: jax.Array,
    precision: Precision,
    options: TaskOptions,
    drop: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Scores [B, classes] of images [B, patches, PIXELS]."""
    p = precision
    x = p.add_bias(p.einsum("btp,pd->btd", images, params["patches"]), params["b_patches"])
    token = jnp.broadcast_to(params["token"].astype(p.dtype), (len(x), *params["token"].shape))
    x = jnp.concatenate([token, x], axis=1) + params["positions"].astype(p.stream_dtype)
    x = drop(x, Site.STATES)
    layer = partial(encoder_layer, sizes, p)
    x = run_layers(layer, x, params["layers"], options.remat, drop)
    x = blocks.layer_norm(p, x[:, 0], params["final_scale"], params["final_shift"], _EPS)
    return p.add_bias(p.einsum("bd,dc->bc", x, params["head"]), params["b_head"])


def train_task(sizes: Mapping[str, Any] | Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the classifier.

    Raises UsageError for sizes that do not fit, or fewer than one patch beside the class token.
    """
    known = sizes if isinstance(sizes, Sizes) else Sizes(**sizes)
    patches = known.positions - 1
    if options.seq_len != known.positions or patches < 1:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires the {known.positions} positions of the model (patches and the class"
            f" token, 2 or more), got {options.seq_len}",
        )

    def loss(
        params: Params, batch: dict[str, jax.Array], precision: Precision, drop: Dropout
    ) -> jax.Array:
        given = logits(known, params, batch["images"], precision, options, drop)
        return blocks.cross_entropy(precision, given, batch["targets"], options.one_hot_loss)

    def batch(n: int) -> dict[str, Any]:
        images = jax.ShapeDtypeStruct((n, patches, PIXELS), np.float32)
        return {"images": images, "targets": jax.ShapeDtypeStruct((n,), np.int32)}

    samples = Samples(batch, partial(_noise, patches, known.vocab), known.positions)
    return blocks.sample_task(partial(init_params, known), loss, samples, options)


def _noise(
    patches: int, classes: int, seed: int, count: int, data: str | None
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of random images and labels; there is no data set to read."""
    rng = np.random.default_rng(seed)
    while True:
        images = rng.normal(size=(count, patches, PIXELS)).astype(np.float32)
        yield {"images": images, "targets": rng.integers(0, classes, count).astype(np.int32)}
