"""Units that are smaller than a block, resharded to the ranks of a node."""

from torch.distributed.fsdp import fully_shard
from transformer import seeded


def build():
    model = seeded()
    for layer in model.layers:
        fully_shard(layer.attention, reshard_after_forward=8)
        fully_shard(layer.feed_forward, reshard_after_forward=8)
    fully_shard(model)
    return model
