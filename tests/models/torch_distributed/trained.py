"""A module with its batch, loss and optimizer, distributed on the way, by one function."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformer import seeded


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build_checkpointed():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, *others = build()
    for layer in model.layers:
        checkpoint_wrapper(layer)
    return model, *others


def build():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = seeded()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.arange(16).reshape(2, 8)
    batch = {"tokens": tokens, "labels": tokens + 1}
    return model, batch, loss, torch.optim.AdamW(model.parameters(), lr=1e-3)
