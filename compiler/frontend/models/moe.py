"""A Mixtral-style decoder: Llama attention, and feed-forward experts behind a top-k router.

Rows go to experts by products with one-hot tensors, within each sequence and up to a capacity per
expert (GShard, Lepikhin et al. 2020): rows beyond it keep only their residual. `capacity_factor`
times the even share is the capacity; at `experts / chosen` no row is ever dropped. Gradients of the
router come through the weights of the chosen experts; there is no auxiliary loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from compiler.diagnostics import UsageError
from compiler.frontend.models import blocks, llama
from compiler.frontend.models.blocks import Params, Precision, TaskOptions
from compiler.frontend.models.llama import LlamaConfig
from compiler.frontend.task import TrainTask


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts a layer has, how many a row visits, and the room of each.

    Raises UsageError for a choice that cannot be made.
    """

    count: int
    chosen: int = 2
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count or self.capacity_factor <= 0:
            raise UsageError(
                "SW_MODEL_CONFIG",
                f"experts require 1 <= chosen <= count and room, got {self}",
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
    params["layers"] |= blocks.normal_leaves(inner, shapes, jnp.float32)
    return params


def routes(experts: Experts, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where rows sit, [B, T, E, C] of 0 and 1, and the same times the weight of the expert.

    Earlier rows, and of one row the better expert, are seated first.
    """
    rows, room = x.shape[1], experts.capacity(x.shape[1])
    scores = jax.nn.softmax(x.astype(jnp.float32) @ router.astype(jnp.float32))
    best, chosen = jax.lax.top_k(scores, experts.chosen)  # [B, T, K]
    best = best / jnp.sum(best, axis=-1, keepdims=True)
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
    seats, shares = (t.astype(dtype) for t in routes(experts, layer["router"], x))
    taken = jnp.einsum("btec,btd->ebcd", seats, x)
    gate = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", taken, layer["w_gate"].astype(dtype)))
    wide = gate * jnp.einsum("ebcd,edf->ebcf", taken, layer["w_up"].astype(dtype))
    given = jnp.einsum("ebcf,efd->ebcd", wide, layer["w_down"].astype(dtype))
    return jnp.einsum("btec,ebcd->btd", shares, given)


def train_task(config: LlamaConfig, experts: Experts, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for sizes that do not fit."""
    config.check()
    tables = partial(llama.rope_tables, config, options.seq_len)

    def layer(tables: tuple[jax.Array, jax.Array], x: jax.Array, z: Params) -> jax.Array:
        normed = llama.rms_norm(x, z["attn_norm"], config.rms_norm_eps)
        x = x + llama.attention(config, z, normed, tables)
        return x + feed_forward(experts, z, llama.rms_norm(x, z["mlp_norm"], config.rms_norm_eps))

    def loss(params: Params, batch: dict[str, jax.Array], precision: Precision) -> jax.Array:
        x = params["embed"].astype(precision.dtype)[batch["tokens"]]
        x = blocks.run_layers(partial(layer, tables()), x, params["layers"], options.remat)
        x = llama.rms_norm(x, params["final_norm"], config.rms_norm_eps)
        given = x @ params["lm_head"].astype(x.dtype)
        return blocks.cross_entropy(given.astype(jnp.float32), batch["targets"])

    def init(key: jax.Array, precision: Precision) -> Params:
        params = init_params(config, experts, key)
        stored: Params = jax.tree.map(lambda leaf: leaf.astype(precision.param_dtype), params)
        return stored

    positions = config.max_position_embeddings
    return blocks.language_task(init, loss, config.vocab_size, positions, options)
