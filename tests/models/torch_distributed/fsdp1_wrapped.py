"""FullyShardedDataParallel of copies, blocks wrapped by hand, by class and by function."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
from transformer import TransformerBlock, seeded


def build():
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("outer", "inner"))
    how = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    return FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}), **how)


def build_custom():
    policy = CustomPolicy(lambda m: isinstance(m, TransformerBlock))
    return FSDP(seeded(), auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True))


def build_by_hand():
    model = seeded()
    with enable_wrap(wrapper_cls=FSDP):
        for number in range(len(model.layers)):
            model.layers[number] = wrap(model.layers[number])
    return FSDP(model)
