"""Attention written in JAX by hand: index orders, grouped heads, masks, biases, softmax by other
means, dropout, checkpoints, loops, and structures that are more than one attention.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from tests.corpus.case import SIZES, spelling

B, G, H, T, S, D, E, M = (SIZES[c] for c in "bghtsdem")
QKV = ("bthd", "bshd", "bshe")
SCALE = D**-0.5


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bthd,bshd->bhts", q, k) * SCALE


def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhts,bshe->bthe", p, v)


def causal(x: jax.Array) -> jax.Array:
    rows, keys = x.shape[-2:]
    return jnp.where(jnp.tril(jnp.ones((rows, keys), bool)), x, -1e9)


# Index orders and heads.


@spelling(*QKV)
def plain(q, k, v):
    return weigh(jax.nn.softmax(scores(q, k)), v)


@spelling("bhtd", "bhsd", "bhse")
def heads_first(q, k, v):
    p = jax.nn.softmax(q @ k.swapaxes(2, 3) * SCALE)
    return p @ v


@spelling("tbhd", "sbhd", "sbhe")
def time_first(q, k, v):
    p = jax.nn.softmax(jnp.einsum("tbhd,sbhd->bhts", q, k))
    return jnp.einsum("bhts,sbhe->tbhe", p, v)


@spelling("bhdt", "bhds", "bhes")
def width_before_time(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bhdt,bhds->bhts", q, k))
    return jnp.einsum("bhts,bhes->bhet", p, v)


@spelling(*QKV)
def keys_before_rows(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", k, q) * SCALE, axis=2)
    return jnp.einsum("bhst,bshe->bthe", p, v)


@spelling("td", "sd", "se")
def one_head(q, k, v):
    return jax.nn.softmax(q @ k.T * SCALE) @ v


@spelling("bthd", "bsgd", "bsge")
def grouped_by_repeat(q, k, v):
    k, v = (jnp.repeat(a, H // G, axis=2) for a in (k, v))
    return plain(q, k, v)


@spelling("bthd", "bsgd", "bsge")
def grouped_by_broadcast(q, k, v):
    wide = [
        jnp.broadcast_to(a[:, :, :, None], (B, S, G, H // G, a.shape[-1])).reshape(B, S, H, -1)
        for a in (k, v)
    ]
    return plain(q, *wide)


@spelling("bthd", "bsgd", "bsge")
def grouped_by_einsum(q, k, v):
    q = q.reshape(B, T, G, H // G, D)
    p = jax.nn.softmax(jnp.einsum("btgnd,bsgd->bgnts", q, k))
    return jnp.einsum("bgnts,bsge->btgne", p, v).reshape(B, T, H, E)


@spelling("bthd", "bsd", "bse")
def multi_query(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k))
    return jnp.einsum("bhts,bse->bthe", p, v)


@spelling(*QKV)
def mapped_over_samples_and_heads(q, k, v):
    return jax.vmap(jax.vmap(one_head, 1, 1))(q, k, v)


@spelling("bhtd", "bhsd", "bhse")
def heads_in_the_batch(q, k, v):
    q, k, v = (a.reshape(B * H, *a.shape[2:]) for a in (q, k, v))
    p = jax.nn.softmax(jax.lax.batch_matmul(q, k.swapaxes(1, 2)))
    return jax.lax.batch_matmul(p, v).reshape(B, H, T, E)


@spelling(*QKV)
def heads_in_the_batch_by_transpose(q, k, v):
    q, k, v = (a.swapaxes(1, 2).reshape(B * H, a.shape[1], -1) for a in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", q, k))
    return jnp.einsum("nts,nse->nte", p, v).reshape(B, H, T, E).swapaxes(1, 2)


@spelling("thd", "shd", "she", forward=H, backward=H)
def loop_over_heads(q, k, v):
    return jnp.stack([one_head(q[:, h], k[:, h], v[:, h]) for h in range(H)], 1)


@spelling("btm")
def self_attention(x):
    x = jnp.tanh(x)
    return jax.nn.softmax(jnp.einsum("btm,bsm->bts", x, x)) @ x


@spelling("btm", "mm", "mm", "mm", "mm")
def projected(x, wq, wk, wv, wo):
    q, k, v = ((x @ w).reshape(B, T, H, M // H) for w in (wq, wk, wv))
    return weigh(jax.nn.softmax(causal(scores(q, k))), v).reshape(B, T, M) @ wo


@spelling("btm", "mm", "mm")
def rotary_and_normalised(x, wq, wk):
    def heads(w):
        y = (x @ w).reshape(B, T, H, D)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        angle = jnp.arange(T)[:, None, None] * 10.0 ** -jnp.arange(D // 2)
        low, high = jnp.split(y, 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    return weigh(jax.nn.softmax(causal(scores(heads(wq), heads(wk)))), x.reshape(B, T, H, D))


# Masks and biases.


def masked(change, *shapes, name, **facts):
    """A plain attention whose scores `change` sees, with its own arguments behind q, k and v."""

    def fn(q, k, v, *rest):
        return weigh(jax.nn.softmax(change(scores(q, k), *rest)), v)

    spelling(*QKV, *shapes, name=name, **facts)(fn)


def window(x):
    distance = jnp.arange(T)[:, None] - jnp.arange(S)
    return jnp.where((distance >= 0) & (distance < 40), x, jnp.finfo(x.dtype).min)


def offset_causal(x):
    rows = jax.lax.broadcasted_iota(jnp.int32, (T, S), 0)
    keys = jax.lax.broadcasted_iota(jnp.int32, (T, S), 1)
    return jnp.where(rows + S - T >= keys, x, -jnp.inf)


def segments(x, rows, keys):
    return jnp.where(rows[:, None, :, None] == keys[:, None, None], x, -1e30)


def padding_of_both(x, rows, keys):
    legal = (rows[:, :, None] > 0) & (keys[:, None] > 0)
    return x + jnp.where(legal, 0.0, -1e9)[:, None]


def alibi(x):
    slopes = 2.0 ** -jnp.arange(1, H + 1)
    return causal(x + slopes[:, None, None] * (jnp.arange(S) - jnp.arange(T)[:, None]))


masked(causal, name="causal_tril")
masked(window, name="sliding_window")
masked(offset_causal, name="causal_with_offset")
masked(lambda x: x - 1e9 * (1 - jnp.tril(jnp.ones((T, S)))), name="additive_mask")
masked(segments, "bt:4", "bs:4", name="segment_ids")
masked(padding_of_both, "bt:5", "bs:5", name="padding_of_rows_and_keys")
masked(lambda x, m: jnp.where(m[:, None, None] > 0, x, -1e9), "bs:3", name="padding_of_keys")
masked(alibi, name="alibi")
masked(lambda x, b: x + b, "hts", name="learned_bias")
masked(lambda x, r, c: x * r[:, :, None] + c[:, None], "ht", "hs", name="row_scale_and_key_bias")
masked(lambda x: 15.0 * jnp.tanh(x / 15.0), name="soft_cap")
masked(lambda x, t: x * jnp.exp(t)[:, None, None], "h", name="learned_temperature")


@spelling(*QKV)
def where_argument(q, k, v):
    legal = jnp.tril(jnp.ones((T, S), bool))
    return weigh(jax.nn.softmax(scores(q, k), where=legal, axis=-1), v)


# Softmax by other means.


def softened(softmax, name, **facts):
    """A causal attention with its own softmax."""

    def fn(q, k, v):
        return weigh(softmax(causal(scores(q, k))), v)

    spelling(*QKV, name=name, **facts)(fn)


def without_max(x):
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def with_stopped_max(x):
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return e * (1 / e.sum(-1, keepdims=True))


def clipped(x):
    e = jnp.exp(jnp.clip(x, -60.0, 60.0))
    return e / e.sum(-1, keepdims=True)


def plus_one(x):
    top = jnp.maximum(jax.lax.stop_gradient(x.max(-1, keepdims=True)), 0.0)
    e = jnp.exp(x - top)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(-top))


def with_sink(x):
    sink = jnp.zeros((*x.shape[:-1], 1), x.dtype)
    return jax.nn.softmax(jnp.concatenate([sink, x], -1))[..., 1:]


def in_base_two(x):
    e = jnp.exp2(x * 1.4426950408889634)
    return e / e.sum(-1, keepdims=True)


def with_epsilon(x):
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return e / (e.sum(-1, keepdims=True) + 1e-6)


softened(without_max, "exponential_without_max")
softened(with_stopped_max, "reciprocal_of_the_sum")
softened(clipped, "clipped_exponential")
softened(lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)), "exp_of_logsumexp")
softened(lambda x: jnp.exp(jax.nn.log_softmax(x)), "exp_of_log_softmax")
softened(plus_one, "softmax_plus_one")
softened(with_sink, "concatenated_sink")
softened(in_base_two, "softmax_in_base_two")
softened(with_epsilon, "softmax_with_epsilon")


@spelling(*QKV)
def normalised_behind_the_values(q, k, v):
    x = causal(scores(q, k))
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return weigh(e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


@spelling(*QKV, dtype="bfloat16")
def softmax_in_fp32_of_bf16(q, k, v):
    p = jax.nn.softmax(causal(scores(q, k)).astype(jnp.float32)).astype(jnp.bfloat16)
    return weigh(p, v)


@spelling(*QKV, dtype="bfloat16")
def accumulated_in_fp32(q, k, v):
    x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    return weigh(jax.nn.softmax(causal(x)).astype(q.dtype), v)


# Dropout, checkpoints, loops.


@spelling(*QKV)
def dropout(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    keep = jax.random.bernoulli(jax.random.key(3), 0.9, p.shape)
    return weigh(jnp.where(keep, p / 0.9, 0.0), v)


@spelling(*QKV)
def dropout_by_product(q, k, v):
    p = jax.nn.softmax(causal(scores(q, k)))
    keep = jax.random.bernoulli(jax.random.key(5), 0.8, (H, T, S))
    return weigh(p * keep / 0.8, v)


def layer(x, w, softmax=jax.nn.softmax):
    y = jnp.tanh(x @ w)
    p = softmax(causal(jnp.einsum("btm,bsm->bts", y, y)))
    return x + jnp.tanh(jnp.einsum("bts,bsm->btm", p, y) @ w)


spelling("btm", "mm", name="checkpointed", forward=1)(jax.checkpoint(layer))
spelling("btm", "mm", name="checkpoint_that_saves_products")(
    jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
)


def stack(x, w, body):
    """Three layers in a scan, with weights that differ."""
    ws = jnp.stack([w, 0.5 * w, w * w])
    return jax.lax.scan(lambda h, w: (body(h, w), None), x, ws)[0]


spelling("btm", "mm", name="scanned")(partial(stack, body=layer))
spelling("btm", "mm", name="scanned_and_checkpointed")(partial(stack, body=jax.checkpoint(layer)))


@spelling("btm", "mm", "bt:4")
def scanned_with_segments(x, w, ids):
    """The mask is made once, outside of the loop."""
    legal = ids[:, :, None] == ids[:, None]
    return stack(x, w, partial(layer, softmax=lambda a: jax.nn.softmax(jnp.where(legal, a, -1e9))))


@spelling("btm", "mm", forward=2, backward=2)
def two_layers(x, w):
    return layer(layer(x, w), w.T)


@spelling("btm", "mm")
def scanned_with_dropout(x, w):
    keys = jax.random.key_data(jax.random.split(jax.random.key(9), 3))

    def body(h, wk):
        w, key = wk

        def drop(a):
            keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, a.shape)
            return jnp.where(keep, jax.nn.softmax(a) / 0.9, 0.0)

        return layer(h, w, drop), None

    return jax.lax.scan(body, x, (jnp.stack([w, 0.5 * w, w * w]), keys))[0]


# Structures.


@spelling("bthd", "bshd", "bth", "bsh", "bshe")
def two_score_terms(q, k, q_position, k_position, v):
    extra = jnp.einsum("bth,bsh->bhts", q_position, k_position)
    return weigh(jax.nn.softmax(scores(q, k) + extra), v)


@spelling("bthd", "bsm", "md", "me")
def latent_keys_and_values(q, latent, up_k, up_v):
    k, v = latent @ up_k, latent @ up_v
    p = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k))
    return jnp.einsum("bhts,bse->bthe", p, v)


@spelling(*QKV, "hh", "hh")
def talking_heads(q, k, v, before, after):
    x = jnp.einsum("bhts,hn->bnts", scores(q, k), before)
    return weigh(jnp.einsum("bhts,hn->bnts", jax.nn.softmax(x), after), v)


@spelling("bthd", "bshd", "bthd", "bshd", "bshe", forward=1, backward=2)
def differential(q, k, q2, k2, v):
    p = jax.nn.softmax(scores(q, k)) - 0.3 * jax.nn.softmax(scores(q2, k2))
    return weigh(p, v)


@spelling(*QKV)
def probabilities_returned(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return weigh(p, v), p


@spelling("bthd", "bshd")
def values_are_keys(q, k):
    return weigh(jax.nn.softmax(scores(q, k)), k)


@spelling("bhd", "bshd", "bshe")
def one_query(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", q, k))
    return jnp.einsum("bhs,bshe->bhe", p, v)


@spelling("bthd", "gsd", "gse")
def keys_in_two_dims(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bthd,gsd->bhtgs", q, k), axis=(-2, -1))
    return jnp.einsum("bhtgs,gse->bthe", p, v)


@spelling("bthd", "bthd", "bthe")
def along_one_of_two_axes(q, k, v):
    """Rows attend within windows of half the positions."""
    q, k, v = (a.reshape(B, 2, T // 2, H, -1) for a in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("bnthd,bnshd->bnhts", q, k))
    return jnp.einsum("bnhts,bnshe->bnthe", p, v).reshape(B, T, H, E)


@spelling("btm", "bsm", "mi", "mi", "mm")
def cross_attention(x, memory, wq, wk, wv):
    q, k = ((a @ w).reshape(B, -1, H, 24) for a, w in ((x, wq), (memory, wk)))
    v = (memory @ wv).reshape(B, S, H, M // H)
    return weigh(jax.nn.softmax(scores(q, k)), v).reshape(B, T, M)


@spelling("btm", "sm", "sm")
def softmax_memory(x, keys, values):
    return jax.nn.softmax(x @ keys.T) @ values


@spelling("thd", "shd", "she")
def mapped_over_heads_with_lax_map(q, k, v):
    mapped = jax.lax.map(lambda a: one_head(*a), [jnp.moveaxis(a, 1, 0) for a in (q, k, v)])
    return jnp.moveaxis(mapped, 0, 1)
