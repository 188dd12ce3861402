"""Attention of every kind in `architecture.py`, and the projections and norms it is made of.

Einsum letters: b batch, t and s positions, k kv heads, g heads per kv head, e head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.orchestrator.models import blocks
from shardwright.orchestrator.models.adapters import product
from shardwright.orchestrator.models.architecture import (
    Attention,
    LatentAttention,
    Norm,
    Relative,
)
from shardwright.orchestrator.models.layers import (
    EXACT,
    How,
    Params,
    Site,
    hide_earlier,
    hide_later,
)
from shardwright.orchestrator.models.leaves import FUSED
from shardwright.orchestrator.models.rope import Rope, Tables, rotate


@dataclass(frozen=True, slots=True)
class Given:
    """What the layers of a stack read beside their input: tables of rotary positions, what is added
    to scores by distance [H, T, T], and what the encoder made [B, T, D]."""

    tables: Mapping[Rope | None, Tables | None] = field(default_factory=dict)
    distances: jax.Array | None = None
    encoded: jax.Array | None = None


NOTHING_GIVEN = Given()


def normed(norm: Norm, layer: Params, name: str, x: jax.Array) -> jax.Array:
    """A norm over the last dim, computed in fp32."""
    weight = layer[name]
    if norm.kind == "layer":
        return blocks.layer_norm(EXACT, x, weight, layer[f"{name}_bias"], norm.eps).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + norm.eps)
    if norm.kind == "rms1":
        return (x32 * scale * (1.0 + weight)).astype(x.dtype)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    """`x` times the matrix w<name>, and the bias b<name> where there is one."""
    matrix = layer[f"w{name}"]
    is_plain = isinstance(matrix, jax.Array)
    made = x @ matrix.astype(x.dtype) if is_plain else product(x, matrix)
    return made + layer[f"b{name}"].astype(x.dtype) if f"b{name}" in layer else made


def projected(layer: Params, x: jax.Array, *names: str) -> list[jax.Array]:
    """`x` [B, T, D] under the projections `names`, of those that are fused as one product."""
    found = {name: linear(layer, name, x) for name in names if f"w{name}" in layer}
    for fused, parts in FUSED.items():
        if fused in layer and {part[1:] for part in parts} <= set(names):
            wide = jnp.einsum("btd,dcn->btcn", x, layer[fused].astype(x.dtype))
            found |= {part[1:]: wide[:, :, i] for i, part in enumerate(parts)}
    return [found[name] for name in names]


def attention(
    part: Attention | LatentAttention, layer: Params, x: jax.Array, given: Given, how: How
) -> jax.Array:
    """Attention of positions [B, T, D] to each other with what `part` has besides."""
    if isinstance(part, LatentAttention):
        made = narrowed(part, layer, x, given.tables[part.rope])
        return widened(part, layer, made, how)
    q, k, v = heads(part, layer, projected(layer, x, "q", "k", "v"), given.tables.get(part.rope))
    return attended(part, layer, q, k, v, how, given.distances)


def crossed(part: Attention, layer: Params, x: jax.Array, given: Given, how: How) -> jax.Array:
    """Attention of positions [B, T, D] to what the encoder made."""
    assert given.encoded is not None
    made = [linear(layer, "q", x), *projected(layer, given.encoded, "k", "v")]
    return attended(part, layer, *heads(part, layer, made, None), how)


def heads(
    part: Attention, layer: Params, made: Sequence[jax.Array], turned: Tables | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, K, G, E], keys and values [B, S, K, E], turned by their positions, of
    projections [B, ., heads * E]."""
    a, (b, t, _) = part, made[0].shape
    q, k, v = (y.reshape(b, y.shape[1], -1, a.head_dim) for y in made)
    if a.head_norm:
        q, k = (normed(a.head_norm, layer, f"{n}_norm", y) for n, y in (("q", q), ("k", k)))
    if turned:
        q, k = rotate(q, turned), rotate(k, turned)
    return q.reshape(b, t, a.kv_heads, a.heads // a.kv_heads, a.head_dim), k, v


def attended(
    part: Attention,
    layer: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    how: How,
    beside: jax.Array | None = None,
) -> jax.Array:
    """What every position takes of others, of `heads`; `beside` is added to scores [H, T, T]."""
    a = part
    scores = scored(a, q, k, beside=beside)
    if a.causal:
        scores = hide_later(scores)
    if 0 < a.window < q.shape[1]:
        scores = hide_earlier(scores, a.window)
    shares = _softmax(scores, layer["sinks"] if a.sinks else None)
    return linear(layer, "o", _mixed(shares, v, how))


_PAIRS = "btkge,bske->bkgts"


def scored(
    part: Attention,
    q: jax.Array,
    k: jax.Array,
    spec: str = _PAIRS,
    beside: jax.Array | None = None,
) -> jax.Array:
    """Scores of queries and keys in fp32, scaled and capped."""
    scores = _scores(q, k, part.scale, spec)
    if part.relative and beside is not None:
        scores = scores + beside.reshape(1, *scores.shape[1:])
    return capped(scores, part.softcap) if part.softcap else scores


def _scores(q: jax.Array, k: jax.Array, scale: float, spec: str = _PAIRS) -> jax.Array:
    """Products of queries [B, T, K, G, E] with keys [B, S, K, E], fp32 [B, K, G, T, S]."""
    scores = jnp.einsum(spec, q, k).astype(jnp.float32)
    return scores if scale == 1 else scores * scale


def _mixed(shares: jax.Array, v: jax.Array, how: How) -> jax.Array:
    """Values [B, S, K, E] added up by the shares [B, K, G, T, S]: [B, T, heads * E]."""
    weights = how.drop(shares.astype(v.dtype), Site.WEIGHTS)
    mixed = jnp.einsum("bkgts,bske->btkge", weights, v)
    return mixed.reshape(v.shape[0], shares.shape[3], -1)


@dataclass(frozen=True, slots=True)
class Narrow:
    """What latent attention makes of positions: queries without positions [B, T, H, P] and with
    them [B, T, H, U], and what a cache keeps: the vector that keys and values are products of
    [B, T, R], and the keys with positions [B, T, U], which heads share."""

    plain: jax.Array
    turned: jax.Array
    latent: jax.Array
    common: jax.Array


def narrowed(part: LatentAttention, layer: Params, x: jax.Array, turned: Tables | None) -> Narrow:
    """The parts of latent attention of positions [B, T, D]."""
    a, (b, t, _) = part, x.shape
    assert turned is not None
    read = normed(a.norm, layer, "q_norm", linear(layer, "_q_down", x)) if a.query_rank else x
    q = linear(layer, "q", read).reshape(b, t, a.heads, -1)
    narrow = linear(layer, "_kv_down", x)
    latent = normed(a.norm, layer, "kv_norm", narrow[..., : a.rank])
    common = rotate(narrow[:, :, None, a.rank :], turned, interleaved=a.rope.interleaved)
    end = rotate(q[..., a.plain_dim :], turned, interleaved=a.rope.interleaved)
    return Narrow(q[..., : a.plain_dim], end, latent, common[:, :, 0])


def widened(part: LatentAttention, layer: Params, given: Narrow, how: How) -> jax.Array:
    """Latent attention of positions to each other, with keys and values of every head."""
    a, (b, t, _) = part, given.latent.shape
    kv = linear(layer, "_kv", given.latent).reshape(b, t, a.heads, -1)
    common = jnp.broadcast_to(given.common[:, :, None], (b, t, a.heads, a.turned_dim))
    q = jnp.concatenate([given.plain, given.turned], axis=-1)
    k = jnp.concatenate([kv[..., : a.plain_dim], common], axis=-1)
    scores = hide_later(_scores(q[:, :, :, None], k, a.scale))
    return linear(layer, "o", _mixed(_softmax(scores, None), kv[..., a.plain_dim :], how))


def capped(x: jax.Array, most: float) -> jax.Array:
    """`x` bent towards at most `most` (Gemma 2)."""
    return jnp.tanh(x / most) * most


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the last dim of [B, K, G, T, S], beside a score per head if there are sinks."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.reshape(1, *scores.shape[1:3], 1, 1)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    most = jax.lax.stop_gradient(most)
    powers = jnp.exp(scores - most)
    return powers / (jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sink - most))


def distances(part: Relative, table: jax.Array, length: int, causal: bool) -> jax.Array:
    """What is added to the scores of as many positions [H, T, T], fp32, of the learned [buckets,
    H]: made once per distance, and laid out by one look at rows that are one element longer than
    where they begin. Source: the Mesh TensorFlow transformer of T5, `_relative_position_bucket`."""
    ahead = np.arange(2 * length)
    ahead = np.where(ahead < length, ahead, ahead - 2 * length)
    buckets = part.buckets if causal else part.buckets // 2
    far = np.maximum(-ahead, 0) if causal else np.abs(ahead)
    exact = buckets // 2
    grown = np.log(np.maximum(far, 1).astype(np.float32) / exact) / math.log(part.most / exact)
    long = np.minimum(exact + (grown * (buckets - exact)).astype(np.int32), buckets - 1)
    chosen = np.where(far < exact, far, long)
    chosen = chosen if causal else chosen + np.where(ahead > 0, buckets, 0)
    made = jax.nn.one_hot(chosen, part.buckets) @ table.astype(jnp.float32)
    rows = jnp.broadcast_to(made.T[:, None], (made.shape[1], length, 2 * length))
    flat = rows.reshape(len(rows), -1)[:, : length * (2 * length - 1)]
    return flat.reshape(len(rows), length, 2 * length - 1)[:, :, :length]
