"""Selective checkpointing with a policy, and a helper's own recomputation inside of forward."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformer import seeded


def context():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def build():
    model = seeded()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, context_fn=context)
        fully_shard(layer)
    fully_shard(model)
    return model


def build_offload():
    model = seeded()
    for layer in model.layers:
        fully_shard(offload_wrapper(layer))
    fully_shard(model)
    return model


def recomputed(function, value):
    return checkpoint(function, value, use_reentrant=False)
