"""A scanned decoder with dropout on attention, on the hidden units and on the residual, as a JAX
user writes it: the key is part of the state, every layer folds its number into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.compiler.frontend.task import TrainTask

WIDTH, HEADS, INNER, VOCAB, LENGTH, LAYERS = 32, 4, 64, 64, 16, 2


def dropped(key: jax.Array, x: jax.Array, rate: float = 0.3) -> jax.Array:
    """`x` with a share of its elements zero and the others scaled up."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def block(x: jax.Array, layer: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Attention and a feed-forward part, each added to the residual."""
    for_scores, for_hidden, for_residual = jax.random.split(key, 3)
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, layer[name]) for name in "qkv")
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / np.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    weights = dropped(for_scores, jax.nn.softmax(scores))
    x = x + jnp.einsum("bhts,bshe,hed->btd", weights, v, layer["o"])
    hidden = dropped(for_hidden, jax.nn.relu(x @ layer["up"]))
    return x + dropped(for_residual, hidden @ layer["down"])


def logits(params: dict, tokens: jax.Array, key: jax.Array) -> jax.Array:
    """Next-token logits."""
    x = params["embed"][tokens]

    def layer(x: jax.Array, numbered: tuple) -> tuple[jax.Array, None]:
        number, weights = numbered
        return block(x, weights, jax.random.fold_in(key, number)), None

    x, _ = jax.lax.scan(layer, x, (jnp.arange(LAYERS), params["layers"]))
    return x @ params["head"]


def init(key: jax.Array) -> tuple:
    """Weights, momentum and the key of the first step."""
    split = {name: (LAYERS, WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
    joined = {"o": (LAYERS, HEADS, WIDTH // HEADS, WIDTH)}
    flat = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    shapes = {
        "embed": (VOCAB, WIDTH),
        "head": (WIDTH, VOCAB),
        "layers": split | joined | flat,
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(key, len(leaves))
    drawn = [0.2 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    params = tree.unflatten(drawn)
    return params, TRANSFORM.init(params), jax.random.key_data(keys[0])


TRANSFORM = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))


def step(params: Any, opt_state: Any, rng: jax.Array, batch: dict) -> tuple:
    """One step; the key of the next one is drawn from this one's."""
    now, after = jax.random.split(jax.random.wrap_key_data(rng))

    def loss(params: Any) -> jax.Array:
        rows = jax.nn.log_softmax(logits(params, batch["tokens"], now))
        return -jnp.mean(jnp.take_along_axis(rows, batch["targets"][..., None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TRANSFORM.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, jax.random.key_data(after), {"loss": value}


def train_task() -> TrainTask:
    """The task."""

    def batch(n: int) -> dict:
        shape = jax.ShapeDtypeStruct((n, LENGTH), jnp.int32)
        return {"tokens": shape, "targets": shape}

    def batches(seed: int, n: int, _data: str | None) -> Iterator[dict]:
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.integers(0, VOCAB, (n, LENGTH + 1)).astype(np.int32)
            yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    return TrainTask(
        step=step,
        init=init,
        batch=batch,
        batches=batches,
        state_names=("params", "opt_state", "rng"),
        tokens_per_sample=LENGTH,
        name="dropout",
    )
