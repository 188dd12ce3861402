"""Experts behind a router: which a row of a sequence visits, and what they make of it.

Rows go to experts in one of four ways. Within their sequence: "blocks": sorted by expert and padded
to blocks that each have one expert, so that no row is ever dropped and few are added (MegaBlocks,
Gale et al. 2022); "products": by products with one-hot tensors, up to a capacity per expert, beyond
which rows keep only their residual (GShard, Lepikhin et al. 2020); "sorted": the same with rows
sorted by expert and looked up. `capacity_factor` times the even share is the capacity; at
`count / chosen` no row is dropped. "grouped": the rows of all samples as one list sorted by expert,
with a product per group of it, as MaxText spells it with `ragged_dot`; every expert then multiplies
every row, so that no config takes it. Gradients of the router come through the weights of the
chosen experts; there is no auxiliary loss. ("first" is no way to train: every row visits the same
experts, as many as it chose, so that FLOPs can be counted.)
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
    ways = {
        "blocks": _in_blocks,
        "sorted": _looked_up,
        "products": _multiplied,
        "grouped": _grouped,
        "first": _first,
    }
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


def _in_blocks(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """With the rows of each sequence sorted by expert, in blocks of one expert's."""
    rows = x.shape[1]
    if part.count * rows <= most_blocks(part, rows) * part.block:
        return _in_seats(part, layer, x, rows)  # as many seats as rows are fewer
    best, chosen = choices(part, layer, x)
    choice, owner, place = jax.vmap(partial(_runs, part))(chosen)

    def looked_up(given: jax.Array, at: jax.Array) -> jax.Array:
        return jax.vmap(lambda one, i: one.at[i].get(mode="promise_in_bounds"))(given, at)

    def product(given: jax.Array, name: str, shares: jax.Array | float = 1) -> jax.Array:
        made = block_products(given, layer[f"w{name}"].astype(given.dtype), owner)
        if not part.bias:
            return made
        bias = layer[f"b{name}"].astype(given.dtype).at[owner].get(mode="promise_in_bounds")
        return made + bias[:, :, None] * shares

    taken = looked_up(x, choice // part.chosen)
    shares = looked_up(best.reshape(len(x), -1).astype(x.dtype), choice)[..., None]
    # Weighted in front of the last product, so that no gradient needs what it makes.
    made = product(_gated(part, partial(product, taken)) * shares, "_down", shares)
    return jnp.sum(looked_up(made.reshape(len(x), -1, x.shape[2]), place), axis=2)


def most_blocks(part: Experts, rows: int) -> int:
    """How many blocks the choices of a sequence of `rows` can need: the last one of every expert
    that is visited may hold a single row.
    """
    choices = rows * part.chosen
    return (choices + min(part.count, choices) * (part.block - 1)) // part.block


def _runs(part: Experts, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [T, K] of one sequence: the choice in every place of the blocks [N, b], the
    expert of every block [N], and the place of every choice [T, K], blocks one after the other.

    Places that are left over hold some choice again; nobody reads what becomes of it.
    """
    order, sizes, starts = _by_expert(part, chosen)
    ends = jnp.cumsum((sizes + part.block - 1) // part.block)
    firsts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    number = jnp.arange(most_blocks(part, len(chosen)), dtype=ends.dtype)
    owner = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1, dtype=ends.dtype), part.count - 1)
    at = (starts - firsts * part.block)[owner] + number * part.block
    at = jnp.minimum(at[:, None] + jnp.arange(part.block, dtype=ends.dtype), chosen.size - 1)
    place = firsts[chosen] * part.block + _number(order, starts, chosen)
    return order[at], owner.astype(jnp.uint32), place


def _products(rows: jax.Array, weights: jax.Array, owner: jax.Array) -> jax.Array:
    """Blocks of rows [B, N, b, D] times the matrices [E, D, F] of their experts [B, N].

    Block by block, so that a matrix is read where it lies. The gradient of the matrices adds up
    in the order of blocks, in the type of the matrices, for each of the B sequences by itself: a
    sum over them in every step of the loop would be one over cores.
    """

    def one(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        given, expert = block
        return None, jnp.einsum("btd,bdf->btf", given, _of(weights, expert))

    _, made = jax.lax.scan(one, None, _by_block(rows, owner))
    return jnp.swapaxes(made, 0, 1)


_Kept = tuple[jax.Array, jax.Array, jax.Array]


def _products_forward(
    rows: jax.Array, weights: jax.Array, owner: jax.Array
) -> tuple[jax.Array, _Kept]:
    return _products(rows, weights, owner), (rows, weights, owner)


def _products_backward(kept: _Kept, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, owner = kept

    def one(totals: jax.Array, block: _Kept) -> tuple[jax.Array, jax.Array]:
        given, wanted, expert = block
        more = jnp.einsum("btd,btf->bdf", given, wanted)
        totals = jax.vmap(_added)(totals, more, expert)
        return totals, jnp.einsum("btf,bdf->btd", wanted, _of(weights, expert))

    nothing = jnp.zeros((len(rows), *weights.shape), weights.dtype)
    totals, made = jax.lax.scan(one, nothing, _by_block(rows, gradient, owner))
    total = jax.lax.reduce(totals, jnp.zeros((), totals.dtype), jax.lax.add, (0,))
    return jnp.swapaxes(made, 0, 1), total, None


block_products = jax.custom_vjp(_products)
block_products.defvjp(_products_forward, _products_backward)


def _by_block(*values: jax.Array) -> tuple[jax.Array, ...]:
    """[B, N, ...] as [N, B, ...]."""
    return tuple(jnp.swapaxes(value, 0, 1) for value in values)


def _of(weights: jax.Array, expert: jax.Array) -> jax.Array:
    return weights.at[expert].get(mode="promise_in_bounds")


def _added(totals: jax.Array, more: jax.Array, expert: jax.Array) -> jax.Array:
    """`totals` [E, D, F] with `more` added to the matrix of an expert."""
    sums = jax.lax.dynamic_index_in_dim(totals, expert, keepdims=False) + more
    return jax.lax.dynamic_update_index_in_dim(totals, sums, expert, 0)


def _grouped(part: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """With the rows of all samples as one list, and one product per group of it."""
    rows = x.reshape(-1, x.shape[-1])
    best, chosen = choices(part, layer, rows)

    order = jnp.argsort(chosen.reshape(-1), stable=True)
    source, sizes = order // part.chosen, jnp.bincount(chosen.reshape(-1), length=part.count)

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


def capacity(part: Experts, rows: int) -> int:
    """Rows that one expert takes of a sequence of `rows`."""
    return min(rows, math.ceil(rows * part.chosen * part.capacity_factor / part.count))


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
    return _in_seats(part, layer, x, capacity(part, x.shape[1]))


def _in_seats(part: Experts, layer: Params, x: jax.Array, room: int) -> jax.Array:
    """With the first `room` rows of a sequence that visit an expert."""
    best, chosen = choices(part, layer, x)
    source, filled, seat = jax.vmap(partial(_seats, part, room))(chosen)
    taken = jax.vmap(lambda rows, at: rows[at])(x, source) * filled[..., None].astype(x.dtype)
    given = jnp.swapaxes(_blocks(part, layer, jnp.swapaxes(taken, 0, 1)), 0, 1)
    back = jax.vmap(lambda rows, expert, at: rows[expert, at])(
        given, chosen, jnp.minimum(seat, room - 1)
    )
    shares = (best * (seat < room)).astype(x.dtype)
    return jnp.sum(back * shares[..., None], axis=2)


def _seats(part: Experts, room: int, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [T, K] of one sequence: the row in every seat [E, C], whether there is one,
    and the seat of every choice [T, K].
    """
    order, sizes, starts = _by_expert(part, chosen)
    place = starts[:, None] + jnp.arange(room)
    source = order[jnp.minimum(place, chosen.size - 1)] // part.chosen
    seat = _number(order, starts, chosen)
    return source, jnp.arange(room) < sizes[:, None], seat


def _by_expert(part: Experts, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The choices [T, K] of one sequence sorted by expert, and of every expert how many there are
    and where they start.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(jax.nn.one_hot(chosen, part.count, dtype=jnp.int32), axis=(0, 1))
    return order, sizes, jnp.cumsum(sizes) - sizes


def _number(order: jax.Array, starts: jax.Array, chosen: jax.Array) -> jax.Array:
    """The number of every choice [T, K] among those of its expert."""
    return jnp.argsort(order).reshape(chosen.shape) - starts[chosen]
