"""A vision transformer that classifies images by a class token (Dosovitskiy et al. 2021).

Pre-norm layers, learned positions, full attention, exact GELU. Images arrive cut into patches, one
row of pixels each, so that the patch embedding is the product that a convolution with its stride
as its size is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks
from shardwright.orchestrator.models.blocks import Samples, Sizes, TaskOptions
from shardwright.orchestrator.models.layers import How, Params, Site, run_layers

_EPS = 1e-12  # `layer_norm_eps` of the published ViT configurations
PIXELS = 16 * 16 * 3
"""Numbers of one patch: `patch_size` 16 and three channels of the published configurations."""


def init_params(sizes: Sizes, key: jax.Array) -> Params:
    """Fresh parameters, fp32; `vocab` counts classes, `positions` patches and the class token."""
    c = sizes
    matrices = {
        "patches": (PIXELS, c.hidden),
        "token": (1, c.hidden),
        "positions": (c.positions, c.hidden),
        "head": (c.hidden, c.vocab),
    }
    vectors = {name: (c.hidden,) for name in ("b_patches", "final_scale", "final_shift")}
    return blocks.init_params(c, key, matrices, vectors | {"b_head": (c.vocab,)})


encoder_layer = partial(blocks.pre_norm_layer, eps=_EPS, causal=False, exact=True)


def logits(sizes: Sizes, params: Params, images: jax.Array, how: How) -> jax.Array:
    """Scores [B, classes] of images [B, patches, PIXELS]."""
    p = how.precision
    x = p.linear("btp,pd->btd", images, params["patches"], params["b_patches"])
    token = jnp.broadcast_to(params["token"].astype(p.dtype), (len(x), *params["token"].shape))
    x = jnp.concatenate([token, x], axis=1) + params["positions"].astype(p.stream_dtype)
    x = how.drop(x, Site.STATES)
    x = run_layers(partial(encoder_layer, sizes), x, params["layers"], how)
    x = blocks.layer_norm(p, x[:, 0], params["final_scale"], params["final_shift"], _EPS)
    return p.linear("bd,dc->bc", x, params["head"], params["b_head"])


def train_task(sizes: Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the classifier.

    Raises UsageError for sizes that do not fit, or fewer than one patch beside the class token.
    """
    given = samples(sizes.positions - 1, PIXELS, sizes.vocab, options.seq_len)

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        made = logits(sizes, params, batch["images"], how)
        return blocks.cross_entropy(how.precision, made, batch["targets"], options.one_hot_loss)

    return blocks.sample_task(partial(init_params, sizes), loss, given, options)


def samples(patches: int, pixels: int, classes: int, seq_len: int) -> Samples:
    """Random images cut into patches of so many numbers, and labels; there is no data set to read.

    Raises UsageError for fewer than one patch, and a length that is not theirs and the class
    token's.
    """
    if seq_len != patches + 1 or patches < 1:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires the {patches + 1} positions of the model (patches and the class"
            f" token, 2 or more), got {seq_len}",
        )

    def batch(n: int) -> dict[str, Any]:
        images = jax.ShapeDtypeStruct((n, patches, pixels), np.float32)
        return {"images": images, "targets": jax.ShapeDtypeStruct((n,), np.int32)}

    return Samples(batch, partial(_noise, patches, pixels, classes), seq_len)


def _noise(
    patches: int, pixels: int, classes: int, seed: int, count: int, data: str | None
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches."""
    rng = np.random.default_rng(seed)
    while True:
        images = rng.normal(size=(count, patches, pixels)).astype(np.float32)
        yield {"images": images, "targets": rng.integers(0, classes, count).astype(np.int32)}
