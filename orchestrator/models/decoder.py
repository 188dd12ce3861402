"""What the parts of `architecture.py` compute: a decoder of any family in the table, written as a
JAX user writes it, without any sharding annotation.

Layers that repeat a pattern are stacked on a leading dim and run by `lax.scan`; parameters are
fp32, arithmetic is fp32 or bf16, logits and loss are fp32.

Einsum letters: b batch, t and s positions, k kv heads, g heads per kv head, e head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks, experts
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

_UNIT_NORMS = ("rms", "layer")
"""Norms whose weight is their scale; that of the others is what is added to one."""


class Fresh(StrEnum):
    """What a leaf of fresh parameters holds: normal 0.02, or one number everywhere."""

    DRAWN = "drawn"
    ONE = "one"
    ZERO = "zero"


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of parameters."""

    shape: tuple[int, ...]
    fresh: Fresh = Fresh.DRAWN

    def stacked(self, *sizes: int) -> Leaf:
        """So many of it as one array."""
        return replace(self, shape=(*sizes, *self.shape))


Leaves = dict[str, Leaf]
TablesByRope = Mapping[Rope | None, Tables | None]


def leaves(model: Architecture) -> dict[str, Any]:
    """Every array of parameters, as a tree."""
    m, stack = model, stacked(model.layers)
    outer: dict[str, Any] = {"embed": Leaf((m.vocab, m.hidden))}
    if m.learned_positions:
        outer["positions"] = Leaf((m.positions, m.hidden))
    period = [
        {name: leaf.stacked(stack.times) for name, leaf in layer_leaves(m, layer).items()}
        for layer in stack.period
    ]
    outer["layers"] = period[0] if len(period) == 1 else _numbered(period)
    for name, layers in (("first", stack.first), ("last", stack.last)):
        if layers:
            outer[name] = _numbered([layer_leaves(m, layer) for layer in layers])
    if not m.tied:
        outer["lm_head"] = Leaf((m.hidden, m.vocab))
    return outer | _norm_leaves(m.norm, "final_norm", m.hidden)


def _numbered(parts: Sequence[Leaves]) -> dict[str, Leaves]:
    return {str(number): part for number, part in enumerate(parts)}


def layer_leaves(model: Architecture, layer: Layer) -> Leaves:
    """One layer's arrays."""
    a, width, norm = layer.attention, model.hidden, model.norm
    inner, kv = (n * a.head_dim for n in (a.heads, a.kv_heads))
    feed = _feed_leaves(layer.feed, width)
    found = {"wq": Leaf((width, inner)), "wk": Leaf((width, kv)), "wv": Leaf((width, kv))}
    found |= {name: feed.pop(name) for name in ("w_gate", "w_up") if name in feed}
    found |= {"wo": Leaf((inner, width))} | feed
    if model.fused:
        found = _fused(found)
    if a.bias:
        found |= {
            f"b{name}": Leaf((n,), Fresh.ZERO) for name, n in (("q", inner), ("k", kv), ("v", kv))
        }
    if a.out_bias:
        found["bo"] = Leaf((width,), Fresh.ZERO)
    if a.head_norm:
        found |= _norm_leaves(a.head_norm, "q_norm", a.head_dim)
        found |= _norm_leaves(a.head_norm, "k_norm", a.head_dim)
    if a.sinks:
        found["sinks"] = Leaf((a.heads,), Fresh.ZERO)
    sandwich = ("attended_norm", "fed_norm") if layer.placement == "sandwich" else ()
    for name in ("attn_norm", "mlp_norm", *sandwich):
        found |= _norm_leaves(norm, name, width)
    return found


def _norm_leaves(norm: Norm, name: str, width: int) -> Leaves:
    fresh = Fresh.ONE if norm.kind in _UNIT_NORMS else Fresh.ZERO
    bias = {f"{name}_bias": Leaf((width,), Fresh.ZERO)} if norm.kind == "layer" else {}
    return {name: Leaf((width,), fresh)} | bias


def _feed_leaves(feed: Mlp | Experts, width: int) -> Leaves:
    """Arrays of a feed-forward part; those of experts have their number in front."""
    read = ("w_up",) if isinstance(feed, Mlp) and not feed.gated else ("w_gate", "w_up")
    found = {name: Leaf((width, feed.width)) for name in read}
    found["w_down"] = Leaf((feed.width, width))
    if feed.bias:
        found |= {f"b{n[1:]}": Leaf((w.shape[1],), Fresh.ZERO) for n, w in found.items()}
    if isinstance(feed, Experts):
        found = {name: leaf.stacked(feed.count) for name, leaf in found.items()}
        found["router"] = Leaf((width, feed.count))
        if feed.bias:
            found["router_bias"] = Leaf((feed.count,), Fresh.ZERO)
    return found


_FUSED = {"w_qkv": ("wq", "wk", "wv"), "w_kv": ("wk", "wv"), "w_gate_up": ("w_gate", "w_up")}
"""Matrices of fused projections -> what they stand for, of equal widths; the first that fits."""


def _fused(found: Leaves) -> Leaves:
    """Projections that read the same input as one array [D, parts, width]."""
    for name, parts in _FUSED.items():
        shapes = {found[part].shape for part in parts if part in found}
        if len(shapes) == 1 and set(parts) <= found.keys():
            (width, inner), *_ = shapes
            found = {n: leaf for n, leaf in found.items() if n not in parts}
            found[name] = Leaf((width, len(parts), inner))
    return found


def count_params(model: Architecture) -> int:
    """Elements of all parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves(model)))


def init_params(model: Architecture, key: jax.Array) -> Params:
    """Fresh parameters, fp32."""
    tree = leaves(model)
    drawn = [leaf for leaf in _in_order(tree) if leaf.fresh is Fresh.DRAWN]
    keys = iter(jax.random.split(key, len(drawn)))

    def made(node: Any) -> Any:
        if not isinstance(node, Leaf):
            return {name: made(inner) for name, inner in node.items()}
        if node.fresh is Fresh.DRAWN:
            return INIT_STD * jax.random.normal(next(keys), node.shape, jnp.float32)
        return jnp.full(node.shape, float(node.fresh is Fresh.ONE), jnp.float32)

    params: Params = made(tree)
    return params


def _in_order(node: Any) -> Iterator[Leaf]:
    """Leaves in the order in which they were written."""
    if isinstance(node, Leaf):
        yield node
    else:
        for inner in node.values():
            yield from _in_order(inner)


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


def linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    """`x` times the matrix w<name>, and the bias b<name> where there is one."""
    made = x @ layer[f"w{name}"].astype(x.dtype)
    return made + layer[f"b{name}"].astype(x.dtype) if f"b{name}" in layer else made


def _products(layer: Params, x: jax.Array, *names: str) -> list[jax.Array]:
    """`x` [B, T, D] under the projections `names`, of those that are fused as one product."""
    found = {name: linear(layer, name, x) for name in names if f"w{name}" in layer}
    for fused, parts in _FUSED.items():
        if fused in layer and {part[1:] for part in parts} <= set(names):
            wide = jnp.einsum("btd,dcn->btcn", x, layer[fused].astype(x.dtype))
            found |= {part[1:]: wide[:, :, i] for i, part in enumerate(parts)}
    return [found[name] for name in names]


def projected(
    part: Attention, layer: Params, x: jax.Array, given: Tables | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, K, G, E], keys and values [B, T, K, E], turned by their positions."""
    a, (b, t, _) = part, x.shape
    q, k, v = (y.reshape(b, t, -1, a.head_dim) for y in _products(layer, x, "q", "k", "v"))
    if a.head_norm:
        q, k = (normed(a.head_norm, layer, f"{n}_norm", y) for n, y in (("q", q), ("k", k)))
    if given:
        q, k = rotate(q, given), rotate(k, given)
    return q.reshape(b, t, a.kv_heads, a.heads // a.kv_heads, a.head_dim), k, v


def scored(part: Attention, spec: str, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores of queries and keys in fp32, scaled and capped."""
    scores = jnp.einsum(spec, q, k).astype(jnp.float32) * part.scale
    return capped(scores, part.softcap) if part.softcap else scores


def attention(
    part: Attention, layer: Params, x: jax.Array, given: Tables | None, how: How
) -> jax.Array:
    """Causal grouped-query attention with what `part` has besides."""
    return attended(part, layer, *projected(part, layer, x, given), how)


def attended(
    part: Attention, layer: Params, q: jax.Array, k: jax.Array, v: jax.Array, how: How
) -> jax.Array:
    """What every position takes from itself and those before it, from `projected`."""
    a, (b, t), dtype = part, q.shape[:2], q.dtype
    scores = hide_later(scored(a, "btkge,bske->bkgts", q, k))
    if 0 < a.window < t:
        scores = hide_earlier(scores, a.window)
    shares = softmax(scores, layer["sinks"] if a.sinks else None)
    weights = how.drop(shares.astype(dtype), Site.WEIGHTS)
    mixed = jnp.einsum("bkgts,bske->btkge", weights, v)
    return linear(layer, "o", mixed.reshape(b, t, -1))


def capped(x: jax.Array, most: float) -> jax.Array:
    """`x` bent towards at most `most` (Gemma 2)."""
    return jnp.tanh(x / most) * most


def softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
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
        return experts.fed(part, layer, x)
    if not part.gated:
        return linear(layer, "_down", activated(part.activation, linear(layer, "_up", x)))
    gate, up = _products(layer, x, "_gate", "_up")
    return linear(layer, "_down", activated(part.activation, gate) * up)


def run_layer(
    model: Architecture,
    part: Layer,
    given: TablesByRope,
    x: jax.Array,
    layer: Params,
    how: How,
) -> jax.Array:
    """One layer."""
    a = part.attention
    attend = partial(attention, a, layer, given=given[a.rope], how=how)
    return layer_around(model, part, attend, x, layer, how)


Attend = Callable[[jax.Array], jax.Array]
"""Attention of a layer: what a norm hands it [B, T, D] -> what is added to the residual."""


def layer_around(
    model: Architecture, part: Layer, attend: Attend, x: jax.Array, layer: Params, how: How
) -> jax.Array:
    """One layer around its attention."""
    norm = model.norm

    def added(x: jax.Array, made: jax.Array, name: str, site: Site) -> jax.Array:
        if part.placement == "sandwich":
            made = normed(norm, layer, name, made)
        made = how.drop(made, site) if model.drops_states else made
        return x + (made if model.residual_scale == 1 else made * model.residual_scale)

    made = attend(normed(norm, layer, "attn_norm", x))
    after = added(x, made, "attended_norm", Site.ATTENDED)
    read = x if part.placement == "parallel" else after
    fed = feed_forward(part.feed, layer, normed(norm, layer, "mlp_norm", read))
    return added(after, fed, "fed_norm", Site.FED)


def logits(model: Architecture, params: Params, tokens: jax.Array, how: How) -> jax.Array:
    """Next-token logits [B, T, V] in fp32."""
    given = tables_of(model, tokens.shape[1])
    return decoded(model, params, embedded(model, params, tokens, how), given, how)


def tables_of(model: Architecture, length: int) -> TablesByRope:
    """The tables of rotary positions of all layers."""
    return {rope: tables(rope, length) if rope else None for rope in ropes(model)}


def ropes(model: Architecture) -> list[Rope | None]:
    """The rotary positions that layers have."""
    return list(dict.fromkeys(layer.attention.rope for layer in model.layers))


def embedded(
    model: Architecture,
    params: Params,
    tokens: jax.Array,
    how: How,
    positions: jax.Array | None = None,
) -> jax.Array:
    """What enters the layers [B, T, D]; `positions` are rows of learned ones, else the first."""
    x = params["embed"].astype(how.precision.dtype)[tokens]
    if model.learned_positions:
        first = params["positions"][: tokens.shape[1]]
        x = x + (first if positions is None else positions).astype(x.dtype)
    x = x if model.embed_scale == 1 else x * model.embed_scale
    return how.drop(x, Site.STATES) if model.drops_states else x


def decoded(
    model: Architecture, params: Params, x: jax.Array, given: TablesByRope, how: How
) -> jax.Array:
    """Next-token logits [B, T, V] in fp32 of embedded tokens [B, T, D]."""
    first, period, last = _bound(model, params, given)
    return read_out(model, params, run_stack(first, period, last, x, how))


def read_out(model: Architecture, params: Params, x: jax.Array) -> jax.Array:
    """Logits [B, T, V] in fp32 of what leaves the layers."""
    m = model
    x = normed(m.norm, params, "final_norm", x)
    head = params["embed"].T if m.tied else params["lm_head"]
    made = (x @ head.astype(x.dtype)).astype(jnp.float32)
    if m.logit_divisor != 1:
        made = made / m.logit_divisor
    return capped(made, m.logit_softcap) if m.logit_softcap else made


def _bound(
    model: Architecture, params: Params, given: TablesByRope
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
        [(partial(run_layer, model, part, given), held[str(i)]) for i, part in enumerate(parts)]
        for parts, held in pairs
    ]


def loss(model: Architecture, params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
    """Mean next-token cross entropy, in nat."""
    return blocks.cross_entropy(
        EXACT, logits(model, params, batch["tokens"], how), batch["targets"]
    )


def train_task(model: Architecture, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for a sequence longer than positions."""
    task, visited = _task(model, options), as_visited(model)
    return task if visited == model else replace(task, model=_task(visited, options))


def _task(model: Architecture, options: TaskOptions) -> TrainTask:
    init = partial(init_params, model)
    return blocks.language_task(init, partial(loss, model), model.vocab, model.positions, options)


def as_visited(model: Architecture) -> Architecture:
    """The model as MFU counts it: every row visits as many experts as it chose, and no others.
    Empty seats are no work of the model, nor are groups of rows that are multiplied for every
    expert and masked.
    """

    def visited(layer: Layer) -> Layer:
        if not isinstance(layer.feed, Experts):
            return layer
        return replace(layer, feed=replace(layer.feed, routing="first"))

    return replace(model, layers=tuple(map(visited, model.layers)))
