"""The training step of a Hugging Face `config.json`, of any family in the table."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic, UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import config_file, decoder
from shardwright.orchestrator.models.adapters import Lora
from shardwright.orchestrator.models.architecture import Architecture
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.config_file import Config
from shardwright.orchestrator.models.family_table import architecture_of, left_out
from shardwright.orchestrator.models.layers import Precision, check_remat

COMPUTE_TYPES = {"f32": "f32", "fp32": "f32", "float32": "f32", "bf16": "bf16", "bfloat16": "bf16"}


def train_task(
    config: Config | Architecture,
    *,
    seq_len: int,
    dtype: str = "f32",
    optimizer: str = "adamw",
    clip: float = 1.0,
    lr: float = 3e-4,
    remat: str = "full",
    name: str = "model",
    lora: Lora | None = None,
    capacity_factor: float = 0.0,
    seats_for_all: bool = False,
) -> TrainTask:
    """The training step of a config on byte-level text; `seq_len` 0: `usual_length`;
    `capacity_factor` 0: experts drop no row; with `seats_for_all`, each has a seat in every expert.

    Raises: UsageError for a config that is not built here, an unknown type, optimizer or remat, a
    sequence longer than the config allows, and for none where it does not say how long one is, for
    a capacity of experts where there are none.
    """
    model = config if isinstance(config, Architecture) else architecture_of(config)
    if capacity_factor or seats_for_all:
        seated = model.with_experts(lambda part: part.seated(capacity_factor))
        if capacity_factor and seated == model:
            raise config_file.without_experts(name)
        model = seated
    beside = "" if isinstance(config, Architecture) else left_out(config)
    ropes = (layer.attention.rope for layer in model.layers)
    scalings = (rope.scaling for rope in ropes if rope)
    scaling = next((found for found in scalings if found), None)
    window = max(model.windows, default=0)
    seq_len = seq_len or config_file.usual_length(model.positions, scaling, window)
    _check(model.positions, seq_len, dtype, remat)
    options = TaskOptions(
        seq_len=seq_len,
        precision=Precision(activations=COMPUTE_TYPES[dtype]),
        optimizer=optimizer,
        clip=clip,
        lr=lr,
        remat=remat,
        dropout=model.dropout,
        lora=lora,
        name=name,
    )
    task = decoder.train_task(model, options)
    if not beside:
        return task
    return replace(task, findings=(Diagnostic("SW_MODEL_CONFIG", beside, severity="note"),))


def _check(positions: int, seq_len: int, dtype: str, remat: str) -> None:
    """Raises UsageError for an option out of range of a model of so many positions."""
    if dtype not in COMPUTE_TYPES:
        raise UsageError("SW_DTYPE", f"dtype requires {', '.join(COMPUTE_TYPES)}, got {dtype}")
    check_remat(remat)
    if not 1 <= seq_len <= positions:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires 1 to {positions} (max_position_embeddings), got {seq_len}",
            hint="take a shorter one; a model of more positions is another config",
        )
