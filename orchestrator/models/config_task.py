"""The training step of a Hugging Face `config.json`, of any family in the table."""

from __future__ import annotations

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import config_file, decoder, llama
from shardwright.orchestrator.models.adapters import Lora
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.config_file import Config
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import Precision


def train_task(
    config: Config,
    *,
    seq_len: int,
    dtype: str = "f32",
    optimizer: str = "adamw",
    clip: float = 1.0,
    lr: float = 3e-4,
    remat: str = "full",
    name: str = "model",
    lora: Lora | None = None,
) -> TrainTask:
    """The training step of a config on byte-level text; `seq_len` 0: `usual_length`.

    Raises: UsageError for a config that is not built here, an unknown type, optimizer or remat, a
    sequence longer than the config allows, and for none where it does not say how long one is.
    """
    model = architecture_of(config)
    scalings = (layer.attention.rope.scaling for layer in model.layers if layer.attention.rope)
    scaling = next((found for found in scalings if found), None)
    window = max(model.windows, default=0)
    seq_len = seq_len or config_file.usual_length(model.positions, scaling, window)
    llama.check_options(model.positions, seq_len, dtype, remat)
    options = TaskOptions(
        seq_len=seq_len,
        precision=Precision(activations=llama.COMPUTE_TYPES[dtype]),
        optimizer=optimizer,
        clip=clip,
        lr=lr,
        remat=remat,
        dropout=model.dropout,
        lora=lora,
        name=name,
    )
    return decoder.train_task(model, options)
