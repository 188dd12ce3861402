"""FullyShardedDataParallel with a policy over blocks."""

import functools

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformer import TransformerBlock, seeded


def build(strategy=ShardingStrategy.FULL_SHARD):
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock}
    )
    model = FSDP(
        seeded(),
        auto_wrap_policy=policy,
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        ),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cuda:0"),
        use_orig_params=True,
    )
    assert not isinstance(model.module, FSDP)
    return model


def build_grad_op():
    return build(ShardingStrategy.SHARD_GRAD_OP)


def build_no_shard():
    return build(ShardingStrategy.NO_SHARD)
