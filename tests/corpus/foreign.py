"""Programs of `programs.toml` that jax, optax, flax, equinox and haiku alone build: a scalar of
parameters and a batch each, or, where something is no gradient, a function.
"""

from __future__ import annotations

from collections.abc import Callable
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
from jax import lax

RNG = np.random.default_rng(11)
N, TIME, WIDTH, VOCAB = 4, 12, 16, 29
Built = tuple[Callable[..., Any], tuple[Any, ...]]
FOREIGN: dict[str, Callable[[], Built]] = {}


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def numbers(top: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, top, shape).astype(np.int32)


def program(build: Callable[[], Built]) -> Callable[[], Built]:
    """Enter a program under the name of its function."""
    FOREIGN[build.__name__] = build
    return build


def gradient(build: Callable[[], Built]) -> Callable[[], Built]:
    """Enter value and gradient by the first argument."""

    def built() -> Built:
        fn, arguments = build()
        return jax.value_and_grad(fn), arguments

    FOREIGN[build.__name__] = built
    return build


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LinenCnn(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        if self.norm:
            y = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x))
            x = nn.relu(x + y)
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def linen(module, *inputs, **options):
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs)
    params = variables.pop("params")
    return params, partial(module.apply, **options), variables


@program
def flax_mnist() -> Built:
    images, labels = normal(N, 8, 8, 1), numbers(10, N)
    params, apply, _ = linen(LinenCnn(), images)
    chain = optax.sgd(0.1, momentum=0.9)

    def step(params, state, images, labels):
        def loss(params):
            logits = apply({"params": params}, images)
            return cross_entropy(logits, labels), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = chain.update(grads, state, params)
        hits = jnp.mean(jnp.argmax(logits, -1) == labels)
        return optax.apply_updates(params, updates), state, value, hits

    return step, (params, chain.init(params), images, labels)


@gradient
def flax_imagenet() -> Built:
    images, labels = normal(N, 8, 8, 3), numbers(10, N)
    params, apply, rest = linen(LinenCnn(norm=True), images)

    def loss(params, images, labels):
        logits, moved = apply({"params": params, **rest}, images, mutable=["batch_stats"])
        moved = sum(jnp.sum(x) for x in jax.tree.leaves(moved))
        return cross_entropy(logits, labels) + 0 * moved

    return loss, (params, images, labels)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens) + nn.Embed(TIME, WIDTH)(jnp.arange(TIME))
        mask = nn.make_causal_mask(tokens)
        y = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.1, deterministic=False)(
            nn.LayerNorm()(x), mask=mask
        )
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        return nn.Dense(VOCAB)(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))))


@gradient
def flax_lm1b() -> Built:
    tokens = numbers(VOCAB, N, TIME)
    params, apply, _ = linen(Decoder(), tokens)

    def loss(params, tokens):
        logits = apply({"params": params}, tokens, rngs={"dropout": jax.random.key(3)})
        soft = optax.smooth_labels(jax.nn.one_hot(tokens, VOCAB), 0.1)
        weights = (tokens > 0).astype(jnp.float32)
        return (optax.softmax_cross_entropy(logits, soft) * weights).sum() / weights.sum()

    return loss, (params, tokens)


class Vae(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(WIDTH)(x))
        mean, logvar = nn.Dense(4)(h), nn.Dense(4)(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(WIDTH)(z))), mean, logvar


@gradient
def flax_vae() -> Built:
    x = np.abs(np.tanh(normal(N, 20)))
    params, apply, _ = linen(Vae(), x, jax.random.key(2))

    def loss(params, x, seed):
        logits, mean, logvar = apply({"params": params}, x, jax.random.key(seed))
        bce = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1).mean()
        return bce - 0.5 * jnp.mean(jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1))

    return loss, (params, x, np.int32(5))


class Seq2seq(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(VOCAB, WIDTH)
        carry, _ = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True)(embed(source))
        outputs = nn.RNN(nn.LSTMCell(WIDTH))(embed(target), initial_carry=carry)
        return nn.Dense(VOCAB)(outputs)


@gradient
def flax_seq2seq() -> Built:
    source, target = numbers(VOCAB, N, TIME), numbers(VOCAB, N, 6)
    params, apply, _ = linen(Seq2seq(), source, target)

    def loss(params, source, target):
        logits = apply({"params": params}, source, target)
        return cross_entropy(logits[:, :-1], target[:, 1:])

    return loss, (params, source, target)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens, lengths):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        forth = nn.RNN(nn.LSTMCell(WIDTH))
        back = nn.RNN(nn.LSTMCell(WIDTH), reverse=True, keep_order=True)
        x = nn.Bidirectional(forth, back)(x, seq_lengths=lengths)
        mask = jnp.arange(x.shape[1]) < lengths[:, None]
        scores = jnp.where(mask, nn.Dense(1)(jnp.tanh(x))[..., 0], -jnp.inf)
        return nn.Dense(2)(jnp.einsum("nt,ntd->nd", jax.nn.softmax(scores), x))


@gradient
def flax_sst2() -> Built:
    tokens, lengths = numbers(VOCAB, N, TIME), np.array([3, 12, 7, 1], np.int32)
    params, apply, _ = linen(Classifier(), tokens, lengths)

    def loss(params, tokens, lengths, labels):
        return cross_entropy(apply({"params": params}, tokens, lengths), labels)

    return loss, (params, tokens, lengths, numbers(2, N))


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, nodes, senders, receivers, graph):
        for _ in range(2):
            sent = nn.relu(nn.Dense(WIDTH)(nodes[senders]))
            nodes = jax.ops.segment_sum(sent, receivers, len(nodes))
            nodes = nn.LayerNorm()(nn.relu(nn.Dense(WIDTH)(nodes)))
        pooled = jax.ops.segment_max(nodes, graph, 3) + jax.ops.segment_sum(nodes, graph, 3)
        return nn.Dense(2)(pooled)


@gradient
def flax_ogbg() -> Built:
    senders, receivers = numbers(9, 21), numbers(9, 21)
    given = (normal(9, 5), senders, receivers, np.array([0, 0, 0, 1, 1, 1, 2, 2, 2], np.int32))
    params, apply, _ = linen(GraphNet(), *given)

    def loss(params, *given):
        return cross_entropy(apply({"params": params}, *given), jnp.array([0, 1, 1]))

    return loss, (params, *given)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.out(self.norm(x + self.attention(x)))


@gradient
def nnx_transformer() -> Built:
    graph, params, rest = nnx.split(NnxBlock(nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    first = nnx.split(NnxBlock(nnx.Rngs(0)), nnx.Param, ...)[1]

    def loss(params, tokens):
        state = jax.tree.map(lambda x: x, first)
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state, rest)(tokens), tokens)

    return loss, (params, numbers(VOCAB, N, TIME))


@gradient
def max_pool_with_indices() -> Built:
    def better(a, b):
        kept = a[0] >= b[0]
        return lax.select(kept, a[0], b[0]), lax.select(kept, a[1], b[1])

    def loss(w, x):
        y = lax.stop_gradient(jnp.tanh(x))
        place = jnp.broadcast_to(
            jnp.arange(y.shape[1] * y.shape[2]).reshape(y.shape[1:3])[None, ..., None], y.shape
        )
        start = (-np.float32(np.inf), np.int32(-1))
        _, at = lax.reduce_window((y, place), start, better, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        flat = (x @ w).reshape(len(x), -1, w.shape[1])
        picked = jnp.take_along_axis(flat, at.reshape(len(x), -1, at.shape[-1]), axis=1)
        return jnp.mean(picked**2)

    return loss, (normal(3, 3), normal(N, 8, 8, 3))


@gradient
def cumulative_softmax() -> Built:
    def loss(w, x):
        scores = (x @ w)[..., 0]
        return jnp.mean(jnp.exp(scores - lax.cumlogsumexp(scores, axis=1)) * x[..., 0])

    return loss, (normal(WIDTH, 1), normal(N, TIME, WIDTH))


@gradient
def ctc_loss() -> Built:
    def loss(w, x, labels):
        pads = jnp.zeros(x.shape[:2])
        return optax.ctc_loss(x @ w, pads, labels, jnp.zeros(labels.shape)).mean()

    return loss, (normal(WIDTH, 7), normal(N, TIME, WIDTH), 1 + numbers(6, N, 4))


@gradient
def associative_scan_ssm() -> Built:
    def loss(params, x):
        decay = jax.nn.sigmoid(params["a"])[None, None] * jnp.ones_like(x)

        def combine(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, h = lax.associative_scan(combine, (decay, x @ params["b"]), axis=1)
        return jnp.mean((h @ params["c"]) ** 2)

    params = {"a": normal(WIDTH), "b": normal(WIDTH, WIDTH), "c": normal(WIDTH, 3)}
    return loss, (params, normal(N, TIME, WIDTH))


@gradient
def linear_attention_scan() -> Built:
    def loss(params, x):
        q, k, v = (x @ params[n] for n in "qkv")

        def turn(state, now):
            q, k, v = now
            state = 0.9 * state + k[:, :, None] * v[:, None]
            return state, jnp.einsum("nd,nde->ne", q, state)

        first = jnp.zeros((len(x), WIDTH, WIDTH))
        _, out = lax.scan(turn, first, jax.tree.map(lambda y: y.swapaxes(0, 1), (q, k, v)))
        return jnp.mean(out**2)

    return loss, ({n: normal(WIDTH, WIDTH) / 4 for n in "qkv"}, normal(N, TIME, WIDTH))


@gradient
def custom_vjp_softcap() -> Built:
    @jax.custom_vjp
    def softcap(x):
        return 5 * jnp.tanh(x / 5)

    softcap.defvjp(lambda x: (softcap(x), x), lambda x, g: (g * (jnp.abs(x) < 5),))

    def loss(w, x):
        y = softcap(x @ w)
        return jnp.mean((y + lax.stop_gradient(jnp.round(y) - y)) ** 2)

    return loss, (normal(WIDTH, WIDTH), normal(N, WIDTH))


@gradient
def remat_scan_layers() -> Built:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(params, x):
        @partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
            return x + jax.nn.silu(h @ w["up"]) @ w["down"], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return loss, ({"up": normal(3, WIDTH, 32), "down": normal(3, 32, WIDTH)}, normal(N, WIDTH))


@program
def vmap_per_example_grads() -> Built:
    def private(w, x, y, seed):
        loss = lambda w, x, y: (jnp.tanh(x @ w).sum() - y) ** 2  # noqa: E731
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
        norms = jnp.sqrt(jnp.sum(grads**2, (1, 2)))
        clipped = (grads / jnp.maximum(1, norms)[:, None, None]).sum(0)
        return w - 0.1 * (clipped + jax.random.normal(jax.random.key(seed), w.shape)) / len(x)

    return private, (normal(WIDTH, 3), normal(N, WIDTH), normal(N), np.int32(9))


@gradient
def fori_power_iteration() -> Built:
    def loss(w, x):
        def turn(_, u):
            v = w.T @ u
            u = w @ (v / (jnp.linalg.norm(v) + 1e-6))
            return u / (jnp.linalg.norm(u) + 1e-6)

        u = lax.stop_gradient(lax.fori_loop(0, 5, turn, jnp.ones(len(w)) / len(w) ** 0.5))
        return jnp.mean((x @ (w / jnp.linalg.norm(w.T @ u))) ** 2)

    return loss, (normal(WIDTH, 8), normal(N, WIDTH))


@program
def newton_schulz_muon() -> Built:
    def update(w, momentum, grad):
        momentum = 0.95 * momentum + grad
        x = momentum / (jnp.linalg.norm(momentum) + 1e-7)

        def turn(x, _):
            a = x @ x.T
            return 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x, None

        return w - 0.02 * lax.scan(turn, x, None, length=5)[0], momentum

    return update, tuple(normal(8, WIDTH) for _ in range(3))


def trained(chain: optax.GradientTransformation, steps: int) -> Built:
    params = {"w": normal(WIDTH, 8), "b": normal(8), "e": normal(VOCAB, 130)}

    def step(params, state, x):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["w"] + p["b"])) ** 2) + jnp.mean(p["e"] ** 2)

        for _ in range(steps):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = chain.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state, value

    return step, (params, chain.init(params), normal(N, WIDTH))


@program
def optax_chain_schedule() -> Built:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)
    mask = {"w": True, "b": False, "e": True}
    adam = optax.adamw(rate, weight_decay=0.1, mask=mask)
    return trained(optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), adam), 2), 2)


@program
def optax_shampoo_like() -> Built:
    labels = {"w": "lamb", "b": "lamb", "e": "factored"}
    chains = {"lamb": optax.lamb(1e-2), "factored": optax.adafactor(1e-2, 16)}
    return trained(optax.multi_transform(chains, labels), 2)


@gradient
def equinox_mlp() -> Built:
    model = eqx.nn.MLP(WIDTH, 3, 20, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    return loss, (params, normal(N, WIDTH), normal(N, 3))


@gradient
def haiku_transformer() -> Built:
    def forward(tokens):
        x = hk.Embed(VOCAB, WIDTH)(tokens)
        y = hk.LayerNorm(-1, True, True)(x)
        causal = jnp.tril(jnp.ones((1, 1, TIME, TIME)))
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(2, 8, w_init=init)(y, y, y, mask=causal)
        hk.ExponentialMovingAverage(0.9, name="seen")(x.mean())
        return hk.Linear(VOCAB)(x)

    net = hk.transform_with_state(forward)
    tokens = numbers(VOCAB, N, TIME)
    params, state = net.init(jax.random.key(0), tokens)

    def loss(params, state, tokens):
        logits, state = net.apply(params, state, None, tokens)
        return cross_entropy(logits, tokens) + 0 * sum(map(jnp.sum, jax.tree.leaves(state)))

    return loss, (params, state, tokens)


@program
def random_augment() -> Built:
    def augment(images, labels, seed):
        def one(image, key):
            crop, flip = jax.random.split(key)
            padded = jnp.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
            at = jax.random.randint(crop, (2,), 0, 5)
            image = lax.dynamic_slice(padded, (*at, 0), image.shape)
            return jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)

        keys = jax.random.split(jax.random.key(seed), len(images) + 2)
        images = jax.vmap(one)(images, keys[2:])
        part = jax.random.beta(keys[0], 0.4, 0.4)
        order = jax.random.permutation(keys[1], len(images))
        soft = jax.nn.one_hot(labels, 10)
        mixed = part * images + (1 - part) * images[order]
        return mixed, part * soft + (1 - part) * soft[order]

    return augment, (normal(N, 8, 8, 3), numbers(10, N), np.int32(4))


@program
def top_k_sampling() -> Built:
    def sample(logits, seed):
        best, index = lax.top_k(logits, 5)
        draw = jax.random.categorical(jax.random.key(seed), best)
        nucleus = jnp.cumsum(jax.nn.softmax(jnp.sort(logits)[:, ::-1]), -1)
        count = jax.vmap(lambda c: jnp.searchsorted(c, 0.9))(nucleus)
        return jnp.take_along_axis(index, draw[:, None], 1)[:, 0], count, jnp.argsort(logits)

    return sample, (normal(N, VOCAB), np.int32(2))
