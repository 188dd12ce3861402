"""Models of golden cells that are no `config.json`: entries of `[model]`, each a small training
step of another kind of code."""

from __future__ import annotations

from examples.own_sharding import step as own_step
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import encoder, gpt
from shardwright.orchestrator.models import moe as mixtral
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.llama import LlamaConfig
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
    return _mixture(mixtral.Experts(8))


def dropless() -> TrainTask:
    """Rows sorted by expert, none dropped: gathers, scatters and a sort."""
    return _mixture(mixtral.Experts(8, 2, 4.0, "sorted"))


def grouped() -> TrainTask:
    """All rows as one sorted list, a product per group of it."""
    return _mixture(mixtral.Experts(8, routing="grouped"))


def _mixture(routing: mixtral.Experts) -> TrainTask:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        head_dim=16,
    )
    return mixtral.train_task(
        config, routing, TaskOptions(seq_len=32, remat="full", optimizer="sgd")
    )


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
