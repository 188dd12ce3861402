"""Flax models whose layers are written out one by one, of several kinds, under any optimizer.

Test assets for re-rolling: what users write, with the spellings that make layers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import text

WIDTH, SEQ_LEN, VOCAB = 16, 8, 32


class Layer(nn.Module):
    """`kind`: pre (norm first), post (norm last), dropout, or experts."""

    kind: str
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        norm_first = self.kind != "post"
        h = nn.LayerNorm(name="n1")(x) if norm_first else x
        h = nn.MultiHeadDotProductAttention(
            num_heads=2, use_bias=False, deterministic=True, name="attn"
        )(h, h, mask=mask)
        if self.kind == "dropout":
            h = nn.Dropout(0.1, deterministic=False)(h)
        x = x + h if norm_first else nn.LayerNorm(name="n1")(x + h)
        if self.kind == "experts":
            return x + self._experts(x)
        h = nn.LayerNorm(name="n2")(x) if norm_first else x
        h = nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(self.inner, name="up")(h)))
        return x + h if norm_first else nn.LayerNorm(name="n2")(x + h)

    def _experts(self, x: jax.Array) -> jax.Array:
        gate = nn.softmax(nn.Dense(4, name="gate")(x))
        w = self.param("w", nn.initializers.normal(0.02), (4, WIDTH, self.inner))
        v = self.param("v", nn.initializers.normal(0.02), (4, self.inner, WIDTH))
        rows = jnp.einsum("btef,efd->bted", nn.relu(jnp.einsum("btd,edf->btef", x, w)), v)
        return jnp.einsum("bte,bted->btd", gate, rows)


class Model(nn.Module):
    """Layers between an embedding and its transpose."""

    kinds: tuple[str, ...]
    inners: tuple[int, ...]
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH, name="wte")
        x = embed(tokens)
        post = self.kinds[0] == "post"
        x = nn.LayerNorm(name="n_in")(x) if post else x
        mask = nn.make_causal_mask(tokens)
        layer = nn.remat(Layer) if self.remat else Layer
        for i, (kind, inner) in enumerate(zip(self.kinds, self.inners, strict=True)):
            x = layer(kind, inner, name=f"layer_{i}")(x, mask)
        return embed.attend(x if post else nn.LayerNorm(name="n_out")(x))


def clipped_adam() -> optax.GradientTransformation:
    """Clipping that does clip, AdamW."""
    return optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-3))


def by_layer() -> optax.GradientTransformation:
    """Adam with another rate for each layer."""

    def rescale(updates: Any, state: Any, params: Any = None) -> Any:
        rates = {k: 0.1 * int(k[6:]) + 0.1 for k in updates if k.startswith("layer_")}
        scaled = {k: optax.tree.scale(rates.get(k, 1.0), v) for k, v in updates.items()}
        return scaled, state

    own = optax.GradientTransformation(lambda params: (), rescale)
    return optax.chain(optax.scale_by_adam(), own)


def train_task(
    kinds: Sequence[str],
    optimizer: optax.GradientTransformation | None = None,
    inners: Sequence[int] = (),
    *,
    remat: bool = False,
) -> TrainTask:
    """The training step; `inners` are the inner widths, 24 unless given."""
    model = Model(tuple(kinds), tuple(inners) or (24,) * len(kinds), remat)
    chain = optimizer or clipped_adam()
    random = "dropout" in kinds

    def init(key: jax.Array) -> tuple[Any, ...]:
        keys = {"params": key, "dropout": key}
        params = model.init(keys, jnp.zeros((1, SEQ_LEN), jnp.int32))["params"]
        rng = (jax.random.key_data(jax.random.key(0)),) if random else ()
        return (params, chain.init(params), *rng)

    def loss_fn(params: Any, rngs: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["tokens"], rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(params: Any, opt_state: Any, *rest: Any) -> Any:
        key = jax.random.wrap_key_data(rest[0]) if random else None
        rngs = {} if key is None else {"dropout": key}
        loss, grads = jax.value_and_grad(loss_fn)(params, rngs, rest[-1])
        updates, opt_state = chain.update(grads, opt_state, params)
        rng = () if key is None else (jax.random.key_data(jax.random.split(key)[0]),)
        return (optax.apply_updates(params, updates), opt_state, *rng, {"loss": loss})

    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: text.token_structs(n, SEQ_LEN),
        batches=text.batch_factory(SEQ_LEN, VOCAB),
        tokens_per_sample=SEQ_LEN,
        state_names=("params", "opt_state", "rng") if random else ("params", "opt_state"),
        name="unrolled_layers",
    )
