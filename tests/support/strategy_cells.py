"""Models and distributions of the strategy matrix: every model under every distribution.

Models are small and cover what strategies trip over: grouped key-value heads, tied embeddings,
biases, norms with shifts, experts, images, clipping and LAMB. Each is one object, which a process
of tests traces and compiles once. A distribution is a strategy's settings on a mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.ops import ShardingConstraintAttrs
from shardwright.compiler.ir.types import Graph
from shardwright.orchestrator.models import config_task, decoder, encoder, gpt
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.settings import StrategySettings
from tests.models import dropout_decoder, flax_decoder
from tests.support import models_vision
from tests.support.road import captured_graph

LANGUAGE = Sizes(layers=2, hidden=32, heads=8, head_dim=8, ffn=64, vocab=64, positions=16)
SAMPLES = 8


@cache
def gqa() -> TrainTask:
    """Two scanned Llama layers: 8 query heads in groups of 4, clipping, AdamW.

    Heads are together as wide as the residual: equal sizes must not be taken for one index.
    """
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 48,
        "head_dim": 8,
    }
    return config_task.train_task(config, seq_len=16, dtype="f32", remat="full")


@cache
def odd_llama(heads: int = 6, kv_heads: int = 6, vocab: int = 258, inner: int = 90) -> TrainTask:
    """A scanned decoder whose heads, vocabulary and columns four cores do not divide."""
    config = {
        "hidden_size": 48,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "head_dim": 8,
    }
    return config_task.train_task(config, seq_len=16, dtype="f32", remat="full")


@cache
def bert() -> TrainTask:
    """A scanned encoder with biases, a tied output projection and LAMB."""
    return encoder.train_task(LANGUAGE, TaskOptions(seq_len=16, optimizer="lamb"))


@cache
def bert_with_dropout() -> TrainTask:
    """The same with masks of the machine's generator."""
    return encoder.train_task(LANGUAGE, TaskOptions(seq_len=16, dropout=0.3, optimizer="lamb"))


@cache
def moe() -> TrainTask:
    """Two scanned layers with 8 experts, 2 per row, some rows dropped."""
    return experts("products")


@cache
def dropless() -> TrainTask:
    """The same with rows sorted by expert, none dropped."""
    return experts("sorted", 4.0)


@cache
def grouped() -> TrainTask:
    """The same with the rows of all samples as one sorted list."""
    return experts("grouped")


def experts(routing: str, capacity: float = 1.25) -> TrainTask:
    config = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "head_dim": 8,
    }
    feed = Experts(count=8, chosen=2, width=16, routing=routing, capacity_factor=capacity)
    model = architecture_of(config).fed_by(feed)
    return decoder.train_task(model, TaskOptions(seq_len=16, remat="full"))


@cache
def tied_gpt() -> TrainTask:
    """A scanned decoder with learned positions and a tied embedding."""
    return gpt.train_task(LANGUAGE, TaskOptions(seq_len=16, remat="full"))


@cache
def flax() -> TrainTask:
    """An unrolled decoder somebody else wrote, tied."""
    return flax_decoder.train_task(width=32, num_layers=2, seq_len=16, vocab=64)


@cache
def vit() -> TrainTask:
    """A vision transformer."""
    return models_vision.vit().task


@cache
def image_groups() -> TrainTask:
    """A network with depthwise and grouped convolutions."""
    return models_vision.grouped().task


MODELS: dict[str, Callable[[], TrainTask]] = {
    "gqa": gqa,
    "bert": bert,
    "tied gpt": tied_gpt,
    "flax": flax,
    "moe": moe,
    "dropless": dropless,
    "grouped": grouped,
    "vit": vit,
    "image groups": image_groups,
    "dropout": cache(dropout_decoder.train_task),
    "bert with dropout": bert_with_dropout,
}


@cache
def model_graph(
    model: str, samples: int = SAMPLES
) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """The captured step of one of the models."""
    return captured_graph(MODELS[model](), samples)


@dataclass(frozen=True)
class Distribution:
    """Settings on a mesh."""

    settings: StrategySettings
    axes: tuple[tuple[str, int], ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return Mesh(self.axes) if self.settings.name == "manual" else make_mesh(dict(self.axes))

    def user(self, graph: Graph, inputs: tuple[Slot, ...]) -> ModuleShardings | None:
        """What the step says itself: samples over `data` and the columns of matrices over `model`,
        as far as they divide; everything else is left open.
        """
        if self.settings.name != "manual":
            return None
        pairs = zip(inputs, graph.inputs, strict=True)
        given = tuple(_by_user(slot, value.type.shape, dict(self.axes)) for slot, value in pairs)
        return ModuleShardings((self.axes,), given, (None,) * len(graph.outputs))


def _by_user(
    slot: Slot, shape: tuple[int, ...], sizes: dict[str, int]
) -> ShardingConstraintAttrs | None:
    spec: list[tuple[str, ...]] = [()] * len(shape)
    if slot.batch_dim is not None:
        spec[slot.batch_dim] = ("data",)
    elif slot.role == "parameter" and len(shape) > 1 and shape[-1] % sizes["model"] == 0:
        spec[-1] = ("model",)
    else:
        return None
    return ShardingConstraintAttrs(tuple(spec))


def distribution(strategy: str, *, sp: bool = True, **keys: int | str | bool) -> Distribution:
    """One distribution: sizes of axes, and keys of the `[strategy]` table."""
    known = {f.name for f in dataclasses.fields(StrategySettings)}
    axes = {key: int(value) for key, value in keys.items() if key not in known}
    chosen: dict[str, Any] = {key: value for key, value in keys.items() if key in known}
    settings = StrategySettings(name=strategy, sequence_parallel=sp, **chosen)
    return Distribution(settings, tuple(axes.items()))


DISTRIBUTIONS = {
    "fsdp 4": distribution("fsdp", dp_shard=4),
    "fsdp kept 4": distribution("fsdp", reshard_after_forward=False, dp_shard=4),
    "hsdp kept tp 8": distribution(
        "fsdp", reshard_after_forward=False, dp_replicate=2, dp_shard=2, tp=2
    ),
    "hsdp 8": distribution("fsdp", dp_replicate=2, dp_shard=4),
    "data parallel 4": distribution("generic", dp_replicate=2, dp_shard=2),
    "zero-1 8": distribution("generic", zero=1, dp_shard=8),
    "zero-2 hybrid 8": distribution("generic", zero=2, dp_replicate=2, dp_shard=4),
    "tp 4": distribution("llm-training", tp=4),
    "tp without sp 4": distribution("llm-training", sp=False, tp=4),
    "tp zero-1 8": distribution("llm-training", dp_shard=2, tp=4),
    "tp zero-3 16": distribution("llm-training", zero=3, dp_replicate=2, dp_shard=2, tp=4),
    "fsdp tp 8": distribution("fsdp", dp_shard=4, tp=2),
    "hsdp tp 8": distribution("fsdp", dp_replicate=2, dp_shard=2, tp=2),
    "tp beyond heads 32": distribution("fsdp", dp_shard=2, tp=16),
}
SEQUENCE_DISTRIBUTIONS = {
    "cp 4": distribution("generic", context="ring", cp=4),
    "fsdp cp 8": distribution("fsdp", context="ring", dp_shard=4, cp=2),
    "cp gathered 4": distribution("generic", context="gather", cp=4),
    "fsdp cp gathered 8": distribution("fsdp", context="gather", dp_shard=2, cp=4),
    "fsdp cp tp 8": distribution("fsdp", context="ring", dp_shard=2, cp=2, tp=2),
    "fsdp cp tp 32": distribution("fsdp", context="ring", dp_shard=4, cp=2, tp=4),
}
"""These need a sequence that crosses layers."""
EXPERT_DISTRIBUTIONS = {
    "ep 4": distribution("generic", ep=4),
    "fsdp ep 8": distribution("fsdp", dp_shard=4, ep=2),
    "fsdp ep tp 8": distribution("fsdp", dp_shard=2, ep=2, tp=2),
    "zero-1 ep tp 16": distribution("llm-training", dp_shard=2, ep=4, tp=2),
    "hsdp ep cp 32": distribution(
        "fsdp", context="ring", dp_replicate=2, dp_shard=2, ep=2, cp=2, tp=2
    ),
}
"""These need experts."""

MANUAL_DISTRIBUTIONS = {
    "manual 4": distribution("manual", data=2, model=2),
    "manual 8": distribution("manual", data=2, model=4),
    "manual 16": distribution("manual", data=2, model=8),
}
"""The user decides about arguments, on a mesh with names of their own."""


def random_inputs(graph: Graph, inputs: tuple[Slot, ...], tokens: int = 9) -> list[np.ndarray]:
    """Small floats, second moments positive, batch integers below `tokens`."""
    rng = np.random.default_rng(7)
    values = []
    for slot, value in zip(inputs, graph.inputs, strict=True):
        shape, dtype = value.type.shape, value.type.dtype
        if dtype.is_float:
            drawn = 0.1 * rng.standard_normal(shape)
            drawn = np.abs(drawn) if slot.role == "optimizer" else drawn
        else:
            drawn = rng.integers(0, tokens if slot.role == "batch" else 3, shape)
        values.append(np.asarray(drawn).astype(dtype.numpy))
    return values


def deep_gqa() -> TrainTask:
    """The scanned Llama with five layers: stages of unequal depth."""
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 48,
        "head_dim": 8,
    }
    return config_task.train_task(config, seq_len=8, dtype="f32", remat="full")


def deep_bert() -> TrainTask:
    """The encoder with LAMB and a tied embedding, four layers."""
    sizes = Sizes(layers=4, hidden=32, heads=4, head_dim=8, ffn=64, vocab=64, positions=8)
    return encoder.train_task(sizes, TaskOptions(seq_len=8, optimizer="lamb"))


def deep_flax() -> TrainTask:
    """The unrolled decoder somebody else wrote, tied, four layers."""
    return flax_decoder.train_task(width=32, num_layers=4, seq_len=8, vocab=64)


PIPELINE_MODELS: dict[str, Callable[[], TrainTask]] = {
    "gqa": deep_gqa,
    "bert": deep_bert,
    "flax": deep_flax,
}
"""Models deep enough for four parts."""
PIPELINE_DISTRIBUTIONS = {
    "pp 2": distribution("llm-training", pp=2),
    "pp 4": distribution("llm-training", pp=4),
    "pp gpipe 4": distribution("llm-training", schedule="gpipe", pp=4),
    "pp interleaved 2": distribution("llm-training", schedule="interleaved", pp=2),
    "pp tp zero-1 8": distribution("llm-training", pp=2, dp_shard=2, tp=2),
    "pp ring 4": distribution("llm-training", context="ring", pp=2, cp=2),
    "pp fsdp 8": distribution("fsdp", pp=2, dp_shard=4),
    "pp fsdp cp 8": distribution("fsdp", pp=2, dp_shard=2, cp=2),
    "pp hsdp tp 16": distribution("fsdp", pp=2, dp_replicate=2, dp_shard=2, tp=2),
    "pp tp zero-1 16": distribution("llm-training", pp=4, dp_shard=2, tp=2),
}
"""Pipelines: schedules, and every other axis beside them."""
