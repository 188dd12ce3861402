"""Several views of the same ranks, as torchtitan's later releases make them."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import seeded


def build():
    world = init_device_mesh("cuda", (16,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 4, 2), ("dp_replicate", "fsdp", "tp"))
    sparse = world._unflatten(0, (2, 2, 4), ("dp_replicate", "efsdp", "ep"))
    assert sparse["ep"].size() == 4 and dense["fsdp"].get_coordinate() == [0]
    model = seeded()
    for layer in model.layers:
        fully_shard(layer, mesh=dense["dp_replicate", "fsdp"])
    return fully_shard(model, mesh=dense["dp_replicate", "fsdp"])
