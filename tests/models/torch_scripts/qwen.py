"""Qwen3 of transformers, tied embeddings, SGD with momentum and a cosine schedule."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def make():
    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            intermediate_size=128,
            vocab_size=256,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    ids = torch.randint(0, 256, (32, 8))
    return model, optimizer, scheduler, {"input_ids": ids, "labels": ids}
