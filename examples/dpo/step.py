"""Preference optimisation of a small decoder, in plain JAX: adapters are trained, the model under
them is frozen, and it is its own reference.

A batch has pairs of answers, the better one first. Direct preference optimisation (Rafailov et al.
2023, arXiv 2305.18290) wants the policy to prefer the better answer by more than the reference
does, so that every step takes two forward passes; odds-ratio preference optimisation (Hong et al.
2024, arXiv 2403.07691) takes no reference. `make_task(loss="orpo")` is the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright import TrainTask

VOCAB, WIDTH, INNER, HEADS, LAYERS, LENGTH = 256, 64, 192, 4, 2, 32
RANK, SCALE, BETA, WEIGHT = 8, 2.0, 0.1, 0.1
PROMPT = 8  # tokens that both answers follow, and that count in no loss
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MATRICES = {
    **dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)),
    "up": (WIDTH, INNER),
    "down": (INNER, WIDTH),
}
Tree = dict[str, Any]


def init(key: jax.Array) -> tuple[Tree, Tree, Any]:
    """Adapters, of which B begins as zero, the frozen model in bfloat16, and the optimizer."""
    keys = iter(jax.random.split(key, 2 + 2 * len(MATRICES)))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers = {name: drawn(LAYERS, *shape) for name, shape in MATRICES.items()}
    model = {"embed": drawn(VOCAB, WIDTH), "layers": layers, "head": drawn(WIDTH, VOCAB)}
    adapters = {
        name: {"a": drawn(LAYERS, rows, RANK), "b": jnp.zeros((LAYERS, RANK, columns))}
        for name, (rows, columns) in MATRICES.items()
    }
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    return adapters, model, OPTIMIZER.init(adapters)


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def log_chances(adapters: Tree | None, model: Tree, tokens: jax.Array) -> jax.Array:
    """The mean log probability of every answer [N], of the model with adapters or without."""

    def linear(x: jax.Array, name: str, held: Tree, own: Tree | None) -> jax.Array:
        made = x @ held[name].astype(x.dtype)
        return made if own is None else made + SCALE * (x @ own[name]["a"]) @ own[name]["b"]

    @jax.checkpoint
    def layer(x: jax.Array, given: tuple[Tree, Tree | None]) -> tuple[jax.Array, None]:
        held, own = given
        read = normed(x)
        q, k, v = (
            linear(read, name, held, own).reshape(*x.shape[:2], HEADS, -1)
            for name in ("q", "k", "v")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.reshape(x.shape), "o", held, own)
        inner = jax.nn.silu(linear(normed(x), "up", held, own))
        return x + linear(inner, "down", held, own), None

    x = model["embed"].astype(jnp.float32)[tokens[:, :-1]]
    x, _ = jax.lax.scan(layer, x, (model["layers"], adapters))
    chances = jax.nn.log_softmax(normed(x) @ model["head"].astype(x.dtype))
    of_token = jnp.take_along_axis(chances, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(of_token[:, PROMPT:], -1)


def dpo(adapters: Tree, model: Tree, batch: Tree) -> jax.Array:
    """How little the policy prefers the better answer, beyond what the reference does."""
    margins = [
        log_chances(adapters, model, batch[name]) - log_chances(None, model, batch[name])
        for name in ("chosen", "rejected")
    ]
    return -jnp.mean(jax.nn.log_sigmoid(BETA * LENGTH * (margins[0] - margins[1])))


def orpo(adapters: Tree, model: Tree, batch: Tree) -> jax.Array:
    """The loss of the better answer, and how little its odds are above those of the other."""
    chosen, rejected = (log_chances(adapters, model, batch[n]) for n in ("chosen", "rejected"))

    def odds(chance: jax.Array) -> jax.Array:
        return chance - jnp.log1p(-jnp.exp(chance))

    ratio = odds(chosen) - odds(rejected)
    return jnp.mean(-chosen - WEIGHT * jax.nn.log_sigmoid(ratio))


LOSSES = {"dpo": dpo, "orpo": orpo}


def batch(n: int) -> dict[str, jax.ShapeDtypeStruct]:
    one = jax.ShapeDtypeStruct((n, LENGTH + 1), jnp.int32)
    return {"chosen": one, "rejected": one}


def batches(seed: int, n: int, _: str | None) -> Iterator[dict[str, np.ndarray]]:
    """Random prompts; better answers count on from the last token, others are random."""
    rng = np.random.default_rng(seed)
    while True:
        chosen, rejected = rng.integers(0, VOCAB, (2, n, LENGTH + 1)).astype(np.int32)
        rejected[:, : PROMPT + 1] = chosen[:, : PROMPT + 1]
        steps = np.arange(1, LENGTH - PROMPT + 1, dtype=np.int32)
        chosen[:, PROMPT + 1 :] = (chosen[:, PROMPT, None] + steps) % VOCAB
        yield {"chosen": chosen, "rejected": rejected}


def make_task(loss: str = "dpo") -> TrainTask:
    def step(adapters: Tree, model: Tree, opt_state: Any, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(LOSSES[loss])(adapters, model, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), model, opt_state, {"loss": value}

    return TrainTask(
        step=step,
        init=init,
        batch=batch,
        batches=batches,
        state_names=("adapters", "model", "opt_state"),
        tokens_per_sample=2 * LENGTH,
        name=loss,
    )
