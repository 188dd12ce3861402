"""A BERT-style encoder with a masked-language-model head over all positions.

Post-norm layers, learned positions, full attention, GELU, a transform before the tied output
projection; `complete` sizes have segment embeddings, a mask of padding, and a pooler with the head
that tells whether the second half of a sample follows the first. `targets` of a batch are the
tokens to predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.task import BatchFactory, TrainTask
from shardwright.orchestrator.models import blocks
from shardwright.orchestrator.models.blocks import Mask, Samples, Sizes, TaskOptions
from shardwright.orchestrator.models.layers import How, Params, Precision, Site, run_layers

_EPS = 1e-12  # `layer_norm_eps` of the published BERT configurations


def init_params(sizes: Sizes, key: jax.Array) -> Params:
    """Fresh parameters: normal 0.02 matrices, zero biases, unit norms, fp32."""
    c = sizes
    matrices = {
        "embed": (c.vocab, c.hidden),
        "positions": (c.positions, c.hidden),
        "w_transform": (c.hidden, c.hidden),
    }
    names = ("b_transform", "embed_scale", "embed_shift", "head_scale", "head_shift")
    vectors = {name: (c.hidden,) for name in names} | {"b_vocab": (c.vocab,)}
    if c.complete:
        matrices |= {"segments": (2, c.hidden), "w_pool": (c.hidden, c.hidden)}
        matrices["w_next"] = (c.hidden, 2)
        vectors |= {"b_pool": (c.hidden,), "b_next": (2,)}
    return blocks.init_params(c, key, matrices, vectors)


def padding_mask(precision: Precision, present: jax.Array) -> jax.Array:
    """What is added to scores [B, 1, 1, T]: 0, or of what is absent the type's least number."""
    absent = 1 - precision.wide(present)[:, None, None, :]
    return absent * jnp.finfo(absent.dtype).min


def encoder_layer(
    sizes: Sizes, x: jax.Array, layer: Params, how: How, mask: Mask = None
) -> jax.Array:
    """Attention and MLP, each added to the residual and then normed."""
    p = how.precision
    attended = blocks.attention(how, layer, x, sizes.heads, causal=False, mask=mask)
    x = x + how.drop(attended, Site.ATTENDED)
    x = blocks.layer_norm(p, x, layer["attn_scale"], layer["attn_shift"], _EPS)
    x = x + how.drop(blocks.mlp(p, layer, x, exact=True), Site.FED)
    return blocks.layer_norm(p, x, layer["mlp_scale"], layer["mlp_shift"], _EPS)


def hidden_states(
    sizes: Sizes, params: Params, batch: Mapping[str, jax.Array], how: How
) -> jax.Array:
    """What the layers make [B, T, D] of tokens and, where `complete`, segments and presence."""
    p, tokens = how.precision, batch["tokens"]
    kept = p.stream_dtype
    x = params["embed"].astype(kept)[tokens]
    x = x + params["positions"][: tokens.shape[1]].astype(kept)
    if sizes.complete:
        x = x + params["segments"].astype(kept)[batch["segments"]]
    x = blocks.layer_norm(p, x, params["embed_scale"], params["embed_shift"], _EPS)
    x = how.drop(x, Site.STATES)
    mask = padding_mask(p, batch["present"]) if sizes.complete else None
    layer = partial(encoder_layer, sizes, mask=mask)
    return run_layers(layer, x, params["layers"], how)


def token_logits(params: Params, x: jax.Array, precision: Precision) -> jax.Array:
    """Logits [B, T, V] of the token at every position."""
    p = precision
    x = p.linear("btd,dk->btk", x, params["w_transform"], params["b_transform"])
    x = jax.nn.gelu(x, approximate=False)
    x = blocks.layer_norm(p, x, params["head_scale"], params["head_shift"], _EPS)
    return p.linear("btd,vd->btv", x, params["embed"], params["b_vocab"])


def next_logits(params: Params, x: jax.Array, precision: Precision) -> jax.Array:
    """Logits [B, 2] of whether the second half follows the first, from the first position."""
    p = precision
    pooled = p.linear("bd,dk->bk", x[:, 0], params["w_pool"], params["b_pool"])
    return p.linear("bd,dk->bk", jnp.tanh(pooled), params["w_next"], params["b_next"])


def train_task(sizes: Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the encoder. Raises UsageError for sizes that do not fit."""

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        p, one_hot = how.precision, options.one_hot_loss
        x = hidden_states(sizes, params, batch, how)
        found = blocks.cross_entropy(p, token_logits(params, x, p), batch["targets"], one_hot)
        if not sizes.complete:
            return found
        return found + blocks.cross_entropy(p, next_logits(params, x, p), batch["is_next"], one_hot)

    samples = blocks.token_samples(sizes.vocab, sizes.positions, options)
    if sizes.complete:
        samples = _pairs(samples)
    return blocks.sample_task(partial(init_params, sizes), loss, samples, options)


def _pairs(samples: Samples) -> Samples:
    """`samples` of two segments without padding, and whether the second belongs to the first."""
    length = samples.tokens

    def batch(n: int) -> dict[str, Any]:
        words = jax.ShapeDtypeStruct((n, length), np.int32)
        is_next = jax.ShapeDtypeStruct((n,), np.int32)
        return {**samples.batch(n), "segments": words, "present": words, "is_next": is_next}

    return Samples(batch, _paired(samples.batches, length // 2), length)


def _paired(batches: BatchFactory, half: int) -> BatchFactory:
    """Batches in which about half of the samples end as their neighbour does."""

    def factory(seed: int, count: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        for made in batches(seed, count, data):
            is_next = rng.integers(0, 2, count).astype(np.int32)
            swapped = is_next == 0
            for rows in (made["tokens"], made["targets"]):
                rows[swapped, half:] = np.roll(rows, 1, axis=0)[swapped, half:]
            segments = np.zeros_like(made["tokens"])
            segments[:, half:] = 1
            present = np.ones_like(segments)
            yield {**made, "segments": segments, "present": present, "is_next": is_next}

    return factory
