"""The tutorial's way: every block, then the model."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformer import seeded


def build():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{rank}"))
    model = seeded()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    for layer, after in zip(model.layers[:-1], model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([after])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
