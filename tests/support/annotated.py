"""A training step whose user wrote the distribution: Megatron's columns and rows by hand, on a mesh
with names of their own.

The same step in the ways JAX offers: shardings on abstract arguments, `in_shardings` and
`out_shardings` of `jax.jit`, or constraints alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.compiler.frontend.task import TrainTask

WIDTH, INNER, CLASSES = 16, 32, 12
WAYS = ("arguments", "jit", "constraints")


def annotated_task(way: str, data: int = 4, model: int = 2, inner: int = INNER) -> TrainTask:
    """Two residual blocks and a classifier, momentum SGD; `way` is one of WAYS."""
    mesh = AbstractMesh((data, model), ("data", "model"))

    def at(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    places = {
        "up": at(None, None, "model"),
        "down": at(None, "model", None),
        "shift": at(),
        "head": at(None, None),
    }
    shapes = {
        "up": (2, WIDTH, inner),
        "down": (2, inner, WIDTH),
        "shift": (2, WIDTH),
        "head": (WIDTH, CLASSES),
    }
    transform = optax.sgd(0.1, momentum=0.9)

    def loss(params: dict, batch: dict) -> jax.Array:
        x = jax.lax.with_sharding_constraint(batch["x"], at("data", None))

        def block(x: jax.Array, layer: tuple) -> tuple[jax.Array, None]:
            up, down, shift = layer
            h = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), at("data", "model"))
            x = jax.lax.with_sharding_constraint(x + h @ down + shift, at("data", None))
            return x, None

        x, _ = jax.lax.scan(block, x, (params["up"], params["down"], params["shift"]))
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"]), batch["y"][:, None], 1)
        return -jnp.mean(picked)

    def step(params: dict, opt_state: Any, batch: dict) -> tuple:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    def init(key: jax.Array) -> tuple:
        keys = jax.random.split(key, len(shapes))
        drawn = zip(keys, shapes.items(), strict=True)
        params = {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in drawn}
        return params, transform.init(params)

    def batch(n: int) -> dict:
        where = {"sharding": at("data")} if way == "arguments" else {}
        return {
            "x": jax.ShapeDtypeStruct((n, WIDTH), jnp.float32, **where),
            "y": jax.ShapeDtypeStruct((n,), jnp.int32, **where),
        }

    jitted = jax.jit(
        step,
        in_shardings=(places, None, {"x": at("data"), "y": at("data")}),
        out_shardings=(places, None, at()),
    )
    return TrainTask(
        step=jitted if way == "jit" else step, init=init, batch=batch, batches=_batches, name=way
    )


def _batches(seed: int, n: int, _data: str | None) -> Iterator[dict]:
    rng = np.random.default_rng(seed)
    while True:
        x = rng.standard_normal((n, WIDTH)).astype(np.float32)
        yield {"x": x, "y": rng.integers(0, CLASSES, n).astype(np.int32)}
