"""Llama of transformers with grouped heads, pre-trained with AdamW; norms have no weight decay."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make():
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=128,
            vocab_size=256,
            use_cache=False,
        )
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    ids = torch.randint(0, 256, (32, 8))
    return model, optimizer, {"input_ids": ids, "labels": ids}
