"""What cannot be, each in a function of its own."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformer import seeded


def names_and_sizes():
    init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp",))


def no_such_dim():
    return init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))["pp"]


def three_dims():
    mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    fully_shard(seeded(), mesh=mesh)


def twice():
    model = seeded()
    fully_shard(model.layers[0])
    fully_shard(model.layers[0])


def outside_in():
    model = seeded()
    fully_shard(model)
    fully_shard(model.layers[0])


def both():
    model = seeded()
    fully_shard(model.layers[0])
    return DistributedDataParallel(model)


def another_model():
    fully_shard(seeded())
    return seeded()


def style_of_a_block():
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    parallelize_module(seeded(), mesh, {"layers.*": ColwiseParallel()})


def two_styles():
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    model = seeded()
    parallelize_module(model, mesh, {"layers.0.attention.wq": ColwiseParallel()})
    parallelize_module(model, mesh, {"layers.*.attention.wq": RowwiseParallel()})


def two_dims():
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(seeded(), mesh, {"output": ColwiseParallel()})


def no_such_module():
    pipeline(seeded(), (), split_spec={"layers.9": SplitPoint.BEGINNING})


def a_part():
    model = seeded()
    PipelineStage(model.layers[0], 0, 4, torch.device("cpu"))


def nothing():
    return {}
