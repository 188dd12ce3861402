"""Models of golden cells that are no `config.json`: entries of `[model]`, each a small training
step of another kind of code."""

from __future__ import annotations

from functools import partial

import jax

from examples.own_sharding import step as own_step
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks, decoder, encoder, gpt, leaves
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How, Params
from tests.models import dropout_decoder
from tests.support import models_vision

SIZES = Sizes(layers=4, hidden=64, heads=8, head_dim=8, ffn=128, vocab=128, positions=32)


def bert() -> TrainTask:
    """Biases, norms with shifts, GELU, a tied output projection, LAMB."""
    return encoder.train_task(SIZES, TaskOptions(seq_len=32, optimizer="lamb"))


def tied_gpt() -> TrainTask:
    """Learned positions and a tied embedding."""
    return gpt.train_task(SIZES, TaskOptions(seq_len=32, optimizer="sgd"))


def experts() -> TrainTask:
    """Eight experts, two per row, some rows dropped: products with one-hot tensors."""
    return _mixture("products")


def dropless() -> TrainTask:
    """Rows sorted by expert, none dropped: gathers, scatters and a sort."""
    return _mixture("sorted", 4.0)


def grouped() -> TrainTask:
    """All rows as one sorted list, a product per group of it."""
    return _mixture("grouped")


def _mixture(routing: str, capacity: float = 1.25) -> TrainTask:
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "head_dim": 16,
    }
    feed = Experts(count=8, chosen=2, width=64, routing=routing, capacity_factor=capacity)
    model = architecture_of(config).fed_by(feed)

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        x = decoder.embedded(model, params, batch["tokens"], how)  # in this order: digests see it
        logits = decoder.decoded(model, params, x, decoder.given_of(model.layers, params, 32), how)
        return blocks.cross_entropy(how.precision, logits, batch["targets"])

    options = TaskOptions(seq_len=32, remat="full", optimizer="sgd")
    init = partial(leaves.init_params, model)
    return blocks.language_task(init, loss, model.vocab, model.positions, options)


def resnet() -> TrainTask:
    """Strided convolutions, batch norm with statistics of all samples, pooling."""
    return models_vision.resnet().task


def unet() -> TrainTask:
    """Group norm, resizing, convolutions of concatenations."""
    return models_vision.unet().task


def vit() -> TrainTask:
    """A convolution over patches, a class token, attention without a mask."""
    return models_vision.vit().task


def dropout() -> TrainTask:
    """Random masks from a key that is part of the state."""
    return dropout_decoder.train_task()


def own_sharding() -> TrainTask:
    """Its user says how it is distributed."""
    return own_step.make_task()
