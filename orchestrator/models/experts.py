"""Experts behind a router: which a row of a sequence visits, and what they make of it.

Rows go to experts in one of three ways. "grouped": the rows of all samples are one list sorted by
expert, with a product per group of it, and no row is ever dropped (MegaBlocks, Gale et al. 2022;
MaxText spells it with `ragged_dot` too). "products": by products with one-hot tensors, within each
sequence and up to a capacity per expert (GShard, Lepikhin et al. 2020); rows beyond it keep only
their residual. "sorted": the same with rows sorted by expert and looked up. `capacity_factor` times
the even share is the capacity; at `count / chosen` no row is dropped. Gradients of the router come
through the weights of the chosen experts; there is no auxiliary loss. ("first" is no way to train:
every row visits the same experts, as many as it chose, so that FLOPs can be counted.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.layers import Params

_SHARPNESS = 1.702  # of the sigmoid that gates in gpt-oss, as in the quick form of GELU
_LEAST = 1e-20  # of a sum of weights, as in DeepSeek-V3's own code


def fed(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The chosen experts' blocks of every row of `x` [B, T, D], added up."""
    ways = {"sorted": _looked_up, "products": _multiplied, "grouped": _grouped, "first": _first}
    return ways[part.routing](part, layer, x)


def choices(part: Experts, layer: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of the chosen experts of rows [..., D], and which they are, both [..., K]."""
    scores = rows.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
    if part.bias:
        scores = scores + layer["router_bias"]
    if part.router.startswith("sigmoid"):
        return _of_groups(part, layer, jax.nn.sigmoid(scores))
    if part.router == "top-k, softmax":
        best, chosen = jax.lax.top_k(scores, part.chosen)
        return jax.nn.softmax(best), chosen
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores), part.chosen)
    if part.router == "softmax, top-k":
        return best, chosen
    return best / jnp.sum(best, axis=-1, keepdims=True), chosen


def _of_groups(part: Experts, layer: Params, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choices by scores of their own [..., E], among the experts of the best groups."""
    order = scores + layer["router_shift"] if part.corrected else scores
    if part.groups > 1:
        groups = order.reshape(*order.shape[:-1], part.groups, -1)
        pairs = jnp.sum(jax.lax.top_k(groups, min(2, groups.shape[-1]))[0], axis=-1)
        _, seen = jax.lax.top_k(pairs, part.groups_chosen)
        is_seen = jnp.sum(jax.nn.one_hot(seen, part.groups), axis=-2)
        order = jnp.where(is_seen[..., None] > 0, groups, -jnp.inf).reshape(order.shape)
    _, chosen = jax.lax.top_k(order, part.chosen)
    best = jnp.take_along_axis(scores, chosen, axis=-1)
    if part.router == "sigmoid, top-k, normalised":
        best = best / (jnp.sum(best, axis=-1, keepdims=True) + _LEAST)
    return best * part.scale, chosen


def _grouped(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """With the rows of all samples as one list, and one product per group of it."""
    rows = x.reshape(-1, x.shape[-1])
    best, chosen = choices(part, layer, rows)

    order, source, sizes = by_expert(chosen, part.count)

    def product(given: jax.Array, name: str) -> jax.Array:
        made = jax.lax.ragged_dot(given, layer[f"w{name}"].astype(given.dtype), sizes)
        if not part.bias:
            return made
        return made + layer[f"b{name}"].astype(given.dtype)[chosen.reshape(-1)[order]]

    wide = _gated(part, partial(product, rows[source]))
    shares = best.reshape(-1)[order].astype(x.dtype)
    made = product(wide, "_down") * shares[:, None]
    return jnp.zeros_like(rows).at[source].add(made).reshape(x.shape)


def _gated(part: Experts, product: Callable[[str], jax.Array]) -> jax.Array:
    """What the products with the two matrices that read a row make together."""
    if not part.limit:
        return jax.nn.silu(product("_gate")) * product("_up")
    gate, up = product("_gate"), product("_up")
    gate, up = jnp.minimum(gate, part.limit), jnp.clip(up, -part.limit, part.limit)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * _SHARPNESS))


def _first(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """With the first experts for every row."""
    best, _ = choices(part, layer, x)

    def product(spec: str, given: jax.Array, name: str) -> jax.Array:
        made = jnp.einsum(spec, given, layer[f"w{name}"][: part.chosen].astype(given.dtype))
        return made + layer[f"b{name}"][: part.chosen].astype(given.dtype) if part.bias else made

    made = product("btkf,kfd->btkd", _gated(part, partial(product, "btd,kdf->btkf", x)), "_down")
    return jnp.einsum("btkd,btk->btd", made, best.astype(x.dtype))


def by_expert(chosen: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [N, K] of all rows: the choices sorted by expert, the row of each, and how
    many there are of every expert.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    source, sizes = order // chosen.shape[1], jnp.bincount(chosen.reshape(-1), length=count)
    return order, source, sizes


def capacity(part: Experts, rows: int) -> int:
    """Rows that one expert takes of a sequence of `rows`."""
    return math.ceil(rows * part.chosen * part.capacity_factor / part.count)


def routes(part: Experts, layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where rows sit, [B, T, E, C] of 0 and 1, and the same times the weight of the expert.

    Earlier rows, and of one row the better expert, are seated first.
    """
    rows, room = x.shape[1], capacity(part, x.shape[1])
    best, chosen = choices(part, layer, x)
    hits = jax.nn.one_hot(chosen, part.count)  # [B, T, K, E]
    order = hits.reshape(x.shape[0], rows * part.chosen, part.count)
    seat = (jnp.cumsum(order, axis=1) - order).reshape(hits.shape)
    seats = (
        hits[..., None]
        * jax.nn.one_hot(jnp.sum(seat * hits, axis=-1).astype(jnp.int32), room)[..., None, :]
    )
    return jnp.sum(seats, axis=2), jnp.einsum("btkec,btk->btec", seats, best)


def _multiplied(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """With rows seated by products with one-hot tensors."""
    seats, shares = (t.astype(x.dtype) for t in routes(part, layer, x))
    given = _blocks(part, layer, jnp.einsum("btec,btd->ebcd", seats, x))
    return jnp.einsum("btec,ebcd->btd", shares, given)


def _blocks(part: Experts, layer: Params, taken: jax.Array) -> jax.Array:
    """Every expert's block on its rows, [E, B, C, D]."""

    def product(spec: str, given: jax.Array, name: str) -> jax.Array:
        made = jnp.einsum(spec, given, layer[f"w{name}"].astype(given.dtype))
        bias = layer[f"b{name}"].astype(given.dtype)[:, None, None] if part.bias else None
        return made if bias is None else made + bias

    wide = _gated(part, partial(product, "ebcd,edf->ebcf", taken))
    return product("ebcf,efd->ebcd", wide, "_down")


def _looked_up(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The same with rows sorted by expert: looked up into seats, and looked up from there."""
    best, chosen = choices(part, layer, x)
    source, filled, seat = jax.vmap(partial(_seats, part))(chosen)
    taken = jax.vmap(lambda rows, at: rows[at])(x, source) * filled[..., None].astype(x.dtype)
    given = jnp.swapaxes(_blocks(part, layer, jnp.swapaxes(taken, 0, 1)), 0, 1)
    room = given.shape[2]
    back = jax.vmap(lambda rows, expert, at: rows[expert, at])(
        given, chosen, jnp.minimum(seat, room - 1)
    )
    shares = (best * (seat < room)).astype(x.dtype)
    return jnp.sum(back * shares[..., None], axis=2)


def _seats(part: Experts, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [T, K] of one sequence: the row in every seat [E, C], whether there is one,
    and the seat of every choice [T, K].
    """
    rows, room = chosen.shape[0], capacity(part, chosen.shape[0])
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(jax.nn.one_hot(chosen, part.count, dtype=jnp.int32), axis=(0, 1))
    starts = jnp.cumsum(sizes) - sizes
    place = starts[:, None] + jnp.arange(room)
    source = order[jnp.minimum(place, rows * part.chosen - 1)] // part.chosen
    seat = jnp.argsort(order).reshape(chosen.shape) - starts[chosen]
    return source, jnp.arange(room) < sizes[:, None], seat
