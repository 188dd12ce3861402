"""Attention as libraries write it: jax.nn, Flax linen and nnx, Equinox, Haiku.

Parameters are fixed numbers inside of the function: gradients go to the inputs, which is enough for
the whole backward pass of attention.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from tests.corpus.case import SIZES, spelling

B, G, H, T, S, D, M = (SIZES[c] for c in "bghtsdm")
SAME = ("bthd", "bshd", "bshd")
FLOATS = jax.nn.dot_product_attention


@spelling(*SAME)
def jax_nn(q, k, v):
    return FLOATS(q, k, v)


@spelling("bthd", "bthd", "bthd")
def jax_nn_causal(q, k, v):
    return FLOATS(q, k, v, is_causal=True)


@spelling("bthd", "bsgd", "bsgd", "ts")
def jax_nn_grouped_with_bias(q, k, v, bias):
    return FLOATS(q, k, v, bias=bias[None, None])


@spelling("bthd", "bthd", "bthd")
def jax_nn_local_window(q, k, v):
    return FLOATS(q, k, v, is_causal=True, local_window_size=(31, 0))


def linen(module, *inputs, **options):
    """A linen module with parameters drawn from a fixed key."""
    key = jax.random.key(1)
    variables = module.init(key, *inputs, **options)
    return module.apply(variables, *inputs, rngs={"dropout": key}, **options)


@spelling("btm")
def linen_self(x):
    return linen(nn.MultiHeadDotProductAttention(num_heads=H, qkv_features=M), x)


@spelling("btm")
def linen_causal(x):
    module = nn.MultiHeadDotProductAttention(num_heads=H, qkv_features=M)
    return linen(module, x, mask=nn.make_causal_mask(jnp.ones((B, T))))


@spelling("btm", "bsm")
def linen_cross(x, memory):
    return linen(nn.MultiHeadDotProductAttention(num_heads=H), x, memory)


@spelling("btm")
def linen_dropout(x):
    module = nn.MultiHeadDotProductAttention(num_heads=H, dropout_rate=0.2)
    return linen(module, x, deterministic=False)


@spelling("btm")
def linen_normalised_queries(x):
    return linen(nn.MultiHeadDotProductAttention(num_heads=H, normalize_qk=True), x)


@spelling("btm", "bt:5")
def linen_padding(x, lengths):
    mask = nn.make_attention_mask(lengths > 0, lengths > 0)
    return linen(nn.MultiHeadDotProductAttention(num_heads=H), x, mask=mask)


@spelling("bthd", "bshd", "bshd")
def linen_function(q, k, v):
    return nn.dot_product_attention(q, k, v)


@spelling("btm")
def nnx_module(x):
    module = nnx.MultiHeadAttention(num_heads=H, in_features=M, decode=False, rngs=nnx.Rngs(2))
    return module(x)


@spelling("bthd", "bshd", "bshd")
def nnx_function(q, k, v):
    return nnx.dot_product_attention(q, k, v)


@spelling("tm")
def equinox_module(x):
    return eqx.nn.MultiheadAttention(H, M, key=jax.random.key(3))(x, x, x)


@spelling("tm", "sm")
def equinox_causal_cross(x, memory):
    module = eqx.nn.MultiheadAttention(H, M, key=jax.random.key(3))
    return module(x, memory, memory, mask=jnp.tril(jnp.ones((T, S), bool)))


@spelling("btm")
def haiku_module(x):
    def run(x):
        return hk.MultiHeadAttention(H, D, w_init=hk.initializers.RandomNormal(0.1))(x, x, x)

    transformed = hk.without_apply_rng(hk.transform(run))
    return transformed.apply(transformed.init(jax.random.key(4), x), x)
