"""The parameters of an architecture: every array by name, its shape and what it holds first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.orchestrator.models.architecture import (
    Architecture,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Norm,
    Relative,
    stacked,
)
from shardwright.orchestrator.models.layers import INIT_STD, Params

_UNIT_NORMS = ("rms", "layer")
"""Norms whose weight is their scale; that of the others is what is added to one."""
CROSSED = "cross_"
"""In front of the names of attention to the encoder."""


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
    trained: bool = True

    def stacked(self, size: int) -> Leaf:
        """So many of it as one array."""
        return replace(self, shape=(size, *self.shape))


Leaves = dict[str, Leaf]


def leaves(model: Architecture) -> dict[str, Any]:
    """Every array of parameters, as a tree."""
    m = model
    outer: dict[str, Any] = {}
    if m.patches:
        outer |= {"w_patches": Leaf((m.patches.pixels, m.hidden)), "token": Leaf((1, m.hidden))}
        outer["b_patches"] = Leaf((m.hidden,), Fresh.ZERO)
    else:
        outer["embed"] = Leaf((m.vocab, m.hidden))
    if m.learned_positions:
        outer["positions"] = Leaf((m.positions, m.hidden))
    if m.segments:
        outer["segments"] = Leaf((m.segments, m.hidden))
    if m.embed_norm:
        outer |= _norm(m.norm, "embed_norm", m.hidden)
    outer |= _stack(m, m.layers)
    if m.encoder:
        outer["encoder"] = _stack(m, m.encoder)
    if m.transform:
        outer |= {"w_transform": Leaf((m.hidden, m.hidden))}
        outer |= {"b_transform": Leaf((m.hidden,), Fresh.ZERO)}
        outer |= _norm(m.norm, "transform_norm", m.hidden)
    if not m.tied:
        outer["lm_head"] = Leaf((m.hidden, m.vocab))
    if m.transform or m.patches:
        outer["b_head"] = Leaf((m.vocab,), Fresh.ZERO)
    return outer


def _stack(model: Architecture, layers: tuple[Layer, ...]) -> dict[str, Any]:
    """Arrays of a stack of layers, with those that all of them share."""
    stack = stacked(layers)
    found: dict[str, Any] = {}
    period: Sequence[Leaves] = [
        {name: leaf.stacked(stack.times) for name, leaf in layer_leaves(model, layer).items()}
        for layer in stack.period
    ]
    found["layers"] = period[0] if len(period) == 1 else _numbered(period)
    for name, some in (("first", stack.first), ("last", stack.last)):
        if some:
            found[name] = _numbered([layer_leaves(model, layer) for layer in some])
    relative = relative_of(layers)
    if relative:
        part, heads = relative
        found["relative"] = Leaf((part.buckets, heads))
    return found | (_norm(model.norm, "final_norm", model.hidden) if model.final_norm else {})


def relative_of(layers: tuple[Layer, ...]) -> tuple[Relative, int] | None:
    """The scores by distance that layers share, if there are any, and their heads."""
    part = layers[0].attention
    return (part.relative, part.heads) if isinstance(part, Attention) and part.relative else None


def _numbered(parts: Sequence[Leaves]) -> dict[str, Leaves]:
    return {str(number): part for number, part in enumerate(parts)}


def layer_leaves(model: Architecture, layer: Layer) -> Leaves:
    """One layer's arrays."""
    width, feed = model.hidden, _feed(layer.feed, model.hidden)
    projections, rest = _attention(layer.attention, width)
    found = projections | {name: feed.pop(name) for name in ("w_gate", "w_up") if name in feed}
    found |= {"wo": rest.pop("wo")} | feed
    if model.fused:
        found = _fused(found)
    found |= rest
    norms = ["attn_norm", "mlp_norm"]
    if layer.placement == "sandwich":
        norms += ["attended_norm", "fed_norm"]
    if layer.crossed:
        crossed, others = _attention(layer.crossed, width)
        found |= {CROSSED + name: leaf for name, leaf in (crossed | others).items()}
        norms.append(f"{CROSSED}norm")
    for name in norms:
        found |= _norm(model.norm, name, width)
    return found


def _attention(part: Attention | LatentAttention, width: int) -> tuple[Leaves, Leaves]:
    """The projections of attention's input, and its other arrays."""
    a = part
    if isinstance(a, LatentAttention):
        return _latent(a, width)
    inner, kv = (n * a.head_dim for n in (a.heads, a.kv_heads))
    sizes = {"q": inner, "k": kv, "v": kv}
    rest = {"wo": Leaf((inner, width))}
    if a.bias:
        rest |= {f"b{name}": Leaf((size,), Fresh.ZERO) for name, size in sizes.items()}
    if a.out_bias:
        rest["bo"] = Leaf((width,), Fresh.ZERO)
    if a.head_norm:
        rest |= _norm(a.head_norm, "q_norm", a.head_dim) | _norm(a.head_norm, "k_norm", a.head_dim)
    if a.sinks:
        rest["sinks"] = Leaf((a.heads,), Fresh.ZERO)
    return {f"w{name}": Leaf((width, size)) for name, size in sizes.items()}, rest


def _latent(a: LatentAttention, width: int) -> tuple[Leaves, Leaves]:
    query = a.heads * (a.plain_dim + a.turned_dim)
    narrow = {"_kv_down": a.rank + a.turned_dim}
    narrow |= {"_q_down": a.query_rank} if a.query_rank else {}
    found = {f"w{name}": Leaf((width, size)) for name, size in narrow.items()}
    rest = {"wo": Leaf((a.heads * a.value_dim, width))}
    rest["w_kv"] = Leaf((a.rank, a.heads * (a.plain_dim + a.value_dim)))
    rest |= _norm(a.norm, "kv_norm", a.rank)
    if a.query_rank:
        rest["wq"] = Leaf((a.query_rank, query))
        rest |= _norm(a.norm, "q_norm", a.query_rank)
    else:
        found["wq"] = Leaf((width, query))
    if a.bias:
        rest |= {f"b{name}": Leaf((size,), Fresh.ZERO) for name, size in narrow.items()}
        rest["bo"] = Leaf((width,), Fresh.ZERO)
    return found, rest


def _norm(norm: Norm, name: str, width: int) -> Leaves:
    fresh = Fresh.ONE if norm.kind in _UNIT_NORMS else Fresh.ZERO
    bias = {f"{name}_bias": Leaf((width,), Fresh.ZERO)} if norm.kind == "layer" else {}
    return {name: Leaf((width,), fresh)} | bias


def _feed(feed: Mlp | Experts, width: int) -> Leaves:
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
        if feed.corrected:
            found["router_shift"] = Leaf((feed.count,), Fresh.ZERO, trained=False)
        if feed.shared:
            found |= {f"w_shared_{n}": Leaf((width, feed.shared)) for n in ("gate", "up")}
            found["w_shared_down"] = Leaf((feed.shared, width))
    return found


FUSED = {"w_qkv": ("wq", "wk", "wv"), "w_kv": ("wk", "wv"), "w_gate_up": ("w_gate", "w_up")}
"""Matrices of fused projections -> what they stand for, of equal widths; the first that fits."""


def _fused(found: Leaves) -> Leaves:
    """Projections that read the same input as one array [D, parts, width]."""
    for name, parts in FUSED.items():
        shapes = {found[part].shape for part in parts if part in found}
        if len(shapes) == 1 and set(parts) <= found.keys():
            (width, inner), *_ = shapes
            found = {n: leaf for n, leaf in found.items() if n not in parts}
            found[name] = Leaf((width, len(parts), inner))
    return found


def count_params(model: Architecture) -> int:
    """Elements of all parameters that are trained."""
    found = jax.tree.leaves(leaves(model))
    return sum(math.prod(leaf.shape) for leaf in found if leaf.trained)


def trained(model: Architecture) -> dict[str, Any] | None:
    """Which parameters are trained, as their tree; None: all are."""
    found: dict[str, Any] = jax.tree.map(lambda leaf: leaf.trained, leaves(model))
    return None if all(jax.tree.leaves(found)) else found


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
