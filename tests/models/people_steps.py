"""Training steps in the shapes in which people write them: what they take and give back, and what
they have inside.

The list was drawn up before any of them was run. Calls and results:

1. `loss_first`: `(state, batch) -> (loss, state)`, linen TrainState, jitted
2. `dict_state`: a dict with params, moments and a Python count, metrics nested, `train/loss`
3. `named_tuple`: a NamedTuple as state, `(state, loss)`
4. `dataclass_key`: a registered dataclass, `(state, batch, rng)`, the key is not returned
5. `two_arrays`: `(params, opt_state, x, y) -> (params, opt_state, loss, aux)`, jitted and donated
6. `key_returned`: a raw key that is split inside and returned, before the batch
7. `partial_static`: model and optimizer given by functools.partial to a jit with static_argnums
8. `frozen_backbone`: weights between others that are not returned
9. `carry`: `((params, opt_state), batch) -> ((params, opt_state), metrics)` with several scalars
10. `in_place`: `nnx.jit`, module and optimizer change in place, only the loss is returned
11. `rate_argument`: the learning rate as a scalar argument that is not returned
12. `two_players`: two sets of weights and two optimizers, losses of both, a key
13. `haiku_state`: `hk.transform_with_state`, `(params, state, opt_state, rng, batch)`

Insides:

14. `multi_steps`: `optax.MultiSteps` with clipping
15. `scan_accumulation`: a batch of [parts, samples, ...] that `lax.scan` walks
16. `loop_accumulation`: a batch that is reshaped into parts, which `lax.fori_loop` walks
17. `own_gradients`: a `custom_vjp` loss and a `custom_jvp` activation
18. `scanned_layers`: `lax.scan` over layers under `jax.checkpoint` with a policy
19. `unrolled_layers`: layers in a Python loop, each under `jax.checkpoint`, names that are saved
20. `every_other_step`: `lax.cond` on the count of steps
21. `if_finite`: `optax.apply_if_finite`
22. `averages`: moving averages of the weights and `batch_stats` in a TrainState
23. `masked_decay`: `optax.masked` decay, `inject_hyperparams` with a schedule
24. `half_compute`: weights cast to bfloat16 inside
25. `per_sample_clipping`: gradients per sample by vmap, clipped, then averaged

Added when those had run:

26. `interpreted_kernel`: a kernel of Pallas on blocks of samples, `interpret=True`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from shardwright import train_step

WIDTH, HIDDEN, SAMPLES = 16, 32, 8


def samples(seed: int, count: int, data: str | None = None) -> Iterator[dict[str, np.ndarray]]:
    """Batches with something to learn: y is a rotation of x."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(count, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 3, 1)}


def first_batch() -> dict[str, np.ndarray]:
    """The batch that examples show."""
    return next(samples(0, SAMPLES))


def weights(key: jax.Array) -> dict[str, jax.Array]:
    """Those of an MLP."""
    inner, outer = jax.random.split(key)
    return {
        "w1": jax.random.normal(inner, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "w2": jax.random.normal(outer, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """The MLP."""
    return jax.nn.gelu(x @ params["w1"]) @ params["w2"]


def error(params: Any, batch: Any) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def start(tx: optax.GradientTransformation) -> Callable[[], Any]:
    """An example of params, state of the optimizer and batch."""

    def example() -> Any:
        params = weights(jax.random.key(0))
        return params, tx.init(params), first_batch()

    return example


def updated(tx: Any, grads: Any, opt_state: Any, params: Any) -> Any:
    """Weights and state of the optimizer after a step."""
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def plain(tx: optax.GradientTransformation, loss_of: Any = error, **settings: Any) -> Any:
    """`(params, opt_state, batch) -> (params, opt_state, loss)`."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return *updated(tx, grads, opt_state, params), loss

    settings = {"example": start(tx), "batches": samples} | settings
    return train_step(step, **settings)


def loss_first() -> Any:
    model = nn.Sequential([nn.Dense(HIDDEN), nn.gelu, nn.Dense(WIDTH)])

    def example() -> Any:
        batch = first_batch()
        params = model.init(jax.random.key(0), batch["x"])["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
        return state, batch

    @train_step(example=example, batches=samples)
    @jax.jit
    def step(state: TrainState, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return loss, state.apply_gradients(grads=grads)

    return step


def dict_state() -> Any:
    tx = optax.sgd(0.1, momentum=0.9)

    def example() -> Any:
        params = weights(jax.random.key(0))
        return {"params": params, "opt": tx.init(params), "count": 0}, first_batch()

    @train_step(example=example, batches=samples)
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(error)(state["params"], batch)
        params, opt = updated(tx, grads, state["opt"], state["params"])
        metrics = {"train": {"loss": loss, "norm": optax.global_norm(grads)}}
        return {"params": params, "opt": opt, "count": state["count"] + 1}, metrics

    return step


class Training(NamedTuple):
    """State of `named_tuple`."""

    params: Any
    opt_state: Any
    step: Any


def named_tuple() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params = weights(jax.random.key(0))
        return Training(params, tx.init(params), jnp.zeros((), jnp.int32)), first_batch()

    @train_step(example=example, batches=samples)
    def step(state: Training, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(error)(state.params, batch)
        return Training(*updated(tx, grads, state.opt_state, state.params), state.step + 1), loss

    return step


@jax.tree_util.register_dataclass
@dataclass
class Noisy:
    """State of `dataclass_key`."""

    params: Any
    opt_state: Any


def dataclass_key() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params = weights(jax.random.key(0))
        return Noisy(params, tx.init(params)), first_batch(), jax.random.PRNGKey(1)

    @train_step(example=example, batches=samples)
    def step(state: Noisy, batch: Any, rng: jax.Array) -> Any:
        kept = jax.random.bernoulli(rng, 0.9, batch["x"].shape)
        noisy = {**batch, "x": jnp.where(kept, batch["x"] / 0.9, 0)}
        loss, grads = jax.value_and_grad(error)(state.params, noisy)
        return Noisy(*updated(tx, grads, state.opt_state, state.params)), {"loss": loss}

    return step


def two_arrays() -> Any:
    tx = optax.adamw(1e-2)

    def example() -> Any:
        params, opt_state, batch = start(tx)()
        return params, opt_state, batch["x"], batch["y"]

    @train_step(example=example, batches=samples)
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            answer = mlp(params, x)
            return jnp.mean((answer - y) ** 2), {"size": jnp.mean(jnp.abs(answer))}

        (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return *updated(tx, grads, opt_state, params), loss, aux

    return step


def key_returned() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params, opt_state, batch = start(tx)()
        return params, opt_state, jax.random.PRNGKey(1), batch

    @train_step(example=example, batches=samples)
    def step(params: Any, opt_state: Any, key: jax.Array, batch: Any) -> Any:
        key, own = jax.random.split(key)
        noisy = {**batch, "x": batch["x"] + 0.1 * jax.random.normal(own, batch["x"].shape)}
        loss, grads = jax.value_and_grad(error)(params, noisy)
        return *updated(tx, grads, opt_state, params), key, loss

    return step


def partial_static() -> Any:
    model = nn.Dense(WIDTH)
    tx = optax.adam(1e-2)

    @partial(jax.jit, static_argnums=(0, 1), static_argnames=("decay",))
    def any_step(
        model: nn.Module, tx: Any, params: Any, opt_state: Any, batch: Any, decay: float
    ) -> Any:
        def loss_of(params: Any) -> jax.Array:
            answer = model.apply({"params": params}, batch["x"])
            return jnp.mean((answer - batch["y"]) ** 2) + decay * optax.global_norm(params)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return *updated(tx, grads, opt_state, params), {"loss": loss}

    def example() -> Any:
        batch = first_batch()
        params = model.init(jax.random.key(0), batch["x"])["params"]
        return params, tx.init(params), batch

    step = partial(any_step, model, tx, decay=1e-3)
    return train_step(step, example=example, batches=samples)


def frozen_backbone() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        backbone = weights(jax.random.key(0))
        head = {"w": jnp.eye(WIDTH), "b": jnp.zeros(WIDTH)}
        return head, backbone, tx.init(head), first_batch()

    @train_step(example=example, batches=samples)
    def step(head: Any, backbone: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(head: Any) -> jax.Array:
            answer = mlp(backbone, batch["x"]) @ head["w"] + head["b"]
            return jnp.mean((answer - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(head)
        return *updated(tx, grads, opt_state, head), loss

    return step


def carry() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params, opt_state, batch = start(tx)()
        return (params, opt_state), batch

    @train_step(example=example, batches=samples)
    def step(carry: Any, batch: Any) -> Any:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(error)(params, batch)
        metrics = {"mse_loss": loss, "norm": optax.global_norm(grads), "rate": jnp.float32(1e-2)}
        return updated(tx, grads, opt_state, params), metrics

    return step


class Mlp(nnx.Module):
    """Model of `in_place`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        answer: jax.Array = self.outer(self.dropout(nnx.gelu(self.inner(x))))
        return answer


def in_place() -> Any:
    def example() -> Any:
        model = Mlp(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), first_batch()

    @train_step(example=example, batches=samples)
    @nnx.jit
    def step(model: Mlp, optimizer: nnx.Optimizer, batch: Any) -> Any:
        def loss_of(model: Mlp) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return step


def rate_argument() -> Any:
    tx = optax.scale_by_adam()

    def example() -> Any:
        return *start(tx)(), jnp.float32(1e-2)

    @train_step(example=example, batches=samples)
    def step(params: Any, opt_state: Any, batch: Any, rate: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(error)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), opt_state, loss

    return step


def two_players() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        made, judged = weights(jax.random.key(0)), weights(jax.random.key(1))
        states = tx.init(made), tx.init(judged)
        return made, judged, *states, first_batch(), jax.random.key(2)

    @train_step(example=example, batches=samples, loss="g_loss")
    def step(gen: Any, disc: Any, g_opt: Any, d_opt: Any, batch: Any, rng: jax.Array) -> Any:
        noise = jax.random.normal(rng, batch["x"].shape)

        def score(disc: Any, x: jax.Array) -> jax.Array:
            return mlp(disc, x).mean(-1)

        def g_loss_of(gen: Any) -> jax.Array:
            return jnp.mean(jax.nn.softplus(-score(disc, mlp(gen, noise))))

        def d_loss_of(disc: Any) -> jax.Array:
            fake = jax.nn.softplus(score(disc, mlp(gen, noise)))
            return jnp.mean(jax.nn.softplus(-score(disc, batch["x"])) + fake)

        g_loss, g_grads = jax.value_and_grad(g_loss_of)(gen)
        d_loss, d_grads = jax.value_and_grad(d_loss_of)(disc)
        gen, g_opt = updated(tx, g_grads, g_opt, gen)
        disc, d_opt = updated(tx, d_grads, d_opt, disc)
        return gen, disc, g_opt, d_opt, {"g_loss": g_loss, "d_loss": d_loss}

    return step


def haiku_state() -> Any:
    tx = optax.adam(1e-2)

    def forward(x: jax.Array) -> jax.Array:
        hidden = hk.BatchNorm(True, True, 0.9)(hk.Linear(HIDDEN)(x), is_training=True)
        return hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(hidden)))

    net = hk.transform_with_state(forward)

    def example() -> Any:
        batch, key = first_batch(), jax.random.PRNGKey(0)
        params, state = net.init(key, batch["x"])
        return params, state, tx.init(params), key, batch

    @train_step(example=example, batches=samples)
    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, rng: jax.Array, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            answer, after = net.apply(params, state, rng, batch["x"])
            return jnp.mean((answer - batch["y"]) ** 2), after

        (loss, after), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        params, opt_state = updated(tx, grads, opt_state, params)
        return params, after, opt_state, loss

    return step


def multi_steps() -> Any:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return plain(optax.MultiSteps(clipped, every_k_schedule=2))


def scan_accumulation() -> Any:
    tx = optax.adam(1e-2)

    def batches(seed: int, count: int, data: str | None) -> Any:
        for batch in samples(seed, 2 * count):
            yield {name: leaf.reshape(2, count, WIDTH) for name, leaf in batch.items()}

    def example() -> Any:
        params, opt_state, _ = start(tx)()
        return params, opt_state, next(batches(0, SAMPLES, None))

    @train_step(example=example, batches=batches, batch_dim=1)
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            loss, grads = jax.value_and_grad(error)(params, part)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zero, batch)
        loss, grads = jax.tree.map(lambda leaf: leaf / 2, total)
        return *updated(tx, grads, opt_state, params), loss

    return step


def loop_accumulation() -> Any:
    tx, parts = optax.adam(1e-2), 2

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, WIDTH), batch)

        def add(n: Any, total: Any) -> Any:
            part = jax.tree.map(lambda leaf: leaf[n], pieces)
            loss, grads = jax.value_and_grad(error)(params, part)
            return jax.tree.map(lambda a, b: a + b / parts, total, (loss, grads))

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        loss, grads = jax.lax.fori_loop(0, parts, add, zero)
        return *updated(tx, grads, opt_state, params), {"loss": loss}

    return train_step(step, example=start(tx), batches=samples)


@jax.custom_jvp
def squareplus(x: jax.Array) -> jax.Array:
    """An activation with its own derivative."""
    return (x + jnp.sqrt(x * x + 4)) / 2


@squareplus.defjvp
def _squareplus_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return squareplus(x), dx * (1 + x * jax.lax.rsqrt(x * x + 4)) / 2


@jax.custom_vjp
def clipped_error(answer: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error with gradients of at most one."""
    return jnp.mean((answer - y) ** 2)


def _error_forward(answer: jax.Array, y: jax.Array) -> Any:
    return clipped_error(answer, y), answer - y


def _error_backward(apart: jax.Array, above: jax.Array) -> Any:
    grads = jnp.clip(2 * apart, -1, 1) * above / apart.size
    return grads, -grads


clipped_error.defvjp(_error_forward, _error_backward)


def own_gradients() -> Any:
    def loss_of(params: Any, batch: Any) -> jax.Array:
        answer = squareplus(batch["x"] @ params["w1"]) @ params["w2"]
        loss: jax.Array = clipped_error(answer, batch["y"])
        return loss

    return plain(optax.adam(1e-2), loss_of)


def scanned_layers() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        params = {"layers": jax.vmap(weights)(keys), "scale": jnp.ones(WIDTH)}
        return params, tx.init(params), first_batch()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        @partial(jax.checkpoint, policy=policy)
        def layer(x: jax.Array, own: Any) -> Any:
            return x + mlp(own, x), None

        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.mean((x * params["scale"] - batch["y"]) ** 2)

    return plain(tx, loss_of, example=example)


def unrolled_layers() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params = [weights(key) for key in jax.random.split(jax.random.key(0), 3)]
        return params, tx.init(params), first_batch()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names("hidden")

        @partial(jax.checkpoint, policy=policy)
        def layer(own: Any, x: jax.Array) -> jax.Array:
            hidden = checkpoint_name(x @ own["w1"], "hidden")
            return x + jax.nn.gelu(hidden) @ own["w2"]

        x = batch["x"]
        for own in params:
            x = layer(own, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return plain(tx, loss_of, example=example)


def every_other_step() -> Any:
    tx = optax.adam(1e-2)

    def example() -> Any:
        params = weights(jax.random.key(0))
        state = {"params": params, "slow": params, "opt_state": tx.init(params)}
        return {**state, "count": jnp.zeros((), jnp.int32)}, first_batch()

    @train_step(example=example, batches=samples)
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(error)(state["params"], batch)
        params, opt_state = updated(tx, grads, state["opt_state"], state["params"])
        count = state["count"] + 1

        def pull(params: Any, slow: Any) -> Any:
            slow = jax.tree.map(lambda s, p: s + 0.5 * (p - s), slow, params)
            return slow, slow

        is_due = count % 2 == 0
        params, slow = jax.lax.cond(is_due, pull, lambda p, s: (p, s), params, state["slow"])
        return {"params": params, "slow": slow, "opt_state": opt_state, "count": count}, loss

    return step


def if_finite() -> Any:
    return plain(optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3))


class Averaged(TrainState):
    """State of `averages`."""

    batch_stats: Any
    ema: Any


class Normed(nn.Module):
    """Model of `averages`."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(HIDDEN)(x))
        answer: jax.Array = nn.Dense(WIDTH)(nn.relu(x))
        return answer


def averages() -> Any:
    model = Normed()

    def example() -> Any:
        batch = first_batch()
        variables = model.init(jax.random.key(0), batch["x"])
        state = Averaged.create(
            apply_fn=model.apply,
            tx=optax.adam(1e-2),
            ema=variables["params"],
            **variables,
        )
        return state, batch

    @train_step(example=example, batches=samples)
    @jax.jit
    def step(state: Averaged, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            answer, changed = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((answer - batch["y"]) ** 2), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        ema = optax.incremental_update(state.params, state.ema, 0.1)
        return state.replace(ema=ema), {"loss": loss}

    return step


def masked_decay() -> Any:
    rate = optax.exponential_decay(1e-2, 10, 0.9)
    decay = optax.masked(optax.add_decayed_weights(1e-2), {"w1": True, "w2": False})
    tx = optax.chain(decay, optax.inject_hyperparams(optax.adam)(learning_rate=rate))
    return plain(tx)


def half_compute() -> Any:
    def loss_of(params: Any, batch: Any) -> jax.Array:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
        answer = mlp(*half).astype(jnp.float32)
        return jnp.mean((answer - batch["y"]) ** 2)

    return plain(optax.adam(1e-2), loss_of)


def per_sample_clipping() -> Any:
    tx = optax.sgd(0.1)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        losses, grads = jax.vmap(jax.value_and_grad(error), (None, 0))(params, batch)

        def clipped(one: Any) -> Any:
            norm = optax.global_norm(one)
            return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), one)

        grads = jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(clipped)(grads))
        return *updated(tx, grads, opt_state, params), {"loss": losses.mean()}

    return train_step(step, example=start(tx), batches=samples)


def _silu_kernel(source: Any, target: Any) -> None:
    target[...] = source[...] * jax.nn.sigmoid(source[...])


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
    """An activation as a kernel that walks over two blocks of samples."""
    block = pl.BlockSpec((x.shape[0] // 2, x.shape[1]), lambda n: (n, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        _silu_kernel, shape, grid=(2,), in_specs=[block], out_specs=block, interpret=True
    )
    answer: jax.Array = call(x)
    return answer


def _silu_backward(x: jax.Array, above: jax.Array) -> Any:
    return (jax.vjp(jax.nn.silu, x)[1](above)[0],)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)


def interpreted_kernel() -> Any:
    def loss_of(params: Any, batch: Any) -> jax.Array:
        answer = silu(batch["x"] @ params["w1"]) @ params["w2"]
        return jnp.mean((answer - batch["y"]) ** 2)

    return plain(optax.adam(1e-2), loss_of)


STEPS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        loss_first,
        dict_state,
        named_tuple,
        dataclass_key,
        two_arrays,
        key_returned,
        partial_static,
        frozen_backbone,
        carry,
        in_place,
        rate_argument,
        two_players,
        haiku_state,
        multi_steps,
        scan_accumulation,
        loop_accumulation,
        own_gradients,
        scanned_layers,
        unrolled_layers,
        every_other_step,
        if_finite,
        averages,
        masked_decay,
        half_compute,
        per_sample_clipping,
        interpreted_kernel,
    )
}
