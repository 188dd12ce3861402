"""Fine-tuning steps of users' own: a small residual MLP over tokens whose matrices are frozen, with
low-rank adapters that are trained; scanned, with recomputation or without, stored in any type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.compiler.frontend.task import TrainTask

VOCAB, WIDTH, INNER, LAYERS, LENGTH, RANK, SCALE = 96, 32, 64, 4, 8, 4, 2.0
OPTIMIZER = optax.adamw(1e-2)
SHAPES = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
BASES = ("float32", "bfloat16", "int8")
Tree = dict[str, Any]


def quantised(matrix: jax.Array) -> Tree:
    """Codes of 8 bits and a scale per column."""
    scale = jnp.max(jnp.abs(matrix), axis=-2, keepdims=True) / 127
    return {"codes": jnp.round(matrix / scale).astype(jnp.int8), "scale": scale}


def whole(matrix: Any, dtype: Any) -> jax.Array:
    """A stored matrix in the type of arithmetic."""
    if isinstance(matrix, dict):
        return (matrix["codes"].astype(jnp.float32) * matrix["scale"]).astype(dtype)
    return matrix.astype(dtype)


def weights(key: jax.Array, base: str) -> tuple[Tree, Tree]:
    """Adapters, and what is frozen. Both matrices of an adapter are drawn: no gradient is zero."""
    keys = iter(jax.random.split(key, 8))

    def drawn(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape)

    layers: Tree = {name: drawn(LAYERS, *shape) for name, shape in SHAPES.items()}
    adapters = {
        name: {"a": drawn(LAYERS, rows, RANK), "b": drawn(LAYERS, RANK, columns)}
        for name, (rows, columns) in SHAPES.items()
    }
    stored = jnp.float32 if base == "float32" else jnp.bfloat16
    ends = {"embed": drawn(VOCAB, WIDTH).astype(stored), "out": drawn(WIDTH, VOCAB).astype(stored)}
    if base == "int8":
        return adapters, ends | {"layers": {n: quantised(w) for n, w in layers.items()}}
    return adapters, ends | {"layers": {n: w.astype(stored) for n, w in layers.items()}}


def loss_of(
    adapters: Tree, frozen: Tree, batch: Tree, dtype: Any = jnp.float32, remat: bool = True
) -> jax.Array:
    """Mean next-token cross entropy."""

    def linear(x: jax.Array, matrix: Any, adapter: Tree) -> jax.Array:
        low = (x @ adapter["a"].astype(dtype)) @ adapter["b"].astype(dtype)
        return x @ whole(matrix, dtype) + SCALE * low

    def layer(x: jax.Array, given: tuple[Tree, Tree]) -> tuple[jax.Array, None]:
        held, own = given
        inner = jax.nn.gelu(linear(x, held["up"], own["up"]))
        return x + linear(inner, held["down"], own["down"]), None

    x = frozen["embed"].astype(dtype)[batch["tokens"]]
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (frozen["layers"], adapters))
    chances = jax.nn.log_softmax((x @ frozen["out"].astype(dtype)).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(chances, batch["targets"][..., None], -1))


def batch(n: int) -> Tree:
    """Shapes of `n` samples."""
    return {n_: jax.ShapeDtypeStruct((n, LENGTH), jnp.int32) for n_ in ("tokens", "targets")}


def batches(seed: int, n: int, _: str | None) -> Iterator[Tree]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, VOCAB, (n, LENGTH + 1)).astype(np.int32)
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def separate(base: str = "float32", dtype: Any = jnp.float32, remat: bool = True) -> TrainTask:
    """Adapters and frozen weights are parts of the state of their own."""

    def init(key: jax.Array) -> tuple[Any, ...]:
        adapters, frozen = weights(key, base)
        return adapters, frozen, OPTIMIZER.init(adapters)

    def step(adapters: Tree, frozen: Tree, opt_state: Any, batch: Tree) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(adapters, frozen, batch, dtype, remat)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), frozen, opt_state, {"loss": loss}

    return _task(step, init, ("adapters", "base", "opt_state"))


def masked() -> TrainTask:
    """One tree of parameters, of which optax trains those under `lora` and sets the updates of all
    others to zero, which are added."""
    chain = optax.multi_transform(
        {"train": OPTIMIZER, "freeze": optax.set_to_zero()},
        {"lora": "train", "base": "freeze"},
    )

    def init(key: jax.Array) -> tuple[Any, Any]:
        adapters, frozen = weights(key, "float32")
        params = {"lora": adapters, "base": frozen}
        return params, chain.init(params)

    def step(params: Tree, opt_state: Any, batch: Tree) -> Any:
        def of(p: Tree) -> jax.Array:
            return loss_of(p["lora"], p["base"], batch)

        loss, grads = jax.value_and_grad(of)(params)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return _task(step, init, ("params", "opt_state"))


def accumulated() -> TrainTask:
    """A jitted step that adds up gradients over halves of its batch in a scan, which carries all of
    the state."""
    inner = separate()

    @jax.jit
    def step(adapters: Tree, frozen: Tree, opt_state: Any, batch: Tree) -> Any:
        def half(carry: Any, part: Tree) -> tuple[Any, jax.Array]:
            own, held, total = carry
            loss, grads = jax.value_and_grad(loss_of)(own, held, part)
            return (own, held, jax.tree.map(jnp.add, total, grads)), loss

        halves = jax.tree.map(lambda leaf: leaf.reshape(2, -1, LENGTH), batch)
        zeros = jax.tree.map(jnp.zeros_like, adapters)
        (own, held, total), losses = jax.lax.scan(half, (adapters, frozen, zeros), halves)
        grads = jax.tree.map(lambda leaf: leaf / 2, total)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, own)
        return optax.apply_updates(own, updates), held, opt_state, {"loss": jnp.mean(losses)}

    return _task(step, inner.init, inner.state_names)


FORMS: dict[str, Callable[[], TrainTask]] = {
    "separate": separate,
    "masked": masked,
    "accumulated": accumulated,
}


def _task(step: Any, init: Any, names: tuple[str, ...]) -> TrainTask:
    return TrainTask(
        step=step,
        init=init,
        batch=batch,
        batches=batches,
        state_names=names,
        tokens_per_sample=LENGTH,
        name="lora",
    )
