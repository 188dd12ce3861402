"""DistributedDataParallel, with activation checkpointing of every second block."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from transformer import TransformerBlock, seeded


def build():
    dist.init_process_group(backend="nccl")
    assert dist.is_initialized() and dist.get_rank() == 0
    model = seeded().to("cuda").to(torch.float32)
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    chosen = {id(layer) for layer in model.layers[::2]}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda m: isinstance(m, TransformerBlock) and id(m) in chosen,
    )
    model = DDP(model, device_ids=[0], bucket_cap_mb=50, gradient_as_bucket_view=True)
    dist.barrier()
    assert sum(p.numel() for p in model.module.parameters())
    return model
