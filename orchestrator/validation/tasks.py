"""The training step of a published run."""

from __future__ import annotations

import dataclasses

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.validation.published import Workload


def task_of(w: Workload, name: str = "published") -> TrainTask:
    """The training step of the whole model; vocabularies are padded to the tensor-parallel ranks,
    as Megatron-LM does. Key-value heads that ranks hold copies of are weights of their own, which
    the task's `model` does not have.
    """
    from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
    from shardwright.orchestrator.models.families import family_task
    from shardwright.orchestrator.models.layers import Precision

    sizes = Sizes(
        layers=w.layers,
        hidden=w.hidden,
        heads=w.heads,
        head_dim=w.hidden // w.heads,
        ffn=w.ffn,
        vocab=-(-w.vocab // w.tp) * w.tp,
        positions=w.seq_len,
        complete=True,
        fused=w.fused_projections,
    )
    types = w.storage
    options = TaskOptions(
        seq_len=w.seq_len,
        precision=Precision(
            params=types.params,
            activations=types.activations,
            statistics=types.statistics,
            stream=types.stream,
        ),
        optimizer=w.optimizer,
        remat=w.remat,
        dropout=w.dropout,
        one_hot_loss=w.one_hot_loss,
        name=name,
    )
    model = family_task(w.family, sizes, options, w.kv_heads)
    if not w.replicated_kv or w.tp <= w.kv_heads:
        return model
    return dataclasses.replace(family_task(w.family, sizes, options, w.tp), model=model)
