"""Steps with parts that are written per rank, by `shard_map` and collectives of its own: four
programs of `tests/corpus/programs.toml`, and experts whose rows are exchanged in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from shardwright.compiler.frontend.task import TrainTask

RANKS, WIDTH, TIME, HEADS, EXPERTS = 8, 16, 16, 2, 8
P = PartitionSpec
Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def mesh(axis: str) -> AbstractMesh:
    return AbstractMesh((RANKS,), (axis,))


def manual(axis: str, body: Callable[..., Any], ins: Any, outs: Any, **given: Any) -> Any:
    return jax.shard_map(body, mesh=mesh(axis), in_specs=ins, out_specs=outs, **given)


def ring_attention(params: Params, batch: Batch) -> jax.Array:
    """Queries stay, keys and values go round; a softmax that is online."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        turn = [(r, (r + 1) % RANKS) for r in range(RANKS)]
        here, rows = lax.axis_index("cp"), q.shape[1]

        def fold(carry: Any, number: jax.Array) -> Any:
            top, total, out, k, v = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            place = jnp.arange(rows)
            other = (here - number) % RANKS
            seen = here * rows + place[:, None] >= other * rows + place[None]
            scores = jnp.where(seen, scores, -1e30)
            higher = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - higher[..., None])
            scale = jnp.exp(top - higher)
            total = total * scale + weights.sum(-1)
            out = out * scale[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            k, v = (lax.ppermute(x, "cp", turn) for x in (k, v))
            return (higher, total, out, k, v), None

        zero = lax.pcast(jnp.zeros((q.shape[0], HEADS, rows)), "cp", to="varying")
        first = (zero - 1e30, zero, jnp.zeros_like(q.transpose(0, 2, 1, 3)), k, v)
        (_, total, out, _, _), _ = lax.scan(fold, first, jnp.arange(RANKS))
        return (out / total[..., None]).transpose(0, 2, 1, 3)

    x = batch["x"]
    heads = [(x @ params[n]).reshape(*x.shape[:2], HEADS, -1) for n in ("q", "k", "v")]
    over = P(None, "cp")
    out = manual("cp", attend, (over, over, over), over)(*heads)
    return jnp.mean((out.reshape(x.shape) @ params["o"] - batch["y"]) ** 2)


def moe_all_to_all(params: Params, batch: Batch) -> jax.Array:
    """Every rank has an expert; tokens go there and come back."""

    def route(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ router)
        chosen = jnp.argmax(gates, -1)
        sent = jax.nn.one_hot(chosen, EXPERTS).T[..., None] * x
        there = lax.all_to_all(sent, "ep", 0, 0, tiled=True)
        done = jax.nn.gelu(there @ up[0]) @ down[0]
        back = lax.all_to_all(done, "ep", 0, 0, tiled=True)
        return back.sum(0) * gates.max(-1, keepdims=True)

    x = batch["x"].reshape(-1, WIDTH)
    specs = (P("ep"), P(), P("ep"), P("ep"))
    out = manual("ep", route, specs, P("ep"))(*(x, *(params[n] for n in ("router", "up", "down"))))
    return jnp.mean((out.reshape(batch["y"].shape) - batch["y"]) ** 2)


def moe_ragged(params: Params, batch: Batch) -> jax.Array:
    """Every rank has an expert; its rows go there in one run and come back, none is dropped and
    none is sent that is not there."""

    def route(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ router)
        chosen = jnp.argmax(gates, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        every = lax.all_gather(sizes, "ep")  # [source, target]
        here = lax.axis_index("ep")
        starts = jnp.cumsum(sizes) - sizes
        before = jnp.cumsum(every, axis=0) - every  # rows of lower ranks at each target
        room = jnp.zeros((RANKS * x.shape[0], WIDTH), x.dtype)
        got = every[:, here]
        there = lax.ragged_all_to_all(
            x[order], room, starts, sizes, before[here], got, axis_name="ep"
        )
        done = jax.nn.gelu(there @ up[0]) @ down[0]
        theirs = (jnp.cumsum(every, axis=1) - every)[:, here]
        back = lax.ragged_all_to_all(
            done, jnp.zeros_like(x), before[:, here], got, theirs, sizes, axis_name="ep"
        )
        return jnp.zeros_like(x).at[order].set(back) * gates.max(-1, keepdims=True)

    x = batch["x"].reshape(-1, WIDTH)
    specs = (P("ep"), P(), P("ep"), P("ep"))
    out = manual("ep", route, specs, P("ep"))(*(x, *(params[n] for n in ("router", "up", "down"))))
    return jnp.mean((out.reshape(batch["y"].shape) - batch["y"]) ** 2)


def all_experts(params: Params, batch: Batch) -> jax.Array:
    """What `moe_ragged` means: every row through every expert, one of them kept."""
    x = batch["x"].reshape(-1, WIDTH)
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jnp.argmax(gates, -1)
    wide = jax.nn.gelu(jnp.einsum("rd,edf->ref", x, params["up"]))
    every = jnp.einsum("ref,efd->red", wide, params["down"])
    kept = jnp.take_along_axis(every, chosen[:, None, None], axis=1)[:, 0]
    out = kept * gates.max(-1, keepdims=True)
    return jnp.mean((out.reshape(batch["y"].shape) - batch["y"]) ** 2)


def psum_step(params: Params, batch: Batch) -> jax.Array:
    """Data parallel by hand: a loss of every rank's own samples, averaged."""

    def local(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        loss = jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)
        return lax.pmean(loss, "data")

    whole = jax.tree.map(lambda _: P(), params)
    fn = manual("data", local, (whole, P("data"), P("data")), P())
    loss: jax.Array = fn(params, batch["x"], batch["y"])
    return loss


def gather_weights(params: Params, batch: Batch) -> jax.Array:
    """Weights in pieces, gathered before use; what claims to be equal is not checked."""

    def local(up: jax.Array, down: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        up, down = (lax.all_gather(w, "shard", tiled=True) for w in (up, down))
        loss = jnp.mean((jnp.tanh(x @ up) @ down - y) ** 2)
        return lax.pmean(loss, "shard")

    over = P("shard")
    fn = manual("shard", local, (over, over, over, over), P(), check_vma=False)
    loss: jax.Array = fn(params["up"], params["down"], batch["x"], batch["y"])
    return loss


SQUARE, WIDE = (WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
SHAPES: dict[str, tuple[Callable[..., jax.Array], dict[str, tuple[int, ...]]]] = {
    "ring_attention": (ring_attention, dict.fromkeys("qkvo", SQUARE)),
    "moe_all_to_all": (
        moe_all_to_all,
        {"router": (WIDTH, EXPERTS), "up": (EXPERTS, *WIDE), "down": (EXPERTS, *WIDE[::-1])},
    ),
    "shard_map_psum_step": (psum_step, {"up": WIDE, "down": WIDE[::-1]}),
    "shard_map_gather_weights": (gather_weights, {"up": WIDE, "down": WIDE[::-1]}),
}


RAGGED = "moe_ragged"
"""A step that XLA:CPU cannot run, which has no ragged exchange."""


def make_task(name: str) -> TrainTask:
    """One of the steps, with momentum."""
    experts = SHAPES["moe_all_to_all"][1]
    loss, shapes = (moe_ragged, experts) if name == RAGGED else SHAPES[name]

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        params = {
            n: jax.random.normal(k, s) / s[-2] ** 0.5
            for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }
        return params, jax.tree.map(jnp.zeros_like, params)

    def step(params: Params, velocity: Params, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    def batch(samples: int) -> Any:
        shape = jax.ShapeDtypeStruct((samples, TIME, WIDTH), jnp.float32)
        return {"x": shape, "y": shape}

    def batches(seed: int, samples: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        while True:
            x, y = (rng.normal(size=(samples, TIME, WIDTH)).astype(np.float32) for _ in range(2))
            yield {"x": x, "y": y}

    return TrainTask(
        step=step, init=init, batch=batch, batches=batches, tokens_per_sample=TIME, name=name
    )


ring, moe, psum, gathered = (partial(make_task, name) for name in SHAPES)
