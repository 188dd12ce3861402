"""One small training step in the forms of state that libraries give it: Flax's TrainState, nnx
modules split or as they are, an Equinox module, a nest of plain dicts. Two layers, adam, mean
squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from shardwright.compiler.frontend.task import TrainTask

WIDTH, HIDDEN = 16, 64
CHAIN = optax.adam(1e-3)
Step = Callable[..., Any]


def _task(init: Step, step: Step, names: tuple[str, ...]) -> TrainTask:
    def batch(n: int) -> Any:
        return {name: jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for name in ("x", "y")}

    def batches(seed: int, n: int, data: str | None) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            yield {name: rng.random((n, WIDTH), np.float32) for name in ("x", "y")}

    return TrainTask(step=step, init=init, batch=batch, batches=batches, state_names=names)


def _error(answer: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((answer - batch["y"]) ** 2)


def train_state() -> TrainTask:
    """`step(state, batch)` with Flax's TrainState."""
    model = nn.Sequential([nn.Dense(HIDDEN), nn.gelu, nn.Dense(WIDTH)])

    def init(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, WIDTH)))["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=CHAIN),)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return _error(state.apply_fn({"params": params}, batch["x"]), batch)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return _task(init, step, ("state",))


class _Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: jax.Array = self.dropout(nnx.gelu(self.norm(self.inner(x))))
        answer: jax.Array = self.outer(hidden)
        return answer


def _nnx_step(model: Any, optimizer: Any, batch: Any) -> Any:
    value, gradients = nnx.value_and_grad(lambda m: _error(m(batch["x"]), batch))(model)
    optimizer.update(model, gradients)
    return value


def nnx_split() -> TrainTask:
    """An nnx module and its optimizer, split into a graph that is closed over and a state."""
    graph: list[Any] = []

    def init(key: jax.Array) -> Any:
        model = _Module(nnx.Rngs(key))
        definition, state = nnx.split((model, nnx.Optimizer(model, CHAIN, wrt=nnx.Param)))
        graph[:] = [definition]
        return (state,)

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph[0], state)
        value = _nnx_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), value

    return _task(init, step, ("state",))


def nnx_objects() -> TrainTask:
    """An nnx module and its optimizer, which are pytrees themselves."""

    def init(key: jax.Array) -> Any:
        model = _Module(nnx.Rngs(key))
        return model, nnx.Optimizer(model, CHAIN, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value = _nnx_step(model, optimizer, batch)
        return model, optimizer, value

    return _task(init, step, ("model", "optimizer"))


def equinox_module() -> TrainTask:
    """`eqx.filter_jit` with the module as state: its activation function, rate of dropout and flag
    are leaves, and the key is a typed one."""

    def init(key: jax.Array) -> Any:
        inner, kept = jax.random.split(key)
        mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, activation=jax.nn.gelu, key=inner)
        model = eqx.nn.Sequential([mlp, eqx.nn.Dropout(0.1)])
        return model, CHAIN.init(eqx.filter(model, eqx.is_array)), kept

    @eqx.filter_jit
    def step(model: Any, moments: Any, key: jax.Array, batch: Any) -> Any:
        key, own = jax.random.split(key)
        keys = jax.random.split(own, batch["x"].shape[0])

        def loss(model: Any) -> jax.Array:
            return _error(jax.vmap(lambda x, k: model(x, key=k))(batch["x"], keys), batch)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, moments = CHAIN.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), moments, key, value

    return _task(init, step, ("model", "moments", "prng"))


def plain_nest() -> TrainTask:
    """One dict of dicts, with an average of the weights and a Python number as counter."""

    def init(key: jax.Array) -> Any:
        inner, outer = jax.random.split(key)
        model = {
            "inner": {"w": jax.random.normal(inner, (WIDTH, HIDDEN))},
            "outer": {"w": jax.random.normal(outer, (HIDDEN, WIDTH))},
        }
        return ({"net": model, "mean": model, "moments": CHAIN.init(model), "count": 0},)

    def step(state: Any, batch: Any) -> Any:
        def loss(net: Any) -> jax.Array:
            return _error(jax.nn.gelu(batch["x"] @ net["inner"]["w"]) @ net["outer"]["w"], batch)

        value, gradients = jax.value_and_grad(loss)(state["net"])
        updates, moments = CHAIN.update(gradients, state["moments"])
        net = optax.apply_updates(state["net"], updates)
        mean = optax.incremental_update(net, state["mean"], 0.1)
        return {"net": net, "mean": mean, "moments": moments, "count": state["count"] + 1}, value

    return _task(init, step, ("all",))


FORMS: dict[str, Callable[[], TrainTask]] = {
    form.__name__: form
    for form in (train_state, nnx_split, nnx_objects, equinox_module, plain_nest)
}
