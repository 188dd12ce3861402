"""Programs of `programs.toml` as training steps: a value and gradient with momentum; a step of its
own as it is. What has the samples of the program along dim 0 is the batch, the rest is closed over.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.task import TrainTask
from tests.corpus.foreign import FOREIGN, N

SEPARATE = {"newton_schulz_muon", "vmap_per_example_grads", "random_augment", "top_k_sampling"}
"""Programs that give no gradient of parameters by a batch, and no step with a state."""
STEPS = {"flax_mnist", "optax_chain_schedule", "optax_shampoo_like"}
"""Programs of (parameters, state, batch) that are steps already."""
TRAINED = [name for name in FOREIGN if name not in SEPARATE]


def rows(leaf: Any, samples: int, *, whole: bool = False) -> jax.ShapeDtypeStruct:
    """The type of `samples` like those of a leaf, or of so many whole leaves."""
    given = np.asarray(leaf)
    shape = given.shape if whole else given.shape[1:]
    return jax.ShapeDtypeStruct((samples, *shape), given.dtype)


def make_task(name: str) -> TrainTask:
    """One of `TRAINED`. A program without samples is run on one problem per sample."""
    fn, (params, *rest) = FOREIGN[name]()
    if name in STEPS:
        return task_of_step(name, fn, params, *rest)
    leaves, tree = jax.tree.flatten(tuple(rest))
    moving = [n for n, x in enumerate(leaves) if np.ndim(x) and np.shape(x)[0] == N]
    whole = not moving
    if whole:
        moving = [n for n, x in enumerate(leaves) if np.asarray(x).dtype.kind == "f"]

    def graded(params: Any, batch: Any) -> Any:
        given = [batch.get(str(n), leaf) for n, leaf in enumerate(leaves)]
        return fn(params, *jax.tree.unflatten(tree, given))

    def step(params: Any, velocity: Any, batch: Any) -> Any:
        if whole:
            every = jax.vmap(graded, (None, 0))(params, batch)
            value, grads = jax.tree.map(lambda x: x.mean(0), every)
        else:
            value, grads = graded(params, batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    def init(key: jax.Array) -> Any:
        first = jax.tree.map(jnp.asarray, params)
        return first, jax.tree.map(jnp.zeros_like, first)

    def batch(samples: int) -> Any:
        return {str(n): rows(leaves[n], samples, whole=whole) for n in moving}

    return TrainTask(step=step, init=init, batch=batch, name=name)


def task_of_step(name: str, fn: Any, params: Any, state: Any, *batch: Any) -> TrainTask:
    def step(params: Any, state: Any, batch: Any) -> Any:
        params, state, loss, *_ = fn(params, state, *batch)
        return params, state, loss

    return TrainTask(
        step=step,
        init=lambda key: jax.tree.map(jnp.asarray, (params, state)),
        batch=lambda samples: [rows(x, samples) for x in batch],
        name=name,
    )
