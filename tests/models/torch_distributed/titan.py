"""The order of torchtitan's parallelize functions: tp, activation checkpointing, compile, fsdp."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as ptd_checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformer import seeded


def apply_tp(model, tp_mesh):
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(module=block, device_mesh=tp_mesh, parallelize_plan=plan)


def apply_ac(model):
    for name, block in model.layers.named_children():
        model.layers.register_module(name, ptd_checkpoint_wrapper(block, preserve_rng_state=False))


def apply_compile(model):
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))


def apply_fsdp(model, dp_mesh, cpu_offload=False):
    config = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for block in model.layers:
        fully_shard(block, **config, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)


def build(cpu_offload=False):
    world_mesh = init_device_mesh(
        "cuda", (2, 2, 1, 4), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp")
    )
    world_mesh["dp_replicate", "dp_shard"]._flatten(mesh_dim_name="dp")
    world_mesh["dp_shard", "cp"]._flatten(mesh_dim_name="dp_shard_cp")
    assert world_mesh["dp"].size() == 4 and world_mesh["tp"].get_local_rank() == 0
    model = seeded()
    apply_tp(model, world_mesh["tp"])
    apply_ac(model)
    apply_compile(model)
    apply_fsdp(model, world_mesh["dp_replicate", "dp_shard_cp"], cpu_offload)
    return model


def build_offloaded():
    return build(cpu_offload=True)
