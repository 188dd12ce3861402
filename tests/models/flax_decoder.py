"""A Flax (linen) decoder: unrolled layers, learned positions, LayerNorm with bias, GELU MLP, tied
embedding.

Written the way Flax users write it, without any sharding annotation; a test asset for models nobody
wrote for this compiler.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import text


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype, name="ln_1")(x)
        h = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            dtype=self.dtype,
            use_bias=False,  # the gradient of a key bias is 0: its computed value is only noise
            deterministic=True,
            name="attn",
        )(h, h, mask=mask)
        x = x + h
        h = nn.LayerNorm(dtype=self.dtype, name="ln_2")(x)
        h = nn.Dense(4 * width, dtype=self.dtype, name="up")(h)
        h = nn.Dense(width, dtype=self.dtype, name="down")(nn.gelu(h))
        return x + h


class Decoder(nn.Module):
    """Token and position embedding, blocks, tied output."""

    vocab: int
    width: int
    num_heads: int
    num_layers: int
    max_len: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype, name="wte")
        positions = self.param("wpe", nn.initializers.normal(0.02), (self.max_len, self.width))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        for i in range(self.num_layers):
            x = Block(self.num_heads, self.dtype, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm(dtype=self.dtype, name="ln_f")(x)
        return embed.attend(x).astype(jnp.float32)


def train_task(
    *,
    vocab: int = 256,
    width: int = 64,
    num_heads: int = 4,
    num_layers: int = 3,
    seq_len: int = 32,
    lr: float = 1e-3,
    dtype: Any = jnp.float32,
) -> TrainTask:
    """The training step: adam with a warm-up schedule, clipping by global norm."""
    model = Decoder(vocab, width, num_heads, num_layers, seq_len, dtype)
    schedule = optax.linear_schedule(0.1 * lr, lr, 10)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]
        return params, chain.init(params)

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    precise = None
    if dtype != jnp.float32:
        precise = train_task(
            vocab=vocab,
            width=width,
            num_heads=num_heads,
            num_layers=num_layers,
            seq_len=seq_len,
            lr=lr,
        )
    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: text.token_structs(n, seq_len),
        batches=text.batch_factory(seq_len, vocab),
        tokens_per_sample=seq_len,
        full_precision=precise,
        name="flax_decoder",
    )
