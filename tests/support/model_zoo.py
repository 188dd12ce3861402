"""Small real models in plain JAX, one per family, each as parameters, a batch and a loss.

Sizes are arguments, so that a test may ask for prime widths; nothing here is shaped for the
compiler. `training_step` makes the AdamW step that every framework would. Image models are in
`models_vision.py`, those that live on indices in `models_index.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any
Batch = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`forward(params, *batch)` is what inference runs; `loss(params, *batch)` is a scalar."""

    name: str
    init: Callable[[jax.Array], Params]
    batch: Callable[[jax.Array], Batch]
    forward: Callable[..., Any]
    loss: Callable[..., jax.Array]


def training_step(model: Model) -> tuple[Callable[[Params], Any], Callable[..., Any]]:
    """(state of the optimizer, step(params, state, *batch) -> params, state, loss)."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params: Params, state: Any, *batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer.init, step


def classifier(
    name: str,
    init: Callable[[jax.Array], Params],
    batch: Callable[[jax.Array], Batch],
    scores: Callable[..., jax.Array],
) -> Model:
    """A model whose batch ends with the labels that its scores are trained on."""

    def forward(params: Params, *batch: jax.Array) -> jax.Array:
        return scores(params, *batch[:-1])

    def loss(params: Params, *batch: jax.Array) -> jax.Array:
        return cross_entropy(scores(params, *batch[:-1]), batch[-1])

    return Model(name=name, init=init, batch=batch, forward=forward, loss=loss)


def dense(key: jax.Array, *shape: int) -> jax.Array:
    """A weight matrix scaled by its fan-in (all dims but the last)."""
    fan_in = 1
    for size in shape[:-1]:
        fan_in *= size
    return jax.random.normal(key, shape) * fan_in**-0.5


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * gain


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * gain + bias


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """[batch, time, heads, width] each; `mask` [time, source] keeps where True."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.float32(q.shape[-1])).astype(
        q.dtype
    )
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.asarray(-1e9, scores.dtype))
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshe->bthe", weights, v)


def attention_params(key: jax.Array, width: int, heads: int, head: int) -> Params:
    q, k, v, o = jax.random.split(key, 4)
    parts = {n: dense(w, width, heads * head) for n, w in (("q", q), ("k", k), ("v", v))}
    return {**parts, "o": dense(o, heads * head, width)}


def attend(
    p: Params,
    x: jax.Array,
    source: jax.Array,
    heads: int,
    mask: jax.Array | None,
    core: Callable[..., jax.Array] = attention,
) -> jax.Array:
    """Multi-head attention of `x` [batch, time, width] over `source`; `core` works per head."""
    q, k, v = (
        (y @ p[n]).reshape(*y.shape[:2], heads, -1)
        for n, y in (("q", x), ("k", source), ("v", source))
    )
    out = core(q, k, v, mask)
    return out.reshape(*out.shape[:2], -1) @ p["o"]


def biased_attention(
    table: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """T5's form: no scale, a bias per distance and head from `table` [buckets, heads]."""
    distance = jnp.arange(k.shape[1])[None, :] - jnp.arange(q.shape[1])[:, None]
    bucket = jnp.clip(jnp.abs(distance), 0, table.shape[0] - 1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.moveaxis(table[bucket], -1, 0)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def causal(time: int) -> jax.Array:
    return jnp.tril(jnp.ones((time, time), bool))


def cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def tokens(key: jax.Array, *shape: int, vocabulary: int) -> jax.Array:
    return jax.random.randint(key, shape, 0, vocabulary)


def decoder(
    *,
    width: int = 64,
    heads: int = 4,
    ff: int = 96,
    layers: int = 2,
    vocabulary: int = 96,
    time: int = 48,
    samples: int = 2,
    dtype: Any = jnp.float32,
) -> Model:
    """A scanned Llama-style decoder with SwiGLU and a tied embedding."""

    def init(key: jax.Array) -> Params:
        def layer(key: jax.Array) -> Params:
            a, g, u, d = jax.random.split(key, 4)
            mlp = {
                "gate": dense(g, width, ff),
                "up": dense(u, width, ff),
                "down": dense(d, ff, width),
            }
            gains = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
            return {**mlp, **gains, "attention": attention_params(a, width, heads, width // heads)}

        embed, *keys = jax.random.split(key, layers + 1)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(layer, keys))
        return {"embed": dense(embed, vocabulary, width) * width**0.5, "layers": stacked}

    def forward(params: Params, ids: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        mask = causal(ids.shape[1])

        def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            normed = rms_norm(x, p["norm1"])
            x = x + attend(p["attention"], normed, normed, heads, mask)
            h = rms_norm(x, p["norm2"])
            return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

        x, _ = jax.lax.scan(layer, params["embed"][ids], params["layers"])
        return (x @ params["embed"].T).astype(jnp.float32)

    def batch(key: jax.Array) -> Batch:
        return (tokens(key, samples, time, vocabulary=vocabulary),)

    def loss(params: Params, ids: jax.Array) -> jax.Array:
        return cross_entropy(forward(params, ids)[:, :-1], ids[:, 1:])

    return Model(name="decoder", init=init, batch=batch, forward=forward, loss=loss)


def encoder(
    *,
    width: int = 64,
    heads: int = 4,
    ff: int = 128,
    layers: int = 2,
    vocabulary: int = 96,
    time: int = 48,
    samples: int = 3,
    classes: int = 5,
    dtype: Any = jnp.float32,
) -> Model:
    """A BERT-style encoder, unrolled, with position embeddings, GELU and a padding mask."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, layers * 3 + 3)

        def layer(keys: jax.Array) -> Params:
            zeros = {n: jnp.zeros(width) for n in ("b1", "b2")} | {"bff": jnp.zeros(ff)}
            gains = {n: jnp.ones(width) for n in ("g1", "g2")}
            attention = attention_params(keys[0], width, heads, width // heads)
            mlp = {"up": dense(keys[1], width, ff), "down": dense(keys[2], ff, width)}
            return {**zeros, **gains, **mlp, "attention": attention}

        return {
            "embed": dense(keys[-1], vocabulary, width) * width**0.5,
            "positions": dense(keys[-2], time, width),
            "head": dense(keys[-3], width, classes),
            "layers": [layer(keys[3 * i : 3 * i + 3]) for i in range(layers)],
        }

    def scores(params: Params, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        keep = jnp.arange(ids.shape[1]) < lengths[:, None]
        x = params["embed"][ids] + params["positions"]
        for p in params["layers"]:
            x = layer_norm(
                x + attend(p["attention"], x, x, heads, keep[:, None, None]), p["g1"], p["b1"]
            )
            h = jax.nn.gelu(x @ p["up"] + p["bff"], approximate=False)
            x = layer_norm(x + h @ p["down"], p["g2"], p["b2"])
        pooled = jnp.sum(jnp.where(keep[..., None], x, 0), axis=1) / lengths[:, None]
        return (pooled.astype(dtype) @ params["head"]).astype(jnp.float32)

    def batch(key: jax.Array) -> Batch:
        a, b, c = jax.random.split(key, 3)
        lengths = jax.random.randint(b, (samples,), time // 2, time + 1)
        labels = jax.random.randint(c, (samples,), 0, classes)
        return tokens(a, samples, time, vocabulary=vocabulary), lengths, labels

    return classifier("encoder", init, batch, scores)


def encoder_decoder(
    *,
    width: int = 48,
    heads: int = 3,
    ff: int = 80,
    vocabulary: int = 64,
    source: int = 40,
    target: int = 24,
    samples: int = 2,
    buckets: int = 8,
    dtype: Any = jnp.float32,
) -> Model:
    """A T5-style pair: relative position bias by gather, cross attention, no biases."""

    def init(key: jax.Array) -> Params:
        keys = iter(jax.random.split(key, 12))

        def block(*kinds: str) -> Params:
            parts = {n: attention_params(next(keys), width, heads, width // heads) for n in kinds}
            gains = {f"g{i}": jnp.ones(width) for i in range(3)}
            mlp = {"up": dense(next(keys), width, ff), "down": dense(next(keys), ff, width)}
            return {**parts, **gains, **mlp}

        return {
            "embed": dense(next(keys), vocabulary, width) * width**0.5,
            "bias": dense(next(keys), buckets, heads),
            "encoder": block("self"),
            "decoder": block("self", "cross"),
        }

    def self_attention(p: Params, x: jax.Array, core: Any, mask: jax.Array | None) -> jax.Array:
        normed = rms_norm(x, p["g0"])
        return x + attend(p["self"], normed, normed, heads, mask, core)

    def mlp(p: Params, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(rms_norm(x, p["g2"]) @ p["up"]) @ p["down"]

    def forward(params: Params, given: jax.Array, wanted: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        enc, dec = params["encoder"], params["decoder"]
        core = functools.partial(biased_attention, params["bias"])
        memory = mlp(enc, self_attention(enc, params["embed"][given], core, None))
        x = self_attention(dec, params["embed"][wanted], core, causal(wanted.shape[1]))
        x = mlp(dec, x + attend(dec["cross"], rms_norm(x, dec["g1"]), memory, heads, None))
        return (x @ params["embed"].T).astype(jnp.float32)

    def batch(key: jax.Array) -> Batch:
        a, b = jax.random.split(key)
        return (
            tokens(a, samples, source, vocabulary=vocabulary),
            tokens(b, samples, target, vocabulary=vocabulary),
        )

    def loss(params: Params, given: jax.Array, wanted: jax.Array) -> jax.Array:
        return cross_entropy(forward(params, given, wanted)[:, :-1], wanted[:, 1:])

    return Model(name="encoder_decoder", init=init, batch=batch, forward=forward, loss=loss)


def lstm(
    *,
    inputs: int = 24,
    width: int = 40,
    time: int = 12,
    samples: int = 4,
    classes: int = 6,
    dtype: Any = jnp.float32,
) -> Model:
    """An LSTM scanned over time, last state classified."""

    def init(key: jax.Array) -> Params:
        x, h, o = jax.random.split(key, 3)
        return {
            "x": dense(x, inputs, 4 * width),
            "h": dense(h, width, 4 * width),
            "b": jnp.zeros(4 * width),
            "head": dense(o, width, classes),
        }

    def scores(params: Params, series: jax.Array) -> jax.Array:
        params = cast(params, dtype)

        def cell(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zeros = jnp.zeros((series.shape[0], width), dtype)
        (h, _), _ = jax.lax.scan(cell, (zeros, zeros), jnp.swapaxes(series, 0, 1).astype(dtype))
        return (h @ params["head"]).astype(jnp.float32)

    def batch(key: jax.Array) -> Batch:
        a, b = jax.random.split(key)
        return jax.random.normal(a, (samples, time, inputs)), jax.random.randint(
            b, (samples,), 0, classes
        )

    return classifier("lstm", init, batch, scores)


def diffusion(
    *,
    inputs: int = 32,
    width: int = 72,
    samples: int = 8,
    steps: int = 50,
    dtype: Any = jnp.float32,
) -> Model:
    """A DDPM step: sinusoidal time embedding, noise schedule by cumprod, MLP denoiser."""

    def init(key: jax.Array) -> Params:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "in": dense(a, inputs, width),
            "time": dense(b, 32, width),
            "mid": dense(c, width, width),
            "out": dense(d, width, inputs),
        }

    def noise(params: Params, x: jax.Array, step: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        freq = jnp.exp(-jnp.arange(16) * (jnp.log(10000.0) / 16))
        angle = step[:, None] * freq
        embedding = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)
        h = jax.nn.silu(x.astype(dtype) @ params["in"] + embedding @ params["time"])
        h = h + jax.nn.silu(h @ params["mid"])
        return (h @ params["out"]).astype(jnp.float32)

    def kept() -> jax.Array:
        return jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, steps))

    def loss(params: Params, x: jax.Array, eps: jax.Array, step: jax.Array) -> jax.Array:
        a = kept()[step][:, None]
        noisy = jnp.sqrt(a) * x + jnp.sqrt(1 - a) * eps
        return jnp.mean((noise(params, noisy, step.astype(jnp.float32)) - eps) ** 2)

    def batch(key: jax.Array) -> Batch:
        a, b, c = jax.random.split(key, 3)
        return (
            jax.random.normal(a, (samples, inputs)),
            jax.random.normal(b, (samples, inputs)),
            jax.random.randint(c, (samples,), 0, steps),
        )

    return Model(
        name="diffusion",
        init=init,
        batch=batch,
        loss=loss,
        forward=lambda p, x, eps, step: noise(p, x, step.astype(jnp.float32)),
    )


def random_user(
    *,
    inputs: int = 36,
    width: int = 64,
    latent: int = 10,
    samples: int = 8,
    dtype: Any = jnp.float32,
) -> Model:
    """A variational autoencoder with dropout: the step draws its own threefry numbers."""

    def init(key: jax.Array) -> Params:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "in": dense(a, inputs, width),
            "stats": dense(b, width, 2 * latent),
            "back": dense(c, latent, width),
            "out": dense(d, width, inputs),
        }

    def run(params: Params, x: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
        params = cast(params, dtype)
        drop, draw = jax.random.split(jax.random.wrap_key_data(seed))
        h = jax.nn.relu(x.astype(dtype) @ params["in"])
        keep = jax.random.bernoulli(drop, 0.9, h.shape)
        h = jnp.where(keep, h / 0.9, 0).astype(dtype)
        mean, log_var = jnp.split((h @ params["stats"]).astype(jnp.float32), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(draw, mean.shape)
        out = jax.nn.relu(z.astype(dtype) @ params["back"]) @ params["out"]
        return out.astype(jnp.float32), mean, log_var

    def loss(params: Params, x: jax.Array, seed: jax.Array) -> jax.Array:
        out, mean, log_var = run(params, x, seed)
        divergence = -0.5 * jnp.mean(1 + log_var - mean**2 - jnp.exp(log_var))
        return jnp.mean((out - x) ** 2) + 0.1 * divergence

    def batch(key: jax.Array) -> Batch:
        a, b = jax.random.split(key)
        return jax.random.normal(a, (samples, inputs)), jax.random.key_data(b)

    return Model(
        name="random_user",
        init=init,
        batch=batch,
        loss=loss,
        forward=lambda p, x, seed: run(p, x, seed)[0],
    )


SEQUENCE_MODELS = (decoder, encoder, encoder_decoder, lstm, diffusion, random_user)
