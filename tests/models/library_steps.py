"""Twelve training steps the way their libraries' pages write them: flax linen and nnx, equinox,
haiku, and the recipes of optax.

The list was drawn up before any of them was run:

1. `linen_mnist`: linen CNN, `TrainState`, SGD with momentum, accuracy as a metric
2. `linen_batch_norm`: linen ResNet blocks, `batch_stats` in an own `TrainState`, cosine schedule
3. `linen_lm`: linen causal language model, dropout with a folded key, mask of padding, AdamW
4. `nnx_mnist`: nnx CNN with dropout, `nnx.split` and `nnx.merge`, `nnx.Optimizer`
5. `nnx_transformer`: nnx encoder with `nnx.MultiHeadAttention`, key biases, Adam
6. `equinox_cnn`: equinox CNN, `eqx.filter_value_and_grad`, the module as state
7. `equinox_rnn`: equinox GRU under `lax.scan`, `eqx.apply_updates`
8. `haiku_mlp_ema`: haiku MLP, moving averages of the parameters beside them
9. `haiku_transformer`: haiku decoder with dropout under `hk.transform`
10. `optax_accumulation`: `optax.MultiSteps` over AdamW with clipping by the global norm
11. `optax_loss_scaling`: fp16 forward, a dynamic loss scale, `optax.apply_if_finite`
12. `optax_lookahead`: `optax.lookahead` over SGD, with `zero_nans` and decayed weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from shardwright.compiler.frontend.task import TrainTask

PIXELS, CLASSES = (8, 8, 1), 10
TIME, VOCAB = 16, 64

Batches = Callable[[int, int, str | None], Iterator[dict[str, np.ndarray]]]


def images(samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of labelled images."""
    return {
        "image": jax.ShapeDtypeStruct((samples, *PIXELS), jnp.float32),
        "label": jax.ShapeDtypeStruct((samples,), jnp.int32),
    }


def image_batches(seed: int, samples: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
    """Images whose label is in their brightness."""
    rng = np.random.default_rng(seed)
    while True:
        label = rng.integers(0, CLASSES, samples).astype(np.int32)
        image = rng.normal(size=(samples, *PIXELS)) + label[:, None, None, None] / CLASSES
        yield {"image": image.astype(np.float32), "label": label}


def tokens(samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of token sequences."""
    return {"tokens": jax.ShapeDtypeStruct((samples, TIME + 1), jnp.int32)}


def token_batches(seed: int, samples: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
    """Sequences that count up."""
    rng = np.random.default_rng(seed)
    while True:
        start = rng.integers(1, VOCAB, (samples, 1))
        yield {"tokens": ((start + np.arange(TIME + 1)) % (VOCAB - 1) + 1).astype(np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def on_images(name: str, step: Any, init: Any, state_names: tuple[str, ...]) -> TrainTask:
    """A task on images."""
    return TrainTask(
        step=step,
        init=init,
        batch=images,
        batches=image_batches,
        name=name,
        state_names=state_names,
    )


def on_tokens(name: str, step: Any, init: Any, state_names: tuple[str, ...]) -> TrainTask:
    """A task on token sequences."""
    return TrainTask(
        step=step,
        init=init,
        batch=tokens,
        batches=token_batches,
        name=name,
        state_names=state_names,
        tokens_per_sample=TIME,
    )


class LinenCNN(nn.Module):
    """The CNN of the linen MNIST example, narrower."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=16, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=32)(x))
        return nn.Dense(features=CLASSES)(x)


def linen_mnist() -> TrainTask:
    """1."""
    model = LinenCNN()

    def init(key: jax.Array) -> tuple[TrainState]:
        params = model.init(key, jnp.ones((1, *PIXELS)))["params"]
        return (
            TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)),
        )

    def train_step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch["image"])
            one_hot = jax.nn.one_hot(batch["label"], CLASSES)
            return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return on_images("linen-mnist", train_step, init, ("state",))


class LinenBlock(nn.Module):
    """A residual block with batch norms."""

    features: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.zeros_init())(
            nn.Conv(self.features, (3, 3), use_bias=False)(y)
        )
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), use_bias=False, name="proj")(x)
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """Two blocks and a mean."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for features in (8, 16):
            x = LinenBlock(features, train)(x)
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


class StatsState(TrainState):
    """A state with the moving statistics of batch norms."""

    batch_stats: Any


def linen_batch_norm() -> TrainTask:
    """2."""
    model = LinenResNet()
    tx = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)

    def init(key: jax.Array) -> tuple[StatsState]:
        v = model.init(key, jnp.ones((1, *PIXELS)))
        return (
            StatsState.create(
                apply_fn=model.apply, params=v["params"], batch_stats=v["batch_stats"], tx=tx
            ),
        )

    def train_step(state: StatsState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                mutable=["batch_stats"],
            )
            decay = 1e-4 * 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return cross_entropy(logits, batch["label"]) + decay, updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, {"loss": loss}

    return on_images("linen-batch-norm", train_step, init, ("state",))


class LinenLM(nn.Module):
    """One decoder layer with dropout, its attention with biases."""

    width: int = 32

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, self.width)(inputs)
        x = x + self.param("pos", nn.initializers.normal(0.02), (TIME, self.width))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs)
        )
        h = nn.LayerNorm()(x)
        x = x + nn.SelfAttention(num_heads=4, dropout_rate=0.1, deterministic=not train)(h, mask)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(self.width)(h))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class KeyedState(TrainState):
    """A state with the key of its dropout."""

    dropout_key: jax.Array


def linen_lm() -> TrainTask:
    """3."""
    model = LinenLM()

    def init(key: jax.Array) -> tuple[KeyedState]:
        params_key, dropout_key = jax.random.split(key)
        variables = model.init(params_key, jnp.ones((1, TIME), jnp.int32), train=False)
        tx = optax.adamw(1e-3, weight_decay=0.01)
        return (
            KeyedState.create(
                apply_fn=model.apply, params=variables["params"], tx=tx, dropout_key=dropout_key
            ),
        )

    def train_step(state: KeyedState, batch: Any) -> Any:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        key = jax.random.fold_in(state.dropout_key, state.step)

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, inputs, train=True, rngs={"dropout": key})
            return cross_entropy(logits, targets)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return on_tokens("linen-lm", train_step, init, ("state",))


class NnxCNN(nnx.Module):
    """The CNN of the nnx MNIST page, narrower."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.025, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(8 * 4 * 4, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        x = self.avg_pool(nnx.relu(self.conv1(x)))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(self.dropout(nnx.relu(self.linear1(x))))


def nnx_mnist() -> TrainTask:
    """4."""

    def make(key: jax.Array) -> tuple[NnxCNN, nnx.Optimizer]:
        model = NnxCNN(rngs=nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1)))
        return model, nnx.Optimizer(model, optax.adamw(0.005, b1=0.9), wrt=nnx.Param)

    graphdef = nnx.split(make(jax.random.key(0)))[0]

    def init(key: jax.Array) -> tuple[nnx.State]:
        return (nnx.split(make(key))[1],)

    def train_step(state: nnx.State, batch: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model: NnxCNN) -> jax.Array:
            return cross_entropy(model(batch["image"]), batch["label"])

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], {"loss": loss}

    return on_images("nnx-mnist", train_step, init, ("state",))


class NnxEncoder(nnx.Module):
    """A classifier of sequences: embedding, attention with biases, a mean."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.out = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the next token."""
        h = self.embed(x)
        h = h + self.attention(self.norm(h), mask=nnx.make_causal_mask(x))
        return self.out(h + self.down(nnx.gelu(self.up(h))))


def nnx_transformer() -> TrainTask:
    """5."""
    tx = optax.adam(1e-3)

    def make(key: jax.Array) -> NnxEncoder:
        return NnxEncoder(32, rngs=nnx.Rngs(key))

    graphdef = nnx.split(make(jax.random.key(0)))[0]

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = nnx.split(make(key))[1]
        return params, tx.init(params)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(batch["tokens"][:, :-1])
            return cross_entropy(logits, batch["tokens"][:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return on_tokens("nnx-transformer", train_step, init, ("params", "opt_state"))


class EquinoxCNN(eqx.Module):
    """The CNN of equinox's MNIST page, narrower."""

    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 5 * 5, 32, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(32, CLASSES, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Log-probabilities of one image."""
        for layer in self.layers:
            x = layer(x)
        return x


def equinox_cnn() -> TrainTask:
    """6."""
    optim = optax.adamw(3e-4)

    def init(key: jax.Array) -> tuple[Any, Any]:
        model = EquinoxCNN(key)
        return model, optim.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def make_step(model: EquinoxCNN, opt_state: Any, batch: Any) -> Any:
        def loss_fn(model: EquinoxCNN) -> jax.Array:
            pred = jax.vmap(model)(jnp.moveaxis(batch["image"], -1, 1))
            picked = jnp.take_along_axis(pred, jnp.expand_dims(batch["label"], 1), axis=1)
            return -jnp.mean(picked)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, {"loss": loss}

    return on_images("equinox-cnn", make_step, init, ("model", "opt_state"))


class EquinoxRNN(eqx.Module):
    """The GRU of equinox's RNN page."""

    hidden_size: int = eqx.field(static=True)
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size: int, out_size: int, hidden_size: int, *, key: jax.Array) -> None:
        ckey, lkey = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=ckey)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=lkey)
        self.bias = jnp.zeros(out_size)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Logits of one sequence."""

        def f(carry: jax.Array, inp: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(inp, carry), None

        out, _ = jax.lax.scan(f, jnp.zeros((self.hidden_size,)), rows)
        return self.linear(out) + self.bias


def equinox_rnn() -> TrainTask:
    """7."""
    optim = optax.adam(3e-3)

    def init(key: jax.Array) -> tuple[Any, Any]:
        model = EquinoxRNN(PIXELS[1], CLASSES, 16, key=key)
        return model, optim.init(model)

    def make_step(model: EquinoxRNN, opt_state: Any, batch: Any) -> Any:
        @eqx.filter_value_and_grad
        def compute_loss(model: EquinoxRNN) -> jax.Array:
            return cross_entropy(jax.vmap(model)(batch["image"][..., 0]), batch["label"])

        loss, grads = compute_loss(model)
        updates, opt_state = optim.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, {"loss": loss}

    return on_images("equinox-rnn", make_step, init, ("model", "opt_state"))


def haiku_mlp_ema() -> TrainTask:
    """8."""

    def net_fn(image: jax.Array) -> jax.Array:
        mlp = hk.Sequential(
            [hk.Flatten(), hk.Linear(48), jax.nn.relu, hk.Linear(32), jax.nn.relu, hk.Linear(10)]
        )
        return mlp(image)

    network = hk.without_apply_rng(hk.transform(net_fn))
    optimiser = optax.adam(1e-3)

    def init(key: jax.Array) -> tuple[Any, Any, Any]:
        params = network.init(key, jnp.ones((1, *PIXELS)))
        return params, params, optimiser.init(params)

    def update(params: Any, avg_params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = network.apply(params, batch["image"])
            l2 = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
            labels = jax.nn.one_hot(batch["label"], CLASSES)
            likelihood = jnp.sum(labels * jax.nn.log_softmax(logits))
            return -likelihood / batch["label"].shape[0] + 1e-4 * l2

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        avg_params = optax.incremental_update(params, avg_params, step_size=0.001)
        return params, avg_params, opt_state, {"loss": loss}

    return on_images("haiku-mlp-ema", update, init, ("params", "avg_params", "opt_state"))


def haiku_transformer() -> TrainTask:
    """9."""
    width, rate = 32, 0.1

    def forward(inputs: jax.Array) -> jax.Array:
        x = hk.Embed(VOCAB, width)(inputs)
        x = x + hk.get_parameter("pos", [TIME, width], init=hk.initializers.TruncatedNormal(0.02))
        causal = np.tril(np.ones((1, 1, TIME, TIME)))
        mask = (inputs > 0)[:, None, None, :] * causal
        for _ in range(2):
            h = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
            attention = hk.MultiHeadAttention(
                num_heads=4,
                key_size=8,
                model_size=width,
                w_init=hk.initializers.VarianceScaling(0.5),
            )
            h = attention(h, h, h, mask=mask)
            x = x + hk.dropout(hk.next_rng_key(), rate, h)
            h = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
            h = hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(h)))
            x = x + hk.dropout(hk.next_rng_key(), rate, h)
        h = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(VOCAB)(h)

    network = hk.transform(forward)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b1=0.9, b2=0.99))

    def init(key: jax.Array) -> tuple[Any, Any, jax.Array]:
        key, init_key = jax.random.split(key)
        params = network.init(init_key, jnp.ones((1, TIME), jnp.int32))
        return params, tx.init(params), key

    def update(params: Any, opt_state: Any, rng: jax.Array, batch: Any) -> Any:
        rng, new_rng = jax.random.split(rng)

        def loss_fn(params: Any) -> jax.Array:
            logits = network.apply(params, rng, batch["tokens"][:, :-1])
            targets = jax.nn.one_hot(batch["tokens"][:, 1:], VOCAB)
            return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, new_rng, {"loss": loss}

    return on_tokens("haiku-transformer", update, init, ("params", "opt_state", "rng"))


def mlp_params(key: jax.Array, width: int = 32) -> dict[str, jax.Array]:
    """Weights of an MLP on images."""
    first, second = jax.random.split(key)
    size = int(np.prod(PIXELS))
    return {
        "w1": jax.random.normal(first, (size, width)) / size**0.5,
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(second, (width, CLASSES)) / width**0.5,
        "b2": jnp.zeros(CLASSES),
    }


def mlp(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """Its logits."""
    x = image.reshape(image.shape[0], -1).astype(params["w1"].dtype)
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def optax_step(name: str, tx: optax.GradientTransformation) -> TrainTask:
    """The MLP under a transformation of gradients."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = mlp_params(key)
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(mlp(params, batch["image"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return on_images(name, step, init, ("params", "opt_state"))


def optax_accumulation() -> TrainTask:
    """10."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return optax_step("optax-accumulation", optax.MultiSteps(inner, every_k_schedule=4))


def optax_loss_scaling() -> TrainTask:
    """11."""
    tx = optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=5)

    def init(key: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        params = mlp_params(key)
        scale = {"scale": jnp.float32(2.0**12), "good": jnp.int32(0)}
        return params, tx.init(params), scale

    def step(params: Any, opt_state: Any, scaling: dict[str, jax.Array], batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
            logits = mlp(half, batch["image"]).astype(jnp.float32)
            return cross_entropy(logits, batch["label"]) * scaling["scale"]

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.tree.map(lambda g: g / scaling["scale"], grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt_state = tx.update(grads, opt_state, params)
        good = jnp.where(finite, scaling["good"] + 1, 0)
        grown = jnp.where(good >= 100, scaling["scale"] * 2, scaling["scale"])
        scale = jnp.where(finite, grown, scaling["scale"] / 2)
        loss = loss / scaling["scale"]
        scaling = {"scale": scale, "good": jnp.where(good >= 100, 0, good)}
        return optax.apply_updates(params, updates), opt_state, scaling, {"loss": loss}

    return on_images("optax-loss-scaling", step, init, ("params", "opt_state", "scaling"))


def optax_lookahead() -> TrainTask:
    """12."""
    fast = optax.chain(optax.zero_nans(), optax.add_decayed_weights(1e-4), optax.sgd(0.05))
    tx = optax.lookahead(fast, sync_period=5, slow_step_size=0.5)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = optax.LookaheadParams.init_synced(mlp_params(key))
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(fast: Any) -> jax.Array:
            return cross_entropy(mlp(fast, batch["image"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(params.fast)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return on_images("optax-lookahead", step, init, ("params", "opt_state"))


STEPS: dict[str, Callable[[], TrainTask]] = {
    make.__name__: make
    for make in (
        linen_mnist,
        linen_batch_norm,
        linen_lm,
        nnx_mnist,
        nnx_transformer,
        equinox_cnn,
        equinox_rnn,
        haiku_mlp_ema,
        haiku_transformer,
        optax_accumulation,
        optax_loss_scaling,
        optax_lookahead,
    )
}
