"""Weights stay gathered after the forward pass."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformer import seeded


def build():
    mesh = DeviceMesh("cpu", list(range(8)), mesh_dim_names=("data",))
    model = seeded()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)
