"""A pipeline cut in front of blocks by name, 1F1B, FSDP within stages."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from transformer import seeded


def build():
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp_shard"))
    model = seeded()
    pipe = pipeline(
        module=model,
        mb_args=(torch.zeros(1, 8, dtype=torch.long),),
        split_spec={"layers.3": SplitPoint.BEGINNING},
    )
    assert pipe.num_stages == mesh["pp"].size() == dist.get_world_size(mesh["pp"].get_group())
    stage = pipe.build_stage(mesh["pp"].get_local_rank(), torch.device("cpu"), mesh.get_group("pp"))
    Schedule1F1B(stage, n_microbatches=8, loss_fn=lambda out, target: out.sum())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model
