"""A decoder written by hand with names, einsum letters and sizes of its own: everything is odd or
prime on purpose.

Width 67, 5 heads of 13, ffn 131, vocabulary 257; biases on the projections, ReLU squared, ALiBi
instead of positions, a plain logsumexp loss, weights drawn in a flat dict, SGD with momentum. No
sharding annotation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import text

HEADS, HEAD_SIZE = 5, 13


def _shapes(num_blocks: int, width: int, ffn: int, symbols: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"lookup": (symbols, width), "unlookup": (width, symbols)}
    for i in range(num_blocks):
        shapes[f"blk{i}.qkv"] = (3, width, HEADS, HEAD_SIZE)
        shapes[f"blk{i}.qkv_b"] = (3, HEADS, HEAD_SIZE)
        shapes[f"blk{i}.out"] = (HEADS, HEAD_SIZE, width)
        shapes[f"blk{i}.wide"] = (width, ffn)
        shapes[f"blk{i}.wide_b"] = (ffn,)
        shapes[f"blk{i}.narrow"] = (ffn, width)
        shapes[f"blk{i}.gain"] = (2, width)
    return shapes


def _draw(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if name.endswith("gain"):
        return jnp.ones(shape)
    if name.endswith("_b"):
        return jnp.zeros(shape)
    return jax.random.uniform(key, shape, minval=-0.1, maxval=0.1)


def _standardise(u: jax.Array, gain: jax.Array) -> jax.Array:
    centred = u - u.mean(-1, keepdims=True)
    return gain * centred / jnp.sqrt(jnp.var(u, -1, keepdims=True) + 1e-6)


def _mix(z: dict[str, jax.Array], i: int, u: jax.Array) -> jax.Array:
    """Attention with linear biases; letters: n sample, p q positions, w width, a head, r head size,
    c of qkv.
    """
    length = u.shape[1]
    triple = (
        jnp.einsum("npw,cwar->cnapr", u, z[f"blk{i}.qkv"]) + z[f"blk{i}.qkv_b"][:, None, :, None]
    )
    ask, tell, give = triple
    affinity = jnp.einsum("napr,naqr->napq", ask, tell) / HEAD_SIZE**0.5
    back = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1, dtype=jnp.float32)
    affinity = affinity + slopes[:, None, None] * back
    affinity = jnp.where(back <= 0, affinity, -jnp.inf)
    shares = jnp.exp(affinity - jax.lax.stop_gradient(affinity.max(-1, keepdims=True)))
    shares = shares / shares.sum(-1, keepdims=True)
    return jnp.einsum("napq,naqr,arw->npw", shares, give, z[f"blk{i}.out"])


def _loss(z: dict[str, jax.Array], pages: jax.Array, num_blocks: int) -> jax.Array:
    u = z["lookup"][pages[:, :-1]]
    for i in range(num_blocks):
        u = u + _mix(z, i, _standardise(u, z[f"blk{i}.gain"][0]))
        wide = _standardise(u, z[f"blk{i}.gain"][1]) @ z[f"blk{i}.wide"] + z[f"blk{i}.wide_b"]
        u = u + jnp.square(jax.nn.relu(wide)) @ z[f"blk{i}.narrow"]
    scores = u @ z["unlookup"]
    hit = jnp.take_along_axis(scores, pages[:, 1:, None], axis=-1).squeeze(-1)
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - hit)


def train_task(
    *,
    num_blocks: int = 2,
    width: int = 67,
    ffn: int = 131,
    symbols: int = 257,
    seq_len: int = 31,
    rate: float = 0.05,
) -> TrainTask:
    """The training step; one batch array `pages` holds inputs and targets."""
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate, momentum=0.9))
    shapes = _shapes(num_blocks, width, ffn, symbols)

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, len(shapes))
        params = {n: _draw(n, s, k) for (n, s), k in zip(shapes.items(), keys, strict=True)}
        return params, chain.init(params)

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, batch["pages"], num_blocks)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def batches(seed: int, global_batch: int, data: str | None) -> Any:
        for batch in text.byte_batches(text.load_text(data), seq_len, global_batch, seed):
            yield {"pages": _pages(batch)}

    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: {"pages": jax.ShapeDtypeStruct((n, seq_len + 1), jnp.int32)},
        batches=batches,
        tokens_per_sample=seq_len,
        name="prime_model",
    )


def _pages(batch: dict[str, Any]) -> Any:
    """Inputs and the last target side by side."""
    import numpy as np

    return np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
