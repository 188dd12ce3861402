"""A step of your own with shardings of your own: a residual MLP, its inner index over `model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright import TrainTask

LAYERS, WIDTH, INNER, CLASSES = 4, 256, 1024, 64
MESH = AbstractMesh((8, 4), ("data", "model"))
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def at(*axes: str | None) -> NamedSharding:
    return NamedSharding(MESH, P(*axes))


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    def block(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        up, down = layer
        inner = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), at("data", "model"))
        return jax.lax.with_sharding_constraint(x + inner @ down, at("data", None)), None

    x = jax.lax.with_sharding_constraint(batch["x"], at("data", None))
    x, _ = jax.lax.scan(block, x, (params["up"], params["down"]))
    chances = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(chances, batch["y"][:, None], 1))


def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def init(key: jax.Array) -> tuple[Any, Any]:
    shapes = {
        "up": (LAYERS, WIDTH, INNER),
        "down": (LAYERS, INNER, WIDTH),
        "head": (WIDTH, CLASSES),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: 0.05 * jax.random.normal(one, shape)
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params, OPTIMIZER.init(params)


def batch(n: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((n, WIDTH), jnp.float32, sharding=at("data")),
        "y": jax.ShapeDtypeStruct((n,), jnp.int32, sharding=at("data")),
    }


def batches(seed: int, n: int, _: str | None) -> Iterator[dict[str, np.ndarray]]:
    """Random points; their class is where their largest of the first features is."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.standard_normal((n, WIDTH), np.float32)
        yield {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int32)}


def make_task() -> TrainTask:
    return TrainTask(step=step, init=init, batch=batch, batches=batches, name="own_sharding")
