"""A Mixtral-style decoder: Llama attention, and feed-forward experts behind a top-k router.

Rows go to experts by products with one-hot tensors, within each sequence and up to a capacity per
expert (GShard, Lepikhin et al. 2020): rows beyond it keep only their residual. `capacity_factor`
times the even share is the capacity; at `experts / chosen` no row is ever dropped. With `routing =
"sorted"` rows are sorted by expert and looked up instead; with
"grouped" the rows of all samples are one sorted list with a product per group, and no row is ever
dropped (MegaBlocks, Gale et al. 2022; MaxText spells it with `ragged_dot` too). Gradients of the
router come through the weights of the chosen experts; there is no auxiliary loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks, llama
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.layers import How, Params
from shardwright.orchestrator.models.llama import LlamaConfig

ROUTINGS = ("products", "sorted", "grouped")


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts a layer has, how many a row visits, and the room of each.

    Raises UsageError for a choice that cannot be made.
    """

    count: int
    chosen: int = 2
    capacity_factor: float = 1.25
    routing: str = "products"

    def __post_init__(self) -> None:
        room = self.capacity_factor > 0 and self.routing in ROUTINGS
        if not 1 <= self.chosen <= self.count or not room:
            raise UsageError(
                "SW_MODEL_CONFIG",
                "experts require 1 <= chosen <= count, room, and a routing of"
                f" {', '.join(ROUTINGS)}, got {self}",
            )

    def capacity(self, rows: int) -> int:
        """Rows one expert takes of a sequence of `rows`."""
        return math.ceil(rows * self.chosen * self.capacity_factor / self.count)


def init_params(config: LlamaConfig, experts: Experts, key: jax.Array) -> Params:
    """Llama's parameters with the feed-forward matrices once per expert, and a router."""
    outer, inner = jax.random.split(key)
    params = llama.init_params(config, outer)
    layers, width, ffn = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    shapes = {
        "router": (layers, width, experts.count),
        "w_gate": (layers, experts.count, width, ffn),
        "w_up": (layers, experts.count, width, ffn),
        "w_down": (layers, experts.count, ffn, width),
    }
    params["layers"] |= blocks.normal_leaves(inner, shapes)
    return params


def choices(experts: Experts, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of the chosen experts of every row, and which they are, both [B, T, K]."""
    scores = jax.nn.softmax(x.astype(jnp.float32) @ router.astype(jnp.float32))
    best, chosen = jax.lax.top_k(scores, experts.chosen)
    return best / jnp.sum(best, axis=-1, keepdims=True), chosen


def routes(experts: Experts, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where rows sit, [B, T, E, C] of 0 and 1, and the same times the weight of the expert.

    Earlier rows, and of one row the better expert, are seated first.
    """
    rows, room = x.shape[1], experts.capacity(x.shape[1])
    best, chosen = choices(experts, router, x)
    hits = jax.nn.one_hot(chosen, experts.count)  # [B, T, K, E]
    order = hits.reshape(x.shape[0], rows * experts.chosen, experts.count)
    seat = (jnp.cumsum(order, axis=1) - order).reshape(hits.shape)
    seats = (
        hits[..., None]
        * jax.nn.one_hot(jnp.sum(seat * hits, axis=-1).astype(jnp.int32), room)[..., None, :]
    )
    return jnp.sum(seats, axis=2), jnp.einsum("btkec,btk->btec", seats, best)


def feed_forward(experts: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The experts' blocks on the rows they take, added up per row."""
    dtype = x.dtype
    if experts.routing == "sorted":
        return _sorted_feed_forward(experts, layer, x)
    if experts.routing == "grouped":
        return _grouped_feed_forward(experts, layer, x)
    seats, shares = (t.astype(dtype) for t in routes(experts, layer["router"], x))
    given = _blocks(layer, jnp.einsum("btec,btd->ebcd", seats, x))
    return jnp.einsum("btec,ebcd->btd", shares, given)


def _blocks(layer: Params, taken: jax.Array) -> jax.Array:
    """Every expert's block on its rows, [E, B, C, D]."""
    dtype = taken.dtype
    gate = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", taken, layer["w_gate"].astype(dtype)))
    wide = gate * jnp.einsum("ebcd,edf->ebcf", taken, layer["w_up"].astype(dtype))
    return jnp.einsum("ebcf,efd->ebcd", wide, layer["w_down"].astype(dtype))


def _sorted_feed_forward(experts: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The same with rows sorted by expert: looked up into seats, and looked up from there."""
    best, chosen = choices(experts, layer["router"], x)
    source, filled, seat = jax.vmap(partial(_seats, experts))(chosen)
    taken = jax.vmap(lambda rows, at: rows[at])(x, source) * filled[..., None].astype(x.dtype)
    given = jnp.swapaxes(_blocks(layer, jnp.swapaxes(taken, 0, 1)), 0, 1)
    room = given.shape[2]
    back = jax.vmap(lambda rows, expert, at: rows[expert, at])(
        given, chosen, jnp.minimum(seat, room - 1)
    )
    shares = (best * (seat < room)).astype(x.dtype)
    return jnp.sum(back * shares[..., None], axis=2)


def _grouped_feed_forward(experts: Experts, layer: Params, x: jax.Array) -> jax.Array:
    """The same with the rows of all samples as one list, and one product per group of it."""
    rows = x.reshape(-1, x.shape[-1])
    best, chosen = choices(experts, layer["router"], rows)

    order, source, sizes = by_expert(chosen, experts.count)

    def product(taken: jax.Array, name: str) -> jax.Array:
        return jax.lax.ragged_dot(taken, layer[name].astype(taken.dtype), sizes)

    taken = rows[source]
    wide = jax.nn.silu(product(taken, "w_gate")) * product(taken, "w_up")
    shares = best.reshape(-1)[order].astype(x.dtype)
    given = product(wide, "w_down") * shares[:, None]
    return jnp.zeros_like(rows).at[source].add(given).reshape(x.shape)


def by_expert(chosen: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [N, K] of all rows: the choices sorted by expert, the row of each, and how
    many there are of every expert.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    source, sizes = order // chosen.shape[1], jnp.bincount(chosen.reshape(-1), length=count)
    return order, source, sizes


def _seats(experts: Experts, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For the choices [T, K] of one sequence: the row in every seat [E, C], whether there is one,
    and the seat of every choice [T, K].
    """
    rows, room = chosen.shape[0], experts.capacity(chosen.shape[0])
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(jax.nn.one_hot(chosen, experts.count, dtype=jnp.int32), axis=(0, 1))
    starts = jnp.cumsum(sizes) - sizes
    place = starts[:, None] + jnp.arange(room)
    source = order[jnp.minimum(place, rows * experts.chosen - 1)] // experts.chosen
    seat = jnp.argsort(order).reshape(chosen.shape) - starts[chosen]
    return source, jnp.arange(room) < sizes[:, None], seat


def train_task(config: LlamaConfig, experts: Experts, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for sizes that do not fit."""
    config.check()
    feed = partial(feed_forward, experts)

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        x = llama.embedded(params, batch["tokens"], how)
        tables = llama.rope_tables(config, options.seq_len)
        given = llama.decoded(config, params, x, tables, how, feed)
        return blocks.cross_entropy(how.precision, given, batch["targets"])

    positions = config.max_position_embeddings
    init = partial(init_params, config, experts)
    return blocks.language_task(init, loss, config.vocab_size, positions, options)
