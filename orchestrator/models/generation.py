"""Inference with a decoder: the prefill of a batch of prompts, and one step that decodes one token
of every sequence, with the keys and values of earlier positions in a cache.

The cache holds keys and values [B, K, C, E] of every layer (of latent attention the vectors
[B, C, R] that they are products of), stacked as the layers are, the token
that comes next of every sequence [B], and its position, which all sequences share (static
batching). A layer with a window keeps its last C = window positions, position p at p modulo C;
every other layer keeps all of the context. A decode step reads the cache as it is and attends to
the new token beside it, as NxD Inference does (`compute_for_token_gen`: prior and active scores);
then it writes one position, so that a cache that is donated is updated in place.

Einsum letters: b batch, t queries (1), s positions in the cache, k kv heads, g heads per kv head,
e head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.task import Mode, TrainTask
from shardwright.orchestrator.models import attending, decoder, text
from shardwright.orchestrator.models.architecture import (
    Architecture,
    Attention,
    LatentAttention,
    Layer,
    stacked,
)
from shardwright.orchestrator.models.blocks import Shapes
from shardwright.orchestrator.models.layers import EXACT, MASKED, How, Params, Precision
from shardwright.orchestrator.models.leaves import init_params
from shardwright.orchestrator.models.rope import Rope, Tables, tables

Cache = dict[str, Any]
Pair = dict[str, jax.Array]
"""Keys and values of one layer, `k` and `v`, or of latent attention `latent` and `common`."""
Kind = Attention | LatentAttention


def cache_shapes(model: Architecture, sequences: int, context: int) -> dict[str, Any]:
    """The shape of everything in a cache, as a tree: layers lie as in `decoder.shapes`."""
    stack = stacked(model.layers)

    def pair(layer: Layer, *outer: int) -> Shapes:
        a, many = layer.attention, (*outer, sequences)
        if isinstance(a, LatentAttention):
            return {"latent": (*many, context, a.rank), "common": (*many, context, a.turned_dim)}
        shape = (*many, a.kv_heads, _room(a, context), a.head_dim)
        return {"k": shape, "v": shape}

    period = [pair(layer, stack.times) for layer in stack.period]
    found: dict[str, Any] = {"layers": period[0] if len(period) == 1 else _numbered(period)}
    for name, layers in (("first", stack.first), ("last", stack.last)):
        if layers:
            found[name] = _numbered([pair(layer) for layer in layers])
    return found | {"token": (sequences,), "position": ()}


def _numbered(parts: list[Shapes]) -> dict[str, Shapes]:
    return {str(number): part for number, part in enumerate(parts)}


def check_decodes(model: Architecture, name: str, mode: str) -> None:
    """Raises UsageError for a model that is no decoder with keys and values to cache."""
    is_causal = all(layer.attention.causal for layer in model.layers)
    if model.encoder or model.patches or not is_causal:
        raise UsageError(
            "SW_MODE",
            f"model.mode = {mode} requires a decoder alone, which has keys and values to cache, got"
            f" {name}, which has an encoder",
            hint="shardwright compile times its forward pass, lowered to HLO",
        )


def _room(part: Attention, context: int) -> int:
    """Positions that the cache of a layer holds."""
    return min(part.window, context) if part.window else context


def empty_cache(
    model: Architecture, sequences: int, context: int, precision: Precision = EXACT
) -> Cache:
    """A cache with nothing in it."""

    def made(path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
        is_number = path[-1].key in ("token", "position")
        return jnp.zeros(shape, jnp.int32 if is_number else precision.dtype)

    tree = cache_shapes(model, sequences, context)
    cache: Cache = jax.tree.map_with_path(made, tree, is_leaf=lambda node: isinstance(node, tuple))
    return cache


def prefill(
    model: Architecture, context: int, params: Params, tokens: jax.Array, how: How
) -> tuple[Cache, jax.Array]:
    """The cache of a context behind prompts [B, T], which begin at position 0, and the logits
    [B, V] of their last positions.
    """
    length = tokens.shape[1]
    given = {rope: _tables(rope, context, None, length) for rope in decoder.ropes(model.layers)}

    def attend(
        part: Kind, layer: Params, held: Pair | None, x: jax.Array
    ) -> tuple[jax.Array, Pair]:
        if isinstance(part, LatentAttention):
            own = attending.narrowed(part, layer, x, given[part.rope])
            kept = {name: _kept(row[:, :, None], context)[:, 0] for name, row in _vectors(own)}
            return attending.widened(part, layer, own, how), kept
        made = attending.projected(layer, x, "q", "k", "v")
        q, k, v = attending.heads(part, layer, made, given[part.rope])
        room = _room(part, context)
        new = {"k": _kept(k, room), "v": _kept(v, room)}
        return attending.attended(part, layer, q, k, v, how), new

    positions = params["positions"][:length] if model.learned_positions else None
    x = decoder.embedded(model, params, tokens, how, positions)
    x, held = _run(model, params, None, x, how, attend)
    logits = decoder.read_out(model, params, x[:, -1:])[:, 0]
    return {**held, "token": _best(logits), "position": jnp.int32(length)}, logits


def _kept(made: jax.Array, room: int) -> jax.Array:
    """Keys or values [B, T, K, E] as the cache [B, K, C, E] holds them: the last C of them, each at
    its position modulo C.
    """
    length = made.shape[1]
    if length <= room:
        held = jnp.pad(made, ((0, 0), (0, room - length), (0, 0), (0, 0)))
    else:
        held = jnp.roll(made[:, length - room :], length % room, axis=1)
    return jnp.swapaxes(held, 1, 2)


def decode(
    model: Architecture, context: int, params: Params, cache: Cache, how: How
) -> tuple[Cache, jax.Array]:
    """The cache of a context with its next token in it, and the logits [B, V] behind that."""
    position = cache["position"]
    given = {rope: _tables(rope, context, position) for rope in decoder.ropes(model.layers)}

    def attend(
        part: Kind, layer: Params, held: Pair | None, x: jax.Array
    ) -> tuple[jax.Array, Pair]:
        assert held is not None, "a decode step has a cache"
        if isinstance(part, LatentAttention):
            own = attending.narrowed(part, layer, x, given[part.rope])
            return _absorbed(part, layer, own, held, position), dict(_vectors(own))
        made = attending.projected(layer, x, "q", "k", "v")
        q, k, v = attending.heads(part, layer, made, given[part.rope])
        new = {"k": jnp.swapaxes(k, 1, 2), "v": jnp.swapaxes(v, 1, 2)}
        return _attended(part, layer, q, held, new, position), new

    rows = None
    if model.learned_positions:
        rows = jax.lax.dynamic_slice_in_dim(params["positions"], position, 1)
    x = decoder.embedded(model, params, cache["token"][:, None], how, rows)
    x, made = _run(model, params, cache, x, how, attend)
    logits = decoder.read_out(model, params, x)[:, 0]
    held = {name: cache[name] for name in made}
    held = jax.tree.map(partial(_written, position=position), held, made)
    return {**held, "token": _best(logits), "position": position + 1}, logits


def _written(held: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """Keys or values [..., C, E] with those of one position [..., 1, E]."""
    axis = held.ndim - 2
    return jax.lax.dynamic_update_slice_in_dim(held, new, position % held.shape[axis], axis)


_HELD = "btkge,bkse->bkgts"
"""Queries with keys as the cache holds them."""


def _attended(
    part: Attention, layer: Params, q: jax.Array, held: Pair, new: Pair, position: jax.Array
) -> jax.Array:
    """What the new token [B, 1, K, G, E] takes from the positions in the cache and from itself."""
    dtype = q.dtype
    before, own = (attending.scored(part, q, keys, _HELD) for keys in (held["k"], new["k"]))
    sink = layer["sinks"].reshape(1, part.kv_heads, -1, 1, 1) if part.sinks else None
    before, own = _shares(before, own, position, sink)
    mixed = jnp.einsum("bkgts,bkse->btkge", before.astype(dtype), held["v"])
    share = jnp.einsum("bkgts->btkgs", own.astype(dtype))
    mixed = mixed + share * jnp.einsum("bkse->bske", new["v"])[:, :, :, None]
    return attending.linear(layer, "o", mixed.reshape(*q.shape[:2], -1))


def _vectors(given: attending.Narrow) -> list[tuple[str, jax.Array]]:
    """What a cache keeps of positions [B, T, .] of latent attention."""
    return [("latent", given.latent), ("common", given.common)]


def _absorbed(
    part: LatentAttention,
    layer: Params,
    new: attending.Narrow,
    held: Pair,
    position: jax.Array,
) -> jax.Array:
    """The same of latent attention. Queries are multiplied with what makes keys, and what is mixed
    with what makes values, so that the vectors in the cache are read as they are (DeepSeek-V2,
    section 2.1.2).
    """
    a, dtype = part, new.plain.dtype
    wide = layer["w_kv"].astype(dtype).reshape(a.rank, a.heads, -1)
    keys, values = wide[..., : a.plain_dim], wide[..., a.plain_dim :]
    query = jnp.einsum("bthe,rhe->bthr", new.plain, keys)

    def scored(latent: jax.Array, common: jax.Array) -> jax.Array:
        plain = jnp.einsum("bthr,bsr->bhts", query, latent).astype(jnp.float32)
        turned = jnp.einsum("bthe,bse->bhts", new.turned, common).astype(jnp.float32)
        return (plain + turned) * a.scale

    earlier = scored(held["latent"], held["common"])
    before, own = _shares(earlier, scored(new.latent, new.common), position, None)
    mixed = jnp.einsum("bhts,bsr->bthr", before.astype(dtype), held["latent"])
    mixed = mixed + jnp.einsum("bhts,bsr->bthr", own.astype(dtype), new.latent)
    made = jnp.einsum("bthr,rhe->bthe", mixed, values)
    return attending.linear(layer, "o", made.reshape(*made.shape[:2], -1))


def _shares(
    before: jax.Array, own: jax.Array, position: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Softmax of the scores of the places in the cache [..., 1, C] and of the token at `position`
    itself [..., 1, 1], beside a score per head if there are sinks."""
    before = jnp.where(_is_seen(before.shape[-1], position), before, MASKED)
    most = jnp.maximum(jnp.max(before, axis=-1, keepdims=True), own)
    if sink is not None:
        most = jnp.maximum(most, sink.astype(jnp.float32))
    powers, own = jnp.exp(before - most), jnp.exp(own - most)
    total = jnp.sum(powers, axis=-1, keepdims=True) + own
    if sink is not None:
        total = total + jnp.exp(sink.astype(jnp.float32) - most)
    return powers / total, own / total


def _is_seen(room: int, position: jax.Array) -> jax.Array:
    """Which places of a cache [C] hold a position that the token at `position` sees. Place s holds
    the last position before it that is s modulo C; the oldest of a full window is about to go.
    """
    place = jnp.arange(room)
    last = position - 1
    return (last - (last - place) % room >= 0) & (place != position % room)


def _run(
    model: Architecture,
    params: Params,
    cache: Cache | None,
    x: jax.Array,
    how: How,
    attend: Callable[[Kind, Params, Pair | None, jax.Array], tuple[jax.Array, Pair]],
) -> tuple[jax.Array, Cache]:
    """All layers, each with its part of the cache; what leaves them, and what `attend` made."""
    stack = stacked(model.layers)
    held = cache or {}

    def one(part: Layer, x: jax.Array, layer: Params, pair: Pair | None) -> tuple[jax.Array, Pair]:
        made: list[Pair] = []

        def attended(given: jax.Array) -> jax.Array:
            found, new = attend(part.attention, layer, pair, given)
            made.append(new)
            return found

        return decoder.layer_around(model, part, attended, x, layer, how), made[0]

    def several(
        parts: tuple[Layer, ...], x: jax.Array, layers: Params, pairs: Cache | None
    ) -> tuple[jax.Array, Cache]:
        found: Cache = {}
        for number, part in enumerate(parts):
            name = str(number)
            x, found[name] = one(part, x, layers[name], pairs[name] if pairs else None)
        return x, found

    def period(x: jax.Array, given: tuple[Params, Cache | None]) -> tuple[jax.Array, Cache]:
        if len(stack.period) == 1:
            return one(stack.period[0], x, *given)
        return several(stack.period, x, *given)

    made: Cache = {}
    if stack.first:
        x, made["first"] = several(stack.first, x, params["first"], held.get("first"))
    x, made["layers"] = jax.lax.scan(period, x, (params["layers"], held.get("layers")))
    if stack.last:
        x, made["last"] = several(stack.last, x, params["last"], held.get("last"))
    return x, made


def _best(logits: jax.Array) -> jax.Array:
    """The greedy token of every sequence [B]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _tables(
    rope: Rope | None, context: int, position: jax.Array | None, length: int = 0
) -> Tables | None:
    """The rotary tables of `length` positions, or of one. Frequencies that depend on the length
    (LongRoPE) are those of the whole context, as in vLLM, since what is cached stays as it is.
    """
    if rope is None:
        return None
    if position is not None:
        return tables(rope, context, position)
    cosines, sines = tables(rope, context)
    return cosines[:length], sines[:length]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is asked of a model: `sequences` at a time, a `context` of so many positions, and the
    type of what is computed and stored."""

    mode: Mode
    sequences: int
    context: int
    dtype: str = "f32"
    name: str = "step"


def prompts(model: Architecture, serving: Serving, key: jax.Array) -> jax.Array:
    """The random prompts [B, T] that a decode step goes on from, of half the context."""
    shape = (serving.sequences, max(1, serving.context // 2))
    return jax.random.randint(jax.random.fold_in(key, 1), shape, 0, model.vocab)


def serving_task(model: Architecture, serving: Serving) -> TrainTask:
    """The prefill of prompts that fill the context, or the decode step that such a cache is read
    by. Parameters are stored in the type of the activations.

    The first cache of a decode step is that behind random prompts of half the context.
    """
    check_decodes(model, serving.name, serving.mode.value)
    task, visited = _task(model, serving), decoder.as_visited(model)
    return task if visited == model else replace(task, model=_task(visited, serving))


def _task(model: Architecture, serving: Serving) -> TrainTask:
    s = serving

    def task(precision: Precision) -> TrainTask:
        how = How(precision)

        def init(key: jax.Array) -> tuple[Any, ...]:
            made = init_params(model, key)
            params = jax.tree.map(lambda leaf: leaf.astype(precision.dtype), made)
            if s.mode is Mode.PREFILL:
                return params, empty_cache(model, s.sequences, s.context, precision)
            return params, prefill(model, s.context, params, prompts(model, s, key), how)[0]

        def step(params: Params, cache: Cache, batch: dict[str, jax.Array]) -> Any:
            if s.mode is Mode.PREFILL:
                cache, logits = prefill(model, s.context, params, batch["tokens"], how)
            else:
                cache, logits = decode(model, s.context, params, cache, how)
            return params, cache, {"logits": logits}

        return TrainTask(
            step=step,
            init=init,
            batch=partial(_batch, s),
            batches=partial(_batches, s, model.vocab),
            state_names=("params", "cache"),
            roles={"params": "parameter", "cache": "cache"},
            mode=s.mode,
            context=s.context,
            cache_dims=_sample_dims(model, s.context),
            tokens_per_sample=s.context if s.mode is Mode.PREFILL else 1,
            full_precision=None if precision == EXACT else task(EXACT),
            name=s.name,
        )

    return task(Precision(activations=s.dtype))


def _batch(serving: Serving, n: int) -> dict[str, Any]:
    """What a step is given: prompts that fill the context, or nothing besides the cache."""
    if serving.mode is Mode.DECODE:
        return {}
    return {"tokens": jax.ShapeDtypeStruct((n, serving.context), np.int32)}


def _batches(
    serving: Serving, vocab: int, seed: int, sequences: int, data: str | None
) -> Iterator[dict[str, Any]]:
    """Prompts of byte-level text, or for every decode step nothing."""
    if serving.mode is Mode.DECODE:
        yield from repeat({})
    for batch in text.batch_factory(serving.context, vocab)(seed, sequences, data):
        yield {"tokens": batch["tokens"]}


def _sample_dims(model: Architecture, context: int) -> dict[str, int]:
    """The dim of the sequences of every leaf of a cache that has one, by path."""
    few, more = (
        dict(named_leaves("cache", _structs(cache_shapes(model, n, context)))) for n in (1, 2)
    )
    return {
        name: [a == b for a, b in zip(leaf.shape, more[name].shape, strict=True)].index(False)
        for name, leaf in few.items()
        if leaf.shape != more[name].shape
    }


def _structs(tree: Any) -> Any:
    def struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return jax.tree.map(struct, tree, is_leaf=lambda node: isinstance(node, tuple))
