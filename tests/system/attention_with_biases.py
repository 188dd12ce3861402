"""One layer of attention whose projections have biases, as GPT-2, BERT, OPT and Qwen2 have them,
trained with AdamW.

A bias of the keys adds the same to every score of a query, and a softmax does not change by that:
its gradient is zero, what is computed is nothing but rounding, and AdamW makes a full step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.compiler.frontend.task import TrainTask

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 32, 8
OPTIMIZER = optax.adamw(1e-3)


def init(key: Any) -> Any:
    names = ("words", "places", "query", "key", "value", "out")
    shapes = ((WORDS, WIDTH), (LENGTH, WIDTH), *((WIDTH, WIDTH),) * 4)
    keys = jax.random.split(key, len(names))
    params = {n: jax.random.normal(k, s) * 0.1 for n, k, s in zip(names, keys, shapes, strict=True)}
    params |= {f"{name}_bias": jnp.zeros(WIDTH) for name in names[2:]}
    return params, OPTIMIZER.init(params)


def loss_of(params: Any, batch: Any) -> Any:
    x = params["words"][batch["tokens"]] + params["places"]

    def heads(name: str) -> Any:
        y = x @ params[name] + params[f"{name}_bias"]
        return y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    query, key, value = map(heads, ("query", "key", "value"))
    scores = query @ key.transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5
    mixed = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + mixed @ params["out"] + params["out_bias"]
    logits = jax.nn.log_softmax(x @ params["words"].T)
    return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).mean()


def step(params: Any, state: Any, batch: Any) -> Any:
    return step_of(loss_of, params, state, batch)


def step_of_a_sum(params: Any, state: Any, batch: Any) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        return loss_of(params, batch) * batch["tokens"].size

    return step_of(loss, params, state, batch)


def step_of(loss_of: Callable[[Any, Any], Any], params: Any, state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, {"loss": loss}


def batch(size: int) -> Any:
    tokens = jax.ShapeDtypeStruct((size, LENGTH), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def batches(seed: int, size: int, data: str | None) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    while True:
        text = rng.integers(0, WORDS, (size, LENGTH + 1)).astype(np.int32)
        yield {"tokens": text[:, :-1], "targets": text[:, 1:]}


def make_task() -> TrainTask:
    return TrainTask(step=step, init=init, batch=batch, batches=batches, name="attention")


def make_task_of_a_sum() -> TrainTask:
    return TrainTask(
        step=step_of_a_sum, init=init, batch=batch, batches=batches, name="attention sum"
    )
