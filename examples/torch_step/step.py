"""A PyTorch module as a training step: torchax gives its forward pass as a JAX function.

Needs `pip install -e '.[torch]'`. Weights keep the module's own initial values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torchax
from torch.nn import functional

from shardwright import TrainTask

VOCAB, WIDTH, LAYERS, HEADS, POSITIONS = 256, 128, 2, 4, 64
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(torch.nn.Module):
    """Causal attention and an MLP, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.LayerNorm(WIDTH),
        )
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.before_mlp = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before_attention(x)
        heads = (self._heads(part(y)) for part in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class Decoder(torch.nn.Module):
    """Bytes in, chances of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(POSITIONS, WIDTH))
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places))


def make_task() -> TrainTask:
    torch.manual_seed(0)
    weights, forward = torchax.extract_jax(Decoder())
    initial = jax.tree.map(np.asarray, weights)

    def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        logits = forward(params, (batch["tokens"],))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    def init(_: jax.Array) -> tuple[Any, Any]:
        params = jax.tree.map(jnp.asarray, initial)
        return params, OPTIMIZER.init(params)

    def batch(samples: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (samples, POSITIONS)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "next")}

    return TrainTask(
        step=step,
        init=init,
        batch=batch,
        batches=batches,
        tokens_per_sample=POSITIONS,
        name="torch_step",
    )


def batches(seed: int, samples: int, _: str | None) -> Iterator[dict[str, np.ndarray]]:
    """Counting, from random numbers on: the next token is one more."""
    rng = np.random.default_rng(seed)
    while True:
        first = rng.integers(0, VOCAB, (samples, 1))
        line = (first + np.arange(POSITIONS + 1)) % VOCAB
        yield {"tokens": line[:, :-1].astype(np.int32), "next": line[:, 1:].astype(np.int32)}
