"""Losses that are no mean over the samples of a batch, as people write them: a mean over the valid
tokens, batch norm, dropout with a key of the state's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.task import TrainTask

WIDTH, LENGTH, RATE = 16, 8, 0.1
Pair = tuple[Any, Any]


def init(key: jax.Array) -> tuple[dict[str, jax.Array]]:
    first, second = jax.random.split(key)
    return (
        {
            "inner": jax.random.normal(first, (WIDTH, WIDTH)) / 4,
            "outer": jax.random.normal(second, (WIDTH, 1)),
        },
    )


def init_with_key(key: jax.Array) -> Pair:
    return *init(key), jax.random.key_data(jax.random.fold_in(key, 1))


def batch(samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((samples, LENGTH, WIDTH), jnp.float32),
        "length": jax.ShapeDtypeStruct((samples,), jnp.int32),
    }


def batches(seed: int, samples: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    while True:
        length = rng.integers(1, LENGTH + 1, samples).astype(np.int32)
        x = rng.normal(size=(samples, LENGTH, WIDTH)) * length[:, None, None]
        yield {"x": x.astype(np.float32), "length": length}


def errors_of(params: Any, hidden: jax.Array) -> jax.Array:
    return jnp.squeeze(jnp.tanh(hidden) @ params["outer"] - 1, -1) ** 2


def mean_of_valid(params: Any, batch: Any) -> jax.Array:
    valid = jnp.arange(LENGTH) < batch["length"][:, None]
    errors = errors_of(params, batch["x"] @ params["inner"])
    return jnp.sum(errors * valid) / jnp.sum(valid)


def with_batch_norm(params: Any, batch: Any) -> jax.Array:
    hidden = batch["x"] @ params["inner"]
    mean, var = jnp.mean(hidden, (0, 1)), jnp.var(hidden, (0, 1))
    return jnp.mean(errors_of(params, (hidden - mean) / jnp.sqrt(var + 1e-5)))


def descend(loss_of: Any, params: Any, *more: Any) -> Pair:
    loss, gradients = jax.value_and_grad(loss_of)(params, *more)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), {"loss": loss}


def dropped(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    hidden = batch["x"] @ params["inner"]
    return jnp.mean(errors_of(params, hidden * jax.random.bernoulli(key, 0.5, hidden.shape)))


def step_with_key(params: Any, rng: jax.Array, batch: Any) -> Any:
    now, after = jax.random.split(jax.random.wrap_key_data(rng))
    params, metrics = descend(dropped, params, batch, now)
    return params, jax.random.key_data(after), metrics


def task(step: Any, init: Any = init, state_names: tuple[str, ...] = ("params",)) -> TrainTask:
    return TrainTask(
        step=step, init=init, batch=batch, batches=batches, name="no mean", state_names=state_names
    )


def make_masked() -> TrainTask:
    return task(lambda params, batch: descend(mean_of_valid, params, batch))


def make_batch_norm() -> TrainTask:
    return task(lambda params, batch: descend(with_batch_norm, params, batch))


def make_dropout() -> TrainTask:
    return task(step_with_key, init_with_key, ("params", "rng"))


def make_counted() -> TrainTask:
    """A mean, beside metrics that are none: how many places are valid, and whether all are few."""

    def step(params: Any, batch: Any) -> Any:
        params, metrics = descend(
            lambda p, b: jnp.mean(errors_of(p, b["x"] @ p["inner"])), params, batch
        )
        valid = jnp.sum(batch["length"])
        return params, metrics | {"valid": valid, "few": jnp.all(batch["length"] < 1000)}

    return task(step)
