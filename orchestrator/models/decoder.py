"""What the parts of `architecture.py` compute: a decoder, an encoder or both of any family in the
table, written as a JAX user writes it, without any sharding annotation.

Layers that repeat a pattern are stacked on a leading dim and run by `lax.scan`; parameters are
fp32 (`leaves.py`), arithmetic is fp32 or bf16, logits and loss are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import attending, blocks, experts, text, vit
from shardwright.orchestrator.models.architecture import (
    Activation,
    Architecture,
    Experts,
    Layer,
    Mlp,
    stacked,
)
from shardwright.orchestrator.models.attending import (
    NOTHING_GIVEN,
    Given,
    attention,
    capped,
    crossed,
    linear,
    normed,
    projected,
)
from shardwright.orchestrator.models.blocks import Samples, TaskOptions
from shardwright.orchestrator.models.layers import EXACT, How, Params, Site, run_stack
from shardwright.orchestrator.models.leaves import CROSSED, init_params, relative_of, trained
from shardwright.orchestrator.models.rope import Rope, tables


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
        made = experts.fed(part, layer, x)
        if not part.shared:
            return made
        gate, up = projected(layer, x, "_shared_gate", "_shared_up")
        return made + linear(layer, "_shared_down", jax.nn.silu(gate) * up)
    if not part.gated:
        return linear(layer, "_down", activated(part.activation, linear(layer, "_up", x)))
    gate, up = projected(layer, x, "_gate", "_up")
    return linear(layer, "_down", activated(part.activation, gate) * up)


_BEHIND = {"attn_norm": "attended_norm", "mlp_norm": "fed_norm"}
"""The norm before a part of a layer -> the one behind it, where there are both."""


def run_layer(
    model: Architecture, part: Layer, given: Given, x: jax.Array, layer: Params, how: How
) -> jax.Array:
    """One layer."""
    attend = partial(attention, part.attention, layer, given=given, how=how)
    return layer_around(model, part, attend, x, layer, how, given)


Attend = Callable[[jax.Array], jax.Array]
"""Attention of a layer: what a norm hands it [B, T, D] -> what is added to the residual."""


def layer_around(
    model: Architecture,
    part: Layer,
    attend: Attend,
    x: jax.Array,
    layer: Params,
    how: How,
    given: Given = NOTHING_GIVEN,
) -> jax.Array:
    """One layer around its attention."""
    norm, is_post = model.norm, part.placement == "post"

    def read(name: str, x: jax.Array) -> jax.Array:
        return x if is_post else normed(norm, layer, name, x)

    def added(x: jax.Array, made: jax.Array, name: str, site: Site) -> jax.Array:
        if part.placement == "sandwich":
            made = normed(norm, layer, _BEHIND[name], made)
        made = how.drop(made, site) if model.drops_states else made
        x = x + (made if model.residual_scale == 1 else made * model.residual_scale)
        return normed(norm, layer, name, x) if is_post else x

    after = added(x, attend(read("attn_norm", x)), "attn_norm", Site.ATTENDED)
    if part.crossed:
        own = {n.removeprefix(CROSSED): w for n, w in layer.items() if n.startswith(CROSSED)}
        name, other = f"{CROSSED}norm", _beside(model, how)
        made = crossed(part.crossed, own, read(name, after), given, other)
        made = other.drop(made, Site.ATTENDED) if model.drops_states else made
        after = after + made
    fed = feed_forward(
        part.feed, layer, read("mlp_norm", x if part.placement == "parallel" else after)
    )
    return added(after, fed, "mlp_norm", Site.FED)


def _beside(model: Architecture, how: How) -> How:
    """How attention to the encoder is computed: what it drops is drawn for itself."""
    drop = how.drop
    if not drop.rate:
        return how
    number = drop.layer + jnp.uint32(len(model.encoder) + len(model.layers))
    return replace(how, drop=replace(drop, layer=number))


def logits(
    model: Architecture,
    params: Params,
    read: jax.Array,
    how: How,
    sources: jax.Array | None = None,
) -> jax.Array:
    """Logits in fp32: of a token at every position [B, T, V] of tokens [B, T] (and of what the
    encoder reads [B, T]), or of the class [B, V] of images cut into patches [B, count, pixels]."""
    encoded = None
    if sources is not None:
        encoded, how = _encoded(model, params, sources, how), _behind(model, how)
    given = given_of(model.layers, params, read.shape[1])
    x = _pictured(model, params, read, how) if model.patches else embedded(model, params, read, how)
    return decoded(model, params, x, replace(given, encoded=encoded), how)


def given_of(layers: tuple[Layer, ...], params: Params, length: int) -> Given:
    """What layers read beside their input of so many positions."""
    found = {rope: tables(rope, length) if rope else None for rope in ropes(layers)}
    relative, causal = relative_of(layers), layers[0].attention.causal
    if not relative:
        return Given(found)
    return Given(found, attending.distances(relative[0], params["relative"], length, causal))


def ropes(layers: tuple[Layer, ...]) -> list[Rope | None]:
    """The rotary positions that layers have."""
    return list(dict.fromkeys(layer.attention.rope for layer in layers))


def _encoded(model: Architecture, params: Params, sources: jax.Array, how: How) -> jax.Array:
    """What the encoder makes [B, T, D] of its tokens."""
    held = params["encoder"]
    given = given_of(model.encoder, held, sources.shape[1])
    x = _run(model, model.encoder, held, embedded(model, params, sources, how), given, how)
    return normed(model.norm, held, "final_norm", x)


def _behind(model: Architecture, how: How) -> How:
    """How the decoder is computed: its layers are counted on from those of the encoder."""
    drop = how.drop
    return replace(how, drop=replace(drop, layer=len(model.encoder))) if drop.rate else how


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
    if model.segments:  # all of the first kind
        x = x + params["segments"][0].astype(x.dtype)
    x = x if model.embed_scale == 1 else x * model.embed_scale
    x = normed(model.norm, params, "embed_norm", x) if model.embed_norm else x
    return how.drop(x, Site.STATES) if model.drops_states else x


def _pictured(model: Architecture, params: Params, images: jax.Array, how: How) -> jax.Array:
    """The same of images cut into patches, behind the vector that gathers their class."""
    x = linear(params, "_patches", images.astype(how.precision.dtype))
    token = jnp.broadcast_to(params["token"].astype(x.dtype), (len(x), 1, model.hidden))
    x = jnp.concatenate([token, x], axis=1) + params["positions"].astype(x.dtype)
    return how.drop(x, Site.STATES) if model.drops_states else x


def decoded(model: Architecture, params: Params, x: jax.Array, given: Given, how: How) -> jax.Array:
    """Logits in fp32 of what enters the layers [B, T, D]."""
    return read_out(model, params, _run(model, model.layers, params, x, given, how))


def read_out(model: Architecture, params: Params, x: jax.Array) -> jax.Array:
    """Logits in fp32 of what leaves the layers [B, T, D]."""
    m = model
    x = x[:, 0] if m.patches else x
    x = normed(m.norm, params, "final_norm", x) if m.final_norm else x
    if m.transform:
        x = activated(m.transform, linear(params, "_transform", x))
        x = normed(m.norm, params, "transform_norm", x)
    head = params["embed"].T if m.tied else params["lm_head"]
    made = (x @ head.astype(x.dtype)).astype(jnp.float32)
    if "b_head" in params:
        made = made + params["b_head"]
    if m.logit_divisor != 1:
        made = made / m.logit_divisor
    return capped(made, m.logit_softcap) if m.logit_softcap else made


def _run(
    model: Architecture,
    layers: tuple[Layer, ...],
    params: Params,
    x: jax.Array,
    given: Given,
    how: How,
) -> jax.Array:
    """A stack of layers: the first, the period and the last ones, each with its parameters."""
    stack = stacked(layers)
    alone = len(stack.period) == 1
    pairs = (
        (stack.first, params.get("first", {})),
        (stack.period, {"0": params["layers"]} if alone else params["layers"]),
        (stack.last, params.get("last", {})),
    )
    first, period, last = (
        [(partial(run_layer, model, part, given), held[str(i)]) for i, part in enumerate(parts)]
        for parts, held in pairs
    )
    return run_stack(first, period, last, x, how)


def loss(model: Architecture, params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
    """Mean cross entropy of tokens or classes, in nat."""
    read = batch["images" if model.patches else "tokens"]
    given = logits(model, params, read, how, batch.get("sources"))
    return blocks.cross_entropy(EXACT, given, batch["targets"])


def train_task(model: Architecture, options: TaskOptions) -> TrainTask:
    """The training step of the model. Raises UsageError for a sequence longer than positions."""
    task, visited = _task(model, options), as_visited(model)
    return task if visited == model else replace(task, model=_task(visited, options))


def _task(model: Architecture, options: TaskOptions) -> TrainTask:
    samples, init = _samples(model, options), partial(init_params, model)
    return blocks.sample_task(init, partial(loss, model), samples, options, trained(model))


def as_visited(model: Architecture) -> Architecture:
    """The model as MFU counts it: every row visits as many experts as it chose, and no others.
    Empty seats are no work of the model, nor are rows that fill up a block.
    """
    return model.with_experts(lambda part: replace(part, routing="first"))


def _samples(model: Architecture, options: TaskOptions) -> Samples:
    """Byte-level text, whose first half is what an encoder reads, or images."""
    if model.patches:
        return vit.samples(model.patches.count, model.patches.pixels, model.vocab, options.seq_len)
    samples = blocks.token_samples(model.vocab, model.positions, options)
    if not model.encoder:
        return samples
    length = options.seq_len

    def batch(n: int) -> dict[str, Any]:
        found: dict[str, Any] = samples.batch(n)
        return {"sources": found["tokens"], **found}

    def batches(seed: int, count: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        for made in text.batch_factory(2 * length, model.vocab)(seed, count, data):
            halves = {name: rows[:, length:] for name, rows in made.items()}
            yield {"sources": made["tokens"][:, :length], **halves}

    return Samples(batch, batches, 2 * length)
