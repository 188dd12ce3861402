"""GPT-2 of transformers, fine-tuned with AdamW and a linear warm-up."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def make():
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=256,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 100)
    ids = torch.randint(0, 256, (32, 8))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batch": {"input_ids": ids, "labels": ids},
    }
