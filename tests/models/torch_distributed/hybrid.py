"""HSDP in pairs of blocks, the last pair kept, sums over copies at the end."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import seeded


def build():
    mesh = init_device_mesh(
        "xla", (dist.get_world_size() // 4, 4), mesh_dim_names=("replicate", "shard")
    )
    model = seeded()
    pairs = [list(model.layers[i : i + 2]) for i in range(0, len(model.layers), 2)]
    for number, pair in enumerate(pairs):
        fully_shard(pair, mesh=mesh, reshard_after_forward=number < len(pairs) - 1)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.set_requires_gradient_sync(False)
    return model
