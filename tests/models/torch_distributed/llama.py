"""A model of transformers under FSDP2, tensor parallelism and activation checkpointing."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "use_cache": False,
}


def build():
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    tokens = torch.arange(16).reshape(2, 8)
    return {"model": model, "batch": {"input_ids": tokens, "labels": tokens}}
