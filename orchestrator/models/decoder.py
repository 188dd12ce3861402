"""What the parts of `architecture.py` compute: a decoder of any family in the table, written as a
JAX user writes it, without any sharding annotation.

Layers that repeat a pattern are stacked on a leading dim and run by `lax.scan`; parameters are
fp32, arithmetic is fp32 or bf16, logits and loss are fp32.

Einsum letters: b batch, t and s positions, k kv heads, g heads per kv head, e head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks, moe
from shardwright.orchestrator.models.adapters import product
from shardwright.orchestrator.models.architecture import (
    Activation,
    Architecture,
    Attention,
    Experts,
    Layer,
    Mlp,
    Norm,
    stacked,
)
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.layers import (
    EXACT,
    INIT_STD,
    How,
    Params,
    Site,
    hide_earlier,
    hide_later,
    run_stack,
)
from shardwright.orchestrator.models.rope import Rope, Tables, rotate, tables

Shapes = dict[str, tuple[int, ...]]
_UNIT_NORMS = ("rms", "layer")
"""Norms whose weight is their scale; that of the others is what is added to one."""


def shapes(model: Architecture) -> dict[str, Any]:
    """The shape of every parameter, as a tree."""
    m, stack = model, stacked(model.layers)
    outer: dict[str, Any] = {"embed": (m.vocab, m.hidden)}
    if m.learned_positions:
        outer["positions"] = (m.positions, m.hidden)
    outer |= _norm_shapes(m.norm, "final_norm", m.hidden)
    if not m.tied:
        outer["lm_head"] = (m.hidden, m.vocab)
    period = [_stacked_shapes(m, layer, stack.times) for layer in stack.period]
    outer["layers"] = period[0] if len(period) == 1 else _numbered(period)
    for name, layers in (("first", stack.first), ("last", stack.last)):
        if layers:
            outer[name] = _numbered([layer_shapes(m, layer) for layer in layers])
    return outer


def _numbered(parts: Sequence[Shapes]) -> dict[str, Shapes]:
    return {str(number): part for number, part in enumerate(parts)}


def _stacked_shapes(model: Architecture, layer: Layer, times: int) -> Shapes:
    return {name: (times, *shape) for name, shape in layer_shapes(model, layer).items()}


def layer_shapes(model: Architecture, layer: Layer) -> Shapes:
    """Shapes of one layer's parameters."""
    a, width, norm = layer.attention, model.hidden, model.norm
    inner, kv = (n * a.head_dim for n in (a.heads, a.kv_heads))
    found: Shapes = {"wq": (width, inner), "wk": (width, kv), "wv": (width, kv)}
    found["wo"] = (inner, width)
    if a.bias:
        found |= {"bq": (inner,), "bk": (kv,), "bv": (kv,)}
    if a.out_bias:
        found["bo"] = (width,)
    if a.head_norm:
        found |= _norm_shapes(a.head_norm, "q_norm", a.head_dim)
        found |= _norm_shapes(a.head_norm, "k_norm", a.head_dim)
    if a.sinks:
        found["sinks"] = (a.heads,)
    sandwich = ("attended_norm", "fed_norm") if layer.placement == "sandwich" else ()
    for name in ("attn_norm", "mlp_norm", *sandwich):
        found |= _norm_shapes(norm, name, width)
    return found | _feed_shapes(layer.feed, width)


def _norm_shapes(norm: Norm, name: str, width: int) -> Shapes:
    bias: Shapes = {f"{name}_bias": (width,)} if norm.kind == "layer" else {}
    return {name: (width,)} | bias


def _feed_shapes(feed: Mlp | Experts, width: int) -> Shapes:
    """Shapes of a feed-forward part; those of experts have their number in front."""
    read = ("w_up",) if isinstance(feed, Mlp) and not feed.gated else ("w_gate", "w_up")
    found: Shapes = {name: (width, feed.width) for name in read}
    found["w_down"] = (feed.width, width)
    if feed.bias:
        found |= {f"b{name[1:]}": (shape[1],) for name, shape in found.items()}
    if isinstance(feed, Experts):
        found = {name: (feed.count, *shape) for name, shape in found.items()}
        found["router"] = (width, feed.count)
        if feed.bias:
            found["router_bias"] = (feed.count,)
    return found


def count_params(model: Architecture) -> int:
    """Elements of all parameters."""
    leaves = jax.tree.leaves(shapes(model), is_leaf=lambda node: isinstance(node, tuple))
    return sum(math.prod(shape) for shape in leaves)


def init_params(model: Architecture, key: jax.Array) -> Params:
    """Fresh parameters, fp32: normal 0.02 for matrices, scales of one, biases and sinks of zero."""

    def made(path: tuple[Any, ...], shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        name = path[-1].key
        if "norm" in name and not name.endswith("bias"):
            head = name in ("q_norm", "k_norm")
            norm = model.layers[0].attention.head_norm if head else model.norm
            return jnp.full(shape, float(norm is None or norm.kind in _UNIT_NORMS))
        if name == "sinks" or name.startswith("b") or name.endswith("bias"):
            return jnp.zeros(shape)
        return INIT_STD * jax.random.normal(key, shape, jnp.float32)

    tree = shapes(model)
    paths, structure = jax.tree.flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, tuple)
    )
    keys = jax.random.split(key, len(paths))
    leaves = [made(path, size, k) for (path, size), k in zip(paths, keys, strict=True)]
    params: Params = jax.tree.unflatten(structure, leaves)
    return params


def normed(norm: Norm, layer: Params, name: str, x: jax.Array) -> jax.Array:
    """A norm over the last dim, computed in fp32."""
    weight = layer[name]
    if norm.kind == "layer":
        return blocks.layer_norm(EXACT, x, weight, layer[f"{name}_bias"], norm.eps).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + norm.eps)
    if norm.kind == "rms1":
        return (x32 * scale * (1.0 + weight)).astype(x.dtype)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def _linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    """`x` times the matrix w<name>, and the bias b<name> where there is one."""
    matrix = layer[f"w{name}"]
    is_plain = isinstance(matrix, jax.Array)
    made = x @ matrix.astype(x.dtype) if is_plain else product(x, matrix)
    return made + layer[f"b{name}"].astype(x.dtype) if f"b{name}" in layer else made


def attention(
    part: Attention, layer: Params, x: jax.Array, given: Tables | None, how: How
) -> jax.Array:
    """Causal grouped-query attention with what `part` has besides."""
    a, (b, t, _), dtype = part, x.shape, x.dtype
    made = [_linear(layer, name, x) for name in ("q", "k", "v")]
    q, k, v = (y.reshape(b, t, -1, a.head_dim) for y in made)
    if a.head_norm:
        q, k = (normed(a.head_norm, layer, f"{n}_norm", y) for n, y in (("q", q), ("k", k)))
    if given:
        q, k = rotate(q, given), rotate(k, given)
    q = q.reshape(b, t, a.kv_heads, a.heads // a.kv_heads, a.head_dim)
    scores = jnp.einsum("btkge,bske->bkgts", q, k).astype(jnp.float32) * a.scale
    if a.softcap:
        scores = capped(scores, a.softcap)
    scores = hide_later(scores)
    if 0 < a.window < t:
        scores = hide_earlier(scores, a.window)
    shares = _softmax(scores, layer["sinks"] if a.sinks else None)
    weights = how.drop(shares.astype(dtype), Site.WEIGHTS)
    mixed = jnp.einsum("bkgts,bske->btkge", weights, v)
    return _linear(layer, "o", mixed.reshape(b, t, -1))


def capped(x: jax.Array, most: float) -> jax.Array:
    """`x` bent towards at most `most` (Gemma 2)."""
    return jnp.tanh(x / most) * most


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the last dim of [B, K, G, T, S], beside a score per head if there are sinks."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.reshape(1, *scores.shape[1:3], 1, 1)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    most = jax.lax.stop_gradient(most)
    powers = jnp.exp(scores - most)
    return powers / (jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sink - most))


def activated(kind: Activation, x: jax.Array) -> jax.Array:
    """`x` under an activation."""
    match kind:
        case Activation.SILU:
            return jax.nn.silu(x)
        case Activation.RELU:
            return jax.nn.relu(x)
        case _:
            return jax.nn.gelu(x, approximate=kind is Activation.GELU_TANH)


def feed_forward(part: Mlp | Experts, layer: Params, x: jax.Array) -> jax.Array:
    """What a layer does with every position behind attention."""
    if isinstance(part, Experts):
        return _expert_blocks(part, layer, x)
    if not part.gated:
        return _linear(layer, "_down", activated(part.activation, _linear(layer, "_up", x)))
    gate, up = _linear(layer, "_gate", x), _linear(layer, "_up", x)
    return _linear(layer, "_down", activated(part.activation, gate) * up)


_SHARPNESS = 1.702  # of the sigmoid that gates in gpt-oss, as in the quick form of GELU


def _expert_blocks(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The chosen experts' blocks of every row, added up."""
    rows = x.reshape(-1, x.shape[-1])
    best, chosen = choices(part, layer, rows)

    order, source, sizes = moe.by_expert(chosen, part.count)
    taken, expert = rows[source], chosen.reshape(-1)[order]

    def product(given: jax.Array, name: str) -> jax.Array:
        made = jax.lax.ragged_dot(given, layer[f"w{name}"].astype(given.dtype), sizes)
        return made + layer[f"b{name}"].astype(given.dtype)[expert] if part.bias else made

    gate, up = product(taken, "_gate"), product(taken, "_up")
    if part.limit:
        gate, up = jnp.minimum(gate, part.limit), jnp.clip(up, -part.limit, part.limit)
        wide = (up + 1) * (gate * jax.nn.sigmoid(gate * _SHARPNESS))
    else:
        wide = jax.nn.silu(gate) * up
    shares = best.reshape(-1)[order].astype(x.dtype)
    made = product(wide, "_down") * shares[:, None]
    return jnp.zeros_like(rows).at[source].add(made).reshape(x.shape)


def choices(part: Experts, layer: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of the chosen experts of every row, and which they are, both [N, K]."""
    scores = rows.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
    if part.bias:
        scores = scores + layer["router_bias"]
    if part.router == "top-k, softmax":
        best, chosen = jax.lax.top_k(scores, part.chosen)
        return jax.nn.softmax(best), chosen
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores), part.chosen)
    if part.router == "softmax, top-k":
        return best, chosen
    return best / jnp.sum(best, axis=-1, keepdims=True), chosen


def _layer(
    model: Architecture,
    part: Layer,
    given: Mapping[Rope | None, Tables | None],
    x: jax.Array,
    layer: Params,
    how: How,
) -> jax.Array:
    """One layer."""
    a, norm = part.attention, model.norm

    def added(x: jax.Array, made: jax.Array, name: str, site: Site) -> jax.Array:
        if part.placement == "sandwich":
            made = normed(norm, layer, name, made)
        made = how.drop(made, site) if model.drops_states else made
        return x + (made if model.residual_scale == 1 else made * model.residual_scale)

    attended = attention(a, layer, normed(norm, layer, "attn_norm", x), given[a.rope], how)
    after = added(x, attended, "attended_norm", Site.ATTENDED)
    read = x if part.placement == "parallel" else after
    fed = feed_forward(part.feed, layer, normed(norm, layer, "mlp_norm", read))
    return added(after, fed, "fed_norm", Site.FED)


def logits(model: Architecture, params: Params, tokens: jax.Array, how: How) -> jax.Array:
    """Next-token logits [B, T, V] in fp32."""
    m, length = model, tokens.shape[1]
    used = dict.fromkeys(layer.attention.rope for layer in m.layers)
    given = {rope: tables(rope, length) if rope else None for rope in used}
    x = params["embed"].astype(how.precision.dtype)[tokens]
    if m.learned_positions:
        x = x + params["positions"][:length].astype(x.dtype)
    x = x if m.embed_scale == 1 else x * m.embed_scale
    x = how.drop(x, Site.STATES) if m.drops_states else x
    first, period, last = _bound(m, params, given)
    x = run_stack(first, period, last, x, how)
    x = normed(m.norm, params, "final_norm", x)
    head = params["embed"].T if m.tied else params["lm_head"]
    made = (x @ head.astype(x.dtype)).astype(jnp.float32)
    if m.logit_divisor != 1:
        made = made / m.logit_divisor
    return capped(made, m.logit_softcap) if m.logit_softcap else made


def _bound(
    model: Architecture, params: Params, given: Mapping[Rope | None, Tables | None]
) -> list[list[tuple[Any, Params]]]:
    """First layers, period and last ones, each with its parameters."""
    stack = stacked(model.layers)
    alone = len(stack.period) == 1
    pairs = (
        (stack.first, params.get("first", {})),
        (stack.period, {"0": params["layers"]} if alone else params["layers"]),
        (stack.last, params.get("last", {})),
    )
    return [
        [(partial(_layer, model, part, given), held[str(i)]) for i, part in enumerate(parts)]
        for parts, held in pairs
    ]


def train_task(model: Architecture, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for a sequence longer than positions."""

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        given = logits(model, params, batch["tokens"], how)
        return blocks.cross_entropy(EXACT, given, batch["targets"])

    init = partial(init_params, model)
    return blocks.language_task(init, loss, model.vocab, model.positions, options)
