"""The model as one unit, with weights of smaller groups after the forward pass."""

from torch.distributed.fsdp import fully_shard
from transformer import seeded


def build():
    model = seeded()
    fully_shard(model)
    return model
