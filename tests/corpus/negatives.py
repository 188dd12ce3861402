"""What looks like attention from afar and is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.corpus.case import SIZES, negative

B, H, T, S, D, M = (SIZES[c] for c in "bhtsdm")


@negative("btm", "mi", "im")
def gelu_mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down


@negative("btm", "mi", "mi", "im")
def swiglu_mlp(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@negative("bthd", "bthd", "bthe")
def linear_attention(q, k, v):
    q, k = (jax.nn.elu(a) + 1 for a in (q, k))
    state = jnp.einsum("bthd,bthe->bhde", k, v)
    norm = jnp.einsum("bthd,bhd->bth", q, k.sum(1))
    return jnp.einsum("bthd,bhde->bthe", q, state) / norm[..., None]


@negative("bthd", "bthd", "bthe")
def linear_attention_with_softmax_features(q, k, v):
    q, k = jax.nn.softmax(q, -1), jax.nn.softmax(k, 1)
    return jnp.einsum("bthd,bhde->bthe", q, jnp.einsum("bthd,bthe->bhde", k, v))


@negative("btm", "mi", "bt:96")
def cross_entropy_by_one_hot(x, head, labels):
    logits = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 96) * logits, -1))


@negative("btm", "mi", "bt:96")
def cross_entropy_by_logsumexp(x, head, labels):
    logits = x @ head
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


@negative("tm", "tm")
def clip_loss(images, texts):
    logits = images @ texts.T
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.sum(both * jnp.eye(T)) / T


@negative("btm", "mh", "hmm")
def moe_router(x, gate, experts):
    weights = jax.nn.softmax(x @ gate)
    outputs = jnp.einsum("btm,hmn->bthn", x, experts)
    return jnp.einsum("bth,bthn->btn", weights, outputs)


@negative("btm", "m", "mi", "im")
def norm_and_mlp(x, gain, up, down):
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * gain
    return x + jnp.tanh(y @ up) @ down


@negative("bthd", "bthd", "bthe")
def sigmoid_attention(q, k, v):
    p = jax.nn.sigmoid(jnp.einsum("bthd,bshd->bhts", q, k) - 4.0)
    return jnp.einsum("bhts,bshe->bthe", p, v)


@negative("bthd", "bthd", "bthe")
def retention(q, k, v):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    decay = jnp.where(distance >= 0, 0.9 ** jnp.maximum(distance, 0), 0.0)
    return jnp.einsum("bhts,bshe->bthe", jnp.einsum("bthd,bshd->bhts", q, k) * decay, v)


@negative("bth", "btd", "btd", "bthe")
def state_space_duality(a, b, c, x):
    total = jnp.cumsum(jax.nn.log_sigmoid(a), 1)
    decay = jnp.exp(total[:, :, None] - total[:, None])
    legal = jnp.tril(jnp.ones((T, T), bool))[None, :, :, None]
    mixed = jnp.einsum("btd,bsd->bts", c, b)[..., None] * jnp.where(legal, decay, 0.0)
    return jnp.einsum("btsh,bshe->bthe", mixed, x)
