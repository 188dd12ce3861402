"""Models that move data by index: mixtures of experts, a graph network, bags of words.

Each function returns a `TrainTask`; `FORWARD` holds the forward function of each, loss included.
Sizes are small and mostly odd. No sharding annotation, no choice made for our compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.compiler.frontend.task import TrainTask

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]

WIDTH, HIDDEN, EXPERTS, CHOSEN, SYMBOLS, LENGTH = 24, 20, 6, 2, 37, 12
NODES, EDGES, FEATURES = 11, 29, 5
WORDS, BAG = 53, 9


def _task(
    name: str, shapes: dict[str, tuple[int, ...]], batch: dict[str, tuple[tuple[int, ...], int]]
) -> TrainTask:
    """A task over `FORWARD[name]`; `batch` gives per array the shape of a sample and, for integers,
    how many values there are (0: floats).
    """
    loss, chain = FORWARD[name], optax.adam(3e-3)

    def init(key: jax.Array) -> tuple[Params, Any]:
        keys = jax.random.split(key, len(shapes))
        params = {
            n: 0.3 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }
        return params, chain.init(params)

    def step(params: Params, opt_state: Any, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def types(n: int) -> dict[str, jax.ShapeDtypeStruct]:
        kinds = {k: jnp.int32 if top else jnp.float32 for k, (_, top) in batch.items()}
        return {k: jax.ShapeDtypeStruct((n, *s), kinds[k]) for k, (s, _) in batch.items()}

    def batches(seed: int, n: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        while True:
            yield {
                k: rng.integers(0, top, (n, *s)).astype(np.int32)
                if top
                else rng.standard_normal((n, *s)).astype(np.float32)
                for k, (s, top) in batch.items()
            }

    return TrainTask(step=step, init=init, batch=types, batches=batches, name=name)


def _cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def _attention(z: Params, u: jax.Array) -> jax.Array:
    """One causal head."""
    ask, tell, give = jnp.split(u @ z["qkv"], 3, axis=-1)
    affinity = jnp.einsum("npr,nqr->npq", ask, tell) / WIDTH**0.5
    past = jnp.tril(jnp.ones(affinity.shape[1:], bool))
    shares = jax.nn.softmax(jnp.where(past, affinity, -jnp.inf))
    return u + jnp.einsum("npq,nqr->npr", shares, give) @ z["out"]


def _router(z: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers of the chosen experts of every row."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(rows @ z["router"]), CHOSEN)
    return weights / weights.sum(-1, keepdims=True), chosen


def _sorted_experts(z: Params, rows: jax.Array) -> jax.Array:
    """Dropless: rows are sorted by expert, multiplied group by group, and added back."""
    weights, chosen = _router(z, rows)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    source = order // CHOSEN
    sizes = jnp.bincount(expert, length=EXPERTS)
    wide = jax.nn.silu(jax.lax.ragged_dot(rows[source], z["up"], sizes))
    given = jax.lax.ragged_dot(wide, z["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[source].add(given)


def _dispatched_experts(z: Params, rows: jax.Array) -> jax.Array:
    """Every expert takes at most `room` rows, placed by one-hot products."""
    weights, chosen = _router(z, rows)
    room = rows.shape[0]
    hits = jax.nn.one_hot(chosen.reshape(-1), EXPERTS)
    seat = ((jnp.cumsum(hits, axis=0) - 1.0) * hits).sum(-1).astype(jnp.int32)
    place = hits[:, :, None] * jax.nn.one_hot(seat, room)[:, None, :]
    place = place.reshape(-1, CHOSEN, EXPERTS, room)
    seated = jnp.einsum("tker,td->erd", place, rows)
    wide = jax.nn.silu(jnp.einsum("erd,edh->erh", seated, z["up"]))
    given = jnp.einsum("erh,ehd->erd", wide, z["down"])
    return jnp.einsum("tker,tk,erd->td", place, weights, given)


def _decoder(experts: Callable[[Params, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def loss(z: Params, batch: Batch) -> jax.Array:
        pages = batch["pages"]
        u = _attention(z, z["embed"][pages[:, :-1]])
        rows = u.reshape(-1, WIDTH)
        u = (rows + experts(z, rows)).reshape(u.shape)
        return _cross_entropy(u @ z["embed"].T, pages[:, 1:])

    return loss


def graph_net_loss(z: Params, batch: Batch) -> jax.Array:
    """Two rounds of messages along edges; the largest node state is read out per graph."""

    def one(nodes: jax.Array, ends: jax.Array) -> jax.Array:
        sender, receiver = ends[:, 0], ends[:, 1]
        state = nodes @ z["enter"]
        degree = jax.ops.segment_sum(jnp.ones(EDGES), receiver, NODES)
        for _ in range(2):
            message = jax.nn.relu(state[sender] @ z["send"] + state[receiver] @ z["meet"])
            summed = jax.ops.segment_sum(message, receiver, NODES)
            state = jnp.tanh(state + summed / (1.0 + degree)[:, None] @ z["keep"])
        return jnp.max(state, axis=0) @ z["read"]

    scores = jax.vmap(one)(batch["nodes"], batch["ends"])
    return _cross_entropy(scores, batch["label"])


def bag_of_words_loss(z: Params, batch: Batch) -> jax.Array:
    """Mean and maximum of the vectors of a bag; the most frequent first word is left out."""
    vectors = z["lookup"][batch["words"]]
    frequent = jnp.argmax(jnp.bincount(batch["words"][:, 0], length=WORDS))
    mask = (batch["words"] != frequent)[..., None]
    mean = jnp.sum(vectors * mask, axis=1) / (1.0 + mask.sum(1))
    middle = jnp.median(vectors, axis=1)
    scores = jnp.concatenate([mean, vectors.max(1), middle], -1) @ z["read"]
    return _cross_entropy(scores, batch["label"])


FORWARD: dict[str, Callable[[Params, Batch], jax.Array]] = {
    "moe_sorted": _decoder(_sorted_experts),
    "moe_dispatched": _decoder(_dispatched_experts),
    "graph_net": graph_net_loss,
    "bag_of_words": bag_of_words_loss,
}

_DECODER: dict[str, tuple[int, ...]] = {
    "embed": (SYMBOLS, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "router": (WIDTH, EXPERTS),
    "up": (EXPERTS, WIDTH, HIDDEN),
    "down": (EXPERTS, HIDDEN, WIDTH),
}


def moe_sorted() -> TrainTask:
    """A decoder whose experts take rows sorted by expert."""
    return _task("moe_sorted", _DECODER, {"pages": ((LENGTH + 1,), SYMBOLS)})


def moe_dispatched() -> TrainTask:
    """A decoder whose experts take rows by one-hot products."""
    return _task("moe_dispatched", _DECODER, {"pages": ((LENGTH + 1,), SYMBOLS)})


def graph_net() -> TrainTask:
    """Messages along the edges of small graphs."""
    shapes = {
        "enter": (FEATURES, WIDTH),
        "send": (WIDTH, WIDTH),
        "meet": (WIDTH, WIDTH),
        "keep": (WIDTH, WIDTH),
        "read": (WIDTH, 3),
    }
    batch = {"nodes": ((NODES, FEATURES), 0), "ends": ((EDGES, 2), NODES), "label": ((), 3)}
    return _task("graph_net", shapes, batch)


def bag_of_words() -> TrainTask:
    """A classifier of bags of words."""
    shapes = {"lookup": (WORDS, WIDTH), "read": (3 * WIDTH, 4)}
    return _task("bag_of_words", shapes, {"words": ((BAG,), WORDS), "label": ((), 4)})


TASKS: dict[str, Callable[[], TrainTask]] = {
    "moe_sorted": moe_sorted,
    "moe_dispatched": moe_dispatched,
    "graph_net": graph_net,
    "bag_of_words": bag_of_words,
}
